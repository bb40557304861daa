"""The block-scaled product of our own (kernels/block_gemm.cu), which stands beside cuBLASLt's.

It takes a in 1x128 pieces, b in pieces or 128x128 tiles, into bfloat16 or float32, and adds to what float32 held. It
reads matrices by tensor maps. A map says the shape of a matrix, and is made with the plan. The address stands in its
first eight bytes, where a run writes it, and a replay where it is recorded.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_core import device, dtypes, libraries
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime

if TYPE_CHECKING:
    from te_core.ops.gemm import GemmOperands, GemmSpec

_TYPES = {dtypes.float8_e4m3: "e4m3", dtypes.float8_e5m2: "e5m2", dtypes.bfloat16: "bf16", dtypes.float32: "float"}
_TILE, _CLUSTER, _THREADS, _STAGES = (128, 256), 2, 384, 4
#: The kernel's struct by value: maps of a and b (address and the rest), scales of a and b, out, M, N, K.
TABLE = struct.Struct("=Q120sQ120sQQQ3i28x")
_PLACES = (0, 128, 256, 264, 272)


@dataclass(frozen=True, eq=False, slots=True)
class BlockPlan:
    """All that was decided about one product."""

    spec: GemmSpec
    kernel: Kernel
    blocks: int
    shared: int
    maps: tuple[bytes, ...]  # of a and b, without addresses
    source: str  # who chose it before cuBLASLt
    swizzled = False
    family = "block_gemm.cu"

    def explain(self) -> str:
        """What runs, and who chose it."""
        s = self.spec
        lines = (
            f"gemm {s.m} x {s.n} x {s.k}: a {s.a} x b^T {s.b} -> {s.out}",
            f"  scales of {s.a_format} x {s.b_format}",
        )
        return "\n".join((*lines, f"  runs {self.family} in {self.blocks} blocks, by {self.source}"))

    def run(self, rt: Runtime, operands: GemmOperands) -> None:
        """Launch on the runtime's stream."""
        a, b, out, a_scale, b_scale = operands[:5]
        assert a_scale is not None and b_scale is not None
        spec, (a_map, b_map) = self.spec, self.maps
        addresses = a_scale.ptr, b_scale.ptr, out.ptr
        content = TABLE.pack(a.ptr, a_map, b.ptr, b_map, *addresses, spec.m, spec.n, spec.k)
        table = ctypes.create_string_buffer(content, TABLE.size)
        self.kernel.by_value(rt, self.blocks, _THREADS, table, self.shared, _PLACES)


def able(rt: Runtime, spec: GemmSpec) -> bool:
    """Whether the kernel computes what a spec asks for, on this device."""
    form, other = spec.a_format, spec.b_format
    if form is None or other is None or form.scaling != "block" or form.tiled:
        return False
    asked = spec.bias, spec.epilogue, spec.aux, spec.a_sum, spec.out_sum
    outs = (dtypes.float32,) if spec.accumulate else (dtypes.float32, dtypes.bfloat16)
    sized = spec.m and spec.n and spec.k and spec.alignment >= 16
    return (
        bool(sized) and asked == (None,) * 5 and spec.out in outs and device.info(rt.device.index).capability == (9, 0)
    )


def plan(rt: Runtime, spec: GemmSpec, source: str) -> BlockPlan | None:
    """Its plan; None where tensor maps are not what is known of them."""
    driver, tiled = libraries.driver(), spec.b_format is not None and spec.b_format.tiled
    down, across = -(-spec.m // (_CLUSTER * _TILE[0])), -(-spec.n // _TILE[1])
    maps = [driver.tensor_map((rows, spec.k), (128, 128)) for rows in (spec.m, spec.n)]
    if None in maps:
        return None
    kernel = loader.get(
        rt,
        "block_gemm",
        args="b",
        A_TYPE=_TYPES[spec.a],
        B_TYPE=_TYPES[spec.b],
        OUT=_TYPES[spec.out],
        TILED=tiled,
        ACCUMULATE=spec.accumulate,
    )
    rows, columns = _TILE
    places = (rows + columns) * 128 + 4 * rows + 16  # bytes of one: matrices, a's scales, barriers
    shared = _STAGES * places + 4 * columns * (1 if tiled else _STAGES)
    clusters = min(down * across, device.info(rt.device.index).multiprocessors // _CLUSTER)
    return BlockPlan(
        spec, kernel, _CLUSTER * clusters, -(-shared // 1024) * 1024, tuple(one[8:] for one in maps if one), source
    )
