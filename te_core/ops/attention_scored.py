"""Attention whose scores a user's functions modify, as operations that they put into a cuDNN graph (`ScoreMod`).

Dense q, k and v (sbhd or bshd), scale and nothing else: what is hidden or added is in the functions. The score that
they are given is [b, h, sq, skv], scaled. CUDA only: what the functions build runs nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.attention import AttentionSpec, ScoreMod, Sizes
from te_core.ops import _check
from te_core.ops.attention_terms import NOTHING, Terms, check, check_results, check_stats, sizes_of, stats_shape
from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor

TYPES = (dtypes.bfloat16, dtypes.float16)
#: What the functions may be given tensors of, and how many of them.
GIVEN_TYPES = (dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.int32, dtypes.int64)
MOST_GIVEN = 32

#: (name, tensor): "forward" or "backward", a dot, and what the function calls it.
Given = tuple[tuple[str, Tensor], ...]


class ScoredAsked(NamedTuple):
    """What a plan is made of: of tensors only what their memory is like."""

    spec: AttentionSpec
    mod: ScoreMod
    q: Tensor
    k: Tensor
    v: Tensor
    given: Given
    backward: bool
    stats: bool
    terms: Terms = NOTHING

    @property
    def size(self) -> Sizes:
        """The sizes of its tensors."""
        return sizes_of(self.q, self.k, self.v, self.spec, self.terms)


class Kept(NamedTuple):
    """What backward reads of a forward: its operands, dense, and its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    stats: Tensor


class ScoredOperands(NamedTuple):
    """What a forward, or a backward, reads and writes."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    stats: Tensor | None
    given: Given
    dy: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


@operation(runs="plan_attention_scored attention_scored", public=False)
def attention_scored_forward(
    rt: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    mod: ScoreMod,
    tensors: Mapping[str, Tensor],
    stats: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(the output, dense in q's format with d_v; the statistics for backward, if wanted)."""
    op = "attention_scored_forward"
    given = _given(op, rt, tensors, {})
    plan = _planned(rt, ScoredAsked(spec, mod, q, k, v, given, False, stats))
    out = rt.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    statistics = rt.empty(stats_shape(q, spec.q_format), dtypes.float32) if stats else None
    rt.backend.attention_scored(rt, plan, ScoredOperands(q, k, v, out, statistics, given))
    return out, statistics


@operation(runs="plan_attention_scored attention_scored", public=False)
def attention_scored_backward(
    rt: Runtime,
    dy: Tensor,
    kept: Kept,
    *,
    spec: AttentionSpec,
    mod: ScoreMod,
    tensors: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, dense; `tensors` are those of the forward's function, and of the backward's."""
    op = "attention_scored_backward"
    q, k, v, out, stats = kept
    check_results(op, q, v, dy=dy, out=out)
    check_stats(op, stats, q, spec)
    given = _given(op, rt, *tensors)
    plan = _planned(rt, ScoredAsked(spec, mod, q, k, v, given, True, True))
    dq, dk, dv = (rt.empty(t.shape, t.dtype) for t in (q, k, v))
    rt.backend.attention_scored(rt, plan, ScoredOperands(q, k, v, out, stats, given, dy, dq, dk, dv))
    return dq, dk, dv


def _given(op: str, rt: Runtime, forward: Mapping[str, Tensor], backward: Mapping[str, Tensor]) -> Given:
    found = tuple(
        (f"{side}.{name}", t)
        for side, named in (("forward", forward), ("backward", backward))
        for name, t in named.items()
    )
    _check.require(
        len(found) <= MOST_GIVEN, op, f"{len(found)} tensors", f"at most {MOST_GIVEN}", "put some of them into one"
    )
    for name, t in found:
        _check.one_of(op, f"dtype of {name}", t.dtype, GIVEN_TYPES)
        _check.on_device(op, rt.device, t)
    return found


def _planned(rt: Runtime, asked: ScoredAsked) -> Any:
    """The plan: found again where the functions have a key, else made for this call alone."""
    key = asked.mod.key
    if key is None:
        return _plan(rt, asked)
    return rt.plans.find(rt, _plan, asked, key, like=asked._replace(mod=ScoreMod(None)))


def _plan(rt: Runtime, asked: ScoredAsked) -> Any:
    op, spec = f"attention_scored_{'backward' if asked.backward else 'forward'}", asked.spec
    check(op, rt, asked.q, asked.k, asked.v, spec, NOTHING, TYPES)
    plain = AttentionSpec(
        spec.scale,
        spec.q_format,
        spec.kv_format,
        bottom_right=spec.bottom_right,  # of a band that is not there
        deterministic=spec.deterministic,
    )
    _check.require(
        spec == plain and "thd" not in (spec.q_format, spec.kv_format),
        op,
        f"{spec}",
        "a scale, and dense formats",
        "leave the rest to the functions",
    )
    return rt.backend.plan_attention_scored(rt, asked)
