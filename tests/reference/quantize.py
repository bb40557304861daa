"""Per-tensor FP8 quantization from its formulas, with ml_dtypes as the rounding oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FP8 = {"float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
LIMIT = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0}
FLOAT32_MAX = np.finfo(np.float32).max


def amax(x: np.ndarray) -> np.float32:
    """Max |x| over elements that are not NaN; 0 for none."""
    values = np.abs(x.astype(np.float32)).ravel()
    values = values[~np.isnan(values)]
    return np.float32(values.max()) if values.size else np.float32(0)


def scale_of(largest: np.float32, fp8: str, epsilon: float, power_of_two: bool) -> np.float32:
    """Current scaling's rule."""
    largest = max(np.float32(largest), np.float32(epsilon))
    if not np.isfinite(largest) or largest == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(LIMIT[fp8]) / np.float32(largest)
    scale = min(scale, FLOAT32_MAX)
    if power_of_two:  # round down
        scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1)
    return np.float32(scale)


def cast(x: np.ndarray, scale: np.float32, fp8: str) -> np.ndarray:
    """Saturating round-to-nearest-even cast of float32(x) * scale; a NaN is the code 0x7f."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = x.astype(np.float32) * np.float32(scale)
    codes = np.clip(product, -LIMIT[fp8], LIMIT[fp8]).astype(FP8[fp8]).view(np.uint8)
    return np.where(np.isnan(product), np.uint8(0x7F), codes)


def store(codes: np.ndarray) -> np.ndarray:
    """Padded with zeros to multiples of 16 in both directions."""
    m, k = codes.shape
    return np.pad(codes, ((0, -m % 16), (0, -k % 16)))


def update(scale: list, history: list, limit: float, algo: str) -> tuple[list, list]:
    """One delayed-scaling step, column by column in plain Python; history is a list of rows."""
    scale, history = list(scale), [list(row) for row in history]
    rows = len(history)
    for c in range(len(scale)):
        old = [row[c] for row in history]
        last = old[0]
        if last == 0:
            continue
        largest = last
        if algo == "max":
            for value in old[1:]:
                if value == value and (largest != largest or value > largest):
                    largest = value
        for i in range(1, rows - 1):
            history[i][c] = old[i + 1]
        history[rows - 1][c] = last
        history[0][c] = 0.0
        if largest == largest and 0 < largest < float("inf"):
            with np.errstate(over="ignore"):
                scale[c] = float(min(np.float32(limit) / np.float32(largest), FLOAT32_MAX))
    return scale, history
