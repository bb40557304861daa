"""Peer memory between ranks: what they do, on GPUs as it is, and on the CPU over files that all of them map.

There the driver is `HostDriver`.
"""

from __future__ import annotations

import copy
import ctypes
import os
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from te_core import dtypes, libraries
from te_core.driver import Driver
from te_core.layers.communicator import OPERAND, OUTPUT
from te_torch.exchange import all_gather_object
from te_torch.parallel import overlap, peers
from te_torch.parallel.communicator import view
from te_torch.runtime import runtime_for, to_core
from tests.module_steps import differences
from tests.parallel.overlap_steps import (
    RINGS,
    SETS,
    TOKENS,
    H,
    compared,
    each_said,
    in_groups_of_two,
    initialised,
    make,
    reasons,
    steps,
)
from tests.parallel.ranks import Rank
from tests.parallel.tensor_steps import error_of
from tests.parallel.test_graphed_spread import graphed, step

_WAIT = 1
CFGS = each_said(SETS["rings"], RINGS)
#: Of graphs: which flags are set, and the methods.
GRAPHED = {"rings": ("rings", RINGS), "pipeline": ("rings", None), "bulk": ("bulk", RINGS)}


class HostDriver:
    """A driver over host memory. The host's own work is that of stream 0.

    With one queue it does what it is asked for at once, in the thread that asks, as a GPU with one hardware queue. With
    more, each other stream is a thread that does everything in its order, and a little late.
    """

    def __init__(self, one_queue: bool) -> None:
        self._numbers = count(1)
        self._queues: dict[int, ThreadPoolExecutor] | None = None if one_queue else {}
        self._events: dict[int, threading.Event] = {}  # what was recorded last
        self.on = self.at_first_use = lambda index: nullcontext()

    def __getattr__(self, name: str) -> Any:
        assert hasattr(Driver, name), name
        return lambda *given: None

    def attach(self, index: int) -> int:
        return 0

    def is_capturing(self, stream: int) -> bool:
        return False

    def create_stream(self) -> int:
        number = next(self._numbers)
        if self._queues is not None:
            self._queues[number] = ThreadPoolExecutor(1)
        return number

    def destroy_stream(self, stream: int) -> None:
        if self._queues is not None:
            self._queues.pop(stream).shutdown()

    def create_event(self) -> int:
        return next(self._numbers)

    def register(self, index: int, host: int, nbytes: int) -> int:
        return host

    def _do(self, stream: int, work: Any, *given: Any) -> None:
        if self._queues is None or not stream:
            work(*given)
            return

        def later() -> None:
            time.sleep(random.random() / 1000)
            work(*given)

        self._queues[stream].submit(later)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._do(stream, ctypes.memmove, to, source, nbytes)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._do(stream, ctypes.memset, address, value, nbytes)

    def flags(self, stream: int, made: Any) -> None:
        self._do(stream, self._flags, made)

    def record(self, event: int, stream: int) -> None:
        self._events[event] = reached = threading.Event()
        self._do(stream, reached.set)

    def wait(self, stream: int, event: int) -> None:
        self._do(stream, self._events[event].wait)

    def synchronize(self, stream: int) -> None:
        self.record(-stream, stream)
        self._events[-stream].wait()

    def synchronize_device(self, index: int) -> None:
        for stream in self._queues or ():
            self.synchronize(stream)

    def order_streams(self, index: int, producer: int, consumer: int) -> None:
        self.record(0, producer)
        self.wait(consumer, 0)

    @staticmethod
    def _flags(made: Any) -> None:
        for asked in made:
            word = ctypes.c_uint32.from_address(asked.address)
            if asked.operation == _WAIT:
                while word.value != asked.value:
                    time.sleep(0.0002)
            else:
                word.value = asked.value


def mapped(nbytes: int, group: Any, device: int) -> peers.Mapped:
    """Files of all ranks, each of which maps all."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(nbytes)
        paths = all_gather_object("paths", file.name, group)
        pieces = [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
        all_gather_object("mapped", None, group)
    own = pieces[paths.index(file.name)].fill_(0xFF)
    all_gather_object("filled", None, group)
    return peers.Mapped([piece.data_ptr() for piece in pieces], nbytes, own, pieces)


@contextmanager
def offered(rank: Rank, one_queue: bool = False) -> Iterator[Any]:
    """Groups have peer memory inside; on the CPU that of files, and the driver that they have it from."""
    if rank.device == "cuda":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        yield libraries.driver()
        peers.let_go()
        return
    driver = HostDriver(one_queue)
    with patch.multiple(
        peers,
        _DEVICES=("cpu",),
        _uuid=lambda device: str(rank.number),
        _against=lambda *told: "",
        mapped=mapped,
        libraries=SimpleNamespace(driver=lambda: driver),
    ):
        yield driver
    peers.let_go()


def uses(rank: Rank, count: int, sizes: tuple[int, ...], skewed: bool, one_queue: bool = False) -> int:
    """Parts that go around in rooms of two kinds, of changing sizes: how many came as something else."""
    group, wrong = dist.group.WORLD, 0
    rt = runtime_for(torch.zeros(1, device=rank.device))
    draws = random.Random(rank.number)
    with offered(rank, one_queue):
        found = peers.peers_of(group, rt)
        assert found is not None
        for use in range(count):
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
        return int(wrong)


def part(rank: Rank, number: int, use: int, nbytes: int) -> Any:
    """Bytes that say whose they are, and of which use."""
    values = torch.full((nbytes,), (1 + use + 50 * number) % 251, dtype=torch.uint8, device=rank.device)
    return to_core(values)


def hold_up(rank: Rank) -> None:
    """What this rank is asked for from here on comes late."""
    if rank.device == "cuda":
        torch.cuda._sleep(20_000_000)
    else:
        time.sleep(0.02)


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


def compared_with_plain(
    rank: Rank,
    kind: str,
    recipe: str | None,
    flags: dict[str, bool],
    cfg: dict[str, Any] | None,
    counts: tuple[int, ...],
) -> tuple[float, dict[str, str]]:
    """`compared` of tests/parallel/overlap_steps.py, over peer memory."""
    with offered(rank):
        return compared(rank, kind, recipe, flags, cfg, counts)


def in_two_groups(rank: Rank) -> tuple[float, dict[str, str]]:
    """`in_groups_of_two` of the same."""
    with offered(rank):
        return in_groups_of_two(rank)


def with_graphs(rank: Rank, kind: str, recipe: str | None, how: str = "rings") -> tuple[list[str], dict[str, str]]:
    """What a captured layer, replayed between eager steps, gives that an eager one does not; how its GEMMs ran."""
    group, found, (flags, cfg) = dist.group.WORLD, [], GRAPHED[how]
    with offered(rank), initialised(rank.world, ub_cfgs=each_said(SETS[flags], cfg)):
        module = make(kind, rank, group, **SETS[flags])
        eager, x = copy.deepcopy(module), torch.randn(TOKENS, 1, H).bfloat16().to(rank.device)
        call = graphed(module, rank, (x.clone().requires_grad_(),), recipe)
        for number in range(3):
            given = (1 + number) * x, torch.full_like(x, 0.5 - number)
            got, wanted = step(call, module, recipe, given), step(eager, eager, recipe, given)
            found += differences(got, wanted)
            if not got["y"].isfinite().all():
                found.append("a number that is none")
        said = reasons(eager)
        call.reset()
    return found, said


def first_in_a_capture(rank: Rank) -> str:
    """What a layer says that overlaps for the first time inside a capture, after it ran without."""
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
                    return error_of(lambda: module(x))
                finally:
                    graph.capture_end()


def memory(rank: Rank, count: int) -> tuple[list[int], list[int], int]:
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
                for counts in ((TOKENS,), (64, 32, 96) * (count // 3)):
                    steps(module, rank, None, counts, dist.group.WORLD)
                    found = peers._found[dist.group.WORLD]
                    assert found is not None
                    rooms.append(sum(piece.nbytes for piece in found._mapped.values()))
                note()
            del found, module
            note()
        return rooms, free, len(peers._found)


def long(rank: Rank, count: int) -> tuple[int, float, dict[str, str]]:
    """Many equal steps beside all-reduces of a second group: (how many, those that gave something else, what ran)."""
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
        return count, float(wrong), reasons(module)


def without(rank: Rank, shared: bool) -> tuple[bool, list[str]]:
    """(whether ranks have peer memory that share a GPU, or have some that torch does not see here; what is told)."""
    driver, rt = HostDriver(one_queue=True), runtime_for(torch.zeros(1))
    place = "one" if shared else str(rank.number)
    with (
        warnings.catch_warnings(record=True) as told,
        patch.multiple(
            peers, _DEVICES=("cpu",), _uuid=lambda device: place, libraries=SimpleNamespace(driver=lambda: driver)
        ),
    ):
        warnings.simplefilter("always")
        found = [peers.peers_of(dist.group.WORLD, rt) for _ in range(2)]
    peers.let_go()
    return any(found), [str(one.message) for one in told if "peer memory" in str(one.message)]
