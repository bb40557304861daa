"""Residual connections: the addition by itself, and the same inside of a module that begins with a norm."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.layers.residual import AddSpec, BranchNeeds
from te_torch.base.residual import ADD, Branch, bias_dropout_add
from te_torch.draws import random_pair
from te_torch.function import _gradients, key_of, register
from te_torch.runtime import to_core
from te_torch.tools.memory_report import measure_saved
from te_torch.transformer.layer import DropPath
from tests.backends import on_devices
from tests.covering import covering
from tests.reference.elementwise import keep
from tests.tolerances import DB, snr_db
from tests.world import RECIPES, WIDTH, differences, fp8_state, gradient_for, make, on, region, values

recipes = pytest.mark.parametrize("recipe", RECIPES)
KINDS = ("LayerNormLinear", "LayerNormMLP")
kinds = pytest.mark.parametrize("kind", KINDS)
SHAPE = (3, 8, WIDTH)


def pair_of(device: str, seed: int = 11, offset: int = 5) -> torch.Tensor:
    return torch.tensor([seed, offset], dtype=torch.int64, device=device)


def leaves(device: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """x, residual and bias."""
    return {
        "x": values(*SHAPE, device=device, dtype=dtype, seed=1).requires_grad_(),
        "residual": values(*SHAPE, device=device, dtype=dtype, seed=2).requires_grad_(),
        "bias": values(WIDTH, device=device, dtype=dtype, seed=3).requires_grad_(),
    }


# ---------------------------------------------------------------------------------------------- by itself


@on_devices
@covering(
    turns=2,
    without=[(), ("bias",), ("residual",), ("bias", "residual")],
    p=[0.0, 0.3],
    dtype=[torch.float32, torch.bfloat16],
)
def test_bias_dropout_add(without: tuple[str, ...], p: float, dtype: torch.dtype, device: str) -> None:
    """The formula with the documented mask, and its gradients."""
    given = {name: t for name, t in leaves(device, dtype).items() if name not in without}
    rng = pair_of(device)
    out = bias_dropout_add(given["x"], given.get("bias"), given.get("residual"), p, True, rng)
    dy = gradient_for(out)
    out.backward(dy)
    on(device, out, *(t.grad for t in given.values()))
    mask = torch.from_numpy(keep(out.numel(), p, 11, 5, 0).reshape(SHAPE)) / (1 - p)
    x, dy = given["x"].detach().cpu().double(), dy.cpu().double()
    wanted = x + (given["bias"].detach().cpu().double() if "bias" in given else 0)
    wanted = wanted * mask + (given["residual"].detach().cpu().double() if "residual" in given else 0)
    floor = DB["fp32" if dtype == torch.float32 else "bf16"]
    assert out.dtype == dtype and snr_db(out, wanted) >= floor
    assert snr_db(given["x"].grad, dy * mask) >= floor
    if "bias" in given:
        assert snr_db(given["bias"].grad, (dy * mask).sum((0, 1))) >= floor
    if "residual" in given:
        assert torch.equal(given["residual"].grad.cpu().double(), dy)


@on_devices
def test_without_training_nothing_is_dropped(device: str) -> None:
    given = leaves(device)
    added = bias_dropout_add(given["x"], given["bias"], given["residual"], 0.9, False)
    assert torch.equal(added, given["residual"] + (given["x"] + given["bias"]))
    assert bias_dropout_add(given["x"], None, None, 0.9, False) is given["x"]


@on_devices
def test_everything_dropped(device: str) -> None:
    """With a probability of one the residual is left: no gradient of what was dropped is anything but zero."""
    x, bias, residual = (
        values(*shape, device=device, seed=i).requires_grad_()
        for i, shape in enumerate(((8, 3, 16), (16,), (8, 3, 16)))
    )
    with torch.no_grad():
        x[0, 0, 0] = torch.inf
    y = bias_dropout_add(x, bias, residual, 1.0)
    assert torch.equal(y, residual)
    y.backward(gradient_for(y))
    assert not x.grad.any() and not bias.grad.any() and torch.equal(residual.grad, gradient_for(y))


@on_devices
@pytest.mark.parametrize("frozen", ["x", "residual", "bias"])
def test_only_wanted_gradients(frozen: str, device: str) -> None:
    given = leaves(device)
    given[frozen].requires_grad_(False)
    out = bias_dropout_add(given["x"], given["bias"], given["residual"], 0.5)
    out.backward(gradient_for(out))
    assert [name for name, t in given.items() if t.grad is None] == [frozen]


@on_devices
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_gradients_have_memory_of_their_own(p: float, device: str) -> None:
    """Without dropout the gradient of x is that of the residual; changing one in place changes no other."""
    given = leaves(device)
    out = bias_dropout_add(given["x"], given["bias"], given["residual"], p)
    out.backward(dy := gradient_for(out))
    places = {t.untyped_storage().data_ptr() for t in (given["x"].grad, given["residual"].grad, dy)}
    assert len(places) == 3


@on_devices
def test_drop_path(device: str) -> None:
    """Samples of the first dimension are dropped whole; the mean stays."""
    x = values(4000, 3, 2, device=device, seed=4).requires_grad_()
    module = DropPath(0.25)
    torch.manual_seed(1)
    y = module(x)
    on(device, y)
    kept = (y != 0).flatten(1)
    assert (kept.all(1) | ~kept.any(1)).all()
    share = kept[:, 0].double().mean().item()
    assert abs(share - 0.75) < 5 * np.sqrt(0.75 * 0.25 / 4000)
    assert torch.equal(y[kept[:, 0]], (x / 0.75)[kept[:, 0]])
    y.sum().backward()
    assert torch.equal((x.grad != 0).flatten(1), kept)
    torch.testing.assert_close(x.grad[kept[:, 0]], torch.full_like(x.grad[kept[:, 0]], 1 / 0.75))
    assert torch.equal(module.eval()(x), x) and torch.equal(DropPath(0.0)(x), x)
    assert "0.25" in repr(module)
    x.grad = None
    y = DropPath(1.0)(x)
    y.sum().backward()
    assert not y.any() and not x.grad.any(), "nothing is kept, and nothing is divided by zero"


# ---------------------------------------------------------------------------------------------- inside of a module


FORMS = {
    "input": (False, False, 0.0),
    "sum": (True, False, 0.0),
    "bias": (True, True, 0.0),
    "dropout": (True, True, 0.3),
}
forms = pytest.mark.parametrize("form", FORMS)


def run(module: Any, form: str, fused: bool, recipe: str, **kw: Any) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one step, by a `Branch` or by operations one after the other."""
    device, dtype = str(module.layer_norm_weight.device), module.layer_norm_weight.dtype
    adds, biased, p = FORMS[form]
    given = leaves(device, dtype)
    x, residual = given["x"], given["residual"] if adds else None
    bias, rng = given["bias"] if biased else None, pair_of(device)
    with region(recipe):
        if fused:
            *outputs, stream = module(Branch(x, residual, bias, p, rng), **kw)
        else:
            stream = bias_dropout_add(x, bias, residual, p, True, rng) if adds else x
            found = module(stream, **kw)
            outputs = list(found) if isinstance(found, tuple) else [found]
    pairs = [(t, gradient_for(t, seed=20 + i)) for i, t in enumerate((*outputs, stream))]
    torch.autograd.backward(*zip(*[(t, g) for t, g in pairs if t.requires_grad], strict=True))
    found = {f"output {i}": t.detach() for i, t in enumerate((*outputs, stream))}
    found |= {name: t.grad for name, t in given.items() if t.grad is not None}
    found |= {f"module {name}": t.grad for name, t in module.named_parameters() if t.grad is not None}
    module.zero_grad()
    return found


@on_devices
@covering(turns=2, kind=KINDS, form=FORMS, recipe=RECIPES)
def test_fused_equals_one_after_the_other(kind: str, form: str, recipe: str, device: str) -> None:
    """Bit for bit in float32, where autograd's sum of two gradients rounds as ours; the FP8 state as well."""
    fused = make(kind, device)
    apart = copy.deepcopy(fused)
    for _ in range(3):
        got, wanted = (run(m, form, m is fused, recipe) for m in (fused, apart))
        assert not differences(got, wanted)
        assert not differences(fp8_state(fused), fp8_state(apart))


@on_devices
@recipes
@kinds
def test_all_outputs(kind: str, recipe: str, device: str) -> None:
    """(out, bias, norm output, sum), in this order, each with its gradient; into main_grad, over microbatches."""
    options = {"return_bias": True, "return_layernorm_output": True, "fuse_wgrad_accumulation": True}
    fused = make(kind, device, **options)
    apart = copy.deepcopy(fused)
    for module in (fused, apart):
        for name in module._weight_names():
            getattr(module, name).main_grad = torch.zeros_like(getattr(module, name))
    for first in (True, False):
        runs = [run(m, "dropout", m is fused, recipe, is_first_microbatch=first) for m in (fused, apart)]
        assert not differences(*runs) and {f"output {i}" for i in range(4)} <= set(runs[0])
    for name in fused._weight_names():
        assert torch.equal(getattr(fused, name).main_grad, getattr(apart, name).main_grad)


@on_devices
@forms
@kinds
def test_one_node(kind: str, form: str, device: str) -> None:
    """Both outputs are of one node of autograd, and nothing is saved that was not saved before."""
    module = make(kind, device)
    adds, biased, p = FORMS[form]
    given, rng = leaves(device), pair_of(device)
    branch = Branch(given["x"], given["residual"] if adds else None, given["bias"] if biased else None, p, rng)
    with measure_saved(module) as fused:
        out, stream = module(branch)
    assert out.grad_fn is stream.grad_fn
    assert not adds or stream._base is None, "the sum is no view"
    with measure_saved(module) as apart:
        module(branch.added())
    assert fused.by_layer[""] <= sum(apart.by_layer.values())


@on_devices
@kinds
def test_the_stream_may_not_be_overwritten(kind: str, device: str) -> None:
    """It is what backward reads: torch refuses to change the returned input, and notices a changed sum."""
    module = make(kind, device)
    for x in (values(*SHAPE, device=device, seed=1).requires_grad_() * 1, values(*SHAPE, device=device, seed=1)):
        _, same = module(Branch(x))
        assert same.data_ptr() == x.data_ptr() and same.requires_grad
        with pytest.raises(RuntimeError, match="view"):
            same.add_(1)
    given = leaves(device)
    out, total = module(Branch(given["x"], given["residual"]))
    total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with torch.no_grad():
        out, total = module(Branch(given["x"], given["residual"]))
        assert torch.equal(total.add_(1), given["x"] + given["residual"] + 1)


@on_devices
@kinds
def test_separate_gradients_of_one_sum(kind: str, device: str) -> None:
    given = leaves(device)
    out, total = make(kind, device)(Branch(given["x"], given["residual"]))
    (out.sum() + total.sum()).backward()
    assert torch.equal(given["x"].grad, given["residual"].grad)
    assert given["x"].grad.untyped_storage().data_ptr() != given["residual"].grad.untyped_storage().data_ptr()


def test_one_gradient_of_two_leaves_is_one_tensor() -> None:
    """Also where it comes in another shape than its memory was asked for: two views would be added to in place."""
    memory = torch.zeros(4, WIDTH)
    one = to_core(memory).reshape(2, 2, WIDTH)
    layer: Any = SimpleNamespace(twins=(0, 1))
    dx, dresidual = _gradients(layer, (one, one), (memory,))
    assert dx is dresidual and dx is not None and dx.shape == (2, 2, WIDTH)


@on_devices
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_with_a_quantized_output(recipe: str, device: str) -> None:
    """What attention reads in FP8 comes quantized; the stream beside it stays as it is."""
    fused = make("LayerNormLinear", device, torch.bfloat16)
    apart = copy.deepcopy(fused)
    found = []
    for module in (fused, apart):
        given = leaves(device, torch.bfloat16)
        branch = Branch(given["x"], given["residual"], given["bias"], 0.0)
        with region(recipe):
            if module is fused:
                out, stream = module(branch, fp8_output=True)
            else:
                stream = branch.added()
                out = module(stream, fp8_output=True)
        assert out.shape == (*SHAPE[:-1], 64) and out.dtype == stream.dtype == torch.bfloat16
        out.dequantize().backward(gradient_for(out))
        grads = {
            name: t.grad for name, t in (*given.items(), *((f"module {n}", t) for n, t in module.named_parameters()))
        }
        found.append({"out": out.dequantize().detach(), "stream": stream.detach(), **grads})
    assert not differences(*found)


@on_devices
@kinds
def test_under_torch_autocast(kind: str, device: str) -> None:
    """Residual and bias come in the compute dtype, as the input does."""
    module = make(kind, device)
    given = leaves(device)
    with torch.autocast(device, torch.bfloat16):
        out, total = module(Branch(given["x"], given["residual"], given["bias"], 0.0))
    assert out.dtype == total.dtype == torch.bfloat16
    half = [given[name].detach().bfloat16() for name in ("x", "bias", "residual")]
    assert torch.equal(total, bias_dropout_add(*half, 0.0))
    torch.autograd.backward([out, total], [gradient_for(out), gradient_for(total)])
    assert all(t.grad.dtype == torch.float32 for t in given.values())


@on_devices
def test_operators_return_no_argument_and_nothing_twice(device: str) -> None:
    """What a compiled graph is made of is free of aliases, also where eager hands one gradient on to two inputs."""
    key = key_of(register(ADD, AddSpec(0.0, BranchNeeds(True, False, True)), True))
    x, residual, dy = (values(*SHAPE, device=device, seed=i) for i in range(3))
    (out,) = torch.ops.te_runtime.forward([x, None, residual, None], None, None, key, "")
    assert torch.equal(out, x + residual)
    gradients = torch.ops.te_runtime.backward([dy], [None], None, key)
    assert len(gradients) == 2 and all(torch.equal(g, dy) for g in gradients)
    assert len({t.untyped_storage().data_ptr() for t in (dy, *gradients)}) == 3


def test_a_quantized_gradient_is_refused() -> None:
    module = te.LayerNormLinear(WIDTH, 64, device="cpu")
    with pytest.raises(UnsupportedError, match="fp8_grad"):
        module(Branch(values(2, WIDTH)), fp8_grad=True)


def test_a_pair_is_drawn_where_none_is_given() -> None:
    module = make("LayerNormMLP")
    given = leaves("cpu")
    torch.manual_seed(5)
    _, total = module(Branch(given["x"], given["residual"], None, 0.5))
    torch.manual_seed(5)
    assert torch.equal(total, bias_dropout_add(given["x"], None, given["residual"], 0.5, True, random_pair(total)))
