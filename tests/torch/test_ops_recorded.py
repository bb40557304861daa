"""Chains of `te.ops` as recorded layers: the bits of their operations one by one, and nothing decided anew."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.tape import taped
from te_torch import ops
from te_torch.ops.fuser import OperationFuser
from te_torch.ops.recorded import Recorded
from tests import recipes
from tests.recordings import tapes
from tests.tolerances import DB, snr_db
from tests.world import differences, fp8_state, gradient_for, randomise, region, step, values

WIDTH = 48
CPU: dict[str, Any] = {"device": "cpu"}
#: Without draws: a chain draws once where its operations draw one by one.
RECIPES = [None, *recipes.KINDS[:4], "nvfp4 nearest", *recipes.OVERRIDES]
RECIPES = [name for name in RECIPES if name is None or "nvfp4 " not in name or name == "nvfp4 nearest"]


def linear(width: int = WIDTH, out: int = WIDTH, **options: Any) -> ops.Linear:
    return ops.Linear(width, out, **CPU, **options)


def residual() -> list[Any]:
    """x + linear(norm(x)) through a channel."""
    return [
        ops.MakeExtraOutput().set_extra_output_channel(0, "stream", output_to_caller=False),
        ops.RMSNorm(WIDTH, **CPU),
        linear(),
        ops.AddExtraInput().set_extra_input_channel(0, "stream"),
    ]


def twice() -> list[Any]:
    bias = ops.Bias(WIDTH, **CPU)
    return [bias, ops.SiLU(), bias, linear(bias=False), bias]


#: Chains that are one graph.
WHOLE: dict[str, Callable[[], list[Any]]] = {
    "linear": lambda: [linear()],
    "norm, linear": lambda: [ops.LayerNorm(WIDTH, **CPU), linear(bias=False)],
    "norm, linear, activation, linear": lambda: [
        ops.RMSNorm(WIDTH, zero_centered_gamma=True, **CPU), linear(WIDTH, 96), ops.SwiGLU(), linear()
    ],
    "linear, activation, linear": lambda: [linear(WIDTH, 96, bias=False), ops.ClampedSwiGLU(limit=0.5), linear()],
    "three linears": lambda: [
        linear(), ops.GELU(), linear(), ops.SReLU(), linear(bias=False), ops.LayerNorm(WIDTH, **CPU)
    ],
    "activations": lambda: [ops.GEGLU(), ops.L2Normalization(), ops.ReLU(), linear(24, 8), ops.Identity()],
    "residual": residual,
    "a bias that is there twice": twice,
    "an extra input": lambda: [linear(), ops.AddExtraInput(), ops.GELU()],
}  # fmt: skip


class Cap(ops.BasicOperation):
    """A user's operation."""

    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return torch.tanh(input_)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad_output * (1 - torch.tanh(x) ** 2), ()


class Quantizing(Cap):
    """One that hands over quantized what its neighbours would quantize."""

    def op_forward(self, ctx: Any, input_: Tensor, **given: Any) -> Tensor:
        ctx.quantizer, after = given["prev_op_grad_output_quantizer"], given["next_op_input_quantizer"]
        y = super().op_forward(ctx, input_)
        return y if after is None else after(y)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        dx, none = super().op_backward(ctx, grad_output)
        return dx if ctx.quantizer is None else ctx.quantizer(dx), none


#: Chains of which only a part is one; what runs, with stretches as one.
MIXED: dict[str, tuple[Callable[[], list[Any]], list[str]]] = {
    "a user's operation": (
        lambda: [ops.LayerNorm(WIDTH, **CPU), linear(), Cap(), ops.GELU(), linear(), ops.AddExtraInput()],
        ["Stretch", "Cap", "Stretch"],
    ),
    "one that quantizes": (
        lambda: [linear(), Quantizing(), linear(), ops.SiLU(), linear()], ["Stretch", "Quantizing", "Stretch"]
    ),
    "casts": (
        lambda: [linear(), ops.Quantize(True, True), linear(), ops.ConstantScale(-2.0)],
        ["BasicLinear", "Bias", "Quantize", "Stretch", "ConstantScale"],
    ),
    "a shown output": (
        lambda: [ops.MakeExtraOutput(), ops.RMSNorm(WIDTH, **CPU), linear()], ["MakeExtraOutput", "Stretch"]
    ),
    "in place": (
        lambda: [ops.LayerNorm(WIDTH, **CPU), linear(), ops.GELU(), linear(), ops.AddExtraInput(in_place=True)],
        ["Stretch", "ForwardLinearBiasAdd"],
    ),
    "a bias that is there twice": (lambda: [*twice(), ops.ConstantScale(3.0)], ["Stretch", "ConstantScale"]),
}  # fmt: skip
CHAINS = {**WHOLE, **{f"mixed: {name}": made for name, (made, _) in MIXED.items()}}


@contextmanager
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph is made inside."""
    with monkeypatch.context() as patch:
        patch.setattr(
            Recorded, "_call", lambda self, inputs, _: self.chain().one_by_one(inputs, self.chain().begin(inputs))
        )
        patch.setattr(Recorded, "as_graph", lambda *_: None)
        yield


def run(model: Any, recipe: str | None, i: int = 0, rows: int = 32, seen: Any = None) -> dict[str, Tensor]:
    """A step; the extra input is no leaf, for it may be written to."""
    more = [values(rows, WIDTH, seed=90 + i) * 1] if any(isinstance(op, ops.AddExtraInput) for op in model) else []
    more = [] if any(getattr(op, "_input_channels", None) for op in model) else more
    found = step(lambda *t: (seen or model)(*t, *more), values(rows, WIDTH, seed=i), recipe, owner=model)
    return {key: t.dequantize() if isinstance(t, te.QuantizedTensor) else t for key, t in found.items()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_graph_gives_the_bits_of_its_operations(
    chain: str, recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ops.Sequential(*CHAINS[chain]())
    randomise(model)
    other = copy.deepcopy(model)
    for i in range(3):
        found = run(model, recipe, i)
        with one_by_one(monkeypatch):
            wanted = run(other, recipe, i)
        assert found.keys() == wanted.keys()
        for key, value in found.items():
            # Sums over the tokens of a bias's gradient, or with what is added in place, may have another order.
            assert torch.equal(value, wanted[key]) or snr_db(value, wanted[key]) > 100, key
    assert not differences(fp8_state(model), fp8_state(other))


@pytest.mark.parametrize("name", MIXED)
def test_what_is_between_operations_of_users_is_recorded(name: str) -> None:
    made, runs = MIXED[name]
    model = ops.Sequential(*made())
    run(model, None)
    fused = model._module_groups[0]._recorded.fused
    assert [type(op).__name__ for op, _ in fused.run_forward] == runs
    assert sorted(i for _, places in fused.run_backward for i in places) == [
        *range(len(model._module_groups[0]._basic_ops))
    ]


def test_a_fusion_of_a_users_splits_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **_: Any) -> Any:
            return torch.tanh(input_) * 0.5, [(), ()]

    def fuse(operations: list[Any], **_: Any) -> list[Any]:
        return [Both(operations[2:4]) if i == 2 else op for i, op in enumerate(operations) if i != 3]

    monkeypatch.setattr(OperationFuser, "forward_fusion_functions", [fuse])
    model = ops.Sequential(linear(bias=False), ops.Identity(), ops.GELU(), ops.ReLU(), linear(bias=False))
    x = values(32, WIDTH)
    y = model(x)
    fused = model._module_groups[0]._recorded.fused
    assert [type(op).__name__ for op, _ in fused.run_forward] == ["Stretch", "Both", "Stretch"]
    torch.testing.assert_close(y, torch.tanh(x @ model[0].weight.T) * 0.5 @ model[4].weight.T)


@pytest.mark.parametrize("chain", ["norm, linear, activation, linear", "linear, activation, linear", "residual"])
@pytest.mark.parametrize("recipe", [None, "delayed", "mxfp8"])
def test_a_step_that_repeats_decides_nothing(chain: str, recipe: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with another batch, and in training and inference in turns."""
    model = ops.Sequential(*WHOLE[chain]())

    def steps() -> None:
        for rows in (32, 64):
            run(model, recipe, rows=rows)
            with torch.no_grad(), region(recipe):
                model(values(rows, WIDTH))

    with tapes("first"):
        for _ in range(3):
            steps()
        monkeypatch.setattr(OperationFuser, "begin", None)
        before = taped.COUNTS.replayed
        steps()
        assert taped.COUNTS.replayed == before + 6


def test_a_plan_says_what_was_fused() -> None:
    model = ops.Sequential(*[op.to(torch.bfloat16) for op in WHOLE["linear"]()])
    x = values(32, WIDTH, dtype=torch.bfloat16)
    for _ in range(2):
        step(model, x, None)
        assert [type(op).__name__ for op, _ in model._module_groups[0]._forward_ops] == ["ForwardLinearBiasActivation"]
        step(model, x, "delayed")
        assert (
            model[0].basic_ops[0].get_quantizer("forward", 0).scale.data_ptr()
            == model[0].basic_ops[0].fp8_state.scale_fwd.data_ptr()
        )


@pytest.mark.parametrize("seed", range(24))
def test_what_wants_no_gradient(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen parameters, an input that wants none, torch.autocast, and gradients of one tensor alone."""
    draw = random.Random(seed)
    recipe = draw.choice([None, *recipes.KINDS[:4]])
    model = ops.Sequential(*CHAINS[draw.choice([*CHAINS])]())
    randomise(model)
    parameters = [*model.parameters()]
    for p in parameters:
        p.requires_grad_(draw.random() < 0.5)
    parameters[-1].requires_grad_()
    other = copy.deepcopy(model)
    dtype = draw.choice([None, torch.bfloat16])
    alone = draw.random() < 0.5
    for i in range(3):
        found, wants = [], draw.random() < 0.5
        for m, around in ((model, nullcontext()), (other, one_by_one(monkeypatch))):
            x = values(32, WIDTH, seed=i).requires_grad_(wants)
            extra = [values(32, WIDTH, seed=9 + i)] * _takes_extra(model)
            with around:
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None), region(recipe):
                    y = m(x, *extra)
                y = y[0] if isinstance(y, tuple) else y
                leaves = [t for t in (x, *m.parameters()) if t.requires_grad]
                leaves = leaves[-1:] if alone else leaves
                found.append([y, *torch.autograd.grad(y, leaves, gradient_for(y), allow_unused=True)])
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                a, b = (t.dequantize() if isinstance(t, te.QuantizedTensor) else t for t in (a.detach(), b.detach()))
                assert snr_db(a.float(), b.float()) > (DB["fp8 mlp"] if dtype else 100)

    if not alone and dtype is None:  # else only what is asked for runs, and a graph reads weights as they are
        assert not differences(fp8_state(model), fp8_state(other))


def _takes_extra(model: Any) -> bool:
    return any(isinstance(op, ops.AddExtraInput) and not op._input_channels for op in model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chain", ["linear, activation, linear", "mixed: a user's operation"])
def test_a_chain_that_is_checkpointed(chain: str, reentrant: bool) -> None:
    model = ops.Sequential(*CHAINS[chain]())
    randomise(model)
    other = copy.deepcopy(model)
    for i in range(3):
        wanted = run(model, "delayed", i)
        found = run(other, "delayed", i, seen=lambda *t: checkpoint(other, *t, use_reentrant=reentrant))
        assert not differences(found, wanted)
    assert not differences(fp8_state(other), fp8_state(model))


@pytest.mark.parametrize("chain", ["norm, linear, activation, linear", "mixed: casts"])
def test_weight_gradients_go_into_main_grad(chain: str) -> None:
    model = ops.Sequential(*CHAINS[chain]())
    randomise(model)
    other = copy.deepcopy(model)
    for op in other.modules():
        if isinstance(op, ops.BasicLinear):
            op.fuse_wgrad_accumulation = op._special = True
            op.weight.main_grad = torch.full(op.weight.shape, 0.5)
    for i in range(3):
        wanted, found = run(model, "current", i), run(other, "current", i)
        for name, p in other.named_parameters():
            if "basic_ops.0.weight" in name:
                torch.testing.assert_close(p.main_grad, 0.5 + wanted[name])
                p.main_grad.fill_(0.5)
            else:
                assert torch.equal(found[name], wanted[name])


def test_what_changes_counts_from_the_next_call_on() -> None:
    model = ops.Sequential(ops.RMSNorm(WIDTH, **CPU), ops.Dropout(0.5), linear())
    x = values(32, WIDTH)
    for _ in range(3):
        y = model(x)
    assert not torch.equal(model(x), y)  # another mask
    y = model.eval()(x)
    assert torch.equal(model(x), y)
    model[0].eps = 4.0
    torch.testing.assert_close(model(x), model[2](torch.nn.functional.rms_norm(x, (WIDTH,), eps=4.0)))
    model[1] = ops.ReLU()
    torch.testing.assert_close(model(x), model[2](torch.nn.functional.rms_norm(x, (WIDTH,), eps=4.0).relu()))
    model[2].weight = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
    assert torch.equal(model(x), model[2].bias.expand(32, -1))


@pytest.mark.parametrize("chain", ["three linears", "mixed: a user's operation"])
def test_a_graph_may_be_kept_for_a_second_backward(chain: str) -> None:
    model = ops.Sequential(*CHAINS[chain]())
    extra = [values(32, WIDTH, seed=1)] * _takes_extra(model)
    for i in range(3):
        x = values(32, WIDTH, seed=i).requires_grad_()
        y = model(x, *extra).square().sum()
        y.backward(retain_graph=True)
        first = [t.grad.clone() for t in (x, *model.parameters())]
        y.backward()
        for t, once in zip((x, *model.parameters()), first, strict=True):
            torch.testing.assert_close(t.grad, 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
        model.zero_grad()


def test_a_chain_goes_with_its_model() -> None:
    for made in (*WHOLE.values(), *[made for made, _ in MIXED.values()]):
        model = ops.Sequential(*made())
        for i in range(3):
            run(model, "delayed", i)
        weights = [weakref.ref(p) for p in model.parameters()]
        gc.disable()
        try:
            del model
            assert not any(weight() is not None for weight in weights)
        finally:
            gc.enable()


def test_operations_in_several_dtypes_run_one_by_one() -> None:
    model = ops.Sequential(ops.LayerNorm(WIDTH, dtype=torch.bfloat16, **CPU), linear(), ops.GELU())
    x = values(32, WIDTH, dtype=torch.bfloat16)
    for _ in range(3):
        found = step(model, x, None)
    h = torch.nn.functional.layer_norm(x, (WIDTH,)).float() @ model[1].weight.T + model[1].bias
    assert found["y"].dtype == torch.float32 and found["dx"].dtype == torch.bfloat16
    torch.testing.assert_close(found["y"], torch.nn.functional.gelu(h, approximate="tanh"))


@pytest.mark.parametrize(
    ("chain", "recipe"),
    [
        ("residual", "delayed"),
        ("norm, linear, activation, linear", "current"),
        pytest.param("norm, linear, activation, linear", "delayed", marks=pytest.mark.more),
        pytest.param("three linears", "delayed", marks=pytest.mark.more),
        pytest.param("a bias that is there twice", None, marks=pytest.mark.more),
    ],
)
def test_a_compiler_sees_a_chain_whole(chain: str, recipe: str | None) -> None:
    model = ops.Sequential(*WHOLE[chain]())
    randomise(model)
    other = copy.deepcopy(model)
    compiled = torch.compile(lambda t: 1 + model(2 * t), backend="aot_eager", fullgraph=True)
    for i in range(3):
        x = values(32, WIDTH, seed=i)
        found = step(compiled, x, recipe, owner=model)
        assert not differences(found, step(lambda t: 1 + other(2 * t), x, recipe, owner=other))
    assert not differences(fp8_state(model), fp8_state(other))


def test_a_chain_in_an_exported_program() -> None:
    model, x = ops.Sequential(*WHOLE["three linears"]()), values(32, WIDTH)
    with torch.no_grad(), region("mxfp8"):
        program = torch.export.export(model, (x,)).module()
        assert torch.equal(program(x), model(x))
