"""What kernels of te_core are given by value: the addresses in a table, and all else in it."""

from __future__ import annotations

import ast
import ctypes
from typing import Any

from te_core.backends.cuda import context, gemm_block, gemm_grouped, optimizer, quantize, quantize_grouped

#: Of kernels that take a table by value: an entry, its addresses, the tail, its number that counts entries, their room.
_TABLES = {
    "quantize_grouped": (quantize_grouped._MATRIX, 7, quantize_grouped._TAIL, 3, None),
    "quantize_block_grouped": (quantize_grouped._TILES, 6, quantize_grouped._TAIL, 3, None),
    **dict.fromkeys(("adam", "adam_maxima"), (optimizer._ADAM, 7, optimizer._ADAM_TAIL, 13, None)),
    "adam_quantized": (optimizer._TILES, 10, optimizer._TILES_TAIL, 14, None),
    "sgd": (optimizer._SGD, 4, optimizer._SGD_TAIL, 8, None),
    **dict.fromkeys(("scale_many", "square_many", "norm_of_each"), (optimizer._MANY, 2, optimizer._MANY_TAIL, 5, None)),
    "column_sum_grouped": (quantize_grouped._PART, 2, quantize_grouped._PARTS_TAIL, 1, 128),
}

#: Of those whose table has no rows: all of it, and the numbers of its addresses.
_WHOLE = {
    "context_lengths": (context._TABLE, (0, 1, 2)),
    "context_draws": (context._DRAWS, (0, 1)),
    "block_gemm": (gemm_block.TABLE, (0, 2, 4, 5, 6)),
}
#: Of those that are rows alone, the last of them zeros: a row, and how many addresses it begins with.
_ROWS = {"scale_update": (quantize._STATE, 3)}
#: Of those whose room is a constant: (all of it, where addresses stand, of which some may be none).
_PLACED = {
    "group_sums": lambda constants: gemm_grouped.sums_table(constants["GROUPS"]),
    "grouped_gemm": lambda constants: gemm_grouped.gemm_table(
        bool(constants["WGRAD"]), constants["GROUPS"], constants["SCALES"] != "NONE"
    ),
}


def table(text: str, entry: str, at: int) -> tuple[dict[str, int], list[Any]]:
    """(the addresses in a table at this host address, all else in it)."""
    if entry in _WHOLE:
        whole, pointers = _WHOLE[entry]
        values = whole.unpack(ctypes.string_at(at, whole.size))
        return {f"{i}": values[i] for i in pointers}, [v for i, v in enumerate(values) if i not in pointers]
    if entry in _ROWS:
        form, pointers = _ROWS[entry]
        whole = dict(ast.literal_eval(text)[1])["CAPACITY"] * form.size
        rows = [row for row in form.iter_unpack(ctypes.string_at(at, whole)) if row[0]]
        addresses = {f"{i}.{k}": row[k] for i, row in enumerate(rows) for k in range(pointers)}
        return addresses, [value for row in rows for value in row[pointers:]]
    if entry in _PLACED:
        whole, places = _PLACED[entry](dict(ast.literal_eval(text)[1]))
        content = bytearray(ctypes.string_at(at, whole.size))
        found = {f"{place}": int.from_bytes(content[place : place + 8], "little") for place in places}
        for place in places:
            content[place : place + 8] = bytes(8)
        return {place: address for place, address in found.items() if address}, [bytes(content)]
    form, pointers, behind, counts, room = _TABLES[entry]
    size = dict(ast.literal_eval(text)[1]).get("CAPACITY") if room is None else room
    tail = behind.unpack(ctypes.string_at(at + size * form.size, behind.size))
    rows = [form.unpack(ctypes.string_at(at + i * form.size, form.size)) for i in range(tail[counts])]
    addresses = {f"{i}.{k}": row[k] for i, row in enumerate(rows) for k in range(pointers)}
    return addresses, [*tail, *[value for row in rows for value in row[pointers:]]]
