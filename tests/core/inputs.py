"""Inputs of the quantization, activation and elementwise tests, and memory that shows what was not written."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from te_core import dtypes
from te_core.runtime import Runtime
from te_core.tensor import Tensor

DTYPES = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3", "float8_e5m2")
#: Around the 4, 8, 16, 32, 64, 128 and 256 that the kernels count in, and nothing at all.
SHAPES = [
    (1, 1),
    (3, 5),
    (16, 16),
    (17, 33),
    (0, 32),
    (48, 0),
    (64, 8),
    (80, 160),
    (130, 264),
    (129, 20),
    (257, 1000),
    (31, 520),
]


class Poison:
    """An allocator whose memory is full of one byte, so that an element nobody wrote shows."""

    def __init__(self, rt: Runtime, byte: int) -> None:
        self._rt, self._byte = rt, byte

    def empty(self, shape, dtype, stream) -> Tensor:
        t = self._rt.allocator.empty(shape, dtype, stream)
        if t.size:
            self._rt.backend.copy_from_host(self._rt, np.full(t.nbytes, self._byte, np.uint8), _bytes(t))
        return t


def _bytes(t: Tensor) -> Tensor:
    return Tensor(t.ptr, (t.nbytes,), dtypes.uint8, t.device, t)


def poisoned(rt: Runtime, byte: int = 0xA5) -> Runtime:
    """The same place, with poisoned memory (of 0xff, floats are NaN)."""
    return Runtime(rt.device, rt.stream, Poison(rt, byte), rt.backend)


def placed(rt: Runtime, array: np.ndarray, offset: int = 0) -> Tensor:
    """The array on the runtime's device, `offset` elements past an aligned address."""
    dt = dtypes.dtype(array.dtype)
    base = rt.empty((array.size + offset,), dt)
    view = Tensor(base.ptr + offset * dt.itemsize, array.shape, dt, base.device, base)
    if array.size:
        rt.backend.copy_from_host(rt, np.ascontiguousarray(array), view)
    return view


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of this name."""
    return dtypes.dtype(name).numpy


def values(shape, dtype: str, seed: int = 0, *, special: bool = False) -> np.ndarray:
    """Normal numbers over six decades; with `special`, also NaN, infinities, signed zeros, subnormals, extremes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape)
    x = x.astype(numpy_dtype(dtype))
    if special and x.size:
        info = ml_dtypes.finfo(x.dtype)
        odd = [
            np.nan,
            -np.nan,
            np.inf,
            -np.inf,
            0.0,
            -0.0,
            float(info.max),
            -float(info.max),
            float(info.smallest_subnormal),
        ]
        where = rng.integers(0, x.size, 2 * len(odd))
        x.reshape(-1)[where] = np.array(odd * 2, np.float64).astype(x.dtype)
    return x


def codes(rt: Runtime, t: Tensor | None) -> np.ndarray | None:
    """The bytes of an FP8 tensor."""
    return None if t is None else rt.numpy(t).view(np.uint8)
