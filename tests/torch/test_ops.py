"""`te.ops`: each operation against its formula in float64, chains, extra tensors, operations of users' own."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_torch as te
from te_core.errors import ArgumentError
from te_torch import ops
from te_torch.ops.fuser import OperationFuser
from tests.backends import on_devices
from tests.tolerances import DB, snr_db
from tests.world import randomise, step, values

STAGE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


# ----------------------------------------------------------------------------------------- values of single operations


def gated(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x: act(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def scaled(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, s: act(x) * s[..., None]


def split(act: Callable[[Tensor], Tensor], size: int) -> Callable[..., Tensor]:
    """The same of an input that has its halves in blocks of this size in turn."""
    return lambda x, *s: act(torch.cat([x.unflatten(-1, (-1, 2, size))[..., i, :].flatten(-2) for i in (0, 1)], -1), *s)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    return x.relu().square()


def clamped(limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Callable[..., Tensor]:
    def act(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a = a.clamp(max=limit)
        return a * torch.sigmoid(alpha * a) * (b.clamp(-limit, limit) + offset)

    return act


def situ(b1: float = 4.0, b2: float = 25.0) -> Callable[..., Tensor]:
    def act(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return b1 * torch.tanh(a / b1) * torch.sigmoid(a) * b2 * torch.tanh(b / b2)

    return act


def layer_norm(zero_centred: bool = False, eps: float = 0.3) -> Callable[..., Tensor]:
    return lambda x, w, b: F.layer_norm(x, w.shape, w + zero_centred, b, eps)


def rms_norm(zero_centred: bool = False, eps: float = 0.3) -> Callable[..., Tensor]:
    return lambda x, w: F.rms_norm(x, w.shape, w + zero_centred, eps)


#: Name: (how it is made, the shapes of its input and extra inputs, the formula of these and of its parameters).
OPS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], Callable[..., Any]]] = {
    "Identity": (lambda **_: ops.Identity(), [(3, 5)], lambda x: x),
    "Reshape": (lambda **_: ops.Reshape((-1, 6)), [(3, 4)], lambda x: x.reshape(-1, 6)),
    "ConstantScale": (lambda **_: ops.ConstantScale(-2.5), [(1,)], lambda x: x * -2.5),
    "Bias": (lambda **kw: ops.Bias(5, **kw), [(2, 3, 5)], lambda x, b: x + b),
    "Bias of a vector": (lambda **kw: ops.Bias(5, **kw), [(5,)], lambda x, b: x + b),
    "BasicLinear": (lambda **kw: ops.BasicLinear(3, 5, **kw), [(2, 4, 3)], lambda x, w: x @ w.T),
    "BasicLinear of a vector": (lambda **kw: ops.BasicLinear(32, 64, **kw), [(32,)], lambda x, w: x @ w.T),
    "Linear": (lambda **kw: ops.Linear(32, 64, **kw), [(7, 32)], lambda x, w, b: x @ w.T + b),
    "LayerNorm": (lambda **kw: ops.LayerNorm((4, 16), eps=0.3, **kw), [(7, 4, 16)], layer_norm()),
    "LayerNorm from one": (
        lambda **kw: ops.LayerNorm(64, eps=0.3, zero_centered_gamma=True, **kw), [(19, 64)], layer_norm(True)
    ),
    "RMSNorm": (lambda **kw: ops.RMSNorm(64, eps=0.3, **kw), [(19, 64)], rms_norm()),
    "RMSNorm from one": (
        lambda **kw: ops.RMSNorm((64,), eps=0.3, zero_centered_gamma=True, **kw), [(2, 3, 64)], rms_norm(True)
    ),
    "L2Normalization": (
        lambda **_: ops.L2Normalization(eps=0.3), [(7, 32)], lambda x: x / (x.square().sum(-1, True) + 0.3).sqrt()
    ),
    "GELU": (lambda **_: ops.GELU(), [(37,)], gelu),
    "QGELU": (lambda **_: ops.QGELU(), [(2, 13)], qgelu),
    "ReLU": (lambda **_: ops.ReLU(), [(32, 1, 32)], torch.relu),
    "SReLU": (lambda **_: ops.SReLU(), [(2, 13)], srelu),
    "SiLU": (lambda **_: ops.SiLU(), [(2, 13)], F.silu),
    "GLU": (lambda **_: ops.GLU(), [(2, 26)], gated(torch.sigmoid)),
    "GEGLU": (lambda **_: ops.GEGLU(), [(2, 26)], gated(gelu)),
    "QGEGLU": (lambda **_: ops.QGEGLU(), [(2, 26)], gated(qgelu)),
    "ReGLU": (lambda **_: ops.ReGLU(), [(2, 26)], gated(torch.relu)),
    "SReGLU": (lambda **_: ops.SReGLU(), [(2, 26)], gated(srelu)),
    "SwiGLU": (lambda **_: ops.SwiGLU(), [(32, 1, 32)], gated(F.silu)),
    "SwiGLU in blocks": (lambda **_: ops.SwiGLU(glu_interleave_size=8), [(5, 32)], split(gated(F.silu), 8)),
    "ClampedSwiGLU": (
        lambda **_: ops.ClampedSwiGLU(limit=0.75, glu_linear_offset=0.5), [(5, 64)], clamped(0.75, offset=0.5)
    ),
    "SiTUGLU": (lambda **_: ops.SiTUGLU(beta1=1.5, beta2=2.0), [(5, 64)], situ(1.5, 2.0)),
    "ScaledSwiGLU": (lambda **_: ops.ScaledSwiGLU(16), [(5, 64), (5,)], split(scaled(gated(F.silu)), 16)),
    "ScaledSiTUGLU": (lambda **_: ops.ScaledSiTUGLU(), [(5, 64), (5,)], scaled(situ())),
    "ScaledClampedQGeGLU": (lambda **_: ops.ScaledClampedQGeGLU(limit=1.0), [(5, 64), (5,)], scaled(clamped(1.0))),
    "ScaledSReLU": (lambda **_: ops.ScaledSReLU(activation_recompute_in_mlp=True), [(5, 3, 8), (5, 3)], scaled(srelu)),
    "AddExtraInput": (lambda **_: ops.AddExtraInput(), [(3, 5), (3, 5)], lambda x, e: x + e),
    "MakeExtraOutput": (lambda **_: ops.MakeExtraOutput(), [(3, 5)], lambda x: (x, x)),
    "collectives of one rank": (
        lambda **_: ops.Sequential(ops.AllGather(), ops.ReduceScatter(), ops.AllReduce()), [(3, 5)], lambda x: x
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", STAGE, ids=STAGE.get)
@on_devices
@pytest.mark.parametrize("name", OPS)
def test_an_operation_is_its_formula(name: str, device: str, dtype: torch.dtype) -> None:
    made, shapes, formula = OPS[name]
    op = made(device=device, dtype=dtype) if "of one rank" not in name else made()
    randomise(op)
    inputs = [values(*shape, device=device, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    found = step(op, inputs, None)
    parameters = [p.detach().double().requires_grad_() for p in op.parameters()]
    leaves = [x.double().requires_grad_() for x in inputs]
    if "Scaled" in name:
        formula_out = formula(*leaves)
    else:
        formula_out = formula(leaves[0], *leaves[1:], *parameters)
    outs = formula_out if isinstance(formula_out, tuple) else (formula_out,)
    torch.autograd.backward(
        outs, [values(*o.shape, seed=7 + i, dtype=dtype).to(device).double() for i, o in enumerate(outs)]
    )
    wanted = {f"y{i or ''}": o for i, o in enumerate(outs)} | {f"dx{i or ''}": x.grad for i, x in enumerate(leaves)}
    wanted |= {n: p.grad for (n, _), p in zip(op.named_parameters(), parameters, strict=True)}
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        assert value.dtype == dtype and value.shape == wanted[key].shape
        assert snr_db(value.cpu(), wanted[key].detach().cpu()) > DB[STAGE[dtype]] - 3, key


def test_dropout_draws_its_mask_once() -> None:
    op, x = ops.Dropout(0.25), values(64, 64).requires_grad_()
    y = op(x)
    kept = y != 0
    torch.testing.assert_close(y, kept * x / 0.75)
    assert abs(kept.sum() / 4096 - 0.75) < 0.02
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, kept / 0.75)
    assert torch.equal(op.eval()(x), x) and not torch.equal(ops.Dropout(0.25)(x) != 0, kept)


def test_a_cached_input_has_one_rounding() -> None:
    x = values(16, 32)
    exact, rounded = (step(ops.GELU(cache_quantized_input=cached), x, None) for cached in (False, True))
    assert torch.equal(exact["y"], rounded["y"])
    assert DB["fp8 gemm"] - 3 < snr_db(rounded["dx"], exact["dx"]) < 50


# ------------------------------------------------------------------------------------------------------- containers


def mixed() -> tuple[ops.Sequential, list[nn.Module]]:
    modules: list[nn.Module] = [
        nn.Identity(), ops.Identity(), nn.Identity(), ops.ConstantScale(2.0), ops.Identity(), nn.Identity(),
        ops.Identity(), ops.Identity(), ops.Identity(),
    ]  # fmt: skip
    return ops.Sequential(*modules), modules


def test_a_sequential_is_a_list_of_modules() -> None:
    model, modules = mixed()
    x = values(2, 3)
    assert torch.equal(model(x), 2 * x) and len(model._module_groups) == 6
    assert [*model] == modules and model[-2] is modules[-2] and isinstance(model[2:4], ops.Sequential)
    model[3] = ops.ConstantScale(3.0)
    assert torch.equal(model(x), 3 * x)
    del model[0]
    assert len(model) == 8 and model.pop(2).scale == 3.0 and torch.equal(model(x), x)
    assert model.insert(1, ops.ConstantScale(5.0)) is model and model.append(ops.ConstantScale(2.0)) is model
    model += [ops.ConstantScale(0.5)]
    assert torch.equal(model(x), 5 * x) and [*model.state_dict()] == []
    both = ops.Sequential({"a": ops.ConstantScale(2.0)}) + ops.Sequential(ops.ConstantScale(4.0))
    assert torch.equal(both(x), 8 * x)
    for copied in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        assert torch.equal(copied(x), 8 * x)
    with pytest.raises(IndexError):
        model[17]


def test_extra_tensors_are_the_callers_memory() -> None:
    bias, x = ops.Bias(4, device="cpu"), [values(2, 4, seed=i) for i in range(4)]
    with torch.no_grad():
        bias.bias.copy_(values(4, seed=9))
    add, make = (lambda: ops.AddExtraInput(in_place=True)), (lambda: ops.MakeExtraOutput(in_place=True))
    model = ops.Sequential(
        nn.Identity(), make(), bias, make(), add(), make(), nn.Identity(), bias, add(), make(), add(), nn.Identity(),
        ops.Identity(), make(), ops.Identity(),
    )  # fmt: skip
    one = x[0] + bias.bias
    two = x[1] + one
    three = x[2] + two + bias.bias
    four = x[3] + three
    outputs = model(*x)
    assert [y.data_ptr() for y in outputs[:2]] == [x[3].data_ptr(), x[0].data_ptr()]
    assert [y.data_ptr() for y in outputs[3:]] == [x[i].data_ptr() for i in (1, 2, 3)]
    for y, wanted in zip(outputs, (four, x[0], one, two, three, four), strict=True):
        torch.testing.assert_close(y, wanted)


def test_kwargs_go_to_the_operation_that_is_named() -> None:
    class Plus(ops.BasicOperation):
        def op_forward(self, ctx: Any, input_: Tensor, *, more: float = 0.0, **_: Any) -> Tensor:
            return input_ + more

    model = ops.Sequential(nn.Identity(), Plus(), Plus(), ops.Linear(2, 2, device="cpu"))
    x = torch.zeros(2)
    base = model(x)
    assert torch.allclose(
        model(x, op_kwargs={1: {"more": 1.0}, model[2]: {"more": 2.0}}) - base, model[3].weight.sum(1) * 3
    )
    for key in (0, 3, Plus()):
        with pytest.raises(ValueError, match="op_kwargs"):
            model(x, op_kwargs={key: {}})
    with pytest.raises(IndexError):
        model(x, op_kwargs={7: {}})


# --------------------------------------------------------------------------------------------------------- channels


def channelled(*, to_caller: bool = False) -> ops.Sequential:
    """x + (x + b) through a channel."""
    make = ops.MakeExtraOutput()
    assert make.set_extra_output_channel(0, "x", output_to_caller=to_caller) is make
    bias = ops.Bias(4, device="cpu")
    randomise(bias)
    return ops.Sequential(make, bias, ops.AddExtraInput().set_extra_input_channel(0, "x"))


@pytest.mark.parametrize("to_caller", [False, True])
def test_a_channel_carries_a_residual(to_caller: bool) -> None:
    model, x = channelled(to_caller=to_caller), values(3, 4)
    found = step(model, x, None)
    dy = values(3, 4, seed=7)
    shown = values(3, 4, seed=8) if to_caller else torch.zeros(())
    torch.testing.assert_close(found["y"], 2 * x + model[1].bias)
    torch.testing.assert_close(found["dx"], 2 * dy + shown)
    torch.testing.assert_close(found["1.bias"], dy.sum(0))
    assert ("y1" in found) is to_caller


def test_a_channel_has_several_readers_beside_the_caller() -> None:
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        ops.AddExtraInput(),
        ops.AddExtraInput().set_extra_input_channel(0, "x"),
        ops.AddExtraInput().set_extra_input_channel(0, "x"),
    )
    found = step(model, [values(3), values(3, seed=1)], None)
    torch.testing.assert_close(found["y"], 3 * values(3) + values(3, seed=1))
    torch.testing.assert_close(found["dx"], 3 * values(3, seed=7))
    torch.testing.assert_close(found["dx1"], values(3, seed=7))


WRONG_CHANNELS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "index": (lambda: ops.AddExtraInput().set_extra_input_channel(1, "x"), IndexError, "out of range"),
    "negative": (lambda: ops.MakeExtraOutput().set_extra_output_channel(-1, "x"), IndexError, "out of range"),
    "empty": (lambda: ops.AddExtraInput().set_extra_input_channel(0, ""), ValueError, "non-empty string"),
    "number": (lambda: ops.AddExtraInput().set_extra_input_channel(0, 3), ValueError, "non-empty string"),
    "flag": (
        lambda: ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=1), TypeError, "is no bool"
    ),
    "late": (
        lambda: ops.Sequential(op := ops.AddExtraInput())(torch.ones(1), torch.ones(1)) is None
        or op.set_extra_input_channel(0, "x"),
        RuntimeError,
        "already captured its channel routing",
    ),
    "two": (
        lambda: OperationFuser([ops.MakeExtraOutput().set_extra_output_channel(0, "x") for _ in range(2)]),
        ValueError,
        "multiple producers",
    ),
    "none": (
        lambda: OperationFuser([ops.AddExtraInput().set_extra_input_channel(0, "x")]), ValueError, "has no producer"
    ),
    "later": (
        lambda: OperationFuser(
            [
                ops.AddExtraInput().set_extra_input_channel(0, "x"),
                ops.MakeExtraOutput().set_extra_output_channel(0, "x"),
            ]
        ),
        ValueError,
        "has no earlier producer",
    ),
    "extra inputs": (lambda: ops.AddExtraInput()(torch.ones(1)), ValueError, "0 extra inputs"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CHANNELS)
def test_wrong_channels_are_refused(case: str) -> None:
    call, kind, words = WRONG_CHANNELS[case]
    with pytest.raises(kind, match=words):
        call()


def test_a_channel_may_be_unbound() -> None:
    op = ops.AddExtraInput().set_extra_input_channel(0, "x").set_extra_input_channel(0, None)
    assert torch.equal(op(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))


# ------------------------------------------------------------------------------------------- operations of users' own


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("forward", "backward", "forward_backward"):
        attribute = f"{name}_fusion_functions"
        monkeypatch.setattr(OperationFuser, attribute, list(getattr(OperationFuser, attribute)))
    yield


class LearnableScale(ops.BasicOperation):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(self.scale, input_)
        return self.scale * input_

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        scale, x = ctx.saved_tensors
        return scale * grad_output, ((x * grad_output).sum(),)


def test_a_users_operation_runs_among_others() -> None:
    model, x = ops.Sequential(ops.Identity(), LearnableScale(), ops.Identity()), values(3, 5)
    found, dy = step(model, x, "current"), values(3, 5, seed=7)
    torch.testing.assert_close(found["y"], 1.5 * x)
    torch.testing.assert_close(found["dx"], 1.5 * dy)
    torch.testing.assert_close(found["1.scale"], (x * dy).sum())
    with torch.no_grad():
        assert not model(x).requires_grad


def window(kind: type[ops.FusedOperation], *kinds: type, seen: list[str] | None = None) -> Callable[..., Any]:
    """A function for a registry, which fuses the first such operations."""

    def fuse(given: list[Any], *, recipe: Any = None, **unused: Any) -> list[Any]:
        for i in range(len(given) - len(kinds) + 1):
            if all(isinstance(op, k) for op, k in zip(given[i:], kinds, strict=False)):
                if seen is not None:
                    seen.append(type(recipe).__name__)
                return [*given[:i], kind(given[i : i + len(kinds)]), *given[i + len(kinds) :]]
        return given

    return fuse


class ForwardScaleAdd(ops.FusedOperation):
    def fuser_forward(self, ctxs: Any, x: Tensor, *, basic_op_extra_inputs: Any, **unused: Any) -> Any:
        return basic_op_extra_inputs[1][0] + self.basic_ops[0].scale * x, [(), ()]


class ForwardLinearSiLU(ops.FusedOperation):
    def fuser_forward(self, ctxs: Any, x: Tensor, **unused: Any) -> Any:
        weight = self.basic_ops[0].weight
        made = x @ weight.T
        linear, act = ctxs
        linear.save_for_backward(x, weight)
        linear.with_quantized_compute = False
        linear.input_quantizer = linear.weight_quantizer = linear.grad_output_quantizer = None
        linear.grad_input_quantizer = None
        linear.dtype, linear.input_requires_grad, linear.weight_requires_grad = x.dtype, True, True
        act.save_for_backward(made)
        act.dtype, act.prev_op_grad_output_quantizer = x.dtype, None
        return F.silu(made), [(), ()]


class BackwardScaleLinear(ops.FusedOperation):
    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        x, w = ctxs[1].saved_tensors
        dy = grad_output.to(ctxs[1].dtype)
        return self.basic_ops[0].scale * (dy @ w), [(), (dy.T @ x,)], [(), ()]


class JointLinearSiLU(ops.FusedOperation):
    def fuser_forward(self, ctxs: Any, x: Tensor, **unused: Any) -> Any:
        made = x @ self.basic_ops[0].weight.T
        ctxs[0].save_for_backward(x, made)
        return F.silu(made), [(), ()]

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        x, made = ctxs[0].saved_tensors
        s = torch.sigmoid(made)
        dh = grad_output * s * (1 + made * (1 - s))
        return dh @ self.basic_ops[0].weight, [(dh.T @ x,), ()], [(), ()]


#: Name: (what registers, what fuses which operations, the chain, whether the class stands in (forward, backward)).
OWN: dict[str, Any] = {
    "forward scale and add": (
        "forward", ForwardScaleAdd, (ops.ConstantScale, ops.AddExtraInput),
        lambda: [ops.ConstantScale(2.5), ops.AddExtraInput()], (True, False),
    ),
    "forward linear and SiLU": (
        "forward", ForwardLinearSiLU, (ops.BasicLinear, ops.SiLU),
        lambda: [ops.Linear(8, 6, bias=False, device="cpu"), ops.SiLU()], (True, False),
    ),
    "backward scale and linear": (
        "backward", BackwardScaleLinear, (ops.ConstantScale, ops.BasicLinear),
        lambda: [ops.ConstantScale(2.5), ops.Linear(8, 6, bias=False, device="cpu")], (False, True),
    ),
    "joint linear and SiLU": (
        "forward_backward", JointLinearSiLU, (ops.BasicLinear, ops.SiLU),
        lambda: [ops.Linear(8, 6, bias=False, device="cpu"), ops.SiLU()], (True, True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_users_fusion_stands_in_for_its_operations(name: str, registries: None) -> None:
    passes, kind, kinds, chain, stands = OWN[name]
    x = [values(4, 8), *[values(4, 8, seed=1)] * (ops.AddExtraInput in kinds)]
    plain, model = ops.Sequential(*chain()), ops.Sequential(*chain())
    randomise(plain), randomise(model)
    wanted, seen = step(plain, x, None), list[str]()
    getattr(ops, f"register_{passes}_fusion")(window(kind, *kinds, seen=seen), prepend=True)
    found = step(model, x, None)
    group = model._module_groups[0]
    for some, there in zip((group._forward_ops, group._backward_ops), stands, strict=True):
        assert [type(op) for op, _ in some] == ([kind] if there else [type(op) for op in group._basic_ops])
    if all(stands):
        assert group._forward_ops[0][0] is group._backward_ops[0][0]
    for key, value in found.items():
        torch.testing.assert_close(value, wanted[key])
    assert seen == ["NoneType"]
    step(model, x, "current")
    step(model, x, "current")
    assert seen == ["NoneType", "Float8CurrentScaling"], "asked again where the recipe's class is another one"


def test_what_a_fusion_returns_is_checked(registries: None) -> None:
    ops.register_forward_fusion(lambda given, **_: given[::-1])
    with pytest.raises(RuntimeError, match="a fusion made"):
        ops.Sequential(ops.Identity(), ops.ConstantScale(2.0))(torch.ones(1))


class Wrong(ops.BasicOperation):
    num_extra_outputs = 1

    def __init__(self, outputs: Any, gradients: Any = ((), ())) -> None:
        super().__init__()
        self.outputs, self.gradients = outputs, gradients

    def fuser_forward(self, ctxs: Any, x: Tensor, **unused: Any) -> Any:
        return x * 1, self.outputs

    def fuser_backward(self, ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        return grad_output, *[[some] for some in self.gradients]


@pytest.mark.parametrize(
    ("outputs", "gradients", "words"),
    [
        ([], ((), ()), "0 extra outputs|extra outputs of its basic operations"),
        ([()], ((), ()), "extra outputs of its basic operations"),
        ([(None,)], ((), ()), "is public"),
        ([(torch.ones(1),)], ((torch.ones(1),), ()), "1 gradients for 0 parameters"),
        ([(torch.ones(1),)], ((), (torch.ones(1),)), "1 gradients for 0 extra inputs"),
    ],
)
def test_what_an_operation_returns_is_checked(outputs: Any, gradients: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        Wrong(outputs, gradients)(torch.ones(1, requires_grad=True))[0].backward()


def test_an_operation_says_what_it_does_not_define() -> None:
    class Empty(ops.BasicOperation):
        pass

    class Extra(ops.BasicOperation):
        num_extra_inputs = 1

    with pytest.raises(NotImplementedError, match="Empty defines no op_forward"):
        Empty()(torch.ones(1))
    with pytest.raises(RuntimeError, match="Extra has 1 extra inputs.*define fuser_forward"):
        Extra()(torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="no operations"):
        ops.FusedOperation([])


# ------------------------------------------------------------------------------------------------ built-in fusions


def linear(bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> ops.Linear:
    made = ops.Linear(32, 32, bias=bias, device="cpu", dtype=dtype)
    randomise(made)
    return made


def norm(**options: Any) -> ops.RMSNorm:
    made = ops.RMSNorm(32, device="cpu", dtype=torch.bfloat16, **options)
    randomise(made)
    return made


ADD = dict(in_place=True)
#: Name: (the chain, recipe, classes in forward, classes in backward; None: each operation by itself).
FUSIONS: dict[str, tuple[Callable[[], list[Any]], str | None, list[str] | None, list[str] | None]] = {
    "linear bias": (lambda: [linear(True)], None, ["ForwardLinearBiasActivation"], None),
    "linear bias add": (lambda: [linear(True), ops.AddExtraInput(**ADD)], None, ["ForwardLinearBiasAdd"], None),
    "linear add": (lambda: [linear(), ops.AddExtraInput(**ADD)], "delayed", ["ForwardLinearBiasAdd"], None),
    **{
        f"linear scale {a} add": (
            lambda a=a: [linear(), ops.ConstantScale(a), ops.AddExtraInput(**ADD), ops.Quantize()],
            None if a else "mxfp8", ["ForwardLinearScaleAdd", "Quantize"],
            ["BackwardLinearScale", "AddExtraInput", "Quantize"],
        )
        for a in (1.0, 0.0, -2.5)
    },
    "activation bias": (
        lambda: [ops.Quantize(forward=False, backward=True), ops.Bias(32, device="cpu"), ops.ReLU()],
        "current", None, ["Quantize", "BackwardActivationBias"],
    ),
    "activation bias nvfp4": (
        lambda: [ops.Quantize(forward=False, backward=True), ops.Bias(32, device="cpu"), ops.GELU()],
        "nvfp4 nearest", None, ["Quantize", "BackwardActivationBias"],
    ),
    "activation bias without a recipe": (
        lambda: [ops.Quantize(forward=False, backward=True), ops.Bias(32, device="cpu"), ops.GELU()], None, None, None
    ),
    "add norm": (lambda: [ops.MakeExtraOutput(), norm()], None, None, ["BackwardAddRMSNorm"]),
    "add norm from one": (
        lambda: [ops.MakeExtraOutput(), norm(zero_centered_gamma=True)], "current", None, ["BackwardAddRMSNorm"]
    ),
    "linear add back": (lambda: [ops.MakeExtraOutput(**ADD), linear()], "block", None, ["BackwardLinearAdd"]),
    "linear scale": (lambda: [linear(), ops.ConstantScale(-2.5)], "current", None, ["BackwardLinearScale"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_gives_what_its_operations_give(name: str, registries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, recipe, forward, backward = FUSIONS[name]
    torch.manual_seed(0)
    model = ops.Sequential(*chain())
    dtype = torch.float32 if "activation" in name else torch.bfloat16
    x = [values(16, 32, dtype=dtype)]
    x += [values(16, 32, dtype=dtype, seed=1)] * any(isinstance(op, ops.AddExtraInput) for op in model)
    plain = copy.deepcopy(model)

    def run(m: ops.Sequential) -> dict[str, Tensor]:
        given = [t.clone().requires_grad_() for t in x]
        inputs = [given[0], *[t * 1 for t in given[1:]]]  # written to, so no leaves
        with te.autocast(enabled=recipe is not None, recipe=None if recipe is None else rule(recipe), emulate=True):
            outs = m(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        torch.autograd.backward(outs, [values(16, 32, dtype=dtype, seed=7 + i) for i in range(len(outs))])
        found = {f"y{i}": o.detach() for i, o in enumerate(outs)} | {f"dx{i}": t.grad for i, t in enumerate(given)}
        return found | {n: p.grad for n, p in m.named_parameters()}

    found = run(model)
    group = model._module_groups[0]
    single = [type(op).__name__ for op in group._basic_ops]
    assert [type(op).__name__ for op, _ in group._forward_ops] == (forward or single)
    assert [type(op).__name__ for op, _ in group._backward_ops] == (backward or single)
    for some in ("forward", "backward"):
        monkeypatch.setattr(OperationFuser, f"{some}_fusion_functions", [])
    wanted = run(plain)
    assert [type(op).__name__ for op, _ in plain._module_groups[0]._forward_ops] == single
    for key, value in found.items():
        dense = [t.dequantize() if isinstance(t, te.QuantizedTensor) else t for t in (value, wanted[key])]
        assert type(value) is type(wanted[key]) and snr_db(*[t.float() for t in dense]) > DB["bf16"], key
    if "scale 0.0" in name:
        assert snr_db(found["y0"].dequantize().float(), x[1].float()) > 25


def rule(name: str) -> Any:
    from tests import recipes

    return recipes.rule(name)


def test_a_graph_may_be_kept_for_a_second_backward() -> None:
    chain = [ops.GroupedLinear(2, 8, 8, device="cpu"), ops.GELU(), ops.LayerNorm(8, device="cpu")]
    x = values(4, 8).requires_grad_()
    y = ops.Sequential(*chain)(x, torch.tensor([3, 1])).square().sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_an_extra_output_that_nobody_reads_has_no_gradient() -> None:
    for chain in ([ops.MakeExtraOutput(), norm()], [ops.MakeExtraOutput(in_place=True), linear()]):
        model, x = ops.Sequential(*chain), values(16, 32, dtype=torch.bfloat16).requires_grad_()
        model(x)[0].backward(dy := values(16, 32, dtype=torch.bfloat16, seed=7))
        alone, z = ops.Sequential(chain[1]), x.detach().clone().requires_grad_()
        alone(z).backward(dy)
        assert torch.equal(x.grad, z.grad)


# --------------------------------------------------------------------------------------------------------- bad input

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "width": (lambda: ops.Linear(8, 8, device="cpu")(torch.ones(4, 7)), r"an input of shape \(4, 7\)"),
    "two that do not fit": (
        lambda: ops.Sequential(ops.Bias(16, device="cpu"), ops.GELU(), ops.Linear(8, 8, device="cpu"))(torch.ones(16)),
        r"BasicLinear behind GELU in a chain in 2.basic_ops.0: got an input of shape \(16,\)",
    ),
    "integers": (lambda: ops.GELU()(torch.ones(4, dtype=torch.int64)), "torch.int64"),
    "mode": (lambda: ops.BasicLinear(8, 8, tensor_parallel_mode="Row", device="cpu"), "tensor_parallel_mode='Row'"),
    "size": (lambda: ops.Bias(0), "size=0"),
    "probability": (lambda: ops.Dropout(1.5), "p=1.5"),
    "scale": (lambda: ops.ConstantScale(math.nan), "scale=nan"),
    "beta": (lambda: ops.SiTUGLU(beta1=0.0), "beta1=0.0"),
    "beta infinite": (lambda: ops.ScaledSiTUGLU(beta2=math.inf), "beta2=inf"),
    "recompute": (lambda: ops.ScaledSwiGLU(activation_recompute_in_mlp=True), "activation_recompute_in_mlp=True"),
    "blocks": (lambda: ops.SwiGLU(glu_interleave_size=5)(torch.ones(4, 16)), "glu_interleave_size=5"),
    "scales": (lambda: ops.ScaledSReLU()(torch.ones(4, 16), torch.ones(3)), r"scales of shape \(3,\)"),
    "norm": (lambda: ops.LayerNorm(8, device="cpu")(torch.ones(4, 7)), r"\(4, 7\)"),
    "bias": (lambda: setattr(ops.Linear(8, 8, bias=False, device="cpu"), "bias", nn.Parameter(torch.ones(8))), "bias"),
    "main_grad": (
        lambda: ops.BasicLinear(8, 8, device="cpu", accumulate_into_main_grad=True)(torch.ones(4, 8)).sum().backward(),
        "accumulate_into_main_grad: got a weight without main_grad",
    ),
    "splits": (lambda: ops.GroupedLinear(2, 8, 8, device="cpu")(torch.ones(4, 8), torch.tensor([1, 2, 1])), "splits"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    call, words = BAD[case]
    with pytest.raises(ArgumentError, match=words):
        call()
