"""make_graphed_callables over modules whose weights are spread over ranks: on the CPU by graphs that run their Python
again, by NCCL on two GPUs, where the collectives are part of the graph. A replay is an eager step of the same ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_torch.parallel import communicator
from te_torch.parallel import symmetric as symmetric_memory
from te_torch.parallel.communicator import GroupCommunicator
from te_torch.parallel.symmetric import symmetric_buffer
from te_torch.training.graphs import device as seam
from tests.backends import requires_gpus
from tests.covering import covering
from tests.fake_graphs import FakeDevice
from tests.graph_steps import PIPELINES, Pipeline
from tests.module_steps import differences, fp8_state
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.tensor_steps import (
    STEPS,
    counted,
    cut_ends,
    cut_of,
    error_of,
    inputs,
    make,
    options,
    part,
    piece,
    shapes,
)
from tests.recipes import region, rule

ROWS = 256  # of which two ranks have whole blocks


def spread(kind: str, rank: Rank, sequence: bool = True, **more: Any) -> Any:
    """A layer of this rank's parts."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    module = make(kind, rank.device, **options(rank, sequence), **more)
    values = dict(make(kind, rank.device).named_parameters())
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(part(values[name], cut_of(kind, name), rank.number, rank.world))
    return module


def graphed(modules: Any, rank: Rank, sample: Any, recipe: str | None, **more: Any) -> Any:
    """The modules with graphs; on the CPU with such that run their Python again."""
    before = seam.device
    if rank.device == "cpu":
        seam.device = FakeDevice(*modules) if isinstance(modules, tuple) else FakeDevice(modules)
    try:
        return te.make_graphed_callables(modules, sample, enabled=recipe is not None, recipe=rule(recipe), **more)
    finally:
        if rank.device != "cpu":
            seam.device = before


def tensors(kind: str, rank: Rank, sequence: bool, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's parts of an input and of an output gradient, larger from step to step."""
    wide, out = shapes(kind)
    ends = cut_ends(kind, sequence)
    return tuple(  # type: ignore[return-value]
        ((1 + number) * piece(inputs(ROWS, width, number, seed), end, rank.number, rank.world)).to(rank.device)
        for seed, (width, end) in enumerate(zip((wide, out), ends, strict=True))
    )


def step(call: Any, owner: Any, recipe: str | None, given: Any, **forward: Any) -> dict[str, torch.Tensor]:
    """All that one step gives and leaves; the weights change in place."""
    x, dy = given[0].detach().clone().requires_grad_(), given[1]
    with region(recipe):
        y = call(x, **forward)
    y.backward(dy)
    if hasattr(call, "backward_dw"):
        call.backward_dw()
    found = {"y": y.detach().clone(), "dx": x.grad.clone()}  # type: ignore[union-attr]
    with torch.no_grad():
        for name, p in owner.named_parameters():
            found[name] = p.grad.clone()
            p.sub_(p.grad, alpha=1e-4)
            p.grad = None
    return found | fp8_state(owner)


def replays(rank: Rank, kind: str, recipe: str | None, sequence: bool, more: dict[str, Any]) -> None:
    module = spread(kind, rank, sequence, **more)
    eager = copy.deepcopy(module)
    call = graphed(module, rank, (tensors(kind, rank, sequence, 0)[0].requires_grad_(),), recipe)
    for number in range(STEPS):
        given = tensors(kind, rank, sequence, number)
        with counted() as replayed:
            got = step(call, module, recipe, given)
        with counted() as eagerly:
            wanted = step(eager, eager, recipe, given)
        assert not differences(got, wanted), number
        assert got["y"].isfinite().all()
        if rank.device == "cpu":
            assert replayed == eagerly and eagerly
        else:  # the graphs have the collectives; what a region and a backward reduce at their ends is eager
            assert len(replayed) == (2 if recipe == "delayed" else 0)
    call.reset()


CASES = [
    *[(kind, recipe, True) for kind in ("column", "row", "gated layer") for recipe in ("delayed", "current", "block")],
    ("gated layer", None, True),
    ("gated layer", None, False),
    ("layer", "current", False),
    ("mlp again", "current", True),
]
SOME = [CASES[0], ("row", "current", True), ("gated layer", "block", True), ("gated layer", None, False), CASES[-1]]


@pytest.mark.parametrize(
    ("kind", "recipe", "sequence"), [pytest.param(*c, marks=[] if c in SOME else pytest.mark.full) for c in CASES]
)
def test_replays_are_eager_steps(two: Ranks, kind: str, recipe: str | None, sequence: bool) -> None:
    two.run(replays, kind, recipe, sequence, {})


@pytest.mark.parametrize("kind", [*(pytest.param(k, marks=pytest.mark.full) for k in ("column", "row")), "gated"])
def test_weight_gradients_put_off(two: Ranks, kind: str) -> None:
    """What they read is gathered in the graph that computes them."""
    two.run(replays, kind, "current", True, {"delay_wgrad_compute": True})


def microbatches(rank: Rank, recipe: str) -> None:
    module = spread("gated", rank)
    eager = copy.deepcopy(module)
    sample = (tensors("gated", rank, True, 0)[0].requires_grad_(),)
    call = graphed(module, rank, sample, recipe, cache_quantized_params=True)
    for number in range(2):
        for which, owner in ((call, module), (eager, eager)):
            made = []
            with region(recipe):
                for m in range(3):
                    x, dy = tensors("gated", rank, True, 3 * number + m)
                    y = which(x.requires_grad_(), is_first_microbatch=m == 0)
                    y.backward(dy)
                    made += [y.detach().clone(), x.grad.clone()]
            found = {str(i): t for i, t in enumerate(made)} | {n: p.grad.clone() for n, p in owner.named_parameters()}
            with torch.no_grad():
                for p in owner.parameters():
                    p.sub_(p.grad, alpha=1e-4)
                    p.grad = None
            if which is call:
                got = found | fp8_state(owner)
        assert not differences(got, found | fp8_state(eager)), number
    call.reset()


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.full)])
def test_microbatches(two: Ranks, recipe: str) -> None:
    """Weights are cast once a step, and the ranks' casts are one graph's as an eager step's."""
    two.run(microbatches, recipe)


def pipeline(rank: Rank, name: str, recipe: str) -> None:
    chunks, layers, order = PIPELINES[name]
    modules = [spread("gated", rank) for _ in range(sum(chunks))]
    with torch.no_grad():
        for i, module in enumerate(modules):
            module.fc2_weight.mul_(1 + i)
    twins = copy.deepcopy(modules)
    number: Callable[[int], torch.Tensor] = lambda i: tensors("gated", rank, True, i % 7)[0]  # noqa: E731
    sample = tuple((number(0).requires_grad_(),) for _ in range(sum(chunks) * order.count(1)))
    functions = graphed(tuple(modules), rank, sample, recipe, _order=order, _num_layers_per_chunk=layers)
    replayed, eager = (Pipeline(m, chunks, order, rule(recipe), number) for m in (modules, twins))
    for _ in range(2):
        assert not differences(replayed.run(functions), eager.run(None))
    for function in functions:
        function.reset()


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("interleaved", "delayed"),
        *(
            pytest.param(*c, marks=pytest.mark.full)
            for c in (("1F1B", "delayed"), ("1F1B", "current"), ("interleaved", "current"))
        ),
    ],
)
def test_chunks_of_a_pipeline(two: Ranks, name: str, recipe: str) -> None:
    """Chunks over the same ranks, in a schedule (stages on ranks of their own: test_pipeline.py)."""
    two.run(pipeline, name, recipe)


# ------------------------------------------------------------------------------- what a capture needs, and refuses


class Open(communicator.Work):
    """A collective that is counted until it is waited for."""

    count = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Open.count += 1

    def wait(self) -> None:
        Open.count -= 1
        super().wait()


def left_open(rank: Rank, kind: str, recipe: str | None) -> list[tuple[str, str, int]]:
    """Collectives on their way at the end of a forward, of a backward, of weight gradients that were put off."""
    before, communicator.Work, found = communicator.Work, Open, []  # type: ignore[misc]
    for frozen in ("nothing", "input", "weights"):
        for put_off in (False, True) if kind in ("column", "row", "gated") else (False,):
            module = spread(kind, rank, **({"delay_wgrad_compute": True} if put_off else {}))
            module.requires_grad_(frozen != "weights")
            x, dy = tensors(kind, rank, True, 0)
            with region(recipe):
                y = module(x.requires_grad_(frozen != "input"))
            found.append((frozen, "forward", Open.count))
            y.backward(dy)
            found.append((frozen, "backward", Open.count))
            if put_off:
                module.backward_dw()
                found.append((frozen, "weight gradients", Open.count))
    communicator.Work = before  # type: ignore[misc]
    return [entry for entry in found if entry[2]]


@covering(kind=["column", "row", "norm column", "gated", "mlp again", "layer"], recipe=["current", None, "mxfp8"])
def test_what_a_pass_begins_it_waits_for(pair: Ranks, kind: str, recipe: str | None) -> None:
    """A capture cannot end with work on another stream that nothing has joined; nor may a rank of an eager program."""
    assert pair.run(left_open, kind, recipe) == [[], []]


def first_in_a_capture(rank: Rank) -> tuple[str, bool]:
    module, (x, _) = spread("gated", rank), tensors("gated", rank, True, 0)
    said = error_of(lambda: graphed(module, rank, (x.requires_grad_(),), "current", num_warmup_iters=0))
    with region("current"):
        return said, bool(module(x).isfinite().all())


@requires_gpus(2, ranks=True)
def test_a_first_forward_in_a_capture(ranks_of: Callable[[int, str], Ranks]) -> None:
    """The ranks compare what they run, which reads from the device: outside of a capture only."""
    for said, usable in ranks_of(2, "cuda").run(first_in_a_capture):
        assert said.startswith("UnsupportedError") and "run a step before the capture" in said and usable


def asked_while_capturing(rank: Rank) -> tuple[str, str]:
    """What a capture on a GPU is told, without one."""
    torch.cuda.is_current_stream_capturing = lambda: True  # this process serves no other test of a GPU
    try:
        comm: Any = GroupCommunicator(dist.group.WORLD, set())
        runtime: Any = SimpleNamespace(device=SimpleNamespace(kind="cuda"))
        agreed = error_of(lambda: comm.agree(runtime, "tensor parallelism", {}))
        place = torch.device("cuda", 0)
        return agreed, error_of(lambda: symmetric_buffer(8, torch.float32, place, dist.group.WORLD))
    finally:
        torch.cuda.is_current_stream_capturing = _capturing


_capturing = torch.cuda.is_current_stream_capturing


def test_what_all_ranks_do_together_is_refused_in_a_capture(pair: Ranks) -> None:
    for agreed, mapped in pair.run(asked_while_capturing):
        for said in (agreed, mapped):
            assert said.startswith("UnsupportedError") and "inside a CUDA graph's capture" in said
            assert "run a step before the capture" in said


def symmetric(rank: Rank) -> Any:
    """A graph goes on with the memory that it was captured with, when other sizes have taken its place."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    module = te.Linear(
        256, 512, parallel_mode="row", symmetric_ar_type="one_shot", device="cuda", params_dtype=torch.bfloat16,
        **options(rank, False),
    )  # fmt: skip
    x = torch.randn(64, 256 // rank.world, device="cuda", dtype=torch.bfloat16)
    call = graphed(copy.deepcopy(module), rank, (x.requires_grad_(),), None)
    wanted = module(x)
    most, symmetric_memory._MOST_BUFFERS = symmetric_memory._MOST_BUFFERS, 2
    for rows in (1, 2, 4, 8, 64):
        module(x[:1].expand(rows, -1).contiguous())
    symmetric_memory._MOST_BUFFERS = most
    torch.cuda.empty_cache()
    same = torch.equal(call(x), wanted)
    call.reset()
    return same


@requires_gpus(2)
def test_symmetric_memory(ranks_of: Callable[[int, str], Ranks]) -> None:
    assert all(ranks_of(2, "cuda").run(symmetric))
