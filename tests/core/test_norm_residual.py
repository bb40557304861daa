"""Norms in a residual stream: the sum formed on the way forward, the gradient round the norm added on the way back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.ops.norm import Branch
from te_core.quantized import Cast
from te_core.runtime import Runtime
from tests.core.covering_lists import covering_lists
from tests.core.test_norm import (
    BACKWARD_CASES,
    EPS,
    NUMPY,
    Case,
    assert_close,
    assert_same_cast,
    bits,
    misplaced,
    rounding,
)
from tests.reference import norm as reference


@pytest.mark.parametrize(("kind", "x", "dy", "gamma", "zero_centered", "shape"), BACKWARD_CASES)
def test_backward_takes_the_other_gradient_along(
    rt: Runtime, kind: str, x: str, dy: str, gamma: str, zero_centered: bool, shape: tuple[int, int]
) -> None:
    """dx + add, rounded once: nearer to the exact sum than the two rounded parts; dgamma and dbeta as without."""
    case = Case(kind, x, gamma, shape, seed=2)
    grad = case.random.standard_normal(shape).astype(NUMPY[dy])
    want = reference.backward(grad, case.x, case.gamma, kind=kind, eps=EPS, zero_centered=zero_centered)
    # Of the gradient's own size: where they cancel, a gradient rounded before shows.
    other = (-want.dx * case.random.uniform(0.5, 1.5, shape)).astype(NUMPY[x])
    dx, dgamma, dbeta = case.backward(rt, grad, add=other, zero_centered=zero_centered)
    total = want.dx + other.astype(np.float64)
    assert dx.dtype == NUMPY[x]
    assert_close(dx, total, rounding(total, x, want.dx_scale + np.abs(other.astype(np.float64))))
    _, plain_dgamma, plain_dbeta = case.backward(rt, grad, zero_centered=zero_centered)
    assert np.array_equal(bits(dgamma), bits(plain_dgamma))
    assert dbeta is None or np.array_equal(bits(dbeta), bits(plain_dbeta))


@pytest.mark.parametrize("by", [1, 2, 4])
def test_what_is_added_may_lie_anywhere(rt: Runtime, by: int) -> None:
    case = Case("LayerNorm", "bf16", "bf16", (19, 512))
    dy, other = (case.random.standard_normal(case.x.shape).astype(ml_dtypes.bfloat16) for _ in range(2))
    x, gamma, beta = rt.tensor(case.x), rt.tensor(case.gamma), rt.tensor(case.beta)
    _, _, mean, rstd = ops.norm_forward(rt, x, gamma, beta, kind="LayerNorm", eps=EPS)
    dx, _, _ = ops.norm_backward(
        rt, rt.tensor(dy), x, gamma, mean, rstd, kind="LayerNorm", add=misplaced(rt, other, by)
    )
    want = reference.backward(dy, case.x, case.gamma, kind="LayerNorm", eps=EPS, zero_centered=False)
    total = want.dx + other.astype(np.float64)
    assert_close(rt.numpy(dx), total, rounding(total, "bf16", want.dx_scale + np.abs(other.astype(np.float64))))


BRANCHES = [  # kind, x, gamma, shape, bias, p
    ("LayerNorm", "bf16", "bf16", (70, 1024), True, 0.1),
    ("RMSNorm", "bf16", "fp32", (33, 4096), True, 0.0),
    ("RMSNorm", "fp32", "fp32", (50, 260), False, 0.5),
    ("LayerNorm", "fp32", "bf16", (3, 4096), True, 0.9),
    ("LayerNorm", "fp16", "fp16", (129, 40), False, 0.0),
    ("RMSNorm", "fp16", "fp16", (31, 77), True, 0.3),  # an element at a time, at every place of a draw of four
    ("LayerNorm", "bf16", "bf16", (21, 90), False, 0.3),  # two at a time
    ("LayerNorm", "bf16", "bf16", (5, 1), True, 0.5),
    ("RMSNorm", "bf16", "bf16", (4, 8200), True, 0.2),
    ("LayerNorm", "bf16", "bf16", (35, 20000), True, 0.2),
    ("LayerNorm", "fp32", "fp32", (3, 65535), True, 0.2),  # too long to hold
    ("RMSNorm", "bf16", "bf16", (2, 65536), False, 0.0),
    ("LayerNorm", "bf16", "bf16", (9001, 8), True, 0.4),
    ("RMSNorm", "bf16", "bf16", (0, 64), True, 0.4),
]


@covering_lists(
    pytest.mark.parametrize(("kind", "x", "gamma", "shape", "bias", "p"), BRANCHES),
    pytest.mark.parametrize("delivery", ["values", "delayed", "current"]),
)
def test_a_sum_and_its_norm_in_one(
    rt: Runtime, kind: str, x: str, gamma: str, shape: tuple[int, int], bias: bool, p: float, delivery: str
) -> None:
    """The sum is that of bias_dropout_add bit for bit, and what is normed is the rounded sum."""
    case = Case(kind, x, gamma, shape, seed=4)
    there, gain = rt.tensor(case.x), rt.tensor(case.gamma)
    beta = None if case.beta is None else rt.tensor(case.beta)
    residual = rt.tensor(case.random.standard_normal(shape).astype(NUMPY[x]))
    shift = rt.tensor(case.random.standard_normal(shape[1]).astype(NUMPY[x])) if bias else None
    rng = rt.tensor(np.array([5, 2**40 + 3], np.int64))
    scale = rt.tensor(np.array([3.5], np.float32)) if delivery == "delayed" else None

    def cast() -> Cast | None:
        if delivery == "values":
            return None
        amax = rt.tensor(np.zeros(1, np.float32))
        return Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True, scale=scale, amax=amax)

    options = {"kind": kind, "eps": EPS, "keep": True}
    plain = ops.bias_dropout_add(rt, there, shift, residual, p=p, rng=rng, site=-7)
    apart = cast()
    want, want_q, want_mean, want_rstd = ops.norm_forward(rt, plain, gain, beta, cast=apart, **options)
    branch = Branch(residual, rt.empty(shape, there.dtype), shift, p, rng, -7)
    fused = cast()
    y, q, mean, rstd = ops.norm_forward(rt, there, gain, beta, branch=branch, cast=fused, **options)
    for got, expected in ((branch.sum, plain), (y, want), (mean, want_mean), (rstd, want_rstd)):
        assert (got is None) == (expected is None)
        assert got is None or np.array_equal(bits(rt.numpy(got)), bits(rt.numpy(expected)))
    if fused is not None:
        assert_same_cast(rt, q, want_q)
        assert rt.numpy(fused.amax)[0] == rt.numpy(apart.amax)[0]


@covering_lists(pytest.mark.parametrize("moved", ["residual", "bias", "sum"]), pytest.mark.parametrize("by", [1, 2, 4]))
def test_a_branch_may_lie_anywhere(rt: Runtime, moved: str, by: int) -> None:
    case = Case("RMSNorm", "bf16", "bf16", (19, 512))
    arrays = {
        "residual": case.random.standard_normal(case.x.shape),
        "bias": case.random.standard_normal(512),
        "sum": np.zeros(case.x.shape),
    }
    placed = {
        name: misplaced(rt, a.astype(ml_dtypes.bfloat16), by if name == moved else 0) for name, a in arrays.items()
    }
    rng = rt.tensor(np.array([1, 2], np.int64))
    plain = ops.bias_dropout_add(rt, rt.tensor(case.x), placed["bias"], placed["residual"], p=0.25, rng=rng)
    branch = Branch(placed["residual"], placed["sum"], placed["bias"], 0.25, rng)
    y, _, _, _ = ops.norm_forward(
        rt, rt.tensor(case.x), rt.tensor(case.gamma), None, kind="RMSNorm", eps=EPS, branch=branch
    )
    assert np.array_equal(bits(rt.numpy(branch.sum)), bits(rt.numpy(plain)))
    want = reference.forward(rt.numpy(plain), case.gamma, None, kind="RMSNorm", eps=EPS, zero_centered=False)
    assert_close(rt.numpy(y), want.y, rounding(want.y, "bf16", want.scale))


def test_a_branch_is_checked(rt: Runtime) -> None:
    x, gamma = rt.tensor(np.ones((3, 12), np.float32)), rt.tensor(np.ones(12, np.float32))
    short = rt.tensor(np.ones((1, 12), np.float32))
    for message, branch in [
        ("shape", Branch(short, x)),
        ("shape", Branch(x, short)),
        ("bias", Branch(x, x, rt.tensor(np.ones(7, np.float32)))),
        ("branch.rng=None", Branch(x, x, None, 0.5)),
        ("p=1.5", Branch(x, x, None, 1.5, rt.tensor(np.zeros(2, np.int64)))),
    ]:
        with pytest.raises(ArgumentError, match=message):
            ops.norm_forward(rt, x, gamma, None, kind="RMSNorm", eps=EPS, branch=branch)
    _, _, _, rstd = ops.norm_forward(rt, x, gamma, None, kind="RMSNorm", eps=EPS)
    with pytest.raises(ArgumentError, match="shape"):
        ops.norm_backward(rt, x, x, gamma, None, rstd, kind="RMSNorm", add=short)


@pytest.mark.parametrize(
    ("kind", "shape"), [("LayerNorm", (70, 1024)), ("RMSNorm", (33, 333)), ("LayerNorm", (3, 20000))]
)
def test_in_float32_the_sum_rounds_as_one_of_its_own(rt: Runtime, kind: str, shape: tuple[int, int]) -> None:
    case = Case(kind, "fp32", "fp32", shape, seed=6)
    dy, other = (case.random.standard_normal(shape).astype(np.float32) for _ in range(2))
    dx, _, _ = case.backward(rt, dy)
    total, _, _ = case.backward(rt, dy, add=other)
    assert np.array_equal(bits(total), bits(dx + other))
