"""FP8 attention by cuDNN; see te_core.ops.attention_fp8 for the contract, te_core.attention_rules for what is refused.

cuDNN writes each maximum over; those of delayed scaling are raised. So its graphs write into scratch memory, and one
small kernel (attention_amax.cu) raises the given ones to what it finds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_core.backends.cuda import cudnn
from te_core.backends.cuda.attention_plan import (
    Around,
    Named,
    around,
    dense_like,
    frame_of,
    graph_of,
    graph_spec,
    layouts,
    output_of,
    require,
    run_graph,
)
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.attention import Asked, BackwardOperands, ForwardOperands
    from te_core.ops.attention_fp8 import Scaled

_SLOTS = 4  # pairs of `scale_pairs` that its kernel has parameters for
_PLACES = 4  # maxima of a backward; 16 bytes each


@dataclass(frozen=True, eq=False, slots=True)
class Fp8Plan:
    """All that was decided about one FP8 attention, forward or backward."""

    graph: cudnn.Graph | None  # None: nothing to attend to
    around: Around
    raise_amax: Kernel

    def explain(self) -> str:
        """What runs."""
        if self.graph is None:
            return "FP8 attention: nothing to do"
        number = ".".join(map(str, cudnn.frontend().version))
        return f"FP8 attention: cuDNN {number}, workspace {self.graph.workspace}, a plan {self.graph.source}"


def plan_attention_fp8_forward(rt: Runtime, asked: Asked) -> Fp8Plan:
    """Find or build the graph."""
    require(rt, "attention_fp8_forward", asked, training=False, fp8=True)
    return _plan(rt, asked, None)


def plan_attention_fp8_backward(rt: Runtime, asked: Asked) -> Fp8Plan:
    """Find or build the graph."""
    results = asked.grads or dense_like(asked.q, asked.k, asked.v)
    require(rt, "attention_fp8_backward", asked, results, training=True, fp8=True)
    assert asked.dy is not None and asked.grad is not None
    deterministic, grad = asked.spec.deterministic, asked.grad.name
    return _plan(rt, asked, results, deterministic=deterministic, dy_dtype=asked.dy.dtype.name, grad_dtype=grad)


def _plan(rt: Runtime, asked: Asked, grads: tuple[Tensor, Tensor, Tensor] | None, **options: Any) -> Fp8Plan:
    backward = grads is not None
    frame = frame_of(asked, backward=backward)
    found = layouts(frame, asked, asked.stats, grads)
    near = around(rt, frame, found, grads or (output_of(asked),), zero_sink=False)
    kernel = loader.get(rt, "attention_amax", args="pppppf")
    if not asked.q.size or not asked.k.size:
        return Fp8Plan(None, near, kernel)
    graph = graph_of(rt, graph_spec(frame, asked.q.dtype, found, fp8=True, backward=backward, **options))
    return Fp8Plan(graph, near, kernel)


def _amaxes(rt: Runtime) -> int:
    """The address of the maxima's places, which are zeros between runs."""
    return rt.workspace("attention maxima", 16 * _PLACES, zeroed=True)


def _raise(rt: Runtime, plan: Fp8Plan, found: int, *scaled: Scaled | None, least: float = 0.0) -> None:
    """Raise the maxima that are given; the first one to `least` at least."""
    places = [None if s is None else s.amax for s in scaled]
    plan.raise_amax(rt, 1, len(places), found, *places, *[None] * (_PLACES - len(places)), least)


def attention_fp8_forward(rt: Runtime, plan: Fp8Plan, operands: ForwardOperands) -> None:
    """Run a plan."""
    q, k, v, terms, out, stats, _, scales = operands
    near, lengths = plan.around, terms.lengths
    if plan.graph is None:
        near.tidy(rt, lengths, out, None, None, stats)
        return
    assert scales is not None and scales.out is not None
    s, found = scales.s, _amaxes(rt)
    named: Named = {"q": q, "k": k, "v": v, "out": out, "stats": stats}
    named |= {"q_inverse": scales.q, "k_inverse": scales.k, "v_inverse": scales.v}
    named |= {"s_scale": s.scale, "s_inverse": s.inverse, "out_scale": scales.out.scale}
    maxima = {"s_amax": found, "out_amax": found + 16}
    run_graph(rt, plan.graph, {**named, **maxima, **near.prepare(rt, lengths)})
    _raise(rt, plan, found, s, scales.out, least=1.0)  # of exp(score - largest score), which is quantized
    near.tidy(rt, lengths, out, None, None, stats)


def attention_fp8_backward(rt: Runtime, plan: Fp8Plan, operands: BackwardOperands) -> None:
    """Run a plan."""
    dy, q, k, v, out, stats, terms, dq, dk, dv, _, _, scales = operands
    near, lengths = plan.around, terms.lengths
    if plan.graph is None:
        near.tidy(rt, lengths, dq, dk, dv, None)
        return
    assert scales is not None and scales.dq is not None and scales.dk is not None and scales.dv is not None
    s, dp, found = scales.s, scales.dp, _amaxes(rt)
    named: Named = {"q": q, "k": k, "v": v, "out": out, "stats": stats, "dy": dy, "dq": dq, "dk": dk, "dv": dv}
    named |= {"q_inverse": scales.q, "k_inverse": scales.k, "v_inverse": scales.v, "out_inverse": scales.out}
    named |= {"dy_inverse": scales.dy, "s_scale": s.scale, "s_inverse": s.inverse}
    named |= {"dp_scale": dp.scale, "dp_inverse": dp.inverse}
    named |= {"dq_scale": scales.dq.scale, "dk_scale": scales.dk.scale, "dv_scale": scales.dv.scale}
    maxima = {f"{name}_amax": found + 16 * i for i, name in enumerate(("dq", "dk", "dv", "dp"))}
    run_graph(rt, plan.graph, {**named, **maxima, **near.prepare(rt, lengths)})
    _raise(rt, plan, found, scales.dq, scales.dk, scales.dv, dp)
    near.tidy(rt, lengths, dq, dk, dv, None)


def scale_pairs(rt: Runtime, scales: Sequence[Tensor], places: Sequence[Tensor | None], out: Tensor) -> None:
    """Each scale and its inverse, in one launch of one warp."""
    kernel = loader.get(rt, "scale_pairs", args="pppppppppq")
    missing = [None] * (_SLOTS - len(scales))
    kernel(rt, 1, 32, *scales, *missing, *places, *missing, out, len(scales))
