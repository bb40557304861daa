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

from dataclasses import dataclass

from te_core import dtypes
from te_core.attention import DIMENSIONS, FORMATS
from te_core.ops import _check
from te_core.runtime import Runtime
from te_core.tensor import Tensor

MOVES = ("heads_to_ranks", "ranks_to_heads", "sequence_to_ranks", "ranks_to_sequence")


@dataclass(frozen=True, slots=True)
class ContextRowsSpec:
    """Sizes of the buffer of all ranks; steps in bytes."""

    how: str
    form: str
    size: int
    parts: int
    sequences: int  # in thd, else 0
    tokens: int  # of a rank
    batch: int
    heads: int  # of a part
    width: int  # bytes of a head
    ranked: tuple[int, int, int, int]  # steps of rank, token, batch and head in the buffer
    plain: tuple[int, int, int]  # steps of token, batch and head in the other tensor
    whole: int  # tokens of the other tensor
    repeats: int  # how many ranks a head goes to
    vector: int  # the widest access, in bytes, that divides every address, step and head


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
    op = "context_rows"
    bits = t.ptr if out is None else t.ptr | out.ptr
    key = (op, how, form, size, parts, bits & 15, *_check.seen(t, cu_seqlens_padded, out))
    plan = rt.plans.get(key)
    if plan is None:
        _check_moved(op, t, how, form, size)
        made = _shape(t, how, form, size)
        _check.require(
            out is None or (out.shape == made and out.dtype is t.dtype and _ends_dense(out)),
            op,
            f"out = {out!r}",
            f"{t.dtype} {made} whose last stride is 1",
            "correct out, or leave it out",
        )
        packed = form == "thd" and "sequence" in how
        _check.require(
            (cu_seqlens_padded is not None) == packed and parts >= 1 and (packed or parts == 1),
            op,
            f"cu_seqlens_padded = {cu_seqlens_padded!r}, parts={parts} for {how} in {form}",
            "running sums where thd changes its order, and parts from 1 on",
            "correct them",
        )
        if cu_seqlens_padded is not None:
            _check.require(
                cu_seqlens_padded.ndim == 1
                and cu_seqlens_padded.shape[0] >= 1
                and cu_seqlens_padded.is_contiguous
                and cu_seqlens_padded.dtype is dtypes.int32,
                op,
                f"cu_seqlens_padded = {cu_seqlens_padded!r}",
                "dense int32 running sums that begin with 0",
                "correct cu_seqlens_padded",
            )
        _check.on_device(op, rt.device, t, cu_seqlens_padded, out)
        spec = _spec(t, out, made, how, form, size, parts, cu_seqlens_padded)
        plan = rt.plans.put(key, rt.backend.plan_context_rows(rt, spec))
    if out is None:
        out = rt.empty(_shape(t, how, form, size), t.dtype)
    _check.written(op, "out", out)
    rt.backend.context_rows(rt, plan, t, cu_seqlens_padded, out)
    return out


def _ends_dense(t: Tensor) -> bool:
    return t.shape[-1] < 2 or t.row_major_strides()[-1] == 1


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


def _check_moved(op: str, t: Tensor, how: str, form: str, size: int) -> None:
    """The tensor can be moved so."""
    _check.one_of(op, "how", how, MOVES)
    _check.one_of(op, "form", form, FORMATS)
    _check.require(size >= 1, op, f"size={size}", "the number of ranks", "correct size")
    from_ranks = how.startswith("ranks")
    dims = (3 if form == "thd" else 4) + from_ranks
    _check.require(
        t.ndim == dims and _ends_dense(t) and t.dtype.bits >= 8 and not (from_ranks and t.shape[0] != size),
        op,
        f"t = {t!r}",
        f"{dims} dimensions ({f'{size} parts in ' * from_ranks}{form}) of whole bytes, the last stride 1",
        "correct t, form or size",
    )
    _, token, head = DIMENSIONS[form]
    heads, tokens = t.shape[from_ranks + head], t.shape[from_ranks + token]
    _check.require(
        how != "heads_to_ranks" or (heads > 0 and (heads % size == 0 or size % heads == 0)),
        op,
        f"{heads} heads for {size} ranks",
        "heads that the ranks divide, or that divide them",
        "choose p2p or all_gather, which split no heads",
    )
    times = (size if how == "sequence_to_ranks" else 1) * (1 if form == "thd" else 2)
    _check.require(
        "sequence" not in how or tokens % times == 0,
        op,
        f"{tokens} tokens for {size} ranks",
        f"a multiple of {times}: equal parts, in dense formats of two chunks each",
        "pad the sequences",
    )


def _spec(
    t: Tensor, out: Tensor | None, made: tuple[int, ...], how: str, form: str, size: int, parts: int, cu: Tensor | None
) -> ContextRowsSpec:
    item = t.dtype.itemsize
    to = Tensor(0, made, t.dtype, t.device, None) if out is None else out
    ranked, plain = (t, to) if how.startswith("ranks") else (to, t)
    batch, token, head = DIMENSIONS[form]
    (steps, sizes), (rank_steps, rank_sizes) = (
        ([s * item for s in x.row_major_strides()], x.shape) for x in (plain, ranked)
    )
    width = sizes[-1] * item
    rows = t.size // max(t.shape[-1], 1)
    _check.require(rows < 1 << 31, "context_rows", f"t = {t!r}", "fewer than 2^31 heads of tokens", "split it")
    bits = 16 | t.ptr | to.ptr | width
    for x_steps, x_sizes in ((steps, sizes), (rank_steps, rank_sizes)):
        for step, n in zip(x_steps[:-1], x_sizes[:-1], strict=True):
            bits |= step if n > 1 else 0
    return ContextRowsSpec(
        how,
        form,
        size,
        parts,
        0 if cu is None else cu.shape[0] - 1,
        rank_sizes[1 + token],
        1 if batch is None else rank_sizes[1 + batch],
        rank_sizes[1 + head],
        width,
        (rank_steps[0], rank_steps[1 + token], 0 if batch is None else rank_steps[1 + batch], rank_steps[1 + head]),
        (steps[token], 0 if batch is None else steps[batch], steps[head]),
        sizes[token],
        max(size // max(sizes[head], 1), 1) if how == "heads_to_ranks" else 1,
        bits & -bits,
    )
