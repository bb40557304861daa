"""Which temporaries of a tape share one block: small ones, and no more of them than may be held for all of a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from te_core import dtypes, symbols
from te_core.symbols import Patch
from te_core.tape.layout import laid_out
from te_core.tape.tape import Drop, Slot, Take

KIB = 1 << 10
#: Bytes of temporaries that one step reads, all of them at once; bytes of the block, and how many lie outside of it.
SIZES: dict[str, tuple[list[int], int, int]] = {
    "two": ([64 * KIB, 256], 64 * KIB + 256, 0),
    "one alone": ([64 * KIB], 0, 1),
    "up to 256 KiB": ([256 * KIB, 256 * KIB], 512 * KIB, 0),
    "above 256 KiB": ([256 * KIB + 1, 256 * KIB + 1], 0, 2),
    "small and large": ([64 * KIB, 300 * KIB, 64 * KIB], 128 * KIB, 1),
    "up to 1 MiB": ([256 * KIB] * 4, 1024 * KIB, 0),
    "above 1 MiB": ([256 * KIB] * 5, 1024 * KIB, 1),
    "smaller ones fill it": ([250 * KIB] * 5 + [24 * KIB], 1024 * KIB, 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_small_temporaries_share_a_block(name: str) -> None:
    sizes, block, outside = SIZES[name]
    slots = [
        Slot("memory", "", (nbytes,), dtypes.uint8, nbytes, symbols.base(i, 256)) for i, nbytes in enumerate(sizes)
    ]
    step: Any = SimpleNamespace(patches=tuple(Patch(i, i, 0) for i in range(len(sizes))))
    begins = dict.fromkeys(range(len(sizes)), 0)
    placed, steps, _ = laid_out(slots, [step], (begins, {}), set(), frozenset(), 256)
    shared = [slot.nbytes for slot in placed if slot.name == "temporaries"]
    assert shared == [block] * bool(block)
    for kind in (Take, Drop):
        assert sum(isinstance(one, kind) for one in steps) == outside + bool(block)
    assert sum(patch.slot < len(sizes) for patch in step.patches) == outside
    taken = sorted((p.slot, p.offset, nbytes) for p, nbytes in zip(step.patches, sizes, strict=True))
    for (slot, offset, nbytes), (other, behind, _) in zip(taken, taken[1:], strict=False):
        assert slot != other or offset + nbytes <= behind
