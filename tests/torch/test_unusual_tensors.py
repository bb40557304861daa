"""Tensors that are no plain dense memory, and what is no tensor: a right result, or an error that says what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from tests import recipes
from tests.backends import devices

ROWS, WIDTH, HEADS = 4, 16, 2
MODULES: dict[str, Callable[[str], Any]] = {
    "Linear": lambda device: te.Linear(WIDTH, WIDTH, device=device),
    "LayerNorm": lambda device: te.LayerNorm(WIDTH, device=device),
    "RMSNorm": lambda device: te.RMSNorm(WIDTH, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(WIDTH, WIDTH, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(WIDTH, 2 * WIDTH, device=device),
    "GroupedLinear": lambda device: Grouped(device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, device=device),
    "TransformerLayer": lambda device: te.TransformerLayer(
        WIDTH, 2 * WIDTH, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device=device
    ),
    "DotProductAttention": lambda device: Attention(),
}
LAYERS = pytest.mark.parametrize("kind", MODULES)
on_devices = pytest.mark.parametrize("device", devices())


class Grouped(torch.nn.Module):
    """Two groups, told so."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = te.GroupedLinear(2, WIDTH, WIDTH, device=device)

    def forward(self, x: Any) -> torch.Tensor:
        rows = x.shape[0] // 2 if isinstance(x, torch.Tensor) else 2
        return self.inner(x, [rows, rows])


class Attention(torch.nn.Module):
    """Of an input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = te.DotProductAttention(HEADS, WIDTH // HEADS, attention_dropout=0.0)

    def forward(self, x: Any) -> torch.Tensor:
        return self.inner(x, x, x)


def shape(kind: str) -> tuple[int, ...]:
    """Of an input."""
    if kind == "DotProductAttention":
        return ROWS, 1, HEADS, WIDTH // HEADS
    return (ROWS, 1, WIDTH) if kind in ("MultiheadAttention", "TransformerLayer") else (ROWS, WIDTH)


@LAYERS
@pytest.mark.parametrize("wrong", [[1.0, 2.0], 3, np.zeros((ROWS, WIDTH), np.float32)], ids=lambda t: type(t).__name__)
def test_what_is_no_tensor(wrong: Any, kind: str) -> None:
    with pytest.raises(ArgumentError, match=rf"of type {type(wrong).__name__}.* tensor"):
        MODULES[kind]("cpu")(wrong)


def test_encoder_output_that_is_no_tensor() -> None:
    layer = te.MultiheadAttention(WIDTH, HEADS, attention_type="cross", device="cpu")
    with pytest.raises(ArgumentError, match="encoder_output of type list"):
        layer(torch.randn(ROWS, 1, WIDTH), encoder_output=[1.0])


@on_devices
@LAYERS
@pytest.mark.parametrize("layout", ["to_sparse", "to_mkldnn"])
def test_another_layout(layout: str, kind: str, device: str) -> None:
    if layout == "to_mkldnn" and device != "cpu":
        pytest.skip("hardware: oneDNN's layout is the CPU's")
    x = torch.randn(shape(kind), device=device)
    with pytest.raises(UnsupportedError, match=r"a tensor of layout torch\.\w+.*make it dense"):
        MODULES[kind](device)(getattr(x, layout)())


@on_devices
@LAYERS
def test_memory_that_is_not_there_is_zeros(kind: str, device: str) -> None:
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    zeros: Any = torch._efficientzerotensor
    with torch.no_grad():
        expected = module(torch.zeros_like(x))
        assert torch.equal(module(zeros(x.shape, device=device)), expected)
    x.requires_grad_()
    y = module(x)
    y.backward(zeros(y.shape, device=device))
    assert x.grad is not None and not x.grad.any()
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


@on_devices
@LAYERS
def test_a_part_of_a_conjugate(kind: str, device: str) -> None:
    """Its sign waits, and its memory has the other one."""
    module, x = MODULES[kind](device), torch.randn(shape(kind), dtype=torch.complex64, device=device)
    turned = x.conj().imag
    assert turned.is_neg()
    with torch.no_grad():
        assert torch.equal(module(turned), module(-x.imag))


@on_devices
@LAYERS
def test_batched_gradients(kind: str, device: str) -> None:
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    with pytest.raises(UnsupportedError, match="vmap; is_grads_batched"):
        torch.autograd.functional.jacobian(module, x, vectorize=True)
    rows = torch.autograd.functional.jacobian(module, x)  # one gradient after another
    assert rows.isfinite().all() and rows.any()


@on_devices
@LAYERS
def test_tangents(kind: str, device: str) -> None:
    """A layer has no forward derivative, and does not drop one without a word."""
    module, x = MODULES[kind](device), torch.randn(shape(kind), device=device)
    with forward_ad.dual_level(), pytest.raises((UnsupportedError, NotImplementedError)):
        module(forward_ad.make_dual(x, x))
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(UnsupportedError, match="with a tangent"):
        module(forward_ad.make_dual(x, x))
    with forward_ad.dual_level(), torch.no_grad():
        assert module(x).isfinite().all()


MAIN_GRADS: dict[str, tuple[Any, str]] = {
    "none": (None, "a weight without main_grad"),
    "no tensor": ([1.0], "main_grad, a list"),
    "shape": (torch.zeros(8), r"main_grad of shape \(8,\)"),
    "dtype": (torch.zeros(WIDTH, WIDTH, dtype=torch.float64), "float64"),
    "strides": (torch.zeros(WIDTH, 2 * WIDTH)[:, ::2], r"strides \(32, 2\)"),
    "device": (torch.zeros(WIDTH, WIDTH, device="meta"), "on meta"),
    "layout": (torch.zeros(WIDTH, WIDTH).to_sparse(), "layout torch.sparse_coo"),
}


@pytest.mark.parametrize("wrong", MAIN_GRADS)
def test_main_grad_that_takes_no_gradient(wrong: str) -> None:
    """It would be written as if it were the weight's: beyond its end, or into other rows."""
    main, said = MAIN_GRADS[wrong]
    module = te.Linear(WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    module.weight.main_grad = main
    y = module(torch.randn(ROWS, WIDTH))
    with pytest.raises(ArgumentError, match=rf"{said}.*weight's shape \(16, 16\)"):
        y.sum().backward()


@on_devices
def test_main_grad_of_rows_of_a_buffer(device: str) -> None:
    module = te.Linear(WIDTH, WIDTH, bias=False, fuse_wgrad_accumulation=True, device=device)
    buffer = torch.zeros(4 * WIDTH * WIDTH, device=device)
    module.weight.main_grad = buffer[WIDTH * WIDTH : 2 * WIDTH * WIDTH].view(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH, device=device)
    module(x).sum().backward()
    torch.testing.assert_close(module.weight.main_grad, x.sum(0).expand(WIDTH, WIDTH))
    assert not buffer[: WIDTH * WIDTH].any() and not buffer[2 * WIDTH * WIDTH :].any()


WITH_BIAS: dict[str, Callable[[str], Any]] = {
    "Linear": lambda device: te.Linear(WIDTH, WIDTH, return_bias=True, device=device),
    "LayerNormLinear": lambda device: te.LayerNormLinear(WIDTH, WIDTH, return_bias=True, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(WIDTH, 2 * WIDTH, return_bias=True, device=device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(
        WIDTH, HEADS, return_bias=True, attention_dropout=0.0, device=device
    ),
}


@pytest.mark.timeout(60, method="thread")  # where it becomes one, torch's engine goes round in a circle, in C++
@on_devices
@pytest.mark.parametrize("recipe", [None, "current"])
@pytest.mark.parametrize("kind", WITH_BIAS)
def test_a_returned_bias_in_a_reentrant_checkpoint(kind: str, recipe: str | None, device: str) -> None:
    """Such a checkpoint makes what is returned its own results, which a parameter must not become."""
    module, x = WITH_BIAS[kind](device), torch.randn(ROWS, 1, WIDTH, device=device, requires_grad=True)

    def gradients(call: Callable[..., Any]) -> list[torch.Tensor]:
        module.zero_grad()
        x.grad = None
        with recipes.region(recipe):
            y, bias = call(x)
        (y * 2 + bias).sum().backward()
        return [p.grad for p in (x, *module.parameters())]

    expected = gradients(module)
    again = gradients(lambda x: checkpoint(module, x, use_reentrant=True))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert module(x)[1].requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_returned_biases_of_groups(reentrant: bool) -> None:
    module = te.GroupedLinear(2, WIDTH, WIDTH, return_bias=True, device="cpu")
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y, biases = checkpoint(lambda x: module(x, [2, 2]), x, use_reentrant=reentrant)
    (y.sum() + biases[0].sum() + 2 * biases[1].sum()).backward()
    # A tensor in a list is none of a reentrant checkpoint's results: its gradient is lost there, as torch documents.
    if not reentrant:
        assert module.bias0.grad is not None and (module.bias1.grad == 2 * module.bias0.grad).all()
