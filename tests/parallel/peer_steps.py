"""Peer memory between ranks: what they do, on GPUs as it is, and on the CPU over files that all of them map.

There the driver is `HostDriver`.
"""

from __future__ import annotations

import ctypes
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from te_core import libraries
from te_core.driver import Driver
from te_torch.exchange import all_gather_object
from te_torch.parallel import communicator, peers
from te_torch.runtime import to_core
from tests.parallel.ranks import Rank

_WAIT = 1


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


@contextmanager
def carried(rank: Rank, carrier: str) -> Iterator[Any]:
    """Parts travel through peer memory, or by calls of NCCL or gloo also where GPUs could read each other's memory."""
    with offered(rank) if carrier == "peer memory" else patch.object(communicator, "peers_of", lambda group, rt: None):
        yield


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
