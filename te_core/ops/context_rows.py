"""Rows of tokens on their way between the ranks of context parallelism: bytes are moved, whatever their type.

Beside a rank's [.., h, d] or a whole's stands the buffer of all ranks, [size, .., h, d], whose part i is rank i's: what
an all_to_all takes and brings, an all_gather brings, and a reduce_scatter takes. Its parts may lie apart (a stride of
their own), so that k and v, say, share one buffer.

    heads_to_ranks      [tokens, h, d] -> [size, tokens, h / size, d]; of fewer heads than ranks each goes to size / h
    ranks_to_heads      the inverse: [size, tokens, h, d] -> [tokens, size * h, d]
    sequence_to_ranks   the whole, in sequence order -> [size, a rank's tokens, h, d]
    ranks_to_sequence   the inverse

A rank's tokens of a sequence are its chunks r and 2 * size - 1 - r (te_core/ops/context.py).
"""

from __future__ import annotations

from te_core.attention import DIMENSIONS, FORMATS  # noqa: F401  (of the declaration)
from te_core.ops import _check
from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor

MOVES = ("heads_to_ranks", "ranks_to_heads", "sequence_to_ranks", "ranks_to_sequence")


@operation("""
    how in MOVES: "heads_to_ranks", "ranks_to_heads", "sequence_to_ranks" or "ranks_to_sequence".
    form in FORMATS
    size: Number of ranks.
    must size >= 1: the number of ranks
    t [...] rows: Heads, or tokens, to be moved.
    must t.ndim == len(form) + how.startswith("ranks") and t.dtype.bits >= 8: {len(form) + how.startswith("ranks")}
        dimensions of whole bytes: {form}, with ranks in front where it comes from them; correct t or form
    must not how.startswith("ranks") or t.shape[0] == size: {size} parts; correct t or size
    must t.size // max(t.shape[-1], 1) < 1 << 31: fewer than 2^31 heads of tokens; split it
    cu_seqlens_padded? [...] i32: Running sums of the padded lengths, [b + 1]. None where nothing is padded.
    parts: Number of parts that a sequence is in.
    must (cu_seqlens_padded is not None) == (form == "thd" and "sequence" in how): running sums where thd changes its
        order; correct cu_seqlens_padded
    must cu_seqlens_padded is None or (cu_seqlens_padded.ndim == 1 and cu_seqlens_padded.size): running sums that begin
        with 0; correct cu_seqlens_padded
    must parts >= 1 and (parts == 1 or cu_seqlens_padded is not None): parts from 1 on where thd changes its order
    out? [*_shape(t, how, form, size)] t rows written
""")
def context_rows(
    rt: Runtime,
    t: Tensor,
    *,
    how: str,
    form: str,
    size: int,
    cu_seqlens_padded: Tensor | None = None,
    parts: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Move the rows of t as `how` says; into `out`, or into fresh dense memory.

    t and out have any strides whose last one is 1. In thd `cu_seqlens_padded`, int32 [b + 1], says where whole
    sequences begin; the tensor in sequence order holds 1 / `parts` of each. Tokens of no sequence get zeros.
    """
    _check_parts("context_rows", t, how, form, size)
    if out is None:
        out = rt.empty(_shape(t, how, form, size), t.dtype)
    rt.backend.context_rows(rt, how, form, size, parts, t, cu_seqlens_padded, out)
    return out


def _shape(t: Tensor, how: str, form: str, size: int) -> tuple[int, ...]:
    """The shape of the result."""
    from_ranks = how.startswith("ranks")
    _, token, head = DIMENSIONS[form]
    shape = list(t.shape[from_ranks:])
    if how == "ranks_to_heads":
        shape[head] *= size
    elif how == "ranks_to_sequence":
        shape[token] *= size
    elif how == "heads_to_ranks":
        shape[head] = max(shape[head] // size, 1)
    else:
        shape[token] //= size
    return tuple(shape) if from_ranks else (size, *shape)


def _check_parts(op: str, t: Tensor, how: str, form: str, size: int) -> None:
    """The ranks' parts of the tensor are equal."""
    from_ranks = how.startswith("ranks")
    _, token, head = DIMENSIONS[form]
    heads, tokens = t.shape[from_ranks + head], t.shape[from_ranks + token]
    right = how != "heads_to_ranks" or (heads > 0 and (heads % size == 0 or size % heads == 0))
    got, do = f"{heads} heads for {size} ranks", "choose p2p or all_gather, which split no heads"
    _check.require(right, op, got, "heads that the ranks divide, or that divide them", do)
    times = (size if how == "sequence_to_ranks" else 1) * (1 if form == "thd" else 2)
    got, allowed = (
        f"{tokens} tokens for {size} ranks",
        f"a multiple of {times}: equal parts, in dense formats of two chunks each",
    )
    _check.require("sequence" not in how or tokens % times == 0, op, got, allowed, "pad the sequences")
