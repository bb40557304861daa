"""GroupedLinear where its products read sizes from a tensor: bfloat16 and FP8 on a CPU and on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.errors import ArgumentError
from te_core.tape import taped
from tests import recipes
from tests.backends import capability, on_devices, requires_cuda
from tests.recordings import tapes

GROUPS, IN, OUT, ROWS = 5, 64, 96, 256
SIZES = ([64, 64, 64, 64, 0], [0, 256, 0, 0, 0], [1, 2, 3, 4, 246], [100, 50, 6, 0, 100])


@pytest.fixture(autouse=True)
def hopper(request: pytest.FixtureRequest) -> None:
    here = getattr(request.node, "callspec", None)
    if (here is None or here.params.get("device") != "cpu") and capability() != (9, 0):
        pytest.skip("hardware: groups in one launch are Hopper's")


def module(device: str = "cuda", **options: Any) -> te.GroupedLinear:
    torch.manual_seed(0)
    return te.GroupedLinear(GROUPS, IN, OUT, params_dtype=torch.bfloat16, device=device, **options)


def counts(sizes: list[int], device: str = "cuda") -> torch.Tensor:
    return torch.tensor(sizes, device=device)


def step(
    call: Callable[..., Any], of: te.GroupedLinear, sizes: Any, x: torch.Tensor, recipe: str | None = None
) -> list[torch.Tensor]:
    """Output and gradients."""
    x = x.detach().requires_grad_()
    with recipes.region(recipe):
        y = call(x, sizes)
    y.backward(y.detach() * 0.5 + 1)
    found = [y.detach().clone(), x.grad, *[p.grad for p in of.parameters()]]
    of.zero_grad(set_to_none=True)
    return found  # type: ignore[return-value]


def inputs(seed: int = 0, device: str = "cuda") -> torch.Tensor:
    return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def wanted(of: te.GroupedLinear, sizes: list[int], x: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64, from the output's own gradient on."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in of.named_parameters()}
    x = x.detach().double().requires_grad_()
    parts = x.split(sizes)
    y = torch.cat([part @ leaves[f"weight{e}"].T + leaves[f"bias{e}"] for e, part in enumerate(parts)])
    y.backward(y.detach().to(torch.bfloat16).double() * 0.5 + 1)
    return [y.detach(), x.grad, *[p.grad for p in leaves.values()]]  # type: ignore[list-item]


def near(got: list[torch.Tensor], expected: list[torch.Tensor], recipe: str | None = None) -> None:
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).abs().max() <= (2.0**-6 if recipe is None else 2.0**-3) * (1 + b.abs().max())


#: What reads sizes from a tensor.
by_offsets = pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])


@on_devices
@by_offsets
@pytest.mark.parametrize("given", ["list", "tensor"])
def test_new_sizes_are_replayed(given: str, recipe: str | None, device: str) -> None:
    layer, before = module(device), te.GroupedLinear.host_copies
    with tapes("first") as ran:
        for i, sizes in enumerate(SIZES):
            x = inputs(i, device)
            now = counts(sizes, device) if given == "tensor" else sizes
            near(step(layer, layer, now, x, recipe), wanted(layer, sizes, x), recipe)
            if i == 0:
                recorded = taped.COUNTS.recorded
        assert taped.COUNTS.recorded == recorded and not ran.interpreted
    assert te.GroupedLinear.host_copies == before


@on_devices
@by_offsets
def test_one_program_for_all_sizes(recipe: str | None, device: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    layer, counter = module(device), CompileCounterWithBackend("aot_eager")
    before = te.GroupedLinear.host_copies
    call = torch.compile(layer, fullgraph=True, backend=counter)
    for i, sizes in enumerate(SIZES):
        x = inputs(i, device)
        near(step(call, layer, counts(sizes, device), x, recipe), wanted(layer, sizes, x), recipe)
    assert counter.frame_count == 1 and te.GroupedLinear.host_copies == before


@requires_cuda
@by_offsets
def test_a_captured_graph_takes_other_sizes(recipe: str | None) -> None:
    layer, x, sizes = module(), inputs(), counts(SIZES[0])
    held = x.clone().requires_grad_()

    def run() -> torch.Tensor:
        with recipes.region(recipe):
            y = layer(held, sizes)
        y.backward(y.detach() * 0.5 + 1)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    held.grad = None
    layer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for i, other in enumerate(SIZES):
        x = inputs(i)
        with torch.no_grad():
            held.copy_(x)
        sizes.copy_(counts(other))
        graph.replay()
        found = [y, held.grad, *[p.grad for p in layer.parameters()]]
        near(found, wanted(layer, other, x), recipe)  # type: ignore[arg-type]


@requires_cuda
def test_graphed_callables_take_other_sizes() -> None:
    layer = module()
    plain = module()
    call = te.make_graphed_callables(layer, (inputs().requires_grad_(), counts(SIZES[0])))
    for i, sizes in enumerate(SIZES):
        x = inputs(i)
        near(step(call, layer, counts(sizes), x), wanted(plain, sizes, x))


@on_devices
def test_gradients_go_where_they_are_wanted(device: str) -> None:
    """Into main_grad, added to; later, by backward_dw; not into frozen weights."""
    layer = module(device, fuse_wgrad_accumulation=True, bias=False)
    later = module(device, delay_wgrad_compute=True, bias=False)
    sizes, x = SIZES[3], inputs(0, device)
    for p in layer.parameters():
        p.main_grad = torch.full(p.shape, 2.0, device=device)
    layer.weight1.requires_grad_(False)
    y = layer(x, counts(sizes, device))
    y.backward(y.detach() * 0.5 + 1)
    z = later(x, counts(sizes, device))
    z.backward(z.detach() * 0.5 + 1)
    assert later.weight0.grad is None
    later.backward_dw()
    for e, part in enumerate(x.double().split(sizes)):
        weight = getattr(layer, f"weight{e}")
        grad = (part @ weight.detach().double().T).to(torch.bfloat16).double() * 0.5 + 1
        product = grad.T @ part
        limit = 2.0**-6 * (1 + product.abs().max())
        if e != 1:
            assert (weight.main_grad.double() - 2 - product).abs().max() <= limit
        assert (getattr(later, f"weight{e}").grad.double() - product).abs().max() <= limit
    assert (layer.weight1.main_grad == 2).all()


@requires_cuda
@pytest.mark.parametrize("sizes", [[300, 0, 0, 0, 0], [-5, 100, 61, 50, 50], [1, 1, 1, 1, 1]], ids=str)
def test_wrong_sizes_stay_inside(sizes: list[int]) -> None:
    """Nothing outside of the tensors is read or written; the rows of the groups that there are, are right."""
    layer, x = module(), inputs()
    out = torch.full((ROWS + 64, OUT), 7.0, device="cuda", dtype=torch.bfloat16)
    layer(x, counts(sizes), out=out)
    torch.cuda.synchronize()
    assert (out[ROWS:] == 7).all()
    with pytest.raises(ArgumentError, match="add up"):
        layer(x, sizes)
