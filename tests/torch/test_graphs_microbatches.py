"""Graphed callables in pipelines and over microbatches: cached weights, fused and delayed gradients, `_order`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from te_core.errors import ArgumentError, UnsupportedError
from tests.fake_graphs import FakeDevice
from tests.graph_steps import DELAYED, PIPELINES, WIDTH, Pipeline, fake, graph, linear, mlp, number, region
from tests.world import differences, fp8_state, values

__all__ = ["fake"]


def cached_steps(call: Any, owner: Any, firsts: tuple[bool, ...]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with region("delayed"):
        for i, first in enumerate(firsts):
            x = number(i).requires_grad_()
            y = call(x, is_first_microbatch=first)
            y.backward(values(*y.shape, seed=i))
            found |= {f"y{i}": y.detach().clone(), f"dx{i}": x.grad.clone()}
    found |= {n: p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None}
    owner.zero_grad(set_to_none=True)
    return found | fp8_state(owner)


@pytest.mark.parametrize("split", [False, True])
def test_cached_weights(split: bool, fake: FakeDevice) -> None:
    """Their casts are one graph, which runs in first microbatches and after a change."""
    module = linear(parameters_split=("a", "b")) if split else mlp()
    eager = copy.deepcopy(module)
    graphed = graph(fake, module, cache_quantized_params=True)
    casts, forward, _ = fake.graphs
    for number_of_casts, changed in ((1, False), (2, False), (4, True)):
        firsts = (True, False, False)
        if changed:
            a = cached_steps(graphed, module, firsts)
            assert not differences(a, cached_steps(eager, eager, firsts))
            for owner in (module, eager):
                with torch.no_grad():
                    next(p for p in owner.parameters() if p.ndim == 2).mul_(2)
            firsts = (False, False)
        assert not differences(cached_steps(graphed, module, firsts), cached_steps(eager, eager, firsts))
        assert casts.replays == number_of_casts
    assert forward.replays == 3 + 3 + 3 + 2
    assert not module._weight_cache
    with region("delayed"):
        with pytest.raises(ArgumentError, match="no is_first_microbatch"):
            graphed(number(1))
        with pytest.raises(ArgumentError, match="is_first_microbatch=1"):
            graphed(number(1), is_first_microbatch=1)
    graphed.eval()
    with region("delayed"):
        graphed(number(1), is_first_microbatch=True)


def test_cached_weights_of_a_container(fake: FakeDevice) -> None:
    """The modules inside are told; a container need not take is_first_microbatch."""
    module = torch.nn.Sequential(linear(), mlp())
    graphed = graph(fake, module, cache_quantized_params=True)
    with region("delayed"):
        graphed(number(1), is_first_microbatch=True)
        graphed(number(1), is_first_microbatch=False)
    assert [g.replays for g in fake.graphs] == [1, 2, 0]
    graphed.eval()
    with region("delayed"):
        graphed(number(1), is_first_microbatch=True)


def test_weights_of_two_callables_are_cast_once(fake: FakeDevice) -> None:
    shared = linear()
    a, b = torch.nn.Sequential(shared, linear()), torch.nn.Sequential(shared)
    fake.roots = (a, b)
    sample = ((number(0).requires_grad_(),),) * 2
    graph(fake, (a, b), sample=sample, cache_quantized_params=True)
    with region("delayed"):
        b(number(1), is_first_microbatch=True)
    assert [g.replays for g in fake.graphs] == [1, 0, 1, 0, 0], "b's are cast with a's"
    a.reset()
    assert fake.graphs[0].work is not None, "b reads them"
    b.reset()
    assert fake.graphs[0].work is None


@pytest.mark.parametrize("delay", [False, True])
def test_fused_gradients(delay: bool, fake: FakeDevice) -> None:
    """main_grad: untouched by the capture, overwritten by a first microbatch, added to by others; hooks are told."""
    module = linear(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    eager = copy.deepcopy(module)
    for owner in (module, eager):
        owner.weight.main_grad = torch.full((WIDTH, WIDTH), 5.0)
        owner.weight.grad_added_to_main_grad = False
    graphed = graph(fake, module, cache_quantized_params=True)
    assert (module.weight.main_grad == 5).all() and module.weight.grad_added_to_main_grad is False
    for i, first in enumerate((False, True, False, True)):
        for call in (graphed, eager):
            with region("delayed"):
                y = call(number(i), is_first_microbatch=first)
            y.sum().backward()
            if delay:
                call.backward_dw()
        assert torch.equal(module.weight.main_grad, eager.weight.main_grad), i
        assert module.weight.grad_added_to_main_grad is True or delay
        module.weight.grad_added_to_main_grad = False
    module.weight.main_grad = torch.zeros(WIDTH, WIDTH)
    with region("delayed"), pytest.raises(UnsupportedError, match="parameter weight lies elsewhere"):
        graphed(number(1), is_first_microbatch=True)


def test_delayed_gradients(fake: FakeDevice) -> None:
    module = torch.nn.Sequential(linear(delay_wgrad_compute=True), mlp(delay_wgrad_compute=True))
    eager = copy.deepcopy(module)
    called: list[int] = []
    module[0].register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    graphed = graph(fake, module)
    assert len(fake.graphs) == 3 and not called
    for i in range(2):
        for call in (graphed, eager):
            with region("delayed"):
                y = call(number(i))
            y.sum().backward()
        assert module[0].weight.grad is None if not i else module[0].weight.grad is not None
        graphed.backward_dw()
        for part in eager:
            part.backward_dw()
        assert called == [1] * (i + 1)
        for a, b in zip(module.parameters(), eager.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    graphed.eval()
    with region("delayed"):
        graphed(number(1)).sum().backward()
    graphed.backward_dw()
    assert called == [1, 1, 1], "of the eager backward"


# ------------------------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name: str, reuse: bool, fake: FakeDevice) -> None:
    chunks, given, order = PIPELINES[name]
    layers = tuple(linear(delay_wgrad_compute="apart" in name) for _ in range(sum(chunks)))
    eager = copy.deepcopy(layers)
    pipeline = Pipeline(list(layers), chunks, order, DELAYED, number)
    x = number(0).requires_grad_()
    samples = tuple((x,) for _ in range(len(layers) * pipeline.microbatches))
    fake.roots = layers
    options = {"_num_layers_per_chunk": given, "_reuse_graph_input_output_buffers": reuse}
    functions = graph(fake, layers, sample=samples, _order=order, **options)
    assert type(functions) is tuple and len(functions) == len(samples)
    assert all("forward" not in layer.__dict__ for layer in layers)
    other = Pipeline(list(eager), chunks, order, DELAYED, number)
    for _ in range(3):
        assert not differences(pipeline.run(functions), other.run(None))
    statics = {f.__closure__[0].cell_contents.unit.inputs[0].data_ptr() for f in functions}
    overlap = {"1F1B": 2 * 2, "interleaved": 2 * 2, "unequal": 3, "apart": 4, "apart, by forwards": 1}
    assert len(statics) == (overlap[name] if reuse else len(functions))
    assert bool(fake.lent) is reuse
    for function in functions:
        function.reset()
    pipeline.run(functions)
