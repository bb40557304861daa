"""What graphs ask of the device, in one object, so that all around it can be tested without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError

OPERATION = "make_graphed_callables"
wrong = partial(ArgumentError, OPERATION)
unsupported = partial(UnsupportedError, OPERATION)


class Graph:
    """Work that was done once under observation, to be done again over the same memory.

    It draws from the default generator of the device and from those named here.
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)

    def capture(self, work: Callable[[], Any], pool: Any) -> Any:
        """Do the work under observation; what it returns stays where it is."""
        with torch.cuda.graph(self._graph, pool=pool):
            return work()

    def replay(self) -> None:
        """Do it again."""
        self._graph.replay()

    def reset(self) -> None:
        """Let go of it and of its memory."""
        self._graph.reset()


class Cuda:
    """A CUDA device, as graphs need it."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}  # of warm-ups, by device

    def require(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise for what cannot be captured."""
        for t in tensors:
            if t.device.type != "cuda" or t.get_device() != torch.cuda.current_device():
                raise unsupported(
                    f"a tensor on {t.device}",
                    "parameters and sample_args on the current CUDA device",
                    "move them there, or call torch.cuda.set_device",
                )

    def pool(self) -> Any:
        """A new pool of memory for graphs."""
        return torch.cuda.graph_pool_handle()

    def holds(self, generator: torch.Generator) -> bool:
        """Whether graphs here can draw from this generator."""
        return generator.device.type == "cuda" and generator.device.index in (None, torch.cuda.current_device())

    def graph(self, generators: Iterable[torch.Generator]) -> Graph:
        """A new graph, which draws from these generators besides."""
        return Graph(generators)

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Where what will be captured runs first: on a stream of its own, which nothing overlaps.

        One for each device: a stream keeps its scratch memory for good.
        """
        torch.cuda.synchronize()
        index = torch.cuda.current_device()
        if index not in self._streams:
            self._streams[index] = torch.cuda.Stream()
        with torch.cuda.stream(self._streams[index]):
            yield
        torch.cuda.synchronize()

    def replay(self, graphs: Iterable[Graph], stream: Any, event: Any) -> None:
        """Replay in this order, on `stream` if one is given; the caller's stream waits for it, by `event` if given."""
        mine = torch.cuda.current_stream()
        if stream is None or stream == mine:
            for graph in graphs:
                graph.replay()
            if event is not None:
                event.record(mine)
            return
        stream.wait_stream(mine)
        with torch.cuda.stream(stream):
            for graph in graphs:
                graph.replay()
            if event is not None:
                event.record(stream)
        if event is None:
            mine.wait_stream(stream)
        else:
            mine.wait_event(event)

    def borrowed(self, t: torch.Tensor) -> torch.Tensor:
        """The same memory, which the pool may give to a later capture."""
        if type(t) is not torch.Tensor or not t.numel():
            return t
        size = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        flat = torch.as_tensor(_Bytes(t.data_ptr(), size * t.element_size()), device=t.device)
        return flat.view(t.dtype).as_strided(t.shape, t.stride())


class _Bytes:
    """Memory at an address, whoever it belongs to."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


#: What make_graphed_callables runs on; tests put another one here.
device: Any = Cuda()
