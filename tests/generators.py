"""Inputs as a Transformer sees them, for tests and benchmarks: seeded NumPy arrays in float32, [rows, columns].

Random bits of equal scale are kind to FP8 and, because multipliers that do not toggle draw less power, to the
clock of a GPU as well. Real tensors have channels that are fifty times as large as the rest, tokens that are
larger than others, and gradients spread over many octaves.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

OUTLIER_CHANNELS = 1 / 256  # of all columns: a handful in a hidden size of 4096
OUTLIER_SIZE = 50.0


def activations(rows: int, columns: int, seed: int = 0, *, outliers: bool = True) -> Matrix:
    """Normal values, each channel with a scale of its own, a few channels far larger in every row."""
    rng = np.random.default_rng((seed, 1))
    scale = np.exp(0.3 * rng.standard_normal(columns, np.float32))
    if outliers:
        count = max(1, round(columns * OUTLIER_CHANNELS))
        scale[rng.choice(columns, count, replace=False)] *= OUTLIER_SIZE
    return rng.standard_normal((rows, columns), np.float32) * scale


def weights(rows: int, columns: int, seed: int = 0) -> Matrix:
    """A trained matrix [out, in]: near normal(0, 0.02), rows of unequal norm, some heavy tails."""
    rng = np.random.default_rng((seed, 2))
    values = rng.standard_normal((rows, columns), np.float32)
    values *= 0.02 * np.exp(0.2 * rng.standard_normal((rows, 1), np.float32))
    heavy = rng.integers(0, values.size, max(1, values.size // 4096))
    values.reshape(-1)[heavy] *= 8
    return values


def gradients(rows: int, columns: int, seed: int = 0) -> Matrix:
    """Gradients of an output: tiny, their size spread over four decades from token to token, some tokens without."""
    rng = np.random.default_rng((seed, 3))
    size = 1e-5 * np.exp(2.0 * rng.standard_normal((rows, 1), np.float32))
    size[rng.random(rows) < 1 / 64] = 0  # masked tokens
    return rng.standard_normal((rows, columns), np.float32) * size
