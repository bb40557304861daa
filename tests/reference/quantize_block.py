"""FP8 block scaling from its formulas, block by block in plain loops, with ml_dtypes as the rounding oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.reference.quantize import LIMIT, amax, cast

LENGTH = 128


def scale_of(block: np.ndarray, fp8: str, epsilon: float, power_of_two: bool) -> np.float32:
    """The scale of one block; a quotient beyond float32 becomes the largest value of the block's own type."""
    largest = amax(block)
    if largest < np.float32(epsilon):
        largest = np.float32(epsilon)
    if largest == 0 or np.isinf(largest):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(LIMIT[fp8]) / largest
    if np.isinf(scale):
        scale = np.float32(float(ml_dtypes.finfo(block.dtype).max))
    if power_of_two:  # round down
        scale = np.ldexp(np.float32(1), int(np.frexp(scale)[1]) - 1)
    return np.float32(scale)


def quantize(x: np.ndarray, fp8: str, *, tiled: bool, epsilon: float, power_of_two: bool) -> tuple:
    """Codes [M, K] and the scales of blocks along the rows: [M, blocks], or [row blocks, blocks] if tiled."""
    m, k = x.shape
    height = LENGTH if tiled else 1
    codes = np.zeros((m, k), np.uint8)
    scales = np.zeros((-(-m // height), -(-k // LENGTH)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = np.s_[i * height : (i + 1) * height, j * LENGTH : (j + 1) * LENGTH]
            scales[i, j] = scale_of(x[at], fp8, epsilon, power_of_two)
            codes[at] = cast(x[at], scales[i, j], fp8)
    return codes, scales


def inverses(scales: np.ndarray, tiled: bool, zero: np.float32) -> np.ndarray:
    """The scales as stored: inverse, piece by piece [blocks, rows up to 16], tiled [row blocks, blocks up to 4].

    `zero` is the scale of a block of zeros, which the padding has.
    """
    rows, blocks = scales.shape
    padding = ((0, 0), (0, -blocks % 4)) if tiled else ((0, -rows % 16), (0, 0))
    stored = np.float32(1) / np.pad(scales, padding, constant_values=zero)
    return stored if tiled else stored.T
