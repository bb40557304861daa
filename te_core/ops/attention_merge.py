"""Partial results of one attention: over some of the keys each, put together. What context parallelism adds up.

A partial output comes with its statistics, the logs of its sums of exponentials (te_core/ops/attention.py). Outputs are
weighted by them, in float32; a sink is a term of the sum that no partial has. Gradients of q, k and v are plain sums.

Tensors may have any strides whose last one is 1, so halves of rows are views. In and out may be one tensor: each
element is read by whom it is written.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from te_core import dtypes
from te_core.attention import FORMATS, SOFTMAX  # noqa: F401  (of declarations)
from te_core.errors import ArgumentError
from te_core.ops import _check
from te_core.ops.attention_terms import stats_shape  # noqa: F401  (of declarations)
from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_DIMENSIONS = 5  # that a sum takes at most


class MergeOperands(NamedTuple):
    """What a merge reads and writes."""

    a: Tensor
    a_stats: Tensor
    b: Tensor | None
    b_stats: Tensor | None
    out: Tensor
    stats: Tensor | None
    sink: Tensor | None


@operation("""
    form in FORMATS
    softmax in SOFTMAX: "vanilla", "off-by-one" or "learnable".
    a [...] act strided
    must a.ndim == len(form): {len(form)} dimensions ({form})
    a_stats [*stats_shape(a, form)] f32 strided: Statistics of a.
    b? [...] act strided: Output over other keys. None is none.
    b_stats? [*stats_shape(a, form)] f32 strided: Statistics of b. None where there is no b.
    must (b is None) == (b_stats is None): both or none; pass both
    out [...] act strided written: Where the result is written.
    stats? [*stats_shape(a, form)] f32 strided written: Where statistics are written. None writes none.
    sink? [a.shape[-2]] f32: Addend of each head's denominator. None has none.
    must (sink is not None) == (softmax == "learnable"): a sink with 'learnable', none otherwise
""")
def attention_merge(
    rt: Runtime,
    a: Tensor,
    a_stats: Tensor,
    b: Tensor | None,
    b_stats: Tensor | None,
    *,
    out: Tensor,
    stats: Tensor | None,
    form: str,
    softmax: str = "vanilla",
    sink: Tensor | None = None,
) -> None:
    """The output over the keys of both, into `out`, and its statistics, into `stats`:

        s = log(exp(a_stats) + exp(b_stats) + sink term),   out = a exp(a_stats - s) + b exp(b_stats - s)

    in float32, rounded once to the type of out. a, b and out [.., h, d] in the format `form`, each float32 or the
    activation dtype; statistics float32 [b, h, s] or thd [t, h]. out may be a or b, and stats their statistics.
    Without b the output of a alone is rounded and gets the sink. The sink term is nothing ("vanilla"), exp(0)
    ("off-by-one") or exp(sink) ("learnable": float32 [h]): ask for it once, in the last merge.

    Statistics of +infinity or -infinity say that the row has seen no key: what stands there, NaN too, counts for
    nothing. Rows that no partial has a key for get zeros and +infinity, with a sink too.
    """
    op = "attention_merge"
    _check_alike(op, (len(form),), a=a, b=b, out=out)
    rt.backend.attention_merge(rt, form, softmax, MergeOperands(a, a_stats, b, b_stats, out, stats, sink))


@operation("""
    a [...] act strided
    b? [...] act strided: Second operand. None copies the first.
    out [...] act strided written: Where the result is written.
""")
def context_sum(rt: Runtime, a: Tensor, b: Tensor | None, *, out: Tensor) -> None:
    """out = a + b in float32, rounded once to the type of out; without b, a copy or a cast.

    All of one shape of 1 to 5 dimensions, each float32 or the activation dtype; out may be a or b.
    """
    _check_alike("context_sum", tuple(range(1, _DIMENSIONS + 1)), a=a, b=b, out=out)
    rt.backend.context_sum(rt, a, b, out)


@operation("""
    form in FORMATS
    out [...] act strided: Output of the forward.
    dy [...] out strided
    must out.ndim == len(form): {len(form)} dimensions ({form})
    stats [*stats_shape(out, form)] f32 strided: Statistics of the softmax.
    sink [out.shape[-2]] f32: Addend of each head's denominator.
""")
def attention_sink_grad(rt: Runtime, dy: Tensor, out: Tensor, stats: Tensor, sink: Tensor, *, form: str) -> Tensor:
    """The gradient float32 [h] of a learnable sink: - sum over tokens of exp(sink - stats) * (dy . out).

    dy and out [.., h, d] are those of the whole attention, and `stats` those that count the sink. Of a rank's tokens it
    is the rank's summand. Rows of infinite statistics, which have seen no key, give nothing, whatever stands in them.
    """
    op = "attention_sink_grad"
    _check_alike(op, (len(form),), dy=dy, out=out)
    dsink = rt.empty(sink.shape, dtypes.float32)
    rt.backend.attention_sink_grad(rt, form, dy, out, stats, sink, dsink)
    return dsink


def _check_alike(op: str, dimensions: tuple[int, ...], **tensors: Tensor | None) -> None:
    """All of one shape, each float32 or one activation dtype, with a last stride of 1."""
    given = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(given.values()))
    narrow = {t.dtype for t in given.values()} - {dtypes.float32}
    for name, t in given.items():
        ends = t.ndim in dimensions and (t.shape[-1] < 2 or t.row_major_strides()[-1] == 1)
        if t.shape != first.shape or not ends or len(narrow) > 1:
            got = ", ".join(f"{n} = {other!r}" for n, other in given.items())
            wanted = f"one shape of {dimensions[0]}{f' to {dimensions[-1]}' * (len(dimensions) > 1)} dimensions"
            allowed = f"{wanted}, float32 or one activation dtype, last strides of 1"
            raise ArgumentError(op, got, allowed, f"correct {name}")
    _check.require(prod(first.shape) < 1 << 40, op, f"{first!r}", "less than 2^40 elements", "split it")
