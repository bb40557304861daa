"""A KV cache token by token: where each token of a sequence lies, and what a cache holds after an append."""

from __future__ import annotations

import numpy as np


def token_of(new: np.ndarray, form: str, begins: list[int], row: int, token: int) -> np.ndarray:
    """Token `token` of sequence `row` [groups, d]; `begins` are where packed sequences begin."""
    if form == "thd":
        return new[begins[row] + token]
    return new[row, token] if form == "bshd" else new[token, row]


def slot(cache: np.ndarray, pages: np.ndarray | None, row: int, position: int) -> tuple[int, int]:
    """Where a position of a sequence lies: (row or page, place in it)."""
    if pages is None:
        return row, position
    return int(pages[row, position // cache.shape[1]]), position % cache.shape[1]


def appended(
    cache: np.ndarray, pages: np.ndarray | None, new: np.ndarray, form: str, lengths: list[int], held: list[int]
) -> np.ndarray:
    """The cache after `lengths[i]` new tokens of sequence i went behind the `held[i]` it had."""
    out = cache.copy()
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    for row, count in enumerate(lengths):
        for token in range(count):
            out[slot(cache, pages, row, held[row] + token)] = token_of(new, form, begins, row, token)
    return out


def gathered(cache: np.ndarray, pages: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Contiguous rows [sequences, pages each * page size, groups, d], zeros behind the end."""
    out = np.zeros((len(lengths), pages.shape[1] * cache.shape[1], *cache.shape[2:]), cache.dtype)
    for row, count in enumerate(lengths):
        for position in range(count):
            out[row, position] = cache[slot(cache, pages, row, position)]
    return out
