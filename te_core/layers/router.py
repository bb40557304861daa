"""The router of a mixture of experts as layers: the choice of experts, scores for the auxiliary loss, and this loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes
from te_core.arguments import explained
from te_core.ops import raw as ops
from te_core.ops.router import RouterTerms
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How experts are chosen, and what is told of it."""

    terms: RouterTerms
    form: str = "bytemap"  # of the routing (te_core.ops.router.FORMS)
    counts: bool = False  # whether the tokens of each expert are counted
    bins: int = 0  # of the histogram of each expert


@dataclass(frozen=True, slots=True)
class AuxLossSpec:
    """The numbers of the auxiliary loss."""

    experts: int
    topk: int
    coeff: float


class RouterSaved(NamedTuple):
    """What backward reads."""

    logits: Tensor
    routing: Tensor | None  # None where all experts have scores


class AuxLossSaved(NamedTuple):
    """What backward reads; of probs the shape."""

    probs: Tensor
    weights: Tensor
    total: Tensor


@explained
def forward(
    rt: Runtime,
    logits: Tensor,
    bias: Tensor | None,
    bounds: Tensor | None,
    *,
    spec: RouterSpec,
    scales: Scales | None = None,
) -> tuple[tuple[Tensor, ...], RouterSaved]:
    """((gates, routing, and what the spec asks for: tokens of each expert, a histogram of these logits), saved)."""
    experts, lead = logits.shape[-1], logits.shape[:-1]
    counts = rt.empty((experts,), dtypes.int32) if spec.counts else None
    histogram = rt.zeros((experts, spec.bins), dtypes.int32) if spec.bins else None
    gates, routing = ops.router_topk_forward(
        rt,
        logits.matrix(),
        terms=spec.terms,
        bias=bias,
        form=spec.form,
        counts=counts,
        histogram=histogram,
        bounds=bounds,
    )
    routing = routing.reshape(*lead, routing.shape[1])
    told = [t for t in (counts, histogram) if t is not None]
    return (gates.reshape(*logits.shape), routing, *told), RouterSaved(logits, routing)


@explained
def backward(
    rt: Runtime,
    dgates: Tensor,
    drouting: None,
    dcounts: None,
    dhistogram: None,
    saved: RouterSaved,
    *,
    spec: RouterSpec,
    scales: Scales | None = None,
) -> tuple[Tensor, None, None]:
    """(dlogits, None, None)."""
    assert saved.routing is not None
    given = dgates.matrix(), saved.logits.matrix(), saved.routing.matrix()
    return ops.router_topk_backward(rt, *given, terms=spec.terms).reshape(*saved.logits.shape), None, None


@explained
def scores_forward(
    rt: Runtime, logits: Tensor, *, spec: RouterSpec, scales: Scales | None = None
) -> tuple[tuple[Tensor, Tensor], RouterSaved]:
    """((scores of all experts, routing), saved)."""
    scores, routing = ops.router_scores_forward(rt, logits.matrix(), terms=spec.terms, form=spec.form)
    routing = routing.reshape(*logits.shape[:-1], routing.shape[1])
    return (scores.reshape(*logits.shape), routing), RouterSaved(logits, None)


@explained
def scores_backward(
    rt: Runtime, dscores: Tensor, drouting: None, saved: RouterSaved, *, spec: RouterSpec, scales: Scales | None = None
) -> tuple[Tensor]:
    """(dlogits,)."""
    logits = saved.logits
    dlogits = ops.router_scores_backward(rt, dscores.matrix(), logits.matrix(), terms=spec.terms)
    return (dlogits.reshape(*logits.shape),)


@explained
def aux_loss_forward(
    rt: Runtime, probs: Tensor, weights: Tensor, total: Tensor, *, spec: AuxLossSpec, scales: Scales | None = None
) -> tuple[tuple[Tensor], AuxLossSaved]:
    """((loss [1],), saved)."""
    loss = ops.router_aux_loss_forward(
        rt, probs, weights, total, experts=spec.experts, topk=spec.topk, coeff=spec.coeff
    )
    return (loss,), AuxLossSaved(probs, weights, total)


@explained
def aux_loss_backward(
    rt: Runtime, dloss: Tensor, saved: AuxLossSaved, *, spec: AuxLossSpec, scales: Scales | None = None
) -> tuple[Tensor, None, None]:
    """(dprobs, None, None)."""
    probs, weights, total = saved
    dprobs = ops.router_aux_loss_backward(
        rt, dloss, weights, total, rows=probs.shape[0], experts=spec.experts, topk=spec.topk, coeff=spec.coeff
    )
    return dprobs, None, None
