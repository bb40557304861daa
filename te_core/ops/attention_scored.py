"""Attention whose scores a user's functions modify, as operations that they put into a cuDNN graph (`ScoreMod`).

Dense q, k and v (sbhd or bshd), scale and nothing else: what is hidden or added is in the functions. The score that
they are given is [b, h, sq, skv], scaled. CUDA only: what the functions build runs nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.attention import AttentionSpec, ScoreMod
from te_core.ops import _check
from te_core.ops.attention import Asked
from te_core.ops.attention_terms import NOTHING, check, check_results, check_stats, stats_shape
from te_core.ops.declare import operation, rules
from te_core.runtime import Runtime
from te_core.tensor import Tensor

TYPES = (dtypes.bfloat16, dtypes.float16)
#: What the functions may be given tensors of, and how many of them.
GIVEN_TYPES = (dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.int32, dtypes.int64)
MOST_GIVEN = 32

#: (name, tensor): "forward" or "backward", a dot, and what the function calls it.
Given = tuple[tuple[str, Tensor], ...]


#: What a plan is made of: a plain attention's, the functions, and their tensors.
ScoredAsked = tuple[Asked, ScoreMod, Given]


class Kept(NamedTuple):
    """What backward reads of a forward: its operands, dense, and its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    stats: Tensor


@operation(runs="attention.plan_attention_scored attention.attention_scored", public=False)
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
    plan = _planned(rt, (Asked(spec, q, k, v, NOTHING, stats), mod, given))
    out = rt.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    statistics = rt.empty(stats_shape(q, spec.q_format), dtypes.float32) if stats else None
    named = {"q": q, "k": k, "v": v, "out": out, "stats": statistics}
    rt.backend.attention_scored(rt, plan, {**named, **dict(given)})
    return out, statistics


@operation(runs="attention.plan_attention_scored attention.attention_scored", public=False)
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
    plan = _planned(rt, (Asked(spec, q, k, v, NOTHING, dy=dy), mod, given))
    dq, dk, dv = (rt.empty(t.shape, t.dtype) for t in (q, k, v))
    named = {"q": q, "k": k, "v": v, "out": out, "stats": stats, "dy": dy, "dq": dq, "dk": dk, "dv": dv}
    rt.backend.attention_scored(rt, plan, {**named, **dict(given)})
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
    plain, mod, given = asked
    return _plan(rt, asked) if mod.key is None else rt.plans.find(rt, _plan, asked, mod.key, like=(plain, given))


def _plan(rt: Runtime, asked: ScoredAsked) -> Any:
    spec, q, k, v, *_ = asked[0]
    op = f"attention_scored_{'forward' if asked[0].dy is None else 'backward'}"
    check(op, rt, q, k, v, spec, NOTHING, TYPES)
    _check_plain(op, rt, spec)
    return rt.backend.plan_attention_scored(rt, asked)


@rules("""
    must "thd" not in (spec.q_format, spec.kv_format) and spec == AttentionSpec(spec.scale, spec.q_format,
        spec.kv_format, bottom_right=spec.bottom_right, deterministic=spec.deterministic): a scale, and dense
        formats; leave the rest to the functions
""")
def _check_plain(op: str, rt: Runtime, spec: AttentionSpec) -> None:
    """Nothing but a scale is asked for. (Which corner the band begins in says nothing: there is none.)"""
