"""The rows of the router's operations."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from te_core import dtypes, ops
from te_core.ops.router import FORMS, RouterTerms
from te_core.runtime import Runtime
from tests.core.operations import Array, Case, Found, Near, Put, Row, close, drawn
from tests.reference import router as of_router

#: Tokens, experts, topk, groups, best groups: one of all, odd numbers, more than 32, 16 and 8192 of this and that, more
#: tokens than warps of a GPU.
SIZES = [
    (1, 1, 1, 0, 0), (5, 8, 2, 0, 0), (33, 40, 4, 4, 2), (7, 130, 6, 0, 0), (12, 64, 8, 8, 4), (3, 96, 17, 0, 0),
    (4, 256, 32, 8, 4), (2, 1024, 20, 4, 4), (9, 6, 4, 3, 2), (0, 8, 2, 4, 2), (1, 8192, 40, 0, 0), (9000, 8, 1, 0, 0),
    (6, 33, 33, 0, 0), (20, 12, 2, 6, 2),
]  # fmt: skip
KINDS = [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]
TOPK = [(*both, i) for i, both in enumerate(product(SIZES, KINDS))]


def logits_of(size: Any, dtype: str, number: int, score: str) -> Array:
    """Some beyond 20, where softplus is its argument."""
    x = drawn(size, dtype, number, 1.5)
    if score == "sqrtsoftplus" and x.size > 40:
        x[:2, ::7] += np.asarray(25, x.dtype)
    return x


def gradient(jacobian: Array, g: Array, dtype: str) -> Near | None:
    """From that of the outputs; none of very many experts."""
    if g.shape[1] > 2000:
        return None
    both = [np.einsum("tab,ta->tb", j, f) for j, f in ((jacobian, g), (abs(jacobian), abs(g)))]
    return close(both[0], dtype, 2e-5 * both[1] + 1e-7)._replace(dtype=dtype)


def router_topk(size: Any, dtype: str, number: int) -> Case:
    """Gates, the map in every form, the rows of each expert, and the gradient by way of each form."""
    (tokens, experts, topk, groups, best), (score, pre), at = size
    x, scale = logits_of((tokens, experts), dtype, number, score), (1.0, 2.5)[at % 2]
    bias = None
    if score != "softmax" and at % 3:
        bias = (0.1 * np.random.default_rng(number).standard_normal(experts)).astype(np.float32)
    terms = RouterTerms(topk, score, pre, groups, best, scale)
    gates, chosen, jacobian = of_router.topk(x, topk, score, pre, terms.groups, terms.group_topk, scale, bias)
    g, form = drawn((tokens, experts), dtype, number + 1), list(FORMS)[at % len(FORMS)]

    def run(rt: Runtime, put: Put) -> Found:
        counts = rt.empty((experts,), dtypes.int32) if at % 4 > 1 else None
        offsets = rt.empty((experts + 1,), dtypes.int32) if at % 4 % 3 else None
        more: dict[str, Any] = {"counts": counts, "offsets": offsets, "align": align}
        gates, routing = ops.router_topk_forward(rt, put(x), terms=terms, bias=put(bias), form=form, **more)
        dx = ops.router_topk_backward(rt, put(g), put(x), routing, terms=terms) if experts < 2000 else None
        return {"gates": gates, "routing": routing, "counts": counts, "offsets": offsets, "dx": dx}

    rows, align = chosen.sum(0), (1, 16, 5)[at % 3]
    padded = -(-rows // align) * align
    slack = 4e-6 * gates + (0 if bias is None else scale * 2.0**-22 * chosen)
    return Case(
        run,
        {
            "gates": close(gates, dtype, slack)._replace(dtype=dtype),
            "routing": Near(of_router.written(chosen, form, topk), dtype="bool" if form == "bytemap" else ""),
            "counts": Near(rows, dtype="int32") if at % 4 > 1 else None,
            "offsets": Near(np.append(0, padded.cumsum()), dtype="int32") if at % 4 % 3 else None,
            "dx": gradient(jacobian, g.astype(np.float64), dtype),
        },
    )


def router_equal(size: Any, dtype: str, number: int) -> Case:
    """Of equal ones the first are chosen, minus infinity last, NaN first, and no others than in the best group."""
    topk, groups = size
    x = np.zeros((4, 64), dtype)
    x[1, ::2], x[2, 1::2], x[3, 40:] = -np.inf, 1, np.nan
    x[0, 1] = -0.0
    terms = RouterTerms(topk, groups=groups, group_topk=bool(groups))
    order = [np.argsort(-np.nan_to_num(row.astype(np.float64), nan=9, neginf=-9), kind="stable") for row in x]
    if groups:
        order = [of[(of < 32) == (row[:32].sum() >= row[32:].sum())] for of, row in zip(order, x, strict=True)]
    want = np.sort([of[:topk] for of in order], 1).astype(np.int32)

    def run(rt: Runtime, put: Put) -> Found:
        for _ in range(2):  # the counts are those of one call
            counts = rt.empty((64,), dtypes.int32)
            _, routing = ops.router_topk_forward(rt, put(x), terms=terms, form="int32", counts=counts)
        return {"routing": routing, "counts": counts}

    return Case(run, {"routing": Near(want), "counts": Near(np.bincount(want.ravel(), minlength=64), dtype="int32")})


def router_histogram(size: Any, dtype: str, number: int) -> Case:
    """Added to what is there; what is beyond the bounds is in the outer bins."""
    tokens, experts, topk, bins = size
    x, bias = drawn((tokens, experts), dtype, number), drawn(experts, "float32", 1, 0.1)
    bounds, before = np.array([-0.25, 0.5], np.float32), np.full((experts, bins), 3, np.int32)

    def run(rt: Runtime, put: Put) -> Found:
        counts = put(before)
        terms = RouterTerms(topk, "sigmoid")
        ops.router_topk_forward(rt, put(x), terms=terms, bias=put(bias), histogram=counts, bounds=put(bounds))
        return {"histogram": counts}

    def want(found: dict[str, Array]) -> dict[str, Near | None]:
        exact = before + of_router.histogram(x, topk, bias, (-0.25, 0.5), bins)
        moved = np.abs(np.cumsum(found["histogram"] - exact, axis=1)).sum()  # at the edge of a bin by a rounding
        assert moved <= 1e-3 * x.size and found["histogram"].sum() == exact.sum()
        return {"histogram": Near(exact, 1)}

    return Case(run, want)


def router_scores(size: Any, dtype: str, number: int) -> Case:
    """Scores of all experts, the best of them, and the gradient."""
    (tokens, experts, topk, _, _), (score, _), at = size
    x, g = logits_of((tokens, experts), dtype, number, score), drawn((tokens, experts), "float32", number + 1)
    values, chosen, jacobian = of_router.scores(x, topk, score)
    terms, form = RouterTerms(topk, score), list(FORMS)[at % len(FORMS)]

    def run(rt: Runtime, put: Put) -> Found:
        scores, routing = ops.router_scores_forward(rt, put(x), terms=terms, form=form)
        dx = ops.router_scores_backward(rt, put(g), put(x), terms=terms)
        return {"scores": scores, "routing": routing, "dx": dx if experts < 2000 else None}

    return Case(
        run,
        {
            "scores": Near(values, 1e-5 * values + 1e-30, "float32"),
            "routing": Near(of_router.written(chosen, form, topk)),
            "dx": gradient(jacobian, g.astype(np.float64), dtype),
        },
    )


def router_aux_loss(size: Any, dtype: str, number: int) -> Case:
    """Columns of several sequences, and counts of every type."""
    (tokens, experts, times), kind = size
    probs = np.abs(drawn((tokens, experts * times), dtype, number))
    weights = np.random.default_rng(number).integers(0, 9, experts * times).astype(kind)
    loss, dloss = of_router.aux_loss(probs, weights, 777, experts, 3, 0.25), np.array([1.5], probs.dtype)
    each = np.broadcast_to(1.5 * 0.25 * experts / 3 / 777**2 * weights.astype(np.float64), probs.shape)

    def run(rt: Runtime, put: Put) -> Found:
        given: dict[str, Any] = {"experts": experts, "topk": 3, "coeff": 0.25}
        beside = put(weights), put(np.array([777], ("int32", "int64")[number % 2]))
        dx = ops.router_aux_loss_backward(rt, put(dloss), *beside, rows=tokens, **given)
        return {"loss": ops.router_aux_loss_forward(rt, put(probs), *beside, **given), "dx": dx}

    near = close(np.array([loss]), dtype, 1e-5 * loss)._replace(dtype=dtype)
    return Case(run, {"loss": near, "dx": close(each, dtype, 1e-6 * each)._replace(dtype=dtype)})


ROWS: dict[str, Row] = {
    "router_topk": Row(router_topk, TOPK, large=[((4096, 128, 8, 8, 4), kind, i) for i, kind in enumerate(KINDS)]),
    "router_topk of equal ones": Row(router_equal, [(1, 0), (5, 0), (16, 0), (17, 0), (64, 0), (4, 2), (20, 2)]),
    "router_topk with a histogram": Row(router_histogram, [(40, 16, 4, 10), (300, 96, 20, 1000), (0, 8, 2, 5)]),
    "router_scores": Row(router_scores, TOPK, large=[((4096, 128, 8, 0, 0), kind, i) for i, kind in enumerate(KINDS)]),
    "router_aux_loss": Row(
        router_aux_loss,
        [*product([(40, 8, 1), (1000, 6, 2), (2400, 70, 3), (0, 4, 1)], ("int32", "int64", "float32", "bfloat16"))],
    ),
}  # fmt: skip
