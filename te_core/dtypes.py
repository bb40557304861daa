"""Element types, ours: FP8, E8M0 and FP4 exist here even where a framework lacks them.

A `DType` is a singleton; compare with `is`. Names of NumPy, ml_dtypes and torch are understood
without importing torch (torch's own dtype objects are recognised by their printed name).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from te_core.errors import ArgumentError
from te_core.spelling import choice_error


@dataclass(frozen=True, eq=False, slots=True)
class DType:
    """One element type: its size, its names elsewhere, its finite range."""

    name: str
    bits: int
    dlpack_code: int
    numpy: np.dtype[Any]
    torch_name: str
    kind: str  # "float", "int", "uint", "bool"
    max: float
    aliases: tuple[str, ...] = field(default=())
    itemsize: int = 0  # bytes a stored element takes; two FP4 values share one

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return dtype, (self.name,)

    def nbytes(self, count: int) -> int:
        """Bytes that `count` elements take."""
        return (count * self.bits + 7) // 8

    @property
    def is_float(self) -> bool:
        """Whether the type is a floating-point type of any width."""
        return self.kind == "float"

    @property
    def is_fp8(self) -> bool:
        """Whether the type is one of the two FP8 data formats."""
        return self.bits == 8 and self.dlpack_code in (10, 12)


def _make(name: str, bits: int, code: int, numpy: Any, torch_name: str, kind: str, *aliases: str) -> DType:
    storage = np.dtype(numpy)
    if kind == "float":
        top = float(ml_dtypes.finfo(storage).max)  # type: ignore[no-untyped-call]
    elif kind == "bool":
        top = 1.0
    else:
        top = float(np.iinfo(storage).max)
    return DType(name, bits, code, storage, torch_name, kind, top, aliases, max(1, bits // 8))


float64 = _make("float64", 64, 2, np.float64, "float64", "float", "fp64", "double")
float32 = _make("float32", 32, 2, np.float32, "float32", "float", "fp32", "float")
float16 = _make("float16", 16, 2, np.float16, "float16", "float", "fp16", "half")
bfloat16 = _make("bfloat16", 16, 4, ml_dtypes.bfloat16, "bfloat16", "float", "bf16")
float8_e4m3 = _make("float8_e4m3", 8, 10, ml_dtypes.float8_e4m3fn, "float8_e4m3fn", "float", "e4m3", "float8_e4m3fn")
float8_e5m2 = _make("float8_e5m2", 8, 12, ml_dtypes.float8_e5m2, "float8_e5m2", "float", "e5m2")
float8_e8m0 = _make("float8_e8m0", 8, 14, ml_dtypes.float8_e8m0fnu, "float8_e8m0fnu", "float", "e8m0", "float8_e8m0fnu")
float4_e2m1 = _make("float4_e2m1", 4, 17, ml_dtypes.float4_e2m1fn, "float4_e2m1fn_x2", "float", "e2m1", "float4_e2m1fn")
int8 = _make("int8", 8, 0, np.int8, "int8", "int")
int16 = _make("int16", 16, 0, np.int16, "int16", "int")
int32 = _make("int32", 32, 0, np.int32, "int32", "int")
int64 = _make("int64", 64, 0, np.int64, "int64", "int")
uint8 = _make("uint8", 8, 1, np.uint8, "uint8", "uint")
uint16 = _make("uint16", 16, 1, np.uint16, "uint16", "uint")
uint32 = _make("uint32", 32, 1, np.uint32, "uint32", "uint")
uint64 = _make("uint64", 64, 1, np.uint64, "uint64", "uint")
bool_ = _make("bool", 8, 6, np.bool_, "bool", "bool", "bool_")

ALL: tuple[DType, ...] = (
    float64, float32, float16, bfloat16, float8_e4m3, float8_e5m2, float8_e8m0, float4_e2m1,
    int8, int16, int32, int64, uint8, uint16, uint32, uint64, bool_,
)  # fmt: skip

#: What NumPy calls unsigned integers of so many bytes.
UNSIGNED = {width: f"<u{width}" for width in (1, 2, 4, 8)}

#: What parameters, activations and gradients may be.
ACTIVATION_DTYPES = (float32, bfloat16, float16)

_BY_NAME: dict[str, DType] = {}
for _d in ALL:
    for _n in (_d.name, _d.torch_name, *_d.aliases):
        _BY_NAME[_n] = _d
_BY_NUMPY: dict[Any, DType] = {d.numpy: d for d in ALL}
_BY_DLPACK: dict[tuple[int, int], DType] = {(d.dlpack_code, d.bits): d for d in ALL}


def dtype(spec: Any) -> DType:
    """The `DType` named by ours, NumPy's, ml_dtypes' or torch's spelling (or dtype object)."""
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, str):
        found = _BY_NAME.get(spec.removeprefix("torch."))
    else:
        text = str(spec)
        if text.startswith("torch."):  # a torch.dtype, met without importing torch
            found = _BY_NAME.get(text[6:])
        else:
            try:
                found = None if spec is None else _BY_NUMPY.get(np.dtype(spec))  # NumPy takes None for float64
            except TypeError:
                found = None
    if found is None:
        raise choice_error("dtype", "spec", spec, [d.name for d in ALL])
    return found


def from_dlpack(code: int, bits: int, lanes: int = 1) -> DType:
    """The `DType` of a DLPack (code, bits, lanes) triple; FP4 may come as two lanes a byte."""
    found = _BY_DLPACK.get((code, bits)) if lanes == 1 or (code == 17 and lanes == 2) else None
    if found is None:
        allowed = ", ".join(f"{d.name} ({d.dlpack_code}, {d.bits})" for d in ALL)
        do = "convert the tensor to one of these types, or view FP8 data as uint8 and name its dtype"
        raise ArgumentError("from_dlpack", f"type code {code}, {bits} bits, {lanes} lanes", allowed, do)
    return found
