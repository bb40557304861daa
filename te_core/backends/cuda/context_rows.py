"""Rows of tokens between ranks on CUDA: one launch of context_rows.cu, in the widest vectors that fit."""

from __future__ import annotations

from te_core.attention import DIMENSIONS
from te_core.backends.cuda.attention_merge import in_order
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor, widest_access

_THREADS = 256
_AT_ONCE = 4  # vectors of a thread, as the kernel has it


def context_rows(
    rt: Runtime, how: str, form: str, size: int, parts: int, t: Tensor, cu: Tensor | None, out: Tensor
) -> None:
    """Threads for the vectors of a token, four each, and as many tokens as a block then holds."""
    to_ranks, orders = how.endswith("to_ranks"), "sequence" in how
    (plain, ranked), places = (t, out) if to_ranks else (out, t), DIMENSIONS[form]
    width, vector = t.shape[-1] * t.dtype.itemsize, widest_access(t, out)
    whole, _, all_heads = in_order(plain.shape, places, 1)
    tokens, batch, heads = in_order(ranked.shape[1:], places, 1)
    rank_step, *rank_steps = _bytes(ranked)
    steps = (rank_step, *in_order(rank_steps, places, 0), *in_order(_bytes(plain), places, 0))
    pieces = width // vector
    if heads > 1 and steps[3] == steps[6] == width and orders:
        heads, pieces = 1, heads * pieces
    across = min(_THREADS, 1 << max(-(-heads * pieces // _AT_ONCE) - 1, 0).bit_length())
    down = _THREADS // across
    slots = (whole if orders and not to_ranks else size * tokens) * batch
    repeats = max(size // max(all_heads, 1), 1) if how == "heads_to_ranks" else 1
    sequences = 0 if cu is None else cu.shape[0] - 1
    counts = (sequences, size, parts, repeats, tokens, whole, batch, heads, pieces)
    kernel = loader.get(
        rt,
        "context_rows",
        args="ppp" + "i" * 9 + "q" * 7,
        WIDTH=vector,
        MOVE="ORDER" if orders else "HEADS",
        TO_RANKS=to_ranks,
        PACKED=orders and form == "thd",
        BATCH_FIRST=form == "bshd",
    )
    if slots and heads * pieces:
        kernel(rt, -(-slots // down), (across, down), t, out, cu, *counts, *(n // vector for n in steps))


def _bytes(t: Tensor) -> list[int]:
    return [step * t.dtype.itemsize for step in t.row_major_strides()]
