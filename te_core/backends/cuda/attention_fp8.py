"""FP8 attention by cuDNN; see te_core.ops.attention_fp8 for the contract, te_core.attention_rules for what is refused.

cuDNN writes each maximum over; those of delayed scaling are raised. So its graphs write into scratch memory, and one
small kernel (attention_amax.cu) raises the given ones to what it finds there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from te_core.backends.cuda import cudnn
from te_core.backends.cuda.attention_plan import (
    Around,
    around,
    dense_like,
    frame_of,
    graph_of,
    graph_spec,
    layouts,
    picker,
    require,
)
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention import Asked
    from te_core.ops.attention_fp8 import Fp8BackwardOperands, Fp8ForwardOperands, Scaled

_PLACES = 4  # maxima of a backward; 16 bytes each


@dataclass(frozen=True, eq=False, slots=True)
class Fp8Plan:
    """All that was decided about one FP8 attention, forward or backward."""

    graph: cudnn.Graph | None  # None: nothing to attend to
    pick: Any
    around: Around
    raise_amax: Kernel

    def explain(self) -> str:
        """What runs."""
        if self.graph is None:
            return "FP8 attention: nothing to do"
        number = ".".join(map(str, cudnn.frontend().version))
        return f"FP8 attention: cuDNN {number}, workspace {self.graph.workspace}, a plan {self.graph.source}"


_FORWARD = (
    "q",
    "k",
    "v",
    "out",
    "stats",
    "q_inverse",
    "k_inverse",
    "v_inverse",
    "s_scale",
    "s_inverse",
    "out_scale",
    "s_amax",
    "out_amax",
)
_BACKWARD = (
    "q", "k", "v", "out", "stats", "dy", "dq", "dk", "dv", "q_inverse", "k_inverse", "v_inverse", "out_inverse",
    "dy_inverse", "s_scale", "s_inverse", "dp_scale", "dp_inverse", "dq_scale", "dk_scale", "dv_scale",
    "dq_amax", "dk_amax", "dv_amax", "dp_amax",
)  # fmt: skip


def plan_attention_fp8_forward(rt: Runtime, asked: Asked) -> Fp8Plan:
    """Find or build the graph."""
    spec, size, q, k, v, terms, *_ = asked
    require(rt, "attention_fp8_forward", spec, size, q.dtype, (q, k, v), training=False, terms=terms, fp8=True)
    out = asked.out or Tensor(0, (*q.shape[:-1], v.shape[-1]), q.dtype, q.device, None)
    return _plan(rt, asked, (out,), _FORWARD, backward=False)


def plan_attention_fp8_backward(rt: Runtime, asked: Asked) -> Fp8Plan:
    """Find or build the graph."""
    spec, size, q, k, v, terms, *_ = asked
    results = asked.grads or dense_like(q, k, v)
    require(
        rt, "attention_fp8_backward", spec, size, q.dtype, (q, k, v, *results), training=True, terms=terms, fp8=True
    )
    assert asked.dy is not None and asked.grad is not None
    options = {"deterministic": spec.deterministic, "dy_dtype": asked.dy.name, "grad_dtype": asked.grad.name}
    return _plan(rt, asked, results, _BACKWARD, backward=True, **options)


def _plan(
    rt: Runtime, asked: Asked, results: tuple[Tensor, ...], names: tuple[str, ...], *, backward: bool, **options: Any
) -> Fp8Plan:
    spec, size, q, k, v, terms, stats, *_ = asked
    frame = frame_of(spec, size, terms, backward)
    empty = not q.size or not k.size
    if empty:
        frame = replace(frame, full=not spec.padded)  # all rows are such that see nothing
    grads = (results[0], results[1], results[2]) if backward else None
    found = layouts(frame, q, k, v, False, stats, grads, asked.out)
    near = around(rt, frame, found, results, zero_sink=False)
    kernel = loader.get(rt, "attention_amax", args="ppppp")
    if empty:
        return Fp8Plan(None, None, near, kernel)
    graph = graph_of(rt, graph_spec(frame, q.dtype, found, fp8=True, backward=backward, **options))
    return Fp8Plan(graph, picker(graph, names + tuple(name for name, _ in near.places)), near, kernel)


def _amaxes(rt: Runtime) -> int:
    """The address of the maxima's places, which are zeros between runs."""
    return rt.workspace("attention maxima", 16 * _PLACES, zeroed=True)


def _raise(rt: Runtime, plan: Fp8Plan, found: int, *scaled: Scaled | None) -> None:
    """Raise the maxima that are given."""
    places = [s.amax.ptr if s is not None and s.amax is not None else 0 for s in scaled]
    plan.raise_amax(rt, 1, len(places), found, *places, *[0] * (_PLACES - len(places)))


def attention_fp8_forward(rt: Runtime, plan: Fp8Plan, operands: Fp8ForwardOperands) -> None:
    """Run a plan."""
    q, k, v, terms, scales, out, stats = operands
    near, lengths = plan.around, terms.lengths
    if plan.graph is None:
        near.tidy(rt, lengths, out, None, None, stats)
        return
    assert scales.out is not None
    s, found = scales.s, _amaxes(rt)
    cudnn.execute(
        rt,
        plan.graph,
        plan.pick(
            (
                q.ptr,
                k.ptr,
                v.ptr,
                out.ptr,
                0 if stats is None else stats.ptr,
                scales.q.ptr,
                scales.k.ptr,
                scales.v.ptr,
                s.scale.ptr,
                s.inverse.ptr,
                scales.out.scale.ptr,
                found,
                found + 16,
                *near.prepare(rt, lengths),
            )
        ),
    )
    _raise(rt, plan, found, s, scales.out)
    near.tidy(rt, lengths, out, None, None, stats)


def attention_fp8_backward(rt: Runtime, plan: Fp8Plan, operands: Fp8BackwardOperands) -> None:
    """Run a plan."""
    dy, q, k, v, out, stats, terms, scales, dq, dk, dv = operands
    near, lengths = plan.around, terms.lengths
    if plan.graph is None:
        near.tidy(rt, lengths, dq, dk, dv, None)
        return
    s, dp, found = scales.s, scales.dp, _amaxes(rt)
    assert scales.out is not None and scales.dq is not None and scales.dk is not None and scales.dv is not None
    cudnn.execute(
        rt,
        plan.graph,
        plan.pick(
            (
                q.ptr,
                k.ptr,
                v.ptr,
                out.ptr,
                stats.ptr,
                dy.ptr,
                dq.ptr,
                dk.ptr,
                dv.ptr,
                scales.q.ptr,
                scales.k.ptr,
                scales.v.ptr,
                scales.out.ptr,
                scales.dy.ptr,
                s.scale.ptr,
                s.inverse.ptr,
                dp.scale.ptr,
                dp.inverse.ptr,
                scales.dq.scale.ptr,
                scales.dk.scale.ptr,
                scales.dv.scale.ptr,
                found,
                found + 16,
                found + 32,
                found + 48,
                *near.prepare(rt, lengths),
            )
        ),
    )
    _raise(rt, plan, found, scales.dq, scales.dk, scales.dv, dp)
    near.tidy(rt, lengths, dq, dk, dv, None)
