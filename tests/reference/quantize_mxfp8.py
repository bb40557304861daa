"""MXFP8 from its formulas, by logarithms and float64 instead of bits."""

from __future__ import annotations

import numpy as np

from tests.reference.quantize import FP8, LIMIT

SIDE = 32


def scale_codes(largest: np.ndarray, fp8: str) -> np.ndarray:
    """The E8M0 codes of blocks with these maxima: ceil(log2(amax / limit)) + 127, from 0 to 254."""
    with np.errstate(over="ignore", under="ignore"):
        v = largest.astype(np.float32) * np.float32(1 / LIMIT[fp8])
    finite = np.where(np.isfinite(v), v, np.float32(1)).astype(np.float64)
    fraction, exponent = np.frexp(finite)  # 0.5 <= fraction < 1, or 0
    power = np.where(fraction == 0.5, exponent - 1, exponent)
    codes = np.where(finite == 0, 0, np.clip(power + 127, 0, 254))
    return np.where(np.isinf(v), 254, codes)


def quantize(x: np.ndarray, fp8: str, tiled: bool, columnwise: bool) -> tuple[np.ndarray, np.ndarray]:
    """One copy's data and scale codes, both as they lie in memory."""
    m, k = x.shape
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = np.pad(x.astype(np.float64), ((0, -m % SIDE), (0, -k % SIDE)))
    height, width = wide.shape
    magnitude = np.where(np.isnan(wide), 0, np.abs(wide))
    codes = np.zeros(wide.shape, np.int64)  # of each element
    for i in range(0, height, SIDE):
        for j in range(0, width, SIDE):
            place = np.s_[i : i + SIDE, j : j + SIDE]
            axis = None if tiled else 0 if columnwise else 1
            codes[place] = scale_codes(magnitude[place].max(axis=axis, keepdims=True), fp8)
    with np.errstate(invalid="ignore"):
        scaled = np.ldexp(wide, 127 - codes)
    data = np.clip(scaled, -LIMIT[fp8], LIMIT[fp8]).astype(FP8[fp8]).view(np.uint8)
    data = np.where(np.isnan(scaled), np.uint8(0x7F), data)
    kept = codes[::SIDE] if columnwise else codes[:, ::SIDE]
    rows, columns = (4, 128) if columnwise else (128, 4)
    return data, np.pad(kept, ((0, -kept.shape[0] % rows), (0, -kept.shape[1] % columns))).astype(np.uint8)


def dequantize(data: np.ndarray, scales: np.ndarray, fp8: str, columnwise: bool) -> np.ndarray:
    """The values of one copy with its padding, as float64."""
    height, width = data.shape
    each = np.repeat(scales, SIDE, axis=0 if columnwise else 1)[:height, :width].astype(np.int64)
    with np.errstate(invalid="ignore"):
        values = np.ldexp(data.view(FP8[fp8]).astype(np.float64), each - 127)
    return np.where(each == 255, np.nan, values)


def swizzled(scale: np.ndarray) -> np.ndarray:
    """The bytes of scales [R, C] in cuBLASLt's order, element by element."""
    rows, blocks = scale.shape
    i, j = np.indices(scale.shape)
    to = (i // 128 * (blocks // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    out = np.zeros(rows * blocks, np.uint8)
    out[to.ravel()] = scale.ravel()
    return out
