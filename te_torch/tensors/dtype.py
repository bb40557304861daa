"""`DType`: the documented enum of element types, and its mapping to torch's and the core's."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from te_core import dtypes
from te_core.errors import ArgumentError


class DType(IntEnum):
    """Element types by their documented numbers."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, value: Any) -> DType:
        """The member that a `DType`, a number, a torch dtype or a name of the core's types stands for."""
        if isinstance(value, cls):
            return value
        if isinstance(value, int):
            return cls(value)
        if hasattr(value, "__int__"):  # another package's enum of the same numbers
            return cls(int(value))
        return _FROM_CORE[dtypes.dtype(value)]

    @property
    def core(self) -> dtypes.DType:
        """The core's type of the same name."""
        return _TO_CORE[self]


_TO_CORE = {
    DType.kByte: dtypes.uint8,
    DType.kInt16: dtypes.int16,
    DType.kInt32: dtypes.int32,
    DType.kInt64: dtypes.int64,
    DType.kFloat32: dtypes.float32,
    DType.kFloat16: dtypes.float16,
    DType.kBFloat16: dtypes.bfloat16,
    DType.kFloat8E4M3: dtypes.float8_e4m3,
    DType.kFloat8E5M2: dtypes.float8_e5m2,
    DType.kFloat8E8M0: dtypes.float8_e8m0,
    DType.kFloat4E2M1: dtypes.float4_e2m1,
}
_FROM_CORE = {core: d for d, core in _TO_CORE.items()}

#: torch dtype -> DType
TE_DType: dict[torch.dtype, DType] = {
    torch.uint8: DType.kByte,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.half: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
}
#: and back
TE_DType_To_Torch: dict[DType, torch.dtype] = {d: t for t, d in TE_DType.items()}


def of_core(core: dtypes.DType) -> DType:
    """The documented type of a core type."""
    return _FROM_CORE[core]


def fp8(value: Any) -> dtypes.DType:
    """The core's FP8 type that `value` names."""
    core = DType.cast(value).core
    if not core.is_fp8:
        raise ArgumentError("quantizer", f"fp8_dtype={value!r}", "DType.kFloat8E4M3 or DType.kFloat8E5M2", "correct it")
    return core
