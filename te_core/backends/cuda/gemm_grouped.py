"""Groups of rows whose sizes are on the device, on CUDA: groups.cu sums them, grouped_gemm.cu multiplies them.

The product reads matrices by tensor maps, one for each group's matrix, in a struct by value; a launch takes up to 192
groups (16 before CUDA 12.1). As in gemm_block.py a map is made with the plan, and a run writes addresses.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_core import device, dtypes, libraries
from te_core.backends.cuda.sums import TYPES
from te_core.kernels import loader
from te_core.quantized import columns_of
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.gemm_grouped import GroupedGemmSpec

_HALVES = (dtypes.bfloat16, dtypes.float16)
_CLUSTER, _THREADS = 2, 384
#: Four places of 128 bytes of K, barriers; with blocks four places of scales, of pieces a and b.
_SHARED = 4 * (128 + 256) * 128 + 64 + 4 * (132 + 256)
_PIECES = {"NONE": 0, "ONE": 0, "TILES": 3 * 528, "PIECES": 3 * 1552}
_CAPACITIES = (16, 64, 192)
_SUM_COLUMNS, _SUM_THREADS = 64, 256


def _chunks(groups: int) -> tuple[int, list[tuple[int, int]]]:
    """(how many groups a launch's table has room for, the first and the count of each launch)."""
    capacities = _CAPACITIES if libraries.large_parameters() else _CAPACITIES[:1]
    room = next((c for c in capacities if c >= groups), capacities[-1])
    return room, [(start, min(room, groups - start)) for start in range(0, groups, room)]


# ----------------------------------------------------------------------------------------------- the product


@dataclass(frozen=True, eq=False, slots=True)
class GroupedGemmPlan:
    """All that was decided about one product of groups."""

    spec: GroupedGemmSpec
    kernel: loader.Kernel
    room: int  # groups of a launch
    chunks: list[tuple[int, int]]
    maps: tuple[bytes, bytes]  # of a and of one b, without addresses
    table: struct.Struct
    places: tuple[int, ...]
    blocks: int
    shared: int
    scales: str

    def run(
        self,
        rt: Runtime,
        a: Tensor,
        b: Sequence[Tensor],
        out: Sequence[Tensor | None],
        offsets: Tensor,
        bias: Sequence[Tensor | None],
        scales: tuple[Tensor, Sequence[Tensor]] | None = None,
    ) -> None:
        """Launch on the runtime's stream. Of several matrices (b; with trans_a out) and biases there is one a group."""
        spec, (a_map, b_map), room = self.spec, self.maps, self.room
        for start, count in self.chunks:
            content = [a.ptr, a_map]
            for each in b if spec.trans_a else _filled(b, start, count, room):
                content += [_pointer(each), b_map]
            content += map(_pointer, _filled(out, start, count, room) if spec.trans_a else out)
            content += [0] if spec.trans_a else map(_pointer, _filled(bias, start, count, room))
            content += [offsets.ptr + 4 * start]
            if scales is not None:
                of_a, of_b = scales
                one = self.scales == "ONE"  # of groups in one vector, of which a launch begins with its first one
                content += [of_a.ptr + (4 * start if one else 0)]
                if spec.trans_a:
                    content += [of_b[0].ptr + (4 * start if one else 0)]
                else:
                    content += map(_pointer, _filled(of_b, start, count, room))
                content += [of_a.shape[-1], start]
            content += [spec.rows, spec.m, spec.n, spec.k, count]
            table = ctypes.create_string_buffer(self.table.pack(*content), self.table.size)
            self.kernel.by_value(rt, self.blocks, _THREADS, table, self.shared, self.places)


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.ptr


def _filled(tensors: Sequence[Any], start: int, count: int, room: int) -> list[Any]:
    """Those of a launch, then none as far as its table reaches."""
    return [*tensors[start : start + count], *[None] * (room - count)]


def plan_gemm_grouped(rt: Runtime, spec: GroupedGemmSpec) -> GroupedGemmPlan | None:
    """Its plan; None where a loop over the groups has to compute it."""
    outs = (spec.dtype, dtypes.float32) if spec.trans_a else (spec.dtype,)
    sizes = (spec.m, spec.n) if spec.trans_a else (spec.n, spec.k)
    able = spec.dtype in _HALVES and spec.out in outs and not (spec.trans_a and spec.trans_b)
    scales, types = _scales(spec)
    step = 8 if scales == "NONE" else 16
    able = able and scales is not None and all(s and not s % step for s in sizes)
    if not (able and spec.groups and spec.rows and spec.alignment >= 16):
        return None
    info = device.info(rt.device.index)
    if info.capability != (9, 0):
        return None
    driver = libraries.driver()
    if spec.formats is not None:  # K lies along the rows of all
        columns = columns_of(spec.rows, spec.groups)
        matrices = ((spec.m, columns), (spec.n, columns)) if spec.trans_a else ((spec.rows, spec.k), (spec.n, spec.k))
    else:
        widths = (spec.m, spec.n) if spec.trans_a else (spec.k, spec.k if spec.trans_b else spec.n)
        rows = spec.rows if spec.trans_a else spec.n if spec.trans_b else spec.k
        matrices = (spec.rows, 2 * widths[0]), (rows, 2 * widths[1])
    with driver.on(rt.device.index):  # a backward's thread may have no context yet
        boxed = [driver.tensor_map(matrix, (64, 128)) for matrix in matrices]
    if None in boxed:
        return None
    room, chunks = _chunks(spec.groups)
    kernel = loader.get(
        rt,
        "grouped_gemm",
        args="b",
        A_TYPE=types[0],
        B_TYPE=types[1],
        SCALES=scales,
        SPLIT=scales != "NONE" and (spec.split or scales != "ONE"),
        DTYPE=TYPES[spec.dtype],
        OUT=TYPES[spec.out],
        WGRAD=spec.trans_a,
        B_ROWS=scales == "NONE" and not spec.trans_b,
        ACCUMULATE=spec.accumulate,
        GROUPS=room,
    )
    table, places = gemm_table(spec.trans_a, room, scales != "NONE")
    shared = -(-(_SHARED + _PIECES[scales] + 12 * (room + 1)) // 1024) * 1024
    blocks = info.multiprocessors // _CLUSTER * _CLUSTER
    bodies = boxed[0][8:], boxed[1][8:]  # type: ignore[index]
    return GroupedGemmPlan(spec, kernel, room, chunks, bodies, table, places, blocks, shared, scales)


def _scales(spec: GroupedGemmSpec) -> tuple[Any, tuple[str, str]]:
    """(which SCALES of grouped_gemm.cu, None if none; the instruction's names of the types of a and b)."""
    if spec.formats is None:
        kind = "bf16" if spec.dtype is dtypes.bfloat16 else "f16"
        return "NONE", (kind, kind)
    names = {dtypes.float8_e4m3: "e4m3", dtypes.float8_e5m2: "e5m2"}
    (a, b), found = spec.formats, None
    if a.scaling == b.scaling == "tensor":
        found = "ONE"
    elif a.scaling == b.scaling == "block" and not a.tiled and b.tiled != spec.trans_a:
        found = "PIECES" if spec.trans_a else "TILES"
    return found, (names.get(a.dtype, ""), names.get(b.dtype, ""))


def gemm_table(trans_a: bool, room: int, scaled: bool = False) -> tuple[struct.Struct, tuple[int, ...]]:
    """(the struct of grouped_gemm.cu: maps, outs, biases, offsets, scales, numbers; where its addresses stand)."""
    maps, pointers = 1 + (1 if trans_a else room), room + 2  # one map or out, of the others one a group; offsets
    numbers = 5
    if scaled:
        pointers, numbers = pointers + 1 + (1 if trans_a else room), 7
    after = 128 * maps
    size = after + 8 * pointers + 4 * numbers
    table = struct.Struct("=" + "Q120s" * maps + f"{pointers}Q{numbers}i{-size % 64}x")
    return table, (*range(0, after, 128), *range(after, after + 8 * pointers, 8))


# ---------------------------------------------------------------------------------------------- sizes and sums


def group_offsets(rt: Runtime, sizes: Tensor, rows: int, out: Tensor, faults: Tensor | None) -> None:
    """Running sums of sizes."""
    size = "int" if sizes.dtype is dtypes.int32 else "i64"
    kernel = loader.get(rt, "groups", entry="group_offsets", args="pppii", **_constants(SIZE=size))
    kernel(rt, 1, 32, sizes, out, faults, sizes.shape[0], rows)


def group_sums(rt: Runtime, x: Tensor, offsets: Tensor, outs: Sequence[Tensor | None]) -> None:
    """Column sums of each group that has an out."""
    kind = next(out.dtype for out in outs if out is not None)
    room, chunks = _chunks(len(outs))
    constants = _constants(DTYPE=TYPES[x.dtype], OUT=TYPES[kind], GROUPS=room)
    kernel = loader.get(rt, "groups", entry="group_sums", args="b", **constants)
    across, (form, places) = -(-x.shape[1] // _SUM_COLUMNS), sums_table(room)
    for start, count in chunks:
        addresses = map(_pointer, _filled(outs, start, count, room))
        content = form.pack(x.ptr, offsets.ptr + 4 * start, *addresses, x.shape[1])
        table = ctypes.create_string_buffer(content, form.size)
        kernel.by_value(rt, across * count, _SUM_THREADS, table, 0, places)


def sums_table(room: int) -> tuple[struct.Struct, tuple[int, ...]]:
    """(the struct of group_sums in groups.cu: x, offsets, outs, columns; where its addresses stand)."""
    return struct.Struct(f"={room + 2}Qi4x"), tuple(range(0, 8 * (room + 2), 8))


def _constants(**given: Any) -> dict[str, Any]:
    return {"SIZE": "int", "DTYPE": "float", "OUT": "float", "GROUPS": _CAPACITIES[0], **given}
