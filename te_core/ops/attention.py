"""Attention, forward and backward; `te_core.attention` states what is computed.

Tensors come in the shape of their format: sbhd [s, b, h, d], bshd [b, s, h, d], thd [t, h, d], with any strides
whose last one is 1, so that q, k and v may be parts of one packed projection. k and v may lie in another format
than q, and with `pages` in blocks of a paged cache: [blocks, block size, groups, d], sequence i in the blocks that
row i of `pages` (int32 [b, blocks a sequence]) names; forward only.

The statistics that backward reads are float32 [b, h, sq] (thd: [t, h]): log(sum of exp), sink term included.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.attention import DIMENSIONS, AttentionSpec, Sizes
from te_core.dtypes import DType
from te_core.ops import _check
from te_core.ops.attention_terms import NOTHING, Terms, check, check_results, check_stats, sizes_of, stats_memory
from te_core.ops.declare import operation, rules
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class Attended(NamedTuple):
    """The results of a forward."""

    out: Tensor
    stats: Tensor | None
    max_logit: Tensor | None  # float32 [h]


class Gradients(NamedTuple):
    """The results of a backward; bias in its dtype and shape, sink float32 [h]."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None


class Asked(NamedTuple):
    """What the plan of an attention is made of: of tensors only what their memory is like."""

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    stats: bool = True  # forward: whether statistics are kept
    grads: tuple[Tensor, Tensor, Tensor] | None = None  # backward: where the gradients go; None: dense
    bias_grad: bool = False
    dy: Tensor | None = None
    out: Tensor | None = None  # None: dense
    grad: DType | None = None  # of FP8: the type of the gradients

    @property
    def size(self) -> Sizes:
        """The sizes of its tensors."""
        return sizes_of(self.q, self.k, self.v, self.spec, self.terms)


class ForwardOperands(NamedTuple):
    """What a forward reads and writes."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    out: Tensor
    stats: Tensor | None
    max_logit: Tensor | None = None
    scales: Any = None  # of FP8: `ForwardScales` of attention_fp8.py


class BackwardOperands(NamedTuple):
    """What a backward reads and writes."""

    dy: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    stats: Tensor
    terms: Terms
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsink: Tensor | None = None
    scales: Any = None  # of FP8: `BackwardScales`


#: Up to this many bytes, gradients that a backward makes lie in one block, each from a multiple of _ALIGNED on.
_ONE_BLOCK = 1 << 20
_ALIGNED = 256


#: What the arguments of attention are, in FP8 or not.
FORWARD = """
q: Queries, in the format that `spec` says.
k: Keys, in the format that `spec` says.
v: Values, in the format that `spec` says.
spec: What is computed (`AttentionSpec`).
terms: What else takes part: lengths, mask, bias, slopes, sink, random numbers, pages.
stats: Whether statistics for backward are wanted, or where they are written.
"""
BACKWARD = """
out: Output of the forward.
stats: Statistics of the softmax, float32.
grads: Where the gradients of q, k and v are written. None allocates them.
"""


@operation(FORWARD, runs="plan_attention_forward attention_forward")
def attention_forward(
    rt: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    terms: Terms = NOTHING,
    stats: bool | Tensor = True,
    out: Tensor | None = None,
) -> Attended:
    """The output in q's format with d_v, dense and fresh or into `out`, whose rows of heads may lie apart; the
    statistics for backward, if wanted, fresh or into `stats`; the largest logits.
    """
    plan = rt.plans.find(rt, _plan_forward, Asked(spec, q, k, v, terms, stats is not False, out=out))
    if out is None:
        out = rt.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    _check.written("attention_forward", "out", out)
    statistics = stats_memory("attention_forward", rt, q, spec, stats)
    largest = rt.empty((q.shape[DIMENSIONS[spec.q_format][2]],), dtypes.float32) if spec.max_logit else None
    rt.backend.attention_forward(rt, plan, ForwardOperands(q, k, v, terms, out, statistics, largest))
    return Attended(out, statistics, largest)


def _plan_forward(rt: Runtime, asked: Asked) -> Any:
    """Its arguments are looked at once for all tensors that are alike."""
    op, (spec, q, k, v, terms, *_), out = "attention_forward", asked, asked.out
    check(op, rt, q, k, v, spec, terms)
    if out is not None:
        check_results(op, q, v, apart=True, out=out)
    return rt.backend.plan_attention_forward(rt, asked)


@operation(
    BACKWARD,
    "bias_grad: Whether the gradient of the bias is wanted.",
    runs="plan_attention_backward attention_backward",
)
def attention_backward(
    rt: Runtime,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    *,
    spec: AttentionSpec,
    terms: Terms = NOTHING,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
    bias_grad: bool = False,
) -> Gradients:
    """The gradients of q, k, v, dense (small ones in one block of memory) or into `grads` (parts of a packed one, say);
    of bias and a learnable sink.

    dy lies as the output does, in its dtype. With `spec.partial` k and v are some of the keys: output and statistics
    are those over all of them, and so are the gradients of k and v, while that of q is a summand.
    """
    op = "attention_backward"
    asked = Asked(spec, q, k, v, terms, grads=grads, bias_grad=bias_grad, dy=dy, out=out)
    plan = rt.plans.find(rt, _plan_backward, asked)
    check_stats(op, stats, q, spec)
    _check.written(op, "a gradient", *(grads or ()))
    dq, dk, dv = grads or _fresh(rt, q, k, v)
    dbias = rt.empty(terms.bias.shape, terms.bias.dtype) if bias_grad and terms.bias is not None else None
    dsink = None if terms.sink is None else rt.empty(terms.sink.shape, dtypes.float32)
    operands = BackwardOperands(dy, q, k, v, out, stats, terms, dq, dk, dv, dbias, dsink)
    rt.backend.attention_backward(rt, plan, operands)
    return Gradients(dq, dk, dv, dbias, dsink)


def _plan_backward(rt: Runtime, asked: Asked) -> Any:
    op, (spec, q, k, v, terms, *_) = "attention_backward", asked
    check(op, rt, q, k, v, spec, terms)
    assert asked.dy is not None and asked.out is not None
    check_results(op, q, v, apart=True, dy=asked.dy, out=asked.out)
    _check.require(terms.pages is None, op, "a paged cache", "contiguous k and v", "train without a cache")
    if asked.grads is not None:
        _check_grads(op, rt, q, k, v, *asked.grads)
    return rt.backend.plan_attention_backward(rt, asked)


@rules("""
    dq [*q.shape] q rows
    dk [*k.shape] k rows
    dv [*v.shape] v rows
""")
def _check_grads(op: str, rt: Runtime, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Gradients to be written are like q, k and v."""


def _fresh(rt: Runtime, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of q, k and v: one block where it is small, because an allocation costs 2 us."""
    dtype = q.dtype
    if rt.joins:
        sizes = [-(-dtype.nbytes(prod(t.shape)) // _ALIGNED) * _ALIGNED for t in (q, k, v)]
        if sum(sizes) <= _ONE_BLOCK:
            block = rt.empty((sum(sizes),), dtypes.uint8)
            at, device = block.ptr, block.device
            return (
                Tensor(at, q.shape, dtype, device, block),
                Tensor(at + sizes[0], k.shape, dtype, device, block),
                Tensor(at + sizes[0] + sizes[1], v.shape, dtype, device, block),
            )
    return rt.empty(q.shape, dtype), rt.empty(k.shape, dtype), rt.empty(v.shape, dtype)
