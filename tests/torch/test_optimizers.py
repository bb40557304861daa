"""FusedAdam, FusedSGD and the functions on lists of tensors beside torch's optimizers in float64, and mistakes."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_torch import optimizers as opt
from tests.backends import devices, requires_cuda

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
#: The type of parameters of up to 3, options; how far ten steps may be from float64's, in steps of lr. (Each rounds a
#: float16 master by 7e-4, and an FP8 moment by a sixteenth.)
FORMATS: list[tuple[torch.dtype, dict[str, Any], float]] = [
    (F32, {}, 1e-4),
    (F32, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, 0.1),
    (F32, {"exp_avg_dtype": F16, "exp_avg_sq_dtype": F16}, 0.05),
    (BF16, {"master_weights": True}, 1e-4),
    (BF16, {"master_weights": True, "store_param_remainders": True}, 1e-4),
    (F16, {"master_weights": True, "master_weight_dtype": F16}, 0.7),
    (BF16, {"master_weights": True, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": F16}, 1.0),
    (
        BF16,
        {"master_weights": True, "store_param_remainders": True, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": BF16},
        1.0,
    ),
]
SHAPES = ((16, 24), (24,), (3, 5, 7), (), (0, 4))


def parameters(dtype: torch.dtype, device: str, seed: int = 0) -> list[torch.nn.Parameter]:
    made = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=made).to(dtype).to(device)) for s in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    """Of elements that differ by a factor of up to four: FP8 holds no more of a second moment."""
    made = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s, generator=made).sign() * (1 + torch.rand(s, generator=made)) for s in SHAPES]


def give(params: list[Any], step: int, dtype: torch.dtype | None = None) -> None:
    for p, g in zip(params, gradients(step), strict=True):
        p.grad = g.to(p.device).to(BF16).to(dtype or p.dtype)


def masters(optimizer: Any, params: list[Any]) -> list[torch.Tensor]:
    """The values that the optimizer updates, in float64."""
    state = optimizer.state_dict()["state"]
    found = []
    for i, p in enumerate(params):
        master = state[i].get("master_param") if i in state else None
        if master is None:
            found.append(p.detach().double().cpu())
        elif master.dtype is torch.int16:
            bits = (p.detach().view(torch.int16).int() - (master < 0).int()) << 16 | (master.int() & 0xFFFF)
            found.append(bits.view(F32).double().cpu())
        else:
            found.append(master.double().cpu())
    return found


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize(("dtype", "options", "steps"), FORMATS, ids=str)
def test_beside_float64(device: str, adamw: bool, dtype: torch.dtype, options: dict[str, Any], steps: float) -> None:
    lr = 0.01
    params = parameters(dtype, device)
    theirs = [torch.nn.Parameter(p.detach().double().cpu()) for p in params]
    mine = opt.FusedAdam(params, lr=lr, weight_decay=0.1, adam_w_mode=adamw, **options)
    other = (torch.optim.AdamW if adamw else torch.optim.Adam)(theirs, lr=lr, weight_decay=0.1)
    for i in range(10):
        give(params, i)
        give(theirs, i)
        mine.step()
        other.step()
        for p, q in zip(masters(mine, params), theirs, strict=True):
            assert ((p - q.detach()).abs() <= steps * lr).all(), i
    for p, q in zip(params, masters(mine, params), strict=True):  # the parameter is its master's rounding
        near = 2.0**-8 if dtype is BF16 else 2.0**-10 if dtype is F16 else 0.0
        assert ((p.detach().double().cpu() - q).abs() <= near * q.abs() + 1e-7).all()
    assert mine.param_groups[0]["step"] == 10


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("dtype", "options", "steps"), FORMATS, ids=str)
def test_a_state_goes_on(device: str, dtype: torch.dtype, options: dict[str, Any], steps: float) -> None:
    """From a state dict (pickled), and of a copy: the steps after it are the same; states are saved in float32."""
    params = parameters(dtype, device)
    mine = opt.FusedAdam(params, **options)
    for i in range(3):
        give(params, i)
        mine.step()
    saved = pickle.loads(pickle.dumps(mine.state_dict()))
    kinds = {n: t.dtype for n, t in saved["state"][0].items()}
    assert kinds.pop("master_param", F32) is (torch.int16 if options.get("store_param_remainders") else F32)
    assert set(kinds.values()) == {F32}
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = opt.FusedAdam(again, lr=1.0, **options)
    other.load_state_dict(saved)
    assert other.state_dict()["param_groups"] == saved["param_groups"]
    both = copy.deepcopy([params, mine])
    pickled = pickle.loads(pickle.dumps([params, mine]))
    for i in range(3, 6):
        for some, optimizer in ((params, mine), (again, other), both, pickled):
            give(some, i)
            optimizer.step()
    for p, *others in zip(params, again, both[0], pickled[0], strict=True):
        assert all(torch.equal(p, q) for q in others)


@pytest.mark.parametrize("dtype", [FP8, F16])
def test_scaled_moments_come_back_exactly(dtype: torch.dtype) -> None:
    """Their scales are not saved: of a scale that the values give anew, one in ten was a rounding away."""
    made = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(64)]
    for p in params:
        p.grad = torch.randn(8, 8, generator=made) * torch.rand(1, generator=made)
    mine, other = (opt.FusedAdam(params, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype) for _ in range(2))
    mine.step()
    other.load_state_dict(mine.state_dict())
    for p in params:
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(mine.get_unscaled_state(p, name), other.get_unscaled_state(p, name))
            kept = mine.get_unscaled_state(p, name, skip_unscale=True)
            assert torch.equal(kept.float(), other.get_unscaled_state(p, name, skip_unscale=True).float())


def test_a_scaled_state_is_read_and_written() -> None:
    (p, *_) = parameters(BF16, "cpu")
    mine = opt.FusedAdam([p], master_weights=True, exp_avg_dtype=FP8, exp_avg_sq_dtype=F16)
    mine.initialize_state(p, False)
    values = torch.randn(p.shape) * 1e-3
    for name, error in (("exp_avg", 2.0**-4), ("exp_avg_sq", 2.0**-11), ("master_param", 0.0)):
        mine.set_scaled_state(p, name, values)
        found = mine.get_unscaled_state(p, name)
        assert found.dtype is F32 and ((found - values).abs() <= error * values.abs() + 1e-8).all()
    raw = mine.get_unscaled_state(p, "exp_avg", skip_unscale=True)
    assert raw.dtype is torch.float8_e4m3fn and raw.float().abs().max() == 448


@pytest.mark.parametrize("device", devices())
def test_groups(device: str) -> None:
    """Each has its own numbers, and its step counts from where it was added; also of one without gradients."""
    params = parameters(F32, device)
    theirs = copy.deepcopy(params)
    makers: list[Callable[[Any], Any]] = [lambda g: opt.FusedAdam(g, lr=0.1), lambda g: torch.optim.AdamW(g, lr=0.1)]
    made = []
    for some, make in zip((params, theirs), makers, strict=True):
        optimizer = make([{"params": some[:1], "weight_decay": 0.5}, {"params": some[1:2], "betas": (0.5, 0.6)}])
        optimizer.param_groups[0].setdefault("weight_decay", 0.0)
        optimizer.param_groups[1]["weight_decay"] = 0.0
        for i in range(4):
            if i == 2:
                optimizer.add_param_group({"params": some[2:3], "lr": 0.3, "weight_decay": 0.0})
            give(some, i)
            optimizer.step()
            optimizer.zero_grad()
            assert [p.grad is None for p in some[:4]] == [True, True, i >= 2, False]
        made.append(optimizer)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert [g["step"] for g in made[0].param_groups] == [4, 4, 2]
    made[0].step()
    assert [g["step"] for g in made[0].param_groups] == [5, 5, 3]


@pytest.mark.parametrize("device", devices())
def test_what_lies_otherwise(device: str) -> None:
    """Transposed parameters and gradients, gradients in float32 of bfloat16 parameters, and decoupled ones."""
    p = torch.nn.Parameter(torch.randn(24, 16, device=device).t())
    q = torch.nn.Parameter(p.detach().clone().contiguous())
    h, f = (torch.nn.Parameter(p.detach().to(d).contiguous()) for d in (BF16, BF16))
    g = torch.randn(24, 16, device=device).t()
    p.grad, q.grad = g, g.contiguous()
    h.decoupled_grad, f.grad = g.float(), g.float().to(BF16)  # type: ignore[attr-defined]
    versions = [p._version, q._version]
    one, two = opt.FusedAdam([p], lr=0.1), opt.FusedAdam([q], lr=0.1)
    three = opt.FusedAdam([h], lr=0.1, use_decoupled_grad=True)
    for optimizer in (one, two, three):
        optimizer.step()
    assert torch.equal(p, q) and not p.is_contiguous()
    assert p._version > versions[0] and q._version > versions[1]  # caches of quantized weights notice
    torch.testing.assert_close(h.float(), q, rtol=1e-2, atol=1e-2)
    three.zero_grad(set_to_none=False)
    assert not h.decoupled_grad.any()  # type: ignore[attr-defined]
    three.zero_grad()
    assert h.decoupled_grad is None  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------- on the device alone


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("options", [{}, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, {"exp_avg_dtype": FP8}])
def test_capturable(device: str, options: dict[str, Any]) -> None:
    """lr is assigned in place; a gradient that is not finite skips the step, which does not count."""
    params = parameters(F32, device)
    mine = opt.FusedAdam(params, lr=0.1, capturable=True, **options)
    other = opt.FusedAdam(copy.deepcopy(params), lr=0.1, **options)
    theirs = other.param_groups[0]["params"]
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    scaler.scale(torch.ones((), device=device))  # makes its scale
    for i in range(4):
        give(params, i)
        give(theirs, i)
        for p in params:
            p.grad *= 8
        if i == 2:
            params[1].grad[3] = torch.inf
        else:
            other.step()
        mine.step(grad_scaler=scaler)
        for p, q in zip(params, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        mine.param_groups[0]["lr"].fill_(0.05)
        other.param_groups[0]["lr"] = 0.05
    assert int(mine.param_groups[0]["step"]) == other.param_groups[0]["step"] == 3
    again = opt.FusedAdam(params, capturable=True, **options)
    again.load_state_dict(mine.state_dict())
    assert float(again.param_groups[0]["lr"]) == pytest.approx(0.05) and int(again.param_groups[0]["step"]) == 3


def scaled(params: list[Any], step: int, factor: float) -> None:
    give(params, step)
    for p in params:
        p.grad *= factor


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    ("way", "dtype"),
    [("unscale_", F32), *product(("scaler.step", "step(grad_scaler=)", "sgd"), (F32, F16))],  # torch unscales no F16
)
def test_a_grad_scaler(device: str, way: str, dtype: torch.dtype) -> None:
    """Without capturable, too: the step of gradients that nobody has scaled, and none where one is not finite."""
    make: Any = lambda some: opt.FusedAdam(some, lr=0.1, master_weights=True)  # noqa: E731
    if way == "sgd":
        make = lambda some: opt.FusedSGD(some, lr=0.1, momentum=0.5)  # noqa: E731
    params, theirs = parameters(dtype, device), parameters(dtype, device)
    mine, other = make(params), make(theirs)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    scaler.scale(torch.ones((), device=device))  # makes its scale
    for i in range(3):
        scaled(params, i, scaler.get_scale())
        give(theirs, i)
        if i == 1:
            params[1].grad[3] = torch.inf
        else:
            other.step()
        if way in ("scaler.step", "sgd"):
            with warnings.catch_warnings():  # torch's, that it will hand over the scale in another way
                warnings.simplefilter("ignore", FutureWarning)
                scaler.step(mine)
        else:
            if way == "unscale_":
                scaler.unscale_(mine)
            mine.step(grad_scaler=scaler)
        scaler.update()
        for p, q in zip(params, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6 if dtype is F32 else 1e-3, atol=1e-6)
    assert scaler.get_scale() == 4.0  # it has learned of the infinity
    assert way == "sgd" or mine.param_groups[0]["step"] == 2


@requires_cuda
@pytest.mark.parametrize(
    "options", [{}, {"exp_avg_dtype": FP8, "exp_avg_sq_dtype": F16, "master_weights": True}], ids=str
)
def test_in_a_cuda_graph(options: dict[str, Any]) -> None:
    """Norm, clipping and step, replayed with other gradients and another lr."""
    dtype = BF16 if options else F32
    params = parameters(dtype, "cuda")
    mine = opt.FusedAdam(params, lr=0.1, capturable=True, **options)
    other = opt.FusedAdam(copy.deepcopy(params), lr=0.1, **options)
    theirs = other.param_groups[0]["params"]

    def step(optimizer: Any) -> torch.Tensor:
        norm, factor = opt.clip_by_norm(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step(grad_scale=factor)
        return norm

    give(params, 0)
    give(theirs, 0)
    step(mine)
    step(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = step(mine)
    for i in range(1, 4):
        for p, g in zip(params, gradients(i), strict=True):
            p.grad.copy_(g * i)
        for p, q in zip(theirs, params, strict=True):
            p.grad = q.grad.clone()
        graph.replay()
        assert float(norm) == pytest.approx(float(step(other)))
        mine.param_groups[0]["lr"].fill_(0.1 / i)
        other.param_groups[0]["lr"] = 0.1 / i
        for p, q in zip(params, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6 if dtype is F32 else 2e-2, atol=1e-6)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("most", [0.5, 1e4])
def test_clipping(device: str, most: float) -> None:
    """The step of gradients that torch clipped before."""
    params, theirs = parameters(F32, device), parameters(F32, device)
    params[1] = torch.nn.Parameter(params[1].detach().to(BF16))
    theirs[1] = torch.nn.Parameter(theirs[1].detach().to(BF16))
    give(params, 0)
    give(theirs, 0)
    norm, factor = opt.clip_by_norm(params, most)
    expected = torch.nn.utils.clip_grad_norm_([p for p in theirs], most)
    assert float(norm) == pytest.approx(float(expected), rel=1e-3) and float(factor) <= 1
    assert (float(factor) == 1.0) == (most > 100)
    assert torch.equal(opt.clip_by_norm(params[0], most)[0], opt.clip_by_norm(params[:1], most)[0])  # as torch's
    before = [p.grad.clone() for p in params]
    for some, options in ((params, {"grad_scale": factor}), (theirs, {})):
        # With a large eps the step is in proportion to the gradient.
        opt.FusedAdam(some, lr=0.1, eps=10.0).step(**options)
    for p, q, g in zip(params, theirs, before, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2 if p.dtype is BF16 else 1e-5, atol=1e-6)
        assert torch.equal(p.grad, g)


# ------------------------------------------------------------------------------------------- quantized parameters


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()], ids=lambda r: type(r).__name__
)
@pytest.mark.parametrize("options", [{}, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}], ids=str)
def test_quantized_weights(monkeypatch: pytest.MonkeyPatch, device: str, recipe: Any, options: dict[str, Any]) -> None:
    """A weight in FP8 is its master, quantized; a master begins as the weight's values."""
    calls: list[str] = []
    one_pass = ops.adam_quantized
    monkeypatch.setattr(ops, "adam_quantized", lambda *args: (calls.append("adam_quantized"), one_pass(*args)))
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(128, 256, device=device, params_dtype=BF16)
    beside = torch.nn.Parameter(layer.weight.detach().float())
    mine = opt.FusedAdam(layer.parameters(), lr=0.01, master_weights=True, **options)
    other = opt.FusedAdam([beside], lr=0.01, **options)
    for i in range(3):
        torch.manual_seed(i)
        x = torch.randn(32, 128, dtype=BF16, device=device)
        with te.autocast(recipe=recipe):
            layer(x).square().mean().backward()
        beside.grad = layer.weight.grad.float()
        for optimizer in (mine, other):
            optimizer.step()
            optimizer.zero_grad()
        master = mine.state[layer.weight]["master_param"]
        assert torch.equal(master, beside)
        assert calls.count("adam_quantized") == (type(recipe) is not Float8CurrentScaling)
        calls.clear()
        again = copy.deepcopy(layer.weight).quantize_(master)
        assert torch.equal(again.dequantize(), layer.weight.dequantize())
        with te.autocast(recipe=recipe):
            layer(x)  # reads both orientations


@pytest.mark.parametrize("make", [opt.FusedAdam, lambda groups: opt.FusedSGD(groups, lr=0.1)], ids=["adam", "sgd"])
def test_quantized_weights_are_refused_by_the_step(make: Any) -> None:
    """Megatron-core makes its optimizer with them, and puts float32 shards into the groups before the first step."""
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        layer = te.Linear(64, 64, bias=False, device="cpu")
    plain = torch.nn.Parameter(torch.ones(4))
    optimizer = make([{"params": [plain]}, {"params": [layer.weight]}])
    plain.grad = torch.ones(4)
    optimizer.step()  # nothing to do for what has no gradient
    before = plain.detach().clone()
    layer.weight.grad = torch.ones(64, 64)
    with pytest.raises(UnsupportedError, match="master_weights=True"):
        optimizer.step()
    assert torch.equal(plain, before) and optimizer.param_groups[0].get("step", 1) == 1  # of no group
    shard = torch.nn.Parameter(layer.weight.detach().float())
    shard.grad = layer.weight.grad
    optimizer.param_groups[1]["params"] = [shard]
    optimizer.step()
    assert not torch.equal(shard, layer.weight.detach().float())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()], ids=lambda r: type(r).__name__
)
def test_a_skipped_step_leaves_quantized_weights(device: str, recipe: Any) -> None:
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(128, 256, device=device, params_dtype=F32)
    mine = opt.FusedAdam(layer.parameters(), lr=0.01, master_weights=True, capturable=True)
    scaler = torch.amp.GradScaler(device, init_scale=2.0)
    scaler.scale(torch.ones((), device=device))
    for value in (1.0, torch.inf):
        before = layer.weight.dequantize()
        for p in layer.parameters():
            p.grad = torch.full(p.shape, value, dtype=F32, device=device)
        mine.step(grad_scaler=scaler)
        assert torch.equal(before, layer.weight.dequantize()) == (value == torch.inf)
    assert int(mine.param_groups[0]["step"]) == 1


# ------------------------------------------------------------------------------------------------- torch's states


def test_states_of_torch_and_back() -> None:
    """A run that changes between torch's AdamW and ours, and back, goes on as if it had not."""
    params, theirs = parameters(F32, "cpu"), parameters(F32, "cpu")
    for some in (params, theirs):
        some.pop()  # torch has no state of empty tensors
    options = {"lr": 0.1, "betas": (0.8, 0.95), "weight_decay": 0.2}
    plain, mine = torch.optim.AdamW(theirs, **options), opt.FusedAdam(params, **options)
    for i in range(9):
        for some in (params, theirs):
            for p, g in zip(some, gradients(i), strict=False):
                p.grad = g
        if i == 3:
            saved = copy.deepcopy(plain.state_dict())
            mine = opt.FusedAdam(params, lr=7.0)
            mine.load_state_dict(opt.from_torch_adamw(saved))
            current = mine
        elif i == 6:
            current = torch.optim.AdamW(params, lr=7.0)
            current.load_state_dict(opt.to_torch_adamw(mine.state_dict()))
        elif i == 0:
            current = mine
        current.step()
        plain.step()
        for p, q in zip(params, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    state = plain.state_dict()
    state["state"][0]["step"] += 1
    with pytest.raises(ArgumentError, match=r"steps \[9, 10\] in group 0"):
        opt.from_torch_adamw(state)


def test_masters_survive_the_conversion() -> None:
    params = parameters(BF16, "cpu")
    mine = opt.FusedAdam(params, master_weights=True)
    give(params, 0)
    mine.step()
    saved = mine.state_dict()
    back = opt.from_torch_adamw(opt.to_torch_adamw(saved))
    for i, state in saved["state"].items():
        assert all(torch.equal(back["state"][i][name], t) for name, t in state.items())
    halves = opt.FusedAdam(params, master_weights=True, store_param_remainders=True)
    halves.load_state_dict(back)  # float32 masters are split
    assert all(torch.equal(a, b) for a, b in zip(masters(mine, params), masters(halves, params), strict=True))


# ---------------------------------------------------------------------------------------------------------- SGD


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.5}],
    ids=str,
)
def test_sgd(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    params = parameters(dtype, device)
    theirs = [torch.nn.Parameter(p.detach().double().cpu()) for p in params]
    mine = opt.FusedSGD(params, lr=0.05, weight_decay=0.1, **options)
    other = torch.optim.SGD(theirs, lr=0.05, weight_decay=0.1, **options)
    for i in range(4):
        give(params, i)
        give(theirs, i)
        mine.step()
        other.step()
    error = {F32: 1e-5, BF16: 0.05, F16: 0.005}[dtype]
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p.detach().double().cpu(), q.detach(), rtol=error, atol=error)
    if options:
        buffers, first = mine.get_momentums(params[:2])
        assert not first and [b.shape for b in buffers] == [p.shape for p in params[:2]]
        again = opt.FusedSGD(params, lr=1.0)
        again.load_state_dict(mine.state_dict())
        assert torch.equal(again.get_momentums(params[:1])[0][0], buffers[0])


def test_decay_behind_the_momentum() -> None:
    p = torch.nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    mine = opt.FusedSGD([p], lr=0.1, momentum=0.5, weight_decay=0.5, wd_after_momentum=True)
    mine.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), 1 - 0.1 * 1.5))
    torch.testing.assert_close(mine.state[p]["momentum_buffer"], torch.ones(4))


# ------------------------------------------------------------------------------------------- functions on lists


@pytest.mark.parametrize("device", devices())
def test_functions_on_lists(device: str) -> None:
    apply = opt.multi_tensor_applier
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    tensors = [p.detach() for p in parameters(F32, device)] + [torch.randn(9, device=device, dtype=BF16)]
    outs = [torch.empty_like(t, dtype=F32) for t in tensors]
    apply(opt.multi_tensor_scale, flag, [tensors, outs], 0.5)
    assert all(torch.equal(o, t.float() * 0.5) for o, t in zip(outs, tensors, strict=True)) and not flag
    apply(opt.multi_tensor_scale_tensor, flag, [tensors, outs], torch.tensor([2.0], device=device))
    assert all(torch.equal(o, t.float() * 2) for o, t in zip(outs, tensors, strict=True)) and not flag
    norms = [t.double().norm() for t in tensors if t.numel()]
    norm, each = apply(opt.multi_tensor_l2norm, flag, [tensors], True)
    torch.testing.assert_close(norm.double()[0], torch.stack(norms).norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(each.double(), torch.stack(norms), rtol=1e-5, atol=0)
    quarter = torch.tensor([0.25], device=device)
    norm, none = apply(opt.multi_tensor_unscale_l2norm, flag, [tensors], quarter)
    torch.testing.assert_close(norm.double()[0], torch.stack(norms).norm() / 4, rtol=1e-5, atol=0)
    assert none.numel() == 0
    tensors[0][0, 0] = torch.nan
    apply(opt.multi_tensor_scale, flag, [tensors, outs], 1.0)
    assert int(flag) == 1
    assert apply(opt.multi_tensor_scale, flag, [[torch.empty(0)], [torch.empty(0)]], 1.0) is None
    with pytest.raises(RuntimeError, match="one length"):
        apply(opt.multi_tensor_scale, flag, [tensors, outs[1:]], 1.0)


@pytest.mark.parametrize("device", devices())
def test_adam_and_sgd_on_lists(device: str) -> None:
    """They are what the optimizers call: the same bits."""
    flag, one = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, device=device)
    numbers = (0.9, 0.99, 1e-8)
    for form in ("plain", "capturable", "remainder"):
        dtype = BF16 if form == "remainder" else F32
        params = parameters(dtype, device)
        theirs = copy.deepcopy(params)
        give(params, 0)
        give(theirs, 0)
        other = opt.FusedAdam(
            theirs, lr=0.1, betas=numbers[:2], weight_decay=0.1, master_weights=True, store_param_remainders=True
        )
        other.step()
        lists = [[p.grad for p in params], [p.detach() for p in params]]
        lists += [[torch.zeros_like(p, dtype=F32) for p in params] for _ in range(2)]
        if form == "plain":
            opt.multi_tensor_applier(opt.multi_tensor_adam, flag, lists, 0.1, *numbers, 1, 1, 1, 0.1)
        elif form == "remainder":
            lists.append([torch.zeros_like(p, dtype=torch.int16) for p in params])
            opt.multi_tensor_applier(opt.multi_tensor_adam_param_remainder, flag, lists, 0.1, *numbers, 1, 1, 1, 0.1)
        else:
            step = torch.ones(1, dtype=torch.int32, device=device)
            rest = (0.1 * one, *numbers, step, 1, 1, 0.1, one)
            opt.multi_tensor_applier(opt.multi_tensor_adam_capturable, flag + 1, lists, *rest)
            assert torch.equal(params[0], parameters(F32, device)[0])  # skipped
            opt.multi_tensor_applier(opt.multi_tensor_adam_capturable, flag, lists, *rest)
        assert all(torch.equal(p, q) for p, q in zip(params, theirs, strict=True)), form
    p, g, b = (torch.ones(5, device=device) for _ in range(3))
    half = torch.empty(5, device=device, dtype=F16)
    opt.multi_tensor_sgd(0, flag, [[g], [p], [b], [half]], 0.0, 0.5, 0.0, 0.1, False, False, False, 2.0)
    assert torch.equal(p, torch.full_like(p, 1 - 0.1 * 2.5)) and torch.equal(half, p.half())
    amax, scale, inverse = (torch.tensor([v], device=device) for v in (2.0, 0.0, 0.0))
    opt.multi_tensor_compute_scale_and_scale_inv(0, flag, [[amax], [scale], [inverse]], 448.0, True, 0.0)
    assert float(scale) == 128 and float(inverse) == 1 / 128


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps", "momentum"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "1e-3", None, True])
def test_numbers(name: str, value: Any) -> None:
    """Refused where they come in: by the optimizer, in a group, in a state dict, and by the step if changed later."""
    (p, *_) = parameters(F32, "cpu")
    make: Any = opt.FusedSGD if name == "momentum" else opt.FusedAdam
    with pytest.raises(ArgumentError, match=name):
        make([p], **{"lr": 0.1, name: value})
    mine = make([p], lr=0.1)
    with pytest.raises(ArgumentError, match=name):
        mine.add_param_group({"params": parameters(F32, "cpu"), name: value})
    assert len(mine.param_groups) == 1
    saved = mine.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(ArgumentError, match=name):
        mine.load_state_dict(saved)
    mine.param_groups[0][name] = value
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with pytest.raises(ArgumentError, match=name):
        mine.step()
    assert torch.equal(p, before)


def test_a_scaler_that_is_off_is_none() -> None:
    params = parameters(F32, "cpu")
    give(params, 0)
    mine = opt.FusedAdam(params)
    mine.step(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert mine.param_groups[0]["step"] == 1


def test_a_state_of_another_model() -> None:
    """Refused with what differs, before anything is changed."""
    params = parameters(F32, "cpu")
    mine = opt.FusedAdam(params)
    give(params, 0)
    mine.step()
    saved = mine.state_dict()
    before = copy.deepcopy(saved)
    torch_state = torch.optim.AdamW(parameters(F32, "cpu")).state_dict()
    short = {**saved, "param_groups": [{**saved["param_groups"][0], "params": [0, 1]}]}
    turned = {**saved, "state": {**saved["state"], 0: {**saved["state"][0], "exp_avg": torch.zeros(24, 16)}}}
    foreign = {**saved, "state": {0: {"step": torch.tensor(1.0)}}}
    halves = {**saved, "state": {0: {"master_param": torch.zeros(16, 24, dtype=torch.int16)}}}
    for state, match in (
        (short, r"groups of \[2\]"),
        (turned, r"exp_avg of parameter 0.*\(24, 16\)"),
        (foreign, "from_torch_adamw"),
        (halves, "store_param_remainders"),
        ({}, "'param_groups'"),
        ([], "a list"),
    ):
        with pytest.raises(ArgumentError, match=match):
            mine.load_state_dict(state)
    after = mine.state_dict()
    assert after["param_groups"] == before["param_groups"] and torch_state["state"] == {}
    assert all(torch.equal(after["state"][i][n], t) for i, s in before["state"].items() for n, t in s.items())
