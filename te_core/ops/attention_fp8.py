"""Attention on FP8 operands, forward and backward: both products of each direction read FP8.

As `te_core.ops.attention`, with q, k, v, the output and its gradient FP8 tensors of one scale each. Inside,
P (before dropout) is multiplied by `s.scale` and cast to the type of q, and dS, times the softmax scale, by `dp.scale`
to that of dy; results are multiplied by their scale and cast, saturating. An `amax`, where given, is raised to the
largest |value| before that; several results may raise one.
A result whose scale is None is given in an activation dtype instead (current scaling, whose scales follow from it), and
`out` may come so; cuDNN does that on Blackwell only, so here it runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.attention import AttentionSpec
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import _check
from te_core.ops.attention import BACKWARD, FORWARD, Asked, Attended, BackwardOperands, ForwardOperands
from te_core.ops.attention_terms import NOTHING, Terms, check, check_results, check_stats, stats_memory
from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor

FP8 = (dtypes.float8_e4m3, dtypes.float8_e5m2)


class Scaled(NamedTuple):
    """How one quantity is quantized: float32 [1] each. `inverse` is 1 / scale, what a stored value is multiplied by."""

    scale: Tensor
    inverse: Tensor
    amax: Tensor | None = None


class ForwardScales(NamedTuple):
    """The inverse scales of q, k and v as they came, and how P and the output are quantized."""

    q: Tensor
    k: Tensor
    v: Tensor
    s: Scaled
    out: Scaled | None


class BackwardScales(NamedTuple):
    """Those of what came (`out` and `dy` inverse), and how P, dS and the gradients are quantized."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    dy: Tensor
    s: Scaled
    dp: Scaled
    dq: Scaled | None
    dk: Scaled | None
    dv: Scaled | None


#: Scales that one `scale_pairs` takes.
MAX_PAIRS = 4


@operation("""
    scales: Up to four scales, float32 [1] each.
    places: Where inverses go to, too; None for one that goes nowhere else.
    must 1 <= len(scales) <= MAX_PAIRS and len(places) == len(scales): one to {MAX_PAIRS} scales and a place, or None,
        for each; correct the counts
""")
def scale_pairs(rt: Runtime, scales: Sequence[Tensor], places: Sequence[Tensor | None]) -> Tensor:
    """float32 [n, 2]: each of up to four scales (float32 [1]), as it is now, and its inverse; one launch.

    The inverse also goes to the scale's place, where one is given: behind the data that is written under it.
    """
    op = "scale_pairs"
    for scale in (*scales, *places):
        _check.vector(op, rt.device, "scale", scale, 1, (dtypes.float32,))
    _check.written(op, "a place", *places)
    out = rt.empty((len(scales), 2), dtypes.float32)
    rt.backend.scale_pairs(rt, scales, places, out)
    return out


@operation(FORWARD, "scales: Scales of what is quantized.", runs="plan_attention_fp8_forward attention_fp8_forward")
def attention_fp8_forward(
    rt: Runtime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    scales: ForwardScales,
    terms: Terms = NOTHING,
    stats: bool | Tensor = True,
    out: Tensor | None = None,
) -> Attended:
    """The output in q's type under `scales.out`, fresh or into `out`, and the statistics for backward."""
    shape = (*q.shape[:-1], v.shape[-1])
    if out is None:
        out = rt.empty(shape, q.dtype)
    op = "attention_fp8_forward"
    _check_results(op, rt, (out,), (shape,), q.dtype, scales.out is None)
    check_results(op, q, v, typed=False, apart=True, out=out)
    plan = rt.plans.find(rt, _plan_forward, Asked(spec, q, k, v, terms, stats is not False, out=out))
    _check_scales(op, rt.device, scales)
    _check.written(op, "out", out)
    statistics = stats_memory(op, rt, q, spec, stats)
    rt.backend.attention_fp8_forward(rt, plan, ForwardOperands(q, k, v, terms, out, statistics, scales=scales))
    return Attended(out, statistics, None)


def _plan_forward(rt: Runtime, asked: Asked) -> Any:
    """Its arguments are looked at once for all tensors that are alike."""
    check("attention_fp8_forward", rt, asked.q, asked.k, asked.v, asked.spec, asked.terms, FP8)
    return rt.backend.plan_attention_fp8_forward(rt, asked)


@operation(
    BACKWARD, "grad_dtype: FP8 type of the gradients.", runs="plan_attention_fp8_backward attention_fp8_backward"
)
def attention_fp8_backward(
    rt: Runtime,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    stats: Tensor,
    *,
    spec: AttentionSpec,
    scales: BackwardScales,
    terms: Terms = NOTHING,
    grad_dtype: DType = dtypes.float8_e5m2,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `grad_dtype` under their scales: dense, or into `grads` (parts of a packed one, say)."""
    if grads is None:
        grads = rt.empty(q.shape, grad_dtype), rt.empty(k.shape, grad_dtype), rt.empty(v.shape, grad_dtype)
    op = "attention_fp8_backward"
    _check_results(op, rt, (out,), ((*q.shape[:-1], v.shape[-1]),), q.dtype, scales.out is None)
    _check_results(op, rt, grads, (q.shape, k.shape, v.shape), grad_dtype, scales.dq is None)
    check_results(op, q, v, typed=False, apart=True, dy=dy, out=out)
    asked = Asked(spec, q, k, v, terms, grads=grads, dy=dy, grad=grad_dtype, out=out)
    plan = rt.plans.find(rt, _plan_backward, asked, scales.dq is None)
    check_stats(op, stats, q, spec)
    _check_scales(op, rt.device, scales)
    _check.written(op, "a gradient", *grads)
    operands = BackwardOperands(dy, q, k, v, out, stats, terms, *grads, scales=scales)
    rt.backend.attention_fp8_backward(rt, plan, operands)
    return grads


def _plan_backward(rt: Runtime, asked: Asked) -> Any:
    op, (spec, q, k, v, terms, *_) = "attention_fp8_backward", asked
    check(op, rt, q, k, v, spec, terms, FP8)
    _check.one_of(op, "dtype of dy", _check.dtype(asked.dy), FP8)
    _check.require(terms.pages is None, op, "a paged cache", "contiguous k and v", "train without a cache")
    return rt.backend.plan_attention_fp8_backward(rt, asked)


def _check_scales(op: str, device: Device, scales: ForwardScales | BackwardScales) -> None:
    """One float32 each, on the device."""
    for name, given in zip(scales._fields, scales, strict=True):
        several = given.__class__ is Scaled
        parts: Any = given if several else (given,)
        for part, t in enumerate(parts):
            if t is None:
                right = part == 2 or (not several and name in _MAY_MISS)
            else:
                right = t.shape == (1,) and t.dtype is dtypes.float32 and t.device is device
                right = right and (part < 2 or t.writable)
            if not right:
                allowed = f"float32 [1] on {device}, an amax in memory that may be written to"
                raise ArgumentError(op, f"scales.{name} = {given!r}", allowed, f"correct scales.{name}")


#: Scales of what comes out, which may come without one, and is then no `Scaled` either.
_MAY_MISS = frozenset(("out", "dq", "dk", "dv"))


def _check_results(
    op: str, rt: Runtime, tensors: tuple[Tensor, ...], shapes: tuple[tuple[int, ...], ...], dtype: DType, high: bool
) -> None:
    """Tensors of these shapes: of this FP8 type, or, where they have no scale, of an activation dtype on the CPU."""
    if high and rt.device.kind == "cuda":
        raise UnsupportedError(
            op,
            "results without a scale (current scaling) on CUDA",
            "delayed scaling",
            "use DelayedScaling, or NVTE_DPA_FP8_RECIPE=DelayedScaling",
        )
    allowed = ACTIVATION_DTYPES if high else FP8
    for t, shape in zip(tensors, shapes, strict=True):
        _check.require(
            t.shape == shape
            and t.dtype in allowed
            and (high or t.dtype is dtype)
            and t.device is rt.device
            and t.row_major_strides()[-1] == 1,
            op,
            f"a result {t!r}",
            f"{shape}, {'an activation dtype' if high else dtype}, last stride 1",
            "correct its shape, dtype or scale",
        )
