"""Weights that travel: the parameter stays, its memory leaves and returns, and whoever calls for it finds it there."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_torch as te
from tests import recipes
from tests.module_steps import values as normal
from tests.offload_side import RecordedSide, side
from tests.torch.test_offload import HIDDEN, LAYERS, NONE, TOKENS, assert_equal, small, stack, steps, threshold

__all__ = ["side", "small", "threshold"]


def away(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if not p.untyped_storage().nbytes()]


@pytest.fixture
def linears(small: RecordedSide) -> Iterator[tuple[torch.nn.ModuleList, Any, list[torch.Tensor]]]:
    """Four linears, a context that moves the weights of two, and the weights' values."""
    model = stack(lambda: torch.nn.Linear(HIDDEN, HIDDEN, bias=False))
    made = te.get_cpu_offload_context(True, 2, LAYERS, offload_weights=True)
    yield model, made, [p.detach().clone() for p in model.parameters()]
    gc.collect()
    assert not torch.nn.modules.module._global_forward_pre_hooks


def forward(model: Any, made: Any) -> torch.Tensor:
    y = normal(TOKENS, HIDDEN).to(next(model.parameters()).dtype).requires_grad_()
    for layer in model:
        with made[0]:
            y = layer(y)
        y = made[1](y)
    return y


def test_weights_leave_and_return(linears: Any) -> None:
    model, made, before = linears
    identities = [id(p) for p in model.parameters()]
    views = [p.data for p in model.parameters()]
    y = forward(model, made)
    assert away(model) == ["0.weight", "1.weight"]
    y.sum().backward()
    assert not away(model)
    assert [id(p) for p in model.parameters()] == identities
    for p, view, old in zip(model.parameters(), views, before, strict=True):
        assert torch.equal(p, old)
        assert torch.equal(view, old)
        assert view.data_ptr() == p.data_ptr()
        assert p._version == 1  # as it was made


def test_all_weights_are_back_after_part_of_a_backward(linears: Any) -> None:
    model, made, before = linears
    y = forward(model, made)
    last = [*model.parameters()][-1]
    torch.autograd.grad(y.sum(), last)
    assert not away(model)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_weights_are_back_before_an_optimizer_steps(linears: Any) -> None:
    model, made, before = linears
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    y = forward(model, made)
    assert away(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(p, old - 1) for p, old in zip(model.parameters(), before, strict=True))
    del y


def test_modules_called_while_their_weights_are_away(linears: Any) -> None:
    model, made, _ = linears
    x = normal(4, HIDDEN)
    expected = model[1](x)
    y = forward(model, made)
    assert away(model) == ["0.weight", "1.weight"]
    with torch.no_grad():
        assert torch.equal(model[1](x), expected)
    assert away(model) == ["0.weight"]
    y.sum().backward()
    assert not away(model)


def test_two_passes_with_weights(linears: Any) -> None:
    model, made, before = linears
    y, z = forward(model, made), forward(model, made)
    (y + z).sum().backward()
    again = copy.deepcopy(model)
    again.zero_grad()
    a, b = forward(again, NONE), forward(again, NONE)
    (a + b).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_error_in_forward_brings_weights_back(linears: Any) -> None:
    model, made, before = linears
    y = normal(TOKENS, HIDDEN)
    for i, layer in enumerate(model):
        with contextlib.suppress(ZeroDivisionError), made[0]:
            y = layer(y)
            if i == 3:
                assert away(model)
                raise ZeroDivisionError
        if i < 3:
            y = made[1](y)
    assert not away(model)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_one_weight_in_two_layers(small: RecordedSide) -> None:
    model = stack(lambda: torch.nn.Linear(HIDDEN, HIDDEN, bias=False), 5)
    model[1].weight = model[4].weight = model[0].weight
    expected = steps(copy.deepcopy(model), NONE)
    assert_equal(steps(model, te.get_cpu_offload_context(True, 3, 5, offload_weights=True)), expected)


@pytest.mark.parametrize("kind", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_weights_held_quantized(small: RecordedSide, kind: str) -> None:
    with te.quantized_model_init(enabled=True, recipe=recipes.rule(kind)):
        model = stack(lambda: te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cpu"))
    expected = steps(copy.deepcopy(model), NONE, kind)
    made = te.get_cpu_offload_context(True, 2, LAYERS, offload_weights=True)
    assert_equal(steps(model, made, kind), expected)
    assert small.moved("out")


def test_weights_that_are_pieces_are_refused(small: RecordedSide) -> None:
    flat = normal(2, HIDDEN, HIDDEN)
    model = stack(lambda: torch.nn.Linear(HIDDEN, HIDDEN, bias=False), 2)
    for layer, piece in zip(model, flat, strict=True):
        layer.weight = torch.nn.Parameter(piece)
    with pytest.raises(RuntimeError, match="pieces of one buffer"):
        forward(model, te.get_cpu_offload_context(True, 1, offload_weights=True))


def test_weights_in_a_capture_are_refused(linears: Any, small: RecordedSide) -> None:
    model, made, _ = linears
    small.in_capture = True
    with pytest.raises(RuntimeError, match="a graph keeps the addresses"):
        forward(model, made)


def test_weights_of_a_dropped_pass(linears: Any) -> None:
    """Nobody ran the backward: the next pass finds its weights."""
    model, made, before = linears
    y = forward(model, made)
    del y
    y = forward(model, made)
    y.sum().backward()
    assert not away(model)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
