"""Tokens in front of their padding, one place at a time."""

from __future__ import annotations

import numpy as np


def padding_order(mask: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(what comes to each place, where each has gone, running sums of lengths) of a mask [b, s]."""
    rows, length = mask.shape
    there, again = np.full((2, rows * length), -1, np.int64)
    sums = [0]
    for row in range(rows):
        tokens = [place for place in range(length) if not mask[row, place]]
        padding = [place for place in range(length) if mask[row, place]]
        for to, place in enumerate(tokens + padding):
            old, new = ((p * rows + row) if form == "sbhd" else (row * length + p) for p in (place, to))
            there[new], again[old] = old, new
        sums.append(sums[-1] + len(tokens))
    return there, again, np.array(sums, np.int32)
