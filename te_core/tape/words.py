"""Steps in words of eight bytes, as the player in C takes them: in a program's file, and in a stretch of te_core's own
loop. In the places of addresses stand zeros, and patches say what comes there."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from te_core.backends.cuda.gemm_run import Multiplied
from te_core.backends.cuda.memory import Fill
from te_core.kernels.loader import Launch, TableLaunch
from te_core.symbols import Patch, is_symbol
from te_core.tape.program_file import FILL, LAUNCH, PRODUCT, SIZES, TABLE


class Packed(NamedTuple):
    """A step that runs something."""

    kind: int  # of a program's steps: a launch, a table, a product, a fill
    words: tuple[int, ...]
    patches: tuple[Patch, ...]  # by the number of the word; of a table by the byte in the struct
    nbytes: int = 0  # of a table's struct
    constants: tuple[int, ...] = ()  # the addresses in the words: memory that no call brings


def packed(step: Any) -> Packed | None:
    """Its words; None for a step that is done in another way."""
    kind = step.__class__
    if kind is Launch:
        letters = step.kernel.letters
        args = [0 if letter == "p" and is_symbol(a) else a for letter, a in zip(letters, step.args, strict=True)]
        constants = tuple(a for letter, a in zip(letters, args, strict=True) if letter == "p" and a)
        words = struct.unpack(f"<{len(args)}Q", step.kernel.packed(args))
        behind = tuple(p._replace(number=p.number + SIZES) for p in step.patches)
        return Packed(LAUNCH, (*step.sizes, *words), behind, 0, constants)
    if kind is TableLaunch:
        table = bytearray(step.table)
        for patch in step.patches:
            struct.pack_into("<Q", table, patch.number, 0)
        found = (struct.unpack_from("<Q", table, place)[0] for place in step.places)
        constants = tuple(address for address in found if address)
        nbytes = len(table)
        table += bytes(-nbytes % 8)
        grid, block, shared = step.sizes
        words = struct.unpack(f"<{len(table) // 8}Q", table)
        return Packed(TABLE, (grid, 1, 1, block, 1, 1, shared, *words), step.patches, nbytes, constants)
    if kind is Multiplied:
        words = tuple(0 if is_symbol(address) else address for address in step.addresses)
        return Packed(PRODUCT, words, step.patches, 0, tuple(filter(None, words)))
    if kind is Fill:
        address = 0 if is_symbol(step.address) else step.address
        patches = tuple(p._replace(number=2) for p in step.patches)
        return Packed(FILL, (0, step.nbytes, address), patches, 0, tuple(filter(None, (address,))))
    return None
