"""What a run of the CPU backend writes into.

Every operation walks its matrices in blocks of rows of about CHUNK elements, decoded to float32 in scratch
memory: the several NumPy passes over a block then stay in the core's own cache instead of each going to main
memory. The scratch belongs to an executor, one per (thread, runtime), so threads never share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from threading import local

import numpy as np
import numpy.typing as npt

from te_core import dtypes
from te_core.runtime import Allocator, Runtime

F32 = npt.NDArray[np.float32]

#: Elements of a block: 64 KiB of float32. Half and double of it are within 10 %; 2^18 outgrows the cache.
CHUNK = 1 << 14
#: The largest scratch block (in elements) that outlives its call; a larger one is given back at once.
KEEP = 1 << 24


class Executor:
    """Scratch memory of one thread, from the runtime's allocator."""

    __slots__ = ("_allocator", "_blocks", "codes", "odd", "value", "wide")

    context = number = 0  # a GPU's affair: the steps of a tape are no executor's here

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._blocks: dict[str, F32] = {}
        # The codec's own: values on their way to FP8, their bits rounded to odd, and look-up indices.
        self.value: F32 = self.floats("codec value", CHUNK)
        self.odd: npt.NDArray[np.uint32] = self.floats("codec odd", CHUNK).view(np.uint32)
        self.wide: npt.NDArray[np.int64] = self.floats("codec wide", 2 * CHUNK).view(np.int64)

    def floats(self, slot: str, *shape: int) -> F32:
        """Uninitialised float32 memory that the next request for the same slot overwrites."""
        size = prod(shape)
        block = self._blocks.get(slot)
        if block is None or block.size < size:
            block = self._allocator.empty((max(size, CHUNK),), dtypes.float32, 0).numpy()
            if size <= KEEP:
                self._blocks[slot] = block
        return block[:size].reshape(shape)


def executors(rt: Runtime) -> local:
    """A place for this runtime alone, whose allocator gives the scratch memory; it goes when the thread ends."""
    return local()


def executor(rt: Runtime) -> Executor:
    """Scratch memory for the calling thread."""
    return Executor(rt.allocator)


def scratch(rt: Runtime) -> Executor:
    """The calling thread's executor."""
    found: Executor = rt.executor()
    return found


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of whole rows, about CHUNK elements each (a longer row is a block of its own)."""
    step = max(1, CHUNK // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
