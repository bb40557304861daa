"""GroupedLinear: bit for bit a Linear for each group, in every recipe; and what it adds: splits, buffers, sums."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_torch.base.quantized_init import quantized_model_init
from te_torch.quantized import QuantizedTorch
from tests import recipes
from tests.backends import on_devices, requires_cuda
from tests.covering import covering
from tests.world import randomise, values

RECIPES: dict[str, Any] = {
    "plain": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "high_precision": Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": Float8BlockScaling(backward_override="dequantized"),
}
each_recipe = pytest.mark.parametrize("name", RECIPES)
#: GEMMs of slices see the same addresses as alone (modulo 256 bytes), so that cuBLASLt chooses alike.
K, N, GROUPS = 128, 256, 4
#: Odd sizes and an empty group; one group has all; all but one row.
SPLITS = [[37, 0, 5, 64], [0, 0, 48, 0], [1, 200, 3, 16]]


def grouped(device: str, dtype: torch.dtype = torch.bfloat16, **kw: Any) -> Any:
    module = te.GroupedLinear(GROUPS, K, N, params_dtype=dtype, device=device, **kw)
    randomise(module)
    return module


def separate(module: Any, **kw: Any) -> list[Any]:
    """A Linear for each group with the same parameters."""
    made = []
    for i in range(module.num_gemms):
        weight = getattr(module, f"weight{i}")
        linear = te.Linear(
            module.in_features,
            module.out_features,
            bias=module.use_bias,
            params_dtype=weight.dtype,
            device=weight.device,
            **kw,
        )
        with torch.no_grad():
            linear.weight.copy_(weight)
            if module.use_bias:
                linear.bias.copy_(getattr(module, f"bias{i}"))
        made.append(linear)
    return made


def region(name: str, **kw: Any) -> Any:
    recipe = RECIPES[name]
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe, emulate=True, **kw)


def batch(splits: list[int], device: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """(x, dy); each group on a scale of its own, so that a shared one would show."""
    x = values(sum(splits), K, device=device, seed=seed)
    dy = values(sum(splits), N, device=device, seed=100 + seed)
    factor = torch.repeat_interleave(4.0 ** torch.arange(len(splits)), torch.tensor(splits)).to(device)[:, None]
    return (x * factor).to(dtype).requires_grad_(), (dy / factor).to(dtype)


def run(module: Any, x: torch.Tensor, dy: torch.Tensor, name: str, *args: Any, **kw: Any) -> torch.Tensor:
    x.grad = None
    with region(name):
        y = module(x, *args, **kw)
    y.backward(dy)
    return y.detach()


def run_separate(linears: list[Any], x: Any, dy: Any, splits: list[int], name: str, *args: Any) -> tuple[Any, Any]:
    """(y, dx) of one region around all."""
    leaves = [t.detach().clone().requires_grad_() for t in x.split(splits)]
    with region(name):
        ys = [linear(leaf, *args) for linear, leaf in zip(linears, leaves, strict=True)]
    for y, part in zip(ys, dy.split(splits), strict=True):
        y.backward(part)
    return torch.cat(ys).detach(), torch.cat([leaf.grad for leaf in leaves])


def parameter_pairs(module: Any, linears: list[Any]) -> list[tuple[str, Any, Any]]:
    kinds = ("weight", "bias") if module.use_bias else ("weight",)
    return [
        (f"{kind}{i}", getattr(module, f"{kind}{i}"), getattr(linear, kind))
        for kind in kinds
        for i, linear in enumerate(linears)
    ]


def check_gradients(module: Any, linears: list[Any]) -> None:
    for name, ours, theirs in parameter_pairs(module, linears):
        assert ours.grad is not None and ours.grad.shape == ours.shape and ours.grad.dtype == ours.dtype, name
        assert torch.equal(ours.grad, theirs.grad), name


def check_states(module: Any, linears: list[Any]) -> None:
    for suffix, slots in (("fwd", 3), ("bwd", 2)):
        for what in ("scale", "amax_history"):
            ours = getattr(module.fp8_state, f"{what}_{suffix}")
            theirs = torch.cat([getattr(x.fp8_state, f"{what}_{suffix}") for x in linears], dim=-1)
            assert ours.shape[-1] == slots * GROUPS and torch.equal(ours, theirs), (what, suffix)


@on_devices
@covering(dtype=[torch.bfloat16, torch.float32], name=RECIPES)
def test_equals_separate_linears(name: str, dtype: torch.dtype, device: str) -> None:
    module = grouped(device, dtype)
    linears = separate(module)
    for seed, splits in enumerate(SPLITS):
        x, dy = batch(splits, device, seed, dtype)
        y = run(module, x, dy, name, splits)
        expected, dx = run_separate(linears, x, dy, splits, name)
        if name == "plain" and dtype == torch.bfloat16 and device == "cuda":  # one launch, with sums of its own order
            for got, wanted in ((y, expected), (x.grad, dx)):
                assert (got - wanted).abs().max() <= 2.0**-6 * wanted.abs().max()
            continue
        assert torch.equal(y, expected) and torch.equal(x.grad, dx)
        check_gradients(module, linears)
        module.zero_grad(), [linear.zero_grad() for linear in linears]
        if name == "delayed":
            check_states(module, linears)
            assert seed == 0 or not (module.fp8_state.scale_fwd == 1).all()


@on_devices
@pytest.mark.parametrize("bias", [False, True])
def test_formula(bias: bool, device: str) -> None:
    """Against float64, with whole numbers so small that every sum is exact."""
    module = te.GroupedLinear(3, 24, 40, bias=bias, params_dtype=torch.float32, device=device)
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_((2 * values(*p.shape, seed=i)).round().clamp(-4, 4))
    splits = [3, 0, 6]
    x = (2 * values(9, 24, device=device, seed=7)).round().clamp(-4, 4).requires_grad_()
    dy = (2 * values(9, 40, device=device, seed=8)).round().clamp(-4, 4)
    y = module(x, splits)
    y.backward(dy)
    for i, (rows, dys, xs, dxs) in enumerate(zip(*(t.split(splits) for t in (y, dy, x, x.grad)), strict=True)):
        w = getattr(module, f"weight{i}")
        expected = xs.double() @ w.double().T
        if bias:
            b = getattr(module, f"bias{i}")
            expected += b.double()
            assert torch.equal(b.grad.double(), dys.double().sum(0))
        assert torch.equal(rows.double(), expected)
        assert torch.equal(w.grad.double(), dys.double().T @ xs.double())
        assert torch.equal(dxs.double(), dys.double() @ w.double())
    assert not module.weight1.grad.any(), "an empty group's gradient is zero"


@on_devices
@each_recipe
def test_accumulation_into_main_grad(name: str, device: str) -> None:
    """Three microbatches: the same main_grad as of separate modules; the first overwrites, an empty group's too."""
    module = grouped(device, fuse_wgrad_accumulation=True)
    linears = separate(module, fuse_wgrad_accumulation=True)
    for _, ours, theirs in parameter_pairs(module, linears):
        ours.main_grad, theirs.main_grad = (torch.full(ours.shape, 3.0, device=device) for _ in range(2))
    for seed, (splits, first) in enumerate(zip(SPLITS, (True, False, False), strict=True)):
        x, dy = batch(splits, device, seed)
        y = run(module, x, dy, name, splits, is_first_microbatch=first)
        expected, dx = run_separate(linears, x, dy, splits, name, first)
        assert torch.equal(y, expected) and torch.equal(x.grad, dx)
        for which, ours, theirs in parameter_pairs(module, linears):
            if which.startswith("weight"):
                assert ours.grad is None and torch.equal(ours.main_grad, theirs.main_grad), which
        if not seed:
            assert not module.weight1.main_grad.any()


@on_devices
@pytest.mark.parametrize("name", ["plain", "delayed", "block"])
def test_delayed_weight_gradients(name: str, device: str) -> None:
    """backward_dw gives what backward would have given, oldest first; an empty group waits its turn too."""
    plain = grouped(device)
    later = grouped(device, delay_wgrad_compute=True)
    assert later.need_backward_dw() and later.weight0.skip_backward_post_hook
    expected = []
    for seed, splits in enumerate(SPLITS):
        x, dy = batch(splits, device, seed)
        assert torch.equal(run(plain, x, dy, name, splits), run(later, x, dy, name, splits))
        expected.append([getattr(plain, f"weight{i}").grad for i in range(GROUPS)])
        assert all(torch.equal(getattr(later, f"bias{i}").grad, getattr(plain, f"bias{i}").grad) for i in range(GROUPS))
        plain.zero_grad(), later.zero_grad()
    weights = [getattr(later, f"weight{i}") for i in range(GROUPS)]
    for gradients in expected:
        assert all(w.grad is None for w in weights)
        later.backward_dw()
        assert all(torch.equal(w.grad, g) for w, g in zip(weights, gradients, strict=True))
        later.zero_grad()


@on_devices
def test_buffers(device: str) -> None:
    """Results go into the first rows of a caller's buffers, the rest stays; the same bits as without them."""
    module, splits = grouped(device), SPLITS[0]
    rows = sum(splits)
    for name in ("plain", "current"):
        x, dy = batch(splits, device, 0)
        y = run(module, x, dy, name, splits)
        dx, grads = x.grad, [p.grad for p in module.parameters()]
        module.zero_grad()
        out, dgrad_out = (torch.full((rows + 7, width), 9.0, device=device, dtype=x.dtype) for width in (N, K))
        again = run(module, x, dy, name, splits, out=out, dgrad_out=dgrad_out)
        assert torch.equal(again, y) and again.data_ptr() == out.data_ptr() and (out[rows:] == 9).all()
        assert torch.equal(x.grad, dx) and torch.equal(dgrad_out[:rows], dx) and (dgrad_out[rows:] == 9).all()
        assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), grads, strict=True))
        module.zero_grad()


@on_devices
def test_buffers_and_autograd(device: str) -> None:
    """The gradient that leaves lies in its buffer too. One used again before backward is noticed, a pool is not."""
    module, splits = grouped(device), SPLITS[0]
    rows = sum(splits)
    x, dy = batch(splits, device, 0)
    plain = module(x, splits)
    plain.backward(dy)
    once, x.grad = x.grad, None
    pool = torch.empty(2 * rows, N, device=device, dtype=x.dtype)
    dgrad_out = torch.empty(rows, K, device=device, dtype=x.dtype)
    h, seen = x * 1, []
    h.register_hook(lambda g: seen.append(g.data_ptr()))
    y = module(h, splits, out=pool[:rows], dgrad_out=dgrad_out)
    squares = y.pow(2)  # keeps y
    other = module(x.detach(), splits, out=pool[rows:])
    assert other.data_ptr() == pool[rows:].data_ptr() and torch.equal(other, y)
    (squares.sum() * 0 + (y * dy).sum()).backward()
    assert seen == [dgrad_out.data_ptr()] and torch.equal(x.grad, once)
    x.grad = None
    for _ in range(2):  # gradients of a leaf add up, though both came in one buffer
        module(x, splits, dgrad_out=dgrad_out).backward(dy)
    assert torch.equal(x.grad, once + once)
    stale = module(x, splits, out=pool[:rows]).pow(2).sum()
    module(x, splits, out=pool[:rows])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    y = module(x, splits, out=pool[:rows])
    y.add_(1)  # no view of anything
    y.backward(dy)


@on_devices
def test_a_buffer_of_inference_mode(device: str) -> None:
    """It serves inside of the mode, and is refused outside."""
    module, splits = grouped(device), SPLITS[0]
    x, _ = batch(splits, device, 0)
    with torch.inference_mode():
        buffer = torch.empty(sum(splits), N, device=device, dtype=x.dtype)
        assert torch.equal(module(x, splits, out=buffer), module(x, splits))
    with pytest.raises(ArgumentError, match="made in inference mode"):
        module(x, splits, out=buffer)


@on_devices
def test_splits(device: str) -> None:
    """A list, a tuple, a tensor on either side: the same; only a tensor on the GPU is copied, once."""
    module, splits = grouped(device, torch.float32), SPLITS[0]
    x, _ = batch(splits, device, 0, torch.float32)
    expected = module(x, splits)
    before = te.GroupedLinear.host_copies
    for given in (tuple(splits), torch.tensor(splits), torch.tensor(splits, dtype=torch.int32)):
        assert torch.equal(module(x, given), expected)
    assert te.GroupedLinear.host_copies == before
    assert torch.equal(module(x, torch.tensor(splits, device=device)), expected)
    assert te.GroupedLinear.host_copies == before + (device != "cpu")


@requires_cuda
@each_recipe
def test_a_list_never_waits(name: str) -> None:
    module = grouped("cuda")
    for seed, splits in enumerate(SPLITS):  # kernels are loaded, plans made
        run(module, *batch(splits, "cuda", seed), name, splits)
    x, dy = batch([20, 21, 0, 22], "cuda", 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(module, x, dy, name, [20, 21, 0, 22])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_devices
def test_return_bias(device: str) -> None:
    module, splits = grouped(device, return_bias=True), SPLITS[0]
    x, _ = batch(splits, device, 0)
    out, biases = module(x, splits)
    assert [b.data_ptr() for b in biases] == [getattr(module, f"bias{i}").data_ptr() for i in range(GROUPS)]
    module.return_bias = False
    full = module(x, splits)
    with torch.no_grad():
        [b.zero_() for b in biases]
    assert torch.equal(module(x, splits), out) and not torch.equal(full, out)
    bare = grouped(device, return_bias=True, bias=False)
    assert all(b.numel() == 0 for b in bare(x, splits)[1])
    later = te.GroupedLinear(GROUPS, K, N, return_bias=True, bias=False, params_dtype=x.dtype, device="meta")
    later.reset_parameters()
    y, empty = later.to(device)(x, splits)
    assert all(b.numel() == 0 and b.device == y.device for b in empty), "they were made where there is no memory"


@on_devices
def test_frozen_groups(device: str) -> None:
    """Only the parameters that want gradients get them, the others' values notwithstanding."""
    for name in ("plain", "current"):
        whole, some, splits = grouped(device), grouped(device), SPLITS[0]
        some.weight0.requires_grad_(False), some.bias3.requires_grad_(False)
        x, dy = batch(splits, device, 0)
        run(whole, x, dy, name, splits)
        run(some, x, dy, name, splits)
        for key, p in some.named_parameters():
            expected = None if key in ("weight0", "bias3") else getattr(whole, key).grad
            assert p.grad is expected if expected is None else torch.equal(p.grad, expected), key


@on_devices
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_weights_held_quantized(name: str, device: str) -> None:
    """Made inside quantized_model_init: no other copy of a weight, and the bits of separate modules made so."""
    made = []
    for make in (
        lambda: [te.GroupedLinear(GROUPS, K, N, device=device)],
        lambda: [te.Linear(K, N, device=device) for _ in range(GROUPS)],
    ):
        torch.manual_seed(0)
        with quantized_model_init(recipe=RECIPES[name]):
            made.append(make())
    (module,), linears = made
    assert module.primary_weights_in_fp8 and all(
        isinstance(getattr(module, n), QuantizedTorch) for n in ("weight0", "weight3")
    )
    for seed, splits in enumerate(SPLITS):
        x, dy = batch(splits, device, seed, torch.float32)
        y = run(module, x, dy, name, splits)
        expected, dx = run_separate(linears, x, dy, splits, name)
        assert torch.equal(y, expected) and torch.equal(x.grad, dx)
        check_gradients(module, linears)


@on_devices
def test_calibration(device: str) -> None:
    """Groups are calibrated one by one; the output is that of high precision."""
    module, splits = grouped(device), [3, 0, 5, 8]
    linears = separate(module)
    x, dy = batch(splits, device, 0)
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        y = module(x, splits)
        [linear(part) for linear, part in zip(linears, x.split(splits), strict=True)]
    y.backward(dy)
    assert torch.equal(y, module(x, splits))
    check_states(module, linears)


@on_devices
def test_modes(device: str) -> None:
    """torch.autocast, no_grad, more dimensions, no rows at all."""
    module, splits = grouped(device, torch.float32), SPLITS[0]
    x, dy = batch(splits, device, 0, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        assert module(x, splits).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="Data types for parameters must match"):
        module(x.bfloat16(), splits)
    y = module(x, splits)
    with torch.no_grad():
        assert torch.equal(module(x, splits), y) and not module(x, splits).requires_grad
    assert torch.equal(module(x.view(2, -1, K), splits), y.view(2, -1, N))
    nothing = x[:0].detach().requires_grad_()
    with region("current"):
        empty = module(nothing, [0] * GROUPS)
    empty.sum().backward()
    assert empty.shape == (0, N) and nothing.grad.shape == (0, K) and not module.weight0.grad.any()


@on_devices
def test_parameters(device: str) -> None:
    module = te.GroupedLinear(2, 8, 16, device=device)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == {
        "weight0": (16, 8),
        "bias0": (16,),
        "weight1": (16, 8),
        "bias1": (16,),
    }
    assert set(te.GroupedLinear(2, 8, 16, bias=False, device=device).state_dict()) == {"weight0", "weight1"}
    module = te.GroupedLinear(2, 64, 64, device="meta", init_method=lambda w: w.fill_(3))
    assert module(torch.empty(6, 64, device="meta"), [2, 4]).shape == (6, 64)
    module.reset_parameters()
    assert (module.weight1 == 3).all() and not module.bias1.any()


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**kw: Any) -> Any:
        return te.GroupedLinear(**{"num_gemms": 2, "in_features": 8, "out_features": 8, "device": "cpu", **kw})

    variable = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
    monkeypatch.delenv(variable, raising=False)
    for option in ("single_grouped_weight", "single_grouped_bias"):
        with pytest.warns(UserWarning, match=variable):
            module = make(**{option: True})
        assert "weight0" in dict(module.named_parameters())
        monkeypatch.setenv(variable, "1")
        with quantized_model_init(recipe=RECIPES["current"]), pytest.raises(RuntimeError, match="quantized_model"):
            make(single_grouped_weight=True)
        monkeypatch.delenv(variable)
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "0")
    with pytest.warns(FutureWarning):
        make()


def test_compiled_with_buffers_breaks_the_graph() -> None:
    torch._dynamo.reset()
    module, out = te.GroupedLinear(2, 16, 32, device="cpu"), torch.empty(6, 32)
    x = values(6, 16)
    compiled = torch.compile(lambda x: torch.relu(module(x * 2, [2, 4], out=out)), backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), torch.relu(module(x * 2, [2, 4])))


SINGLE: dict[str, Any] = {"single_grouped_weight": True, "single_grouped_bias": True}
HOW: dict[str, dict[str, Any]] = {
    "plainly": {},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "later": {"delay_wgrad_compute": True},
    "later, main_grad": {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True},
}


@on_devices
@covering(
    rule=(None, "delayed", "current", "block", "mxfp8", "current high_precision", "block dequantized"),
    how=HOW,
    dtype=(torch.bfloat16, torch.float32),
    biases=("none", "each", "one"),
    turns=2,
)
def test_one_parameter_gives_what_parameters_of_groups_give(
    rule: str | None, how: str, dtype: torch.dtype, biases: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    options = HOW[how] | {"bias": biases != "none", "params_dtype": dtype, "device": device}
    several, one = (
        te.GroupedLinear(
            3, 64, 48, **options, single_grouped_weight=single, single_grouped_bias=single and biases == "one"
        )
        for single in (False, True)
    )
    assert sum(1 for _ in one.parameters()) == 1 + {"none": 0, "each": 3, "one": 1}[biases]
    one.load_state_dict(several.state_dict())
    for p in [*several.parameters(), *one.parameters()]:
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    sizes = [[32, 0, 64], [0, 96, 0], [32, 32, 32]]
    for step, split in enumerate(sizes * 2):
        x, dy = (values(96, n, device=device, dtype=dtype, seed=2 * step + n) for n in (64, 48))
        found = []
        for module in (several, one):
            read = x.clone().requires_grad_()
            with recipes.region(rule):
                y = module(read, split, is_first_microbatch=None if step < 3 else step % 3 == 0)
            y.backward(dy)
            module.backward_dw()
            found += [y, read.grad]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    for kind in ("weight", "bias") if biases != "none" else ("weight",):
        for of in ("main_grad",) if "main_grad" in how and kind == "weight" else ("grad",):
            wanted = torch.stack([getattr(getattr(several, f"{kind}{i}"), of) for i in range(3)])
            whole = [getattr(p, of) for name, p in one.named_parameters() if name.startswith(kind)]
            assert torch.equal(whole[0] if len(whole) == 1 else torch.stack(whole), wanted) and wanted.any()


def test_checkpoints_of_one_parameter_and_of_parameters_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    for kind in (te.GroupedLinear, te.ops.GroupedLinear):
        one = kind(2, 16, 32, device="meta", single_grouped_weight=True, single_grouped_bias=True)
        one.reset_parameters()
        assert [tuple(p.shape) for p in one.parameters()] == [(2, 32, 16), (2, 32)] and one.weight[0].any()
        with torch.no_grad():
            one.bias.copy_(values(2, 32, device=str(one.bias.device)))
        several = kind(2, 16, 32, device=one.weight.device)
        several.load_state_dict(one.state_dict())
        assert torch.equal(several.weight1, one.weight[1]) and torch.equal(several.bias0, one.bias[0])
        again = kind(2, 16, 32, device=one.weight.device, single_grouped_weight=True)
        again.load_state_dict(several.state_dict())
        assert torch.equal(again.weight, one.weight) and torch.equal(again.bias1, one.bias[1])
        with pytest.raises(RuntimeError, match="weight"):
            several.load_state_dict({**one.state_dict(), "weight": one.weight[:1]})


@pytest.mark.parametrize("rule", [None, "current"])
def test_one_parameter_in_a_chain(rule: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    made = [te.ops.GroupedLinear(2, 32, 48, device="cpu", **single) for single in ({}, SINGLE)]
    made[1].load_state_dict(made[0].state_dict())
    x, dy, sizes = values(64, 32), values(64, 48), torch.tensor([32, 32])
    for op in made:
        with recipes.region(rule):
            te.ops.Sequential(op)(x, sizes).backward(dy)
    several, one = made
    for kind in ("weight", "bias"):
        wanted = torch.stack([getattr(several, f"{kind}{i}").grad for i in range(2)])
        assert torch.equal(getattr(one, kind).grad, wanted) and wanted.any()
