"""What make_graphed_callables takes and refuses, and how it reads a pipeline's order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import DelayedScaling
from te_torch.training.graphs import device as seam
from te_torch.training.graphs import make as graphs
from te_torch.training.graphs.schedule import BACKWARD, FORWARD, WEIGHTS, of_pipeline
from tests.graph_steps import fake
from tests.refusals import not_refused

__all__ = ["fake"]
pytestmark = pytest.mark.usefixtures("fake")


def linear() -> te.Linear:
    return te.Linear(16, 16, device="cpu")


X = torch.ones(4, 16)
PAIR = ((X,), (X,))


@pytest.mark.parametrize(
    ("older", "newer", "value"),
    [
        ("fp8_enabled", "enabled", True),
        ("fp8_calibrating", "calibrating", True),
        ("fp8_recipe", "recipe", DelayedScaling()),
        ("fp8_group", "amax_reduction_group", object()),
        ("fp8_weight_caching", "cache_quantized_params", True),
    ],
)
def test_older_names(older: str, newer: str, value: Any) -> None:
    with pytest.warns(DeprecationWarning, match=f"{older} is deprecated: use {newer}") as seen:
        te.make_graphed_callables(linear(), (X,), **{older: value})
    assert seen[0].filename == __file__
    with pytest.raises(ArgumentError, match=f"both {older} and {newer}"):
        te.make_graphed_callables(linear(), (X,), **{older: value, newer: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.make_graphed_callables(linear(), (X,), **{newer: value})


def with_hook() -> te.Linear:
    module = linear()
    module.register_forward_hook(lambda *args: None)
    return module


def with_backward_hook() -> te.Linear:
    module = linear()
    module.register_full_backward_pre_hook(lambda *args: None)
    return module


def with_buffer() -> te.Linear:
    module = linear()
    module.register_buffer("learned", torch.ones(2, requires_grad=True))
    return module


def graphed() -> torch.nn.Module:
    return torch.nn.Sequential(te.make_graphed_callables(linear(), (X,)))


def evaluated() -> te.Linear:
    return linear().eval()


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "a function": (lambda: lambda x: x, (X,), {}, TypeError, "got function"),
    "a list": (lambda: [linear()], (X,), {}, TypeError, "got list"),
    "nothing": (lambda: (), (), {}, ArgumentError, "no modules"),
    "two modes": (lambda: (linear(), evaluated()), PAIR, {}, RuntimeError, "train"),
    "a hook": (with_hook, (X,), {}, RuntimeError, "with hooks"),
    "a backward hook": (with_backward_hook, (X,), {}, RuntimeError, "with hooks"),
    "a buffer": (with_buffer, (X,), {}, RuntimeError, "the buffer learned"),
    "graphed": (graphed, (X,), {}, UnsupportedError, "graphed already"),
    "a bare tensor": (linear, X, {}, TypeError, "sample_args of Tensor"),
    "no tensor": (linear, (X, 3), {}, TypeError, "a sample of int"),
    "no tensor by name": (linear, (X,), {"sample_kwargs": {"fp8_output": True}}, TypeError, "a sample of bool"),
    "bare tensors": (lambda: (linear(), linear()), (X, X), {}, TypeError, "with a Tensor"),
    "too few": (lambda: (linear(), linear()), ((X,),), {}, ArgumentError, "1 sample_args for 2 modules"),
    "other kwargs": (lambda: (linear(), linear()), PAIR, {"sample_kwargs": ({},)}, ValueError, "sample_kwargs for 1"),
    "twice": (lambda: (linear(),) * 2, PAIR, {}, ArgumentError, "comes twice"),
    "enabled": (linear, (X,), {"enabled": 1}, TypeError, "enabled=1"),
    "enabled of ints": (linear, (X,), {"enabled": (1,)}, TypeError, "enabled"),
    "flags": (linear, (X,), {"enabled": (True, False)}, ValueError, "2 flags for 1 modules"),
    "recipe": (linear, (X,), {"recipe": "delayed"}, ValueError, "recipe='delayed'"),
    "calibrating": (linear, (X,), {"calibrating": "yes"}, ValueError, "calibrating='yes'"),
    "iterations": (linear, (X,), {"num_warmup_iters": -1}, ValueError, "num_warmup_iters=-1"),
    "layers": (linear, (X,), {"_num_layers_per_chunk": 1}, ValueError, "without _order"),
    "reuse": (linear, (X,), {"_reuse_graph_input_output_buffers": True}, ValueError, "without _order"),
    "reuse in eval": (
        evaluated,
        ((X,),),
        {"_reuse_graph_input_output_buffers": True, "_order": [1, -1]},
        RuntimeError,
        "eval mode",
    ),
    "hooks": (linear, (X,), {"capture_time_hooks": []}, ValueError, "for 1 callables"),
    "kinds of hooks": (linear, (X,), {"capture_time_hooks": [{"hooks": {}}]}, ValueError, "capture_time_hooks of"),
}


def test_refused() -> None:
    wrong = {}
    for case, (make, sample, options, error, message) in REFUSED.items():
        modules = make()
        if said := not_refused(error, message, te.make_graphed_callables, modules, sample, **options):
            wrong[case] = said
        assert not graphs.is_graph_capturing(), case
    assert not wrong


def test_torch_autocast_must_not_keep_its_casts() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="cache_enabled=False"):
        te.make_graphed_callables(linear(), (X,))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        module = te.make_graphed_callables(linear(), (X,))
        assert module(X).dtype == torch.bfloat16


def test_a_cpu_has_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "device", seam.Cuda())
    with pytest.raises(UnsupportedError, match="a tensor on cpu.*move them there"):
        te.make_graphed_callables(linear(), (X,))


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


ORDERS: dict[str, tuple[Any, Any, int, int, type[Exception], str]] = {
    "a number": (1, None, 1, 1, ValueError, "not a list"),
    "nothing": ([], None, 1, 1, ValueError, "not a list"),
    "a name": ([1, "b"], None, 1, 1, ValueError, "not a list"),
    "zero": ([1, 0, -1], None, 1, 1, ValueError, "names no chunk"),
    "a third": ([1, -1, 0.3], None, 1, 1, ValueError, "names no chunk"),
    "no chunk's": ([1, -1, -0.5], None, 1, 1, ValueError, "names no chunk"),
    "a stranger": ([1, -2], None, 1, 1, ValueError, "a backward without a forward"),
    "a backward too few": ([1, 1, -1], None, 1, 2, ValueError, "forwards and backwards"),
    "a chunk less often": ([1, 1, -1, -1, 2, -2, 1, -1], None, 2, 4, ValueError, "forwards and backwards"),
    "backward first": ([1, -1, -1, 1], None, 1, 2, ValueError, "the backward of chunk 1 before its forward"),
    "wgrad first": ([1, 0.5, -1], None, 1, 1, ValueError, "the weight gradients of chunk 1 before its backward"),
    "samples": ([1, -1], None, 1, 2, ValueError, "2 sample_args for 1 layers and 1 microbatches"),
    "uneven": ([1, 2, -2, -1], None, 3, 3, ValueError, "_num_layers_per_chunk=None with 3 modules"),
    "wrong number": ([1, 2, -2, -1], 2, 3, 3, ValueError, "_num_layers_per_chunk=2"),
    "wrong numbers": ([1, 2, -2, -1], [2, 2], 3, 3, ValueError, "_num_layers_per_chunk"),
    "an empty chunk": ([1, 2, -2, -1], [3, 0], 3, 3, ValueError, "_num_layers_per_chunk"),
    "wgrad of two layers": ([1, -1, 0.5], None, 2, 2, RuntimeError, "chunks of one layer"),
    "wgrad of one of two": ([1, -1, 0.5, 1, -1], None, 1, 2, RuntimeError, "2 such entries"),
}


def test_orders_that_are_refused() -> None:
    wrong = {}
    for case, (*given, error, message) in ORDERS.items():
        if said := not_refused(error, message, steps, *given):
            wrong[case] = said
    assert not wrong


def test_the_alias() -> None:
    import te_torch.compat

    te_torch.compat.install()
    try:
        import transformer_engine.pytorch as documented
        from transformer_engine.pytorch import graph
    finally:
        te_torch.compat.uninstall()
    assert documented.make_graphed_callables is graph.make_graphed_callables is te.make_graphed_callables
    for name in ("graph_pool_handle", "is_graph_capturing", "set_capture_start", "set_capture_end"):
        assert getattr(graph, name) is getattr(graphs, name)
