"""The router of a mixture of experts: scores of the experts, the best of them for each token, and the auxiliary loss.

All in float32 whatever the logits x lie in. The score of an expert and what it is chosen by:

    softmax         exp(x) / sum(exp(x)), over all experts with `pre_softmax` and else over the chosen ones; chosen by
                    it, or without `pre_softmax` by x
    sigmoid         s = 1 / (1 + exp(-x)), chosen by s + bias
    sqrtsoftplus    s = sqrt(log(1 + exp(x))), chosen by s + bias

The largest come first, of equal ones the smallest expert; NaN is larger than all. With groups (experts side by side,
as many in each) only those of the best `group_topk` groups are chosen: a group is as good as the sum of its best
topk / group_topk. The gate of a chosen expert is its softmax, or (s + bias) - bias, divided by 1e-20 + the sum over
the chosen ones where topk > 1; and that times `scale`. All other gates are 0.

The auxiliary loss wants scores of all experts: softmax over all, or s / (1e-20 + the sum of s). With N tokens it is

    C sum_e(tokens of e * sum_t(probs[t, e]))    C = coeff experts / topk / N / N

A histogram (of quantile balancing) counts, for each token and expert, the bin floor((cutoff - s - lower) bins / (upper
- lower)), cut off at both ends; the cutoff is the best s + bias that was not chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.ops import _check
from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
#: How it is written which experts a token goes to: a byte an expert, a bit an expert (the lowest bit first), or the
#: numbers of the chosen ones, the smallest first.
FORMS: dict[str, DType] = {
    "bytemap": dtypes.bool_,
    "bitmap_u8": dtypes.uint8,
    "int16": dtypes.int16,
    "int32": dtypes.int32,
    "int64": dtypes.int64,
}
#: An expert's number has 13 bits beside what it is chosen by (kernels/router.cu).
MAX_EXPERTS = 8192
_ROUTINGS, _COUNTS = tuple(FORMS.values()), (dtypes.int32, dtypes.int64, dtypes.float32, dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class RouterTerms:
    """How experts are scored and chosen."""

    topk: int
    score: str = "softmax"
    pre_softmax: bool = False
    groups: int = 0
    group_topk: int = 0  # 0: groups do not count
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check.one_of("router", "score", self.score, SCORES)
        if self.score != "softmax":
            object.__setattr__(self, "pre_softmax", False)
        if not self.group_topk:
            object.__setattr__(self, "groups", 0)

    def check(self, op: str, experts: int) -> None:
        """They fit so many experts."""
        k, groups, best = self.topk, self.groups, self.group_topk
        got, do = f"topk={k} of {experts} experts", "correct topk"
        if not 1 <= k <= experts <= MAX_EXPERTS:
            raise ArgumentError(op, got, f"a topk from 1 to the experts, at most {MAX_EXPERTS} of these", do)
        each = k // best if best else 0
        if best and not (1 <= best <= groups and experts % groups == 0 and k % best == 0 and each * groups <= experts):
            got, do = f"{got}, num_groups={groups}, group_topk={best}", f"{do}, num_groups or group_topk"
            allowed = "groups that divide the experts, and topk experts in equal parts of group_topk of them"
            raise ArgumentError(op, got, allowed, do)


class Routed(NamedTuple):
    """What a launch over logits reads and writes."""

    logits: Tensor
    bias: Tensor | None
    out: Tensor  # gates, or scores
    routing: Tensor
    counts: Tensor | None = None
    offsets: Tensor | None = None
    align: int = 1
    histogram: Tensor | None = None
    bounds: Tensor | None = None


class Weighed(NamedTuple):
    """What the auxiliary loss is of."""

    weights: Tensor  # tokens of each expert
    total: Tensor  # of all tokens
    experts: int
    topk: int
    coeff: float


_LOGITS = """
    logits [tokens, experts] act: Score of each token and expert before it is a score.
    terms: How experts are scored and chosen (`RouterTerms`).
"""


@operation(
    _LOGITS,
    """
    bias? [experts] f32: Addend of what experts are chosen by. None adds none.
    must bias is None or terms.score != "softmax": a bias with sigmoid or sqrtsoftplus; leave bias out
    form in FORMS: How the routing is written.
    counts? [experts] i32 written: Where the number of tokens of each expert is written. None counts none.
    offsets? [experts + 1] i32 written: Where the first row of each expert is written, as `permute` orders rows, and
        last their number. None writes it nowhere.
    align: The rows of each expert become a multiple of this number, in offsets.
    must align >= 1: a number from 1 on
    histogram? [experts, bins] i32 written: Counts that are added to. None counts none.
    bounds? [2] f32: Lower and upper bound of the histogram's bins. None has none.
    must (histogram is None) == (bounds is None): a histogram with bounds; pass both
    must histogram is None or (terms.score == "sigmoid" and bias is not None and not terms.groups
        and terms.topk < experts): a histogram only supports sigmoid with a bias, no groups, and topk below the
        experts; leave histogram out
""",
    runs="router_forward",
)
def router_topk_forward(
    rt: Runtime,
    logits: Tensor,
    *,
    terms: RouterTerms,
    bias: Tensor | None = None,
    form: str = "bytemap",
    counts: Tensor | None = None,
    offsets: Tensor | None = None,
    align: int = 1,
    histogram: Tensor | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(gates [tokens, experts] in the logits' dtype, the routing): each token's best `topk` experts.

    The routing is bool [tokens, experts], uint8 [tokens, experts / 8 rounded up], or numbers [tokens, topk].
    """
    terms.check("router_topk_forward", logits.shape[1])
    out = rt.empty(logits.shape, logits.dtype)
    routing = rt.empty(_routing_shape(logits.shape, terms, form), FORMS[form])
    routed = Routed(logits, bias, out, routing, counts, offsets, align, histogram, bounds)
    rt.backend.router_forward(rt, terms, form, False, routed)
    return out, routing


@operation(
    _LOGITS,
    """
    dgates =logits: Gradient of the gates.
    routing [...] _ROUTINGS: Which experts each token goes to, as the forward gave it.
""",
    runs="router_backward",
)
def router_topk_backward(rt: Runtime, dgates: Tensor, logits: Tensor, routing: Tensor, *, terms: RouterTerms) -> Tensor:
    """The gradient of the logits, in their dtype. The bias has none."""
    op = "router_topk_backward"
    terms.check(op, logits.shape[1])
    form = next(name for name, kind in FORMS.items() if kind is routing.dtype)
    _check.sized(op, "routing", routing, _routing_shape(logits.shape, terms, form), (routing.dtype,))
    out = rt.empty(logits.shape, logits.dtype)
    rt.backend.router_backward(rt, terms, form, dgates, logits, routing, out)
    return out


@operation(_LOGITS, "form in FORMS: How the routing is written.", runs="router_forward")
def router_scores_forward(
    rt: Runtime, logits: Tensor, *, terms: RouterTerms, form: str = "bytemap"
) -> tuple[Tensor, Tensor]:
    """(scores of all experts, float32 [tokens, experts]; the routing): without bias and groups."""
    terms.check("router_scores_forward", logits.shape[1])
    out = rt.empty(logits.shape, dtypes.float32)
    routing = rt.empty(_routing_shape(logits.shape, terms, form), FORMS[form])
    rt.backend.router_forward(rt, terms, form, True, Routed(logits, None, out, routing))
    return out, routing


@operation(_LOGITS, "dscores [tokens, experts] f32: Gradient of the scores.", runs="router_backward")
def router_scores_backward(rt: Runtime, dscores: Tensor, logits: Tensor, *, terms: RouterTerms) -> Tensor:
    """The gradient of the logits, in their dtype."""
    out = rt.empty(logits.shape, logits.dtype)
    rt.backend.router_backward(rt, terms, "", dscores, logits, None, out)
    return out


_WEIGHED = """
    weights [columns] _COUNTS: Tokens of each expert.
    total [1] i32|i64: Number of tokens.
    experts: Number of experts; the columns are as many, or several times as many.
    topk: Experts of a token.
    coeff: Factor of the loss.
    must experts >= 1 and topk >= 1 and columns % experts == 0: columns that are a multiple of the experts; correct the
        experts
"""


@operation("probs [rows, columns] act: Probability of each token and expert.", _WEIGHED, runs="router_aux_loss")
def router_aux_loss_forward(
    rt: Runtime, probs: Tensor, weights: Tensor, total: Tensor, *, experts: int, topk: int, coeff: float
) -> Tensor:
    """The auxiliary loss [1], in the dtype of probs; the order of the additions depends on the shape alone."""
    loss = rt.empty((1,), probs.dtype)
    rt.backend.router_aux_loss(rt, Weighed(weights, total, experts, topk, coeff), probs, loss)
    return loss


@operation("dloss [1] act: Gradient of the loss.\nrows: Rows of probs.", _WEIGHED)
def router_aux_loss_backward(
    rt: Runtime, dloss: Tensor, weights: Tensor, total: Tensor, *, rows: int, experts: int, topk: int, coeff: float
) -> Tensor:
    """The gradient of probs [rows, columns], in the dtype of dloss."""
    out = rt.empty((rows, weights.shape[0]), dloss.dtype)
    rt.backend.router_aux_loss_backward(rt, Weighed(weights, total, experts, topk, coeff), dloss, out)
    return out


def _routing_shape(shape: tuple[int, ...], terms: RouterTerms, form: str) -> tuple[int, int]:
    tokens, experts = shape
    return tokens, {"bytemap": experts, "bitmap_u8": -(-experts // 8)}.get(form, terms.topk)
