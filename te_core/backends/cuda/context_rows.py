"""Rows of tokens between ranks on CUDA: one launch of context_rows.cu, in the widest vectors that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from te_core.attention import DIMENSIONS
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.context_rows import ContextRowsSpec

_THREADS = 256
_AT_ONCE = 4  # vectors of a thread, as the kernel has it


def context_rows(rt: Runtime, spec: ContextRowsSpec, t: Tensor, cu: Tensor | None, out: Tensor) -> None:
    """Threads for the vectors of a token, four each, and as many tokens as a block then holds."""
    to_ranks, orders = spec.how.endswith("to_ranks"), "sequence" in spec.how
    plain, ranked = (t, out) if to_ranks else (out, t)
    width, vector = t.shape[-1] * t.dtype.itemsize, _vector(t, out)
    whole, _, all_heads = _in_order(plain.shape, spec.form, 1)
    tokens, batch, heads = _in_order(ranked.shape[1:], spec.form, 1)
    rank_step, *rank_steps = _bytes(ranked)
    steps = (rank_step, *_in_order(rank_steps, spec.form, 0), *_in_order(_bytes(plain), spec.form, 0))
    pieces = width // vector
    if heads > 1 and steps[3] == steps[6] == width and orders:
        heads, pieces = 1, heads * pieces
    across = min(_THREADS, 1 << max(-(-heads * pieces // _AT_ONCE) - 1, 0).bit_length())
    down = _THREADS // across
    slots = (whole if orders and not to_ranks else spec.size * tokens) * batch
    repeats = max(spec.size // max(all_heads, 1), 1) if spec.how == "heads_to_ranks" else 1
    sequences = 0 if cu is None else cu.shape[0] - 1
    counts = (sequences, spec.size, spec.parts, repeats, tokens, whole, batch, heads, pieces)
    kernel = loader.get(
        rt,
        "context_rows",
        args="ppp" + "i" * 9 + "q" * 7,
        WIDTH=vector,
        MOVE="ORDER" if orders else "HEADS",
        TO_RANKS=to_ranks,
        PACKED=orders and spec.form == "thd",
        BATCH_FIRST=spec.form == "bshd",
    )
    if slots and heads * pieces:
        kernel(rt, -(-slots // down), (across, down), t, out, cu, *counts, *(n // vector for n in steps))


def _in_order(values: Sequence[int], form: str, missing: int) -> tuple[int, int, int]:
    """Of token, batch and head."""
    batch, token, head = DIMENSIONS[form]
    return values[token], missing if batch is None else values[batch], values[head]


def _bytes(t: Tensor) -> list[int]:
    return [step * t.dtype.itemsize for step in t.row_major_strides()]


def _vector(*tensors: Tensor) -> int:
    """The widest access, in bytes up to 16, that divides every address, step and head."""
    bits = 16
    for t in tensors:
        bits |= t.ptr | t.shape[-1] * t.dtype.itemsize
        for step, n in zip(_bytes(t)[:-1], t.shape[:-1], strict=True):
            bits |= step if n > 1 else 0
    return bits & -bits
