"""What make_graphed_callables takes and refuses, and how it reads a pipeline's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling
from te_torch.training.graphs import make as graphs
from te_torch.training.graphs.schedule import BACKWARD, FORWARD, WEIGHTS, of_pipeline
from tests.graph_steps import fake

__all__ = ["fake"]
pytestmark = pytest.mark.usefixtures("fake")


def linear() -> te.Linear:
    return te.Linear(16, 16, device="cpu")


X = torch.ones(4, 16)
PAIR = ((X,), (X,))


def test_what_is_refused_leaves_no_capture() -> None:
    """What is said is in tests/messages/torch_training.py."""
    wrong: tuple[Any, ...] = ({"sample_args": (X, 3)}, {"sample_args": PAIR}, {"sample_args": (X,), "enabled": 1})
    for options in wrong:
        with pytest.raises((TypeError, ValueError)):
            te.make_graphed_callables(linear(), **options)
        assert not graphs.is_graph_capturing()


def test_torch_autocast_that_keeps_no_casts() -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        module = te.make_graphed_callables(linear(), (X,))
        assert module(X).dtype == torch.bfloat16


def test_results() -> None:
    """A module is itself, a tuple a tuple of themselves, one with an order a tuple of functions."""
    a, b = linear(), linear()
    assert te.make_graphed_callables(a, (X,)) is a
    found = te.make_graphed_callables((b,), ((X,),))
    assert type(found) is tuple and found[0] is b
    c = linear()
    made = te.make_graphed_callables((c,), ((X,), (X,)), _order=[1, -1, 1, -1])
    assert type(made) is tuple and len(made) == 2 and made[0] is not c
    for one in (a, b, *made):
        assert callable(one.backward_dw) and callable(one.reset)
        assert torch.equal(one(X), one(X))


def test_one_flag_for_each() -> None:
    recipe = DelayedScaling()
    a, b = te.make_graphed_callables((linear(), linear()), PAIR, enabled=(True, False), recipe=recipe)
    assert a.fp8_state is not None and b.fp8_state is None
    with te.autocast(recipe=recipe):
        b(a(X).detach())
    assert (a.fp8_state.scale_fwd != 1).any()


def test_calibration() -> None:
    recipe = DelayedScaling(amax_history_len=2)
    module = te.make_graphed_callables(linear(), (X,), enabled=False, calibrating=True, recipe=recipe)
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        module(3 * X)
    assert module.fp8_state.amax_history_fwd.amax() >= 3


def test_arguments_of_calls() -> None:
    module = te.make_graphed_callables(_Named(), (X,), sample_kwargs={"a": X, "b": [X, X]})
    assert torch.equal(module(X, b=[2 * X, 3 * X], a=X), 7 * X)
    for wrong in ({"a": X}, {"a": X, "b": [X, X], "c": X}):
        with pytest.raises(TypeError, match="keyword arguments"):
            module(X, **wrong)
    with pytest.raises(TypeError, match="another structure"):
        module(X, a=X, b=(X, X))


class _Named(torch.nn.Module):
    def forward(self, x: torch.Tensor, a: torch.Tensor, b: list[torch.Tensor]) -> torch.Tensor:
        return x + a + b[0] + b[1]


def test_samples_that_are_one_tensor() -> None:
    """Each callable has static inputs of its own, and a spread sample becomes a dense one."""
    x = torch.ones(1, 16).expand(4, 16)
    a, b = te.make_graphed_callables((linear(), linear()), ((x,), (x,)))
    for module in (a, b):
        y = torch.randn(4, 16)
        torch.testing.assert_close(module(y), torch.nn.functional.linear(y, module.weight, module.bias))
    assert (x == 1).all()


def steps(order: list[float], layers: Any, modules: int, samples: int) -> list[tuple[str, int]]:
    return list(of_pipeline(order, layers, modules, samples).steps)


def test_the_order_of_callables() -> None:
    """Chunk by chunk, microbatch by microbatch, layer by layer; a backward goes through its layers in reverse."""
    made = of_pipeline([1, 2, -2, 1, 2, -2, -1, -1], [2, 1], 3, 6)
    assert made.modules == (0, 1, 0, 1, 2, 2) and not made.apart
    f, b = FORWARD, BACKWARD
    assert list(made.steps) == [
        *[(f, 0), (f, 1), (f, 4), (b, 4)],
        *[(f, 2), (f, 3), (f, 5), (b, 5)],
        *[(b, 1), (b, 0), (b, 3), (b, 2)],
    ]


@pytest.mark.parametrize("wgrad", [[0.5, 1.5], [-1.5, -2.5]])
def test_weight_gradients_in_an_order(wgrad: list[float]) -> None:
    one, two = wgrad
    made = of_pipeline([1, 2, -2, -1, two, one], None, 2, 2)
    assert made.apart
    assert list(made.steps)[-2:] == [(WEIGHTS, 1), (WEIGHTS, 0)]
