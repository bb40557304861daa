"""Memory that ranks read without each other's help: on two GPUs, or in files that ranks on the CPU map."""

from __future__ import annotations

import copy
import os
import random
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from te_core import dtypes
from te_core.layers.communicator import OPERAND, OUTPUT
from te_torch.parallel import overlap, peers
from te_torch.parallel.communicator import view
from te_torch.runtime import runtime_for
from tests.parallel.conftest import NCCL
from tests.parallel.overlap_steps import RINGS, SETS, TOKENS, H, each_said, initialised, make, reasons, steps
from tests.parallel.peer_steps import HostDriver, hold_up, offered, part
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.steps import by_ranks, error_of, graphed, same, says
from tests.recipes import region
from tests.world import learn

CFGS = each_said(SETS["rings"], RINGS)
#: Of graphs: which flags are set, and the methods.
GRAPHED = {"rings": ("rings", RINGS), "pipeline": ("rings", None), "bulk": ("bulk", RINGS)}


@pytest.mark.four_ranks
@pytest.mark.parametrize("skewed", [False, True])
@by_ranks()
def test_what_goes_around(rank: Rank, skewed: bool) -> None:
    uses(rank, skewed)


@by_ranks("pair")
def test_one_queue_is_enough(rank: Rank) -> None:
    """Where a GPU has one, nothing may wait for what stands behind it."""
    uses(rank, True, one_queue=True)


def uses(rank: Rank, skewed: bool, one_queue: bool = False) -> None:
    """Parts that go around in rooms of two kinds, of changing sizes: none comes as something else."""
    group, wrong, sizes = dist.group.WORLD, 0, (512, 24, 4096, 8)
    rt = runtime_for(torch.zeros(1, device=rank.device))
    draws = random.Random(rank.number)
    with offered(rank, one_queue):
        found = peers.peers_of(group, rt)
        assert found is not None
        for use in range(24):
            kind, nbytes = (OPERAND, OUTPUT)[use // 3 % 2], sizes[use % len(sizes)]
            held = draws.choice(("begin", "read", "", "")) if skewed else ""
            if held == "begin":
                hold_up(rank)
            room = found.room(rt, kind, max(sizes) * rank.world)
            assert room.memory.nbytes >= max(sizes) * rank.world
            if kind == OPERAND:
                room.push(rt, rank.number, 8, part(rank, rank.number, use, nbytes)).wait()
            for to in found.others:
                if kind == OUTPUT:
                    room.push(rt, to, rank.number * nbytes, part(rank, rank.number, use + to, nbytes)).wait()
                room.announce(rt, to)
            if held == "read":
                hold_up(rank)
            for source in found.others:
                room.await_(rt, source).wait()
                out, told = room.memory.rows(source * nbytes, (source + 1) * nbytes), use + rank.number
                if kind == OPERAND:
                    out, told = rt.empty((nbytes,), dtypes.uint8), use
                    room.pull(rt, source, 8, out).wait()
                wrong += (view(out) != (1 + told + 50 * source) % 251).any().to(torch.int32)
            room.leave(rt)
        assert int(wrong) == 0


@pytest.mark.parametrize(("shared", "why"), [(True, "share a GPU"), (False, "has no access to that of rank")])
@by_ranks("pair")
def test_gpus_that_cannot_read_each_other(rank: Rank, shared: bool, why: str) -> None:
    """Ranks that share a GPU, or have some that torch does not see here: it is told once."""
    driver, rt = HostDriver(one_queue=True), runtime_for(torch.zeros(1))
    place = "one" if shared else str(rank.number)
    driving = SimpleNamespace(driver=lambda: driver)
    with (
        warnings.catch_warnings(record=True) as told,
        patch.multiple(peers, _DEVICES=("cpu",), _uuid=lambda device: place, libraries=driving),
    ):
        warnings.simplefilter("always")
        found = [peers.peers_of(dist.group.WORLD, rt) for _ in range(2)]
    peers.let_go()
    (said,) = [str(one.message) for one in told if "peer memory" in str(one.message)]
    assert not any(found)
    says(said, why, "Parts travel over gloo")


def left_alone(rank: Rank, timeout: int) -> tuple[bool, float, list[str]]:
    """Of the rank whose partner dies in a use of a room: (whether what it reads is NaN, the seconds until it reads, the
    errors of its next calls)."""
    rt = runtime_for(torch.zeros(1, device=rank.device))
    with patch.dict(os.environ), offered(rank):
        found = peers.peers_of(dist.group.WORLD, rt)
        assert found is not None
        other = found.others[0]
        for use in range(2):
            room = found.room(rt, OPERAND, 4096)
            room.push(rt, rank.number, 0, part(rank, rank.number, use, 4096)).wait()
            if use:
                break
            room.announce(rt, other)
            room.await_(rt, other).wait()
            room.leave(rt)
        dist.barrier()
        os.environ["UB_TIMEOUT"] = str(timeout)  # from here on: nobody is to be late before
        if rank.number == 1:
            os._exit(3)
        room.announce(rt, other)
        began, out = time.monotonic(), rt.empty((4096,), dtypes.uint8)
        awaited = room.await_(rt, other)
        awaited.wait()
        said = []
        if rank.device == "cuda":  # the host is ahead
            room.pull(rt, other, 0, out).wait()
            reached = torch.cuda.Event()
            reached.record()
            while not reached.query():  # in a copy to the host, the driver may let no other thread do anything
                time.sleep(0.01)
        else:
            said.append(error_of(lambda: room.pull(rt, other, 0, out)))
            out = room.memory.rows(0, 4096)
        spoiled = bool((view(out).cpu() == 0xFF).all())
        seconds = time.monotonic() - began
        said += [error_of(lambda: room.leave(rt)), error_of(lambda: found.room(rt, OUTPUT, 8))]
    end = dist.distributed_c10d._abort_process_group if rank.device == "cuda" else dist.destroy_process_group
    end()  # its partner joins in nothing
    return spoiled, seconds, said


def test_a_rank_that_dies_ends_the_wait(two: Ranks) -> None:
    waiting, dead = two.outcomes(left_alone, 1)
    assert dead.how == "died", dead
    if waiting.how == "died" and two.device == "cuda":  # a GPU that takes no work beside the wait
        assert "a rank has waited in vain for another one" in waiting.output
        return
    assert waiting.how == "returned", waiting
    spoiled, seconds, said = waiting.value
    assert spoiled and 1 <= seconds < 60
    for error in said:
        says(error, "0 has waited in vain for 1", "results since then are NaN")


@pytest.mark.parametrize(
    ("kind", "recipe", "how"),
    [
        ("mlp", None, "rings"),
        ("mlp", None, "pipeline"),
        ("mlp", "delayed", "bulk"),
        pytest.param("attention", "current", "rings", marks=pytest.mark.more),
        pytest.param("layer", "delayed", "rings", marks=pytest.mark.more),
    ],
)
@by_ranks("two")
def test_graphs_give_the_bits_of_eager_steps(rank: Rank, kind: str, recipe: str | None, how: str) -> None:
    """A captured layer, replayed between eager steps."""
    group, (flags, cfg) = dist.group.WORLD, GRAPHED[how]
    with offered(rank), initialised(rank.world, ub_cfgs=each_said(SETS[flags], cfg)):
        module = make(kind, rank, group, **SETS[flags])
        eager, x = copy.deepcopy(module), torch.randn(TOKENS, 1, H).bfloat16().to(rank.device)
        call = graphed(module, rank, (x.clone().requires_grad_(),), recipe)
        for number in range(3):
            found = []
            for run, owner in ((call, module), (eager, eager)):
                given = ((1 + number) * x).requires_grad_()
                with region(recipe):
                    y = run(given)
                y.backward(torch.full_like(x, 0.5 - number))
                found.append([t.clone() for t in (y.detach(), given.grad, *[p.grad for p in owner.parameters()])])
                learn(owner)
            assert same(*found) and found[0][0].isfinite().all()
        said = reasons(eager)
        call.reset()
    assert all(how.endswith("through peer memory") for how in said.values()) and said


@NCCL
@by_ranks("gpus")
def test_memory_is_not_mapped_in_a_capture(rank: Rank) -> None:
    """Of a layer that overlaps for the first time inside a capture, after it ran without."""
    with offered(rank):
        module = make("mlp", rank, dist.group.WORLD, **SETS["rings"])
        x = torch.zeros(TOKENS, 1, H, dtype=torch.bfloat16, device=rank.device)
        overlap._process.destroyed = True
        module(x)
        with initialised(rank.world, ub_cfgs=CFGS), torch.no_grad():
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    said = error_of(lambda: module(x))
                finally:
                    graph.capture_end()
    says(said, "inside a CUDA graph's capture", "run a step before the capture")


def memory(rank: Rank) -> tuple[list[int], list[int], int]:
    """(bytes that are mapped after the first steps and after all, what a GPU has free after these, then after
    destroy_ub, both of two rounds, how many groups have memory in the end)."""
    rooms, free = [], []

    def note() -> None:
        if rank.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            dist.barrier()
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
            dist.barrier()

    with offered(rank):
        for _ in range(2):
            with initialised(rank.world, ub_cfgs=CFGS):
                module = make("mlp", rank, dist.group.WORLD, **SETS["rings"])
                for counts in ((TOKENS,), (64, 32, 96) * 8):
                    steps(module, rank, None, counts, dist.group.WORLD)
                    found = peers._found[dist.group.WORLD]
                    assert found is not None
                    rooms.append(sum(piece.nbytes for piece in found._mapped.values()))
                note()
            del found, module
            note()
        return rooms, free, len(peers._found)


@by_ranks("two")
def test_memory_is_what_the_documents_say(rank: Rank) -> None:
    """Of two rooms of a kind, whatever the layers and token counts; given back in the end."""
    capacity, size = 2 * TOKENS * H, 2  # elements, bytes of each
    pieces = [capacity // 2 * size + 4096, capacity * size + 4096]
    rooms, _, left = memory(rank)
    assert rooms == [sum(2 * -(-piece // 512) * 512 for piece in pieces)] * 4 and left == 0


@pytest.mark.full  # alone on the GPUs: their free memory is what is compared
@NCCL
@by_ranks("gpus")
def test_a_gpu_gets_its_memory_back(rank: Rank) -> None:
    """It gives whole pages of 2 MiB."""
    _, (inside, outside, *again), _ = memory(rank)
    assert again == [inside, outside] and outside - inside >= 2 * (2 << 20)


def long(rank: Rank, count: int) -> None:
    """Many equal steps beside all-reduces of a second group."""
    second = dist.new_group()
    with offered(rank), initialised(rank.world, ub_cfgs=CFGS):
        module = make("mlp", rank, dist.group.WORLD, **SETS["rings"])
        x = torch.randn(TOKENS, 1, H).bfloat16().to(rank.device)
        others, wrong = torch.zeros(1 << 20, device=rank.device), torch.zeros((), device=rank.device)
        first = None
        draws = random.Random(rank.number)
        for _ in range(count):
            sums = dist.all_reduce(others, group=second, async_op=True)
            if draws.random() < 0.01:
                hold_up(rank)
            y = module(x)
            y.backward(y.detach())
            sums.wait()
            first = y.detach() if first is None else first
            wrong += (y.detach() != first).any()
        said: Any = reasons(module)
        assert float(wrong) == 0 and said and all("through peer memory" in how for how in said.values())


@pytest.mark.full
@NCCL
def test_a_thousand_steps() -> None:
    """However many hardware queues there are, nothing waits for what stands behind it."""
    started = [Ranks(2, "cuda", CUDA_DEVICE_MAX_CONNECTIONS=connections) for connections in ("1", "8", "32")]
    try:
        with ThreadPoolExecutor(len(started)) as beside:
            list(beside.map(lambda ranks: ranks.run(long, 1000), started))
    finally:
        for ranks in started:
            ranks.close()
