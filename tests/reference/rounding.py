"""How far apart the numbers of a type lie."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def spacing(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The distance between neighbours of `dtype` at |value|, in float64 (subnormals included)."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.frexp(np.abs(values.astype(np.float64)))[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant)
