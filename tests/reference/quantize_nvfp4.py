"""NVFP4 from its formulas, block by block in plain loops, with ml_dtypes as the rounding oracle.

A copy is quantized as a matrix of lines: x, or its transpose. Nothing here is shared with a backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tests.reference.elementwise import philox

F = np.float32
TOP = np.finfo(F).max
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)


@dataclass
class Stored:
    """A copy as it lies in memory."""

    data: np.ndarray
    scale: np.ndarray
    amax: np.ndarray

    def codes(self) -> np.ndarray:
        """One E2M1 code an element."""
        return np.stack((self.data & 15, self.data >> 4), axis=-1).reshape(len(self.data), 2 * self.data.shape[1])


def ceil_to(n: int, step: int) -> int:
    """n rounded up."""
    return -(-n // step) * step


def tree(terms: list) -> np.float32:
    """The float32 sum of sixteen, neighbours first."""
    while len(terms) > 1:
        terms = [F(a) + F(b) for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def hadamard_matrix() -> np.ndarray:
    """diag(signs) @ H16 / 4, H16 of Sylvester: the Kronecker power of [[1, 1], [1, -1]]."""
    h = np.ones((1, 1))
    for _ in range(4):
        h = np.kron(np.array([[1, 1], [1, -1]]), h)
    return np.diag(SIGNS) @ h / 4


def transform(x: np.ndarray) -> np.ndarray:
    """The columns of x [M, K] as transformed lines [K, M up to 16s], bf16 values in float32.

    A butterfly adds the pairs of neighbours first, then pairs of those: for each output, the tree of its terms.
    """
    m, k = x.shape
    lines = np.zeros((k, ceil_to(m, 16)), F)
    lines[:, :m] = x.T.astype(ml_dtypes.bfloat16).astype(F)
    matrix, out = hadamard_matrix().astype(F), np.zeros_like(lines)
    for at in range(0, lines.shape[1], 16):
        for j in range(16):
            terms = [lines[:, at + i] * matrix[i, j] for i in range(16)]
            out[:, at + j] = tree(terms)
    return out.astype(ml_dtypes.bfloat16).astype(F) + F(0)  # no negative zeros


def maximum(values: np.ndarray) -> np.float32:
    """Max |v| without NaN, 0 for none."""
    kept = np.abs(values[~np.isnan(values)])
    return F(kept.max()) if kept.size else F(0)


def level(amax: np.float32, bound: int) -> tuple[np.float32, np.float32]:
    """S_enc and S_dec."""
    if amax == 0:
        return F(1), F(1)
    encode = min(F(bound * 6) / amax, TOP)
    encode = encode if encode != 0 else F(1)
    return encode, F(1) / encode


def e4m3(value: np.float32) -> np.uint8:
    """Saturating at 448."""
    return np.array(min(value, F(448))).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def value_of(scale: np.uint8) -> np.float32:
    """An E4M3 code's value."""
    return F(np.array(scale, np.uint8).view(ml_dtypes.float8_e4m3fn))


def nearest(v: np.ndarray) -> np.ndarray:
    """Codes of values: round to nearest even, saturating; NaN is +6."""
    codes = np.clip(v, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return np.where(np.isnan(v), np.uint8(7), codes)


def stochastic(v: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Codes of values: the random byte's share of the step added, then rounded down to the grid."""
    codes = np.zeros(v.shape, np.uint8)
    for at, value in np.ndenumerate(v):
        if np.isnan(value):
            codes[at] = 7
            continue
        size = min(abs(value), F(6))
        step = F(0.5) if size < 2 else F(1) if size < 4 else F(2)
        t = size + F(random[at]) / F(256) * step
        codes[at] = max(i for i in range(8) if GRID[i] <= t) | (8 if np.signbit(value) else 0)
    return codes


def random_bytes(lines: int, length: int, seed: int, offset: int, site: int) -> np.ndarray:
    """Byte i of the Philox stream for element i of [lines, length]."""
    draws, low = [], 0xFFFFFFFF
    for group in range(lines * length // 16):
        counter = (group & low, group >> 32, offset & low, (offset >> 32) ^ (site & low))
        words = philox(counter, (seed & low, seed >> 32))
        draws.extend((word >> (8 * i)) & 255 for word in words for i in range(4))
    return np.array(draws, np.uint8).reshape(lines, length)


def quantize(
    lines: np.ndarray,
    bound: int = 448,
    *,
    tiled: bool = False,
    row_scaled: bool = False,
    four_over_six=None,
    random: np.ndarray | None = None,
    columns: bool = False,
) -> Stored:
    """A copy of [lines, length]; `columns`: its lines are the columns of x (an error is summed over rows of x)."""
    count, length = lines.shape
    v = np.zeros((ceil_to(count, 16), ceil_to(length, 16)), F)
    v[:count, :length] = lines.astype(F)
    amax = np.array([maximum(line) for line in v[:count]] if row_scaled else [maximum(v)], F)
    codes = np.zeros(v.shape, np.uint8)
    scales = np.zeros((ceil_to(len(v), 128), ceil_to(v.shape[1] // 16, 4)), np.uint8)
    height = 16 if tiled else 1
    for row in range(0, len(v), height):
        own = (amax[row] if row < count else F(0)) if row_scaled else amax[0]
        for col in range(0, v.shape[1], 16):
            where = np.s_[row : row + height, col : col + 16]
            chance = None if random is None else random[where]
            block, scale = one_block(v[where], own, bound, four_over_six, chance, columns)
            codes[where] = block
            scales[row : row + height, col // 16] = scale
    return Stored(codes[:, ::2] | codes[:, 1::2] << 4, scales, amax)


def one_block(v, amax, bound, four_over_six, random, columns):
    """Codes and scale of one block."""
    encode, decode = level(amax, bound)
    with np.errstate(all="ignore"):
        if four_over_six is None:
            scale = e4m3(maximum(v) * (encode * (F(1) / F(6))))
            scaled = v * min(F(1) / (value_of(scale) * decode), TOP)
            return (nearest(scaled) if random is None else stochastic(scaled, random)), scale
        base = maximum(v) / F(6) * encode
        results = []
        for factor in (F(1), F(1.5)):
            scale = e4m3(base * factor)
            codes = nearest(v * min(F(1) / (value_of(scale) * decode), TOP))
            back = codes.view(ml_dtypes.float4_e2m1fn).astype(F) * value_of(scale) * amax / F(6 * bound)
            d = back - v
            d = np.abs(d) if four_over_six == "MAE" else d * d
            error = tree([tree(list(row)) for row in (d.T if columns else d)]) if len(d) == 16 else tree(list(d[0]))
            results.append((error, codes, scale))
        (six, *first), (four, *second) = results
    return second if four < six else first


def dequantize(stored: Stored, bound: int, row_scaled: bool) -> np.ndarray:
    """The values of a copy, padded, in float32."""
    codes = stored.codes()
    out = np.zeros(codes.shape, F)
    for row in range(len(codes)):
        if row_scaled and row >= len(stored.amax):
            break
        amax = stored.amax[row if row_scaled else 0]
        for block in range(codes.shape[1] // 16):
            where = np.s_[row, 16 * block : 16 * block + 16]
            with np.errstate(all="ignore"):
                unit = value_of(stored.scale[row, block]) * amax * F(1 / (6 * bound))
                out[where] = codes[where].view(ml_dtypes.float4_e2m1fn).astype(F) * unit
    return out
