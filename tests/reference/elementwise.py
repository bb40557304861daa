"""Philox4x32-10 one counter at a time in Python integers, and dropout by it in float64."""

from __future__ import annotations

import numpy as np

_LOW = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def keep(count: int, p: float, seed: int, offset: int, site: int) -> np.ndarray:
    """Which of the first `count` elements the mask keeps."""
    seed, offset = seed & (2**64 - 1), offset & (2**64 - 1)
    words: list[int] = []
    for group in range(-(-count // 4)):
        words += philox(
            (group & _LOW, group >> 32, offset & _LOW, (offset >> 32) ^ (site & _LOW)), (seed & _LOW, seed >> 32)
        )
    return np.array(words[:count]) >= int(p * 2**32)
