"""LayerNorm and RMSNorm on every backend: values, gradients, FP8 delivery, edges, promises."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from te_core import dtypes, ops
from te_core.errors import ArgumentError
from te_core.plan_cache import PlanCache
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core.covering_lists import covering_lists
from tests.reference import norm as reference

Array = np.ndarray[Any, Any]

KINDS = ("LayerNorm", "RMSNorm")
NUMPY = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
EPS = 1e-5
STATISTICS = 2e-6  # of the row's scale: targets.md, Numerics
SUMS = 1e-5  # of the sum of the absolute terms

# kind, x, gamma, out, zero-centered, shape: every value of each beside every other of its neighbours
FORWARD_CASES = [
    ("LayerNorm", "fp32", "fp32", "fp32", False, (5, 64)),
    ("RMSNorm", "fp32", "fp32", "fp32", True, (3, 1)),
    ("LayerNorm", "fp32", "bf16", "bf16", True, (33, 256)),
    ("RMSNorm", "fp32", "fp16", "fp16", False, (4, 1023)),
    ("LayerNorm", "bf16", "bf16", "bf16", False, (70, 1024)),
    ("LayerNorm", "bf16", "fp32", "bf16", True, (3, 4096)),
    ("RMSNorm", "bf16", "bf16", "bf16", False, (9, 5120)),
    ("RMSNorm", "bf16", "fp32", "fp32", True, (2, 8200)),
    ("LayerNorm", "bf16", "fp16", "fp32", False, (3, 4097)),
    ("LayerNorm", "fp16", "fp16", "fp16", False, (130, 24)),
    ("RMSNorm", "fp16", "fp32", "bf16", True, (17, 100)),
    ("LayerNorm", "fp16", "bf16", "fp32", False, (6, 7)),
    ("RMSNorm", "bf16", "bf16", "bf16", False, (1, 65536)),
    ("LayerNorm", "bf16", "bf16", "bf16", True, (2, 65535)),
    ("LayerNorm", "fp32", "fp32", "fp32", False, (2, 65536)),
    ("LayerNorm", "bf16", "bf16", "bf16", False, (9001, 8)),
    ("RMSNorm", "fp32", "fp32", "fp32", False, (3000, 33)),
    ("LayerNorm", "fp32", "fp32", "fp32", False, (3, 16385)),
    ("RMSNorm", "fp16", "fp16", "fp16", True, (2, 24576)),
]
# kind, x, dy, gamma, zero-centered, shape
BACKWARD_CASES = [
    ("LayerNorm", "fp32", "fp32", "fp32", False, (5, 64)),
    ("RMSNorm", "fp32", "bf16", "fp32", True, (3, 1)),
    ("LayerNorm", "bf16", "bf16", "bf16", False, (700, 1024)),
    ("RMSNorm", "bf16", "bf16", "fp32", True, (300, 4096)),
    ("LayerNorm", "fp16", "fp16", "fp16", True, (9, 5120)),
    ("RMSNorm", "fp16", "fp32", "bf16", False, (17, 100)),
    ("LayerNorm", "bf16", "fp16", "bf16", False, (3, 4097)),
    ("LayerNorm", "fp32", "fp32", "fp32", True, (40, 16384)),
    ("RMSNorm", "bf16", "bf16", "bf16", False, (5, 16383)),
    ("LayerNorm", "bf16", "bf16", "bf16", False, (21, 65536)),
    ("RMSNorm", "fp32", "fp32", "fp32", True, (3, 65535)),
    ("LayerNorm", "bf16", "bf16", "bf16", True, (9001, 8)),
    ("LayerNorm", "fp32", "fp32", "fp32", False, (3000, 33)),
    ("RMSNorm", "fp16", "fp16", "fp16", False, (2500, 768)),
    ("LayerNorm", "fp32", "fp32", "fp32", False, (5000, 1032)),  # several rows for each team of threads
]


class Case:
    """Random operands of one shape; `offset` moves x away from zero."""

    def __init__(
        self, kind: str, x: str, gamma: str, shape: tuple[int, int], *, seed: int = 0, offset: float = 0.5
    ) -> None:
        random = np.random.default_rng([seed, *shape])
        m, k = shape
        # Rows of very different sizes: a statistic taken from a neighbour's row shows.
        spread = np.exp2(random.integers(-4, 5, (m, 1)))
        self.kind = kind
        self.x = ((random.standard_normal(shape) + offset) * spread).astype(NUMPY[x])
        self.gamma = random.uniform(-1.5, 1.5, k).astype(NUMPY[gamma])
        self.beta = random.standard_normal(k).astype(NUMPY[gamma]) if kind == "LayerNorm" else None
        self.random = random

    def forward(self, rt: Runtime, **options: Any) -> tuple[Any, QuantizedTensor | None, Any, Any]:
        """Host copies of y, mean and rstd; the quantized tensor as it is."""
        beta = None if self.beta is None else rt.tensor(self.beta)
        options = {"kind": self.kind, "eps": EPS, **options}
        y, q, mean, rstd = ops.norm_forward(rt, rt.tensor(self.x), rt.tensor(self.gamma), beta, **options)
        return _host(rt, y), q, _host(rt, mean), _host(rt, rstd)

    def backward(self, rt: Runtime, dy: Array, add: Array | None = None, **options: Any) -> tuple[Any, ...]:
        """Host copies of dx, dgamma and dbeta."""
        x, gamma = rt.tensor(self.x), rt.tensor(self.gamma)
        beta = None if self.beta is None else rt.tensor(self.beta)
        _, _, mean, rstd = ops.norm_forward(rt, x, gamma, beta, kind=self.kind, eps=EPS, **options)
        other = None if add is None else rt.tensor(add)
        grads = ops.norm_backward(rt, rt.tensor(dy), x, gamma, mean, rstd, kind=self.kind, add=other, **options)
        return tuple(_host(rt, g) for g in grads)


def _host(rt: Runtime, t: Tensor | None) -> Array | None:
    return None if t is None else rt.numpy(t)


def bits(a: Array) -> Array:
    """The bytes as whole numbers, so that NaN equals itself and -0 is not 0."""
    return a.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize])


def _ulp(values: Array, dtype: Any) -> Array:
    """The distance between neighbouring numbers of `dtype` around the values."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(values), float(info.smallest_normal))))
    return np.exp2(exponent - info.nmant)


def assert_close(got: Array, want: Array, allowed: Array | float) -> None:
    """Each element within what it may be off by."""
    error = np.abs(got.astype(np.float64) - want)
    bad = ~(error <= allowed)
    assert not bad.any(), f"{bad.sum()} of {bad.size} off, first at {np.argwhere(bad)[0]}, worst {error.max()}"


def rounding(want: Array, dtype: str, scale: Array) -> Array:
    """What a correctly computed value may be off by: float32 arithmetic, then half an ulp (a whole one at a tie)."""
    allowed = STATISTICS * scale
    return allowed if dtype == "fp32" else allowed + 0.51 * _ulp(want, NUMPY[dtype])


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(("kind", "x", "gamma", "out", "zero_centered", "shape"), FORWARD_CASES)
def test_forward_is_the_formula(
    rt: Runtime, kind: str, x: str, gamma: str, out: str, zero_centered: bool, shape: tuple[int, int]
) -> None:
    case = Case(kind, x, gamma, shape)
    y, q, mean, rstd = case.forward(rt, zero_centered=zero_centered, out_dtype=dtypes.dtype(out))
    want = reference.forward(case.x, case.gamma, case.beta, kind=kind, eps=EPS, zero_centered=zero_centered)
    assert q is None
    assert y.dtype == NUMPY[out]
    assert_close(y, want.y, rounding(want.y, out, want.scale))
    assert_close(rstd, want.rstd, STATISTICS * want.rstd)
    if kind == "RMSNorm":
        assert mean is None
    else:
        assert_close(mean, want.mean, STATISTICS * np.abs(case.x.astype(np.float64)).max(axis=1))


@pytest.mark.parametrize("eps", [1e-12, 0.25])
@pytest.mark.parametrize("kind", KINDS)
def test_epsilon_stands_under_the_root(rt: Runtime, kind: str, eps: float) -> None:
    case = Case(kind, "fp32", "fp32", (8, 96))
    y, _, _, rstd = case.forward(rt, eps=eps)
    want = reference.forward(case.x, case.gamma, case.beta, kind=kind, eps=eps, zero_centered=False)
    assert_close(y, want.y, STATISTICS * want.scale)
    assert_close(rstd, want.rstd, STATISTICS * want.rstd)


@covering_lists(
    pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("shape", [(6, 48), (3, 4096), (2, 40000)])
)
def test_scaling_a_row_by_a_power_of_two_changes_no_bit(rt: Runtime, kind: str, shape: tuple[int, int]) -> None:
    case = Case(kind, "fp32", "fp32", shape)
    y, _, _, rstd = case.forward(rt, eps=2.0**-16)
    case.x = case.x * np.float32(16)
    scaled, _, _, scaled_rstd = case.forward(rt, eps=2.0**-8)
    assert np.array_equal(bits(scaled), bits(y))
    assert np.array_equal(scaled_rstd * 16, rstd)


@pytest.mark.parametrize("shape", [(6, 48), (3, 4096), (2, 40000)])
def test_layernorm_does_not_see_a_shift(rt: Runtime, shape: tuple[int, int]) -> None:
    # Steps of 1/64 keep x + 4096 exact. E[x^2] - E[x]^2 in float32 would lose every digit of the variance.
    case = Case("LayerNorm", "fp32", "fp32", shape)
    case.x = (case.random.integers(-256, 257, shape) / 64).astype(np.float32)
    y, _, mean, rstd = case.forward(rt)
    case.x = case.x + np.float32(4096)
    shifted, _, shifted_mean, shifted_rstd = case.forward(rt)
    assert_close(shifted_rstd, rstd.astype(np.float64), 2 * STATISTICS * rstd)
    assert_close(shifted_mean, mean.astype(np.float64) + 4096, 4096 * STATISTICS)
    # What is left is the rounding of the mean, some 2^-11, in units of the row's deviation.
    assert_close(shifted, y.astype(np.float64), 4096 * STATISTICS * rstd[:, None] * np.abs(case.gamma) + 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_no_other(rt: Runtime, kind: str) -> None:
    case = Case(kind, "bf16", "bf16", (50, 320))
    y, _, _, rstd = case.forward(rt)
    case.x = case.x[[17]]
    alone, _, _, alone_rstd = case.forward(rt)
    assert np.array_equal(bits(alone[0]), bits(y[17]))
    assert alone_rstd[0] == rstd[17]


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_row_is_finite(rt: Runtime, kind: str) -> None:
    case = Case(kind, "fp32", "fp32", (4, 100))
    case.x[:] = np.array([[0.0], [1.0], [-3.7], [1e4]], np.float32)
    y, _, _, _ = case.forward(rt)
    want = reference.forward(case.x, case.gamma, case.beta, kind=kind, eps=EPS, zero_centered=False)
    assert_close(y, want.y, STATISTICS * want.scale)


@pytest.mark.parametrize("kind", KINDS)
def test_not_a_number_stays_in_its_row(rt: Runtime, kind: str) -> None:
    case = Case(kind, "fp32", "fp32", (5, 40))
    clean, _, _, _ = case.forward(rt)
    case.x[2, 7] = np.nan
    y, _, _, _ = case.forward(rt)
    assert np.isnan(y[2]).all()
    others = [0, 1, 3, 4]
    assert np.array_equal(y[others], clean[others])


# ---------------------------------------------------------------------------------------------- unaligned, empty, odd


def misplaced(rt: Runtime, array: Array, by: int) -> Tensor:
    """The array on the device, `by` elements beyond a 16-byte boundary."""
    flat = rt.tensor(np.concatenate([np.zeros(by, array.dtype), array.reshape(-1)]))
    return Tensor(flat.ptr + by * array.dtype.itemsize, array.shape, flat.dtype, flat.device, flat)


@covering_lists(pytest.mark.parametrize("moved", ["x", "gamma", "dy", "dx"]), pytest.mark.parametrize("by", [1, 2, 4]))
def test_operands_may_lie_anywhere(rt: Runtime, moved: str, by: int) -> None:
    case = Case("LayerNorm", "bf16", "bf16", (19, 512))
    dy = case.random.standard_normal(case.x.shape).astype(ml_dtypes.bfloat16)

    def place(name: str, array: Array) -> Tensor:
        return misplaced(rt, array, by if name == moved else 0)

    x, gamma, beta = place("x", case.x), place("gamma", case.gamma), place("gamma", case.beta)
    scale = rt.tensor(np.array([3.0], np.float32))
    cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True, scale=scale)
    y, q, mean, rstd = ops.norm_forward(rt, x, gamma, beta, kind="LayerNorm", eps=EPS, cast=cast, keep=True)
    plain, _, _, _ = ops.norm_forward(rt, x, gamma, beta, kind="LayerNorm", eps=EPS)
    want = reference.forward(case.x, case.gamma, case.beta, kind="LayerNorm", eps=EPS, zero_centered=False)
    assert_close(rt.numpy(y), want.y, rounding(want.y, "bf16", want.scale))
    assert_same_cast(rt, q, ops.quantize(rt, plain, cast))
    out = place("dx", np.zeros_like(dy))
    dx, dgamma, dbeta = ops.norm_backward(rt, place("dy", dy), x, gamma, mean, rstd, kind="LayerNorm", out=out)
    grads = reference.backward(dy, case.x, case.gamma, kind="LayerNorm", eps=EPS, zero_centered=False)
    assert dx is out
    assert_close(rt.numpy(dx), grads.dx, rounding(grads.dx, "bf16", grads.dx_scale))
    assert_close(rt.numpy(dgamma), grads.dgamma, _sum_error(grads.dgamma, grads.dgamma_terms, "bf16"))
    assert_close(rt.numpy(dbeta), grads.dbeta, _sum_error(grads.dbeta, grads.dbeta_terms, "bf16"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(rt: Runtime, kind: str) -> None:
    case = Case(kind, "bf16", "fp32", (0, 72))
    for delayed in (True, False):
        scale = rt.tensor(np.array([4.0], np.float32)) if delayed else None
        amax = rt.tensor(np.array([0.5], np.float32))
        cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True, scale=scale, amax=amax)
        y, q, _, rstd = case.forward(rt, cast=cast, keep=True)
        assert y.shape == (0, 72)
        assert rstd.shape == (0,)
        assert rt.numpy(q.scale_inv)[0] == (0.25 if delayed else 1.0)
        assert rt.numpy(amax)[0] == 0.5
    dx, dgamma, dbeta = case.backward(rt, np.zeros((0, 72), ml_dtypes.bfloat16))
    assert dx.shape == (0, 72)
    assert not dgamma.any()
    assert dbeta is None if kind == "RMSNorm" else not dbeta.any()


# ---------------------------------------------------------------------------------------------- FP8 delivery


def assert_same_cast(rt: Runtime, got: QuantizedTensor, want: QuantizedTensor) -> None:
    """Equal bytes and scales."""
    for name in ("rowwise", "columnwise", "scale_inv"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            a, b = bits(rt.numpy(a)), bits(rt.numpy(b))
            assert a.shape == b.shape
            assert np.array_equal(a, b), f"{name}: {(a != b).sum()} differ, first at {np.argwhere(a != b)[0]}"


CASTS = [  # kind, x, gamma, out, shape
    ("LayerNorm", "bf16", "bf16", "bf16", (70, 1024)),
    ("RMSNorm", "bf16", "fp32", "bf16", (33, 4096)),
    ("RMSNorm", "fp32", "fp32", "fp32", (50, 260)),
    ("LayerNorm", "fp32", "bf16", "fp16", (16, 100)),
    ("LayerNorm", "fp16", "fp16", "fp32", (129, 40)),
    ("RMSNorm", "fp16", "fp16", "fp16", (31, 77)),
    ("LayerNorm", "bf16", "bf16", "bf16", (5, 1)),
    ("RMSNorm", "bf16", "bf16", "bf16", (1, 8200)),
    ("LayerNorm", "bf16", "bf16", "bf16", (35, 20000)),
    ("RMSNorm", "bf16", "bf16", "bf16", (5000, 16)),
    ("LayerNorm", "bf16", "bf16", "bf16", (9000, 264)),  # more tiles of rows than blocks: scratch is a block's own
]


@covering_lists(
    pytest.mark.parametrize(("kind", "x", "gamma", "out", "shape"), CASTS),
    pytest.mark.parametrize("scaling", ["delayed", "current"]),
    pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True)]),
)
def test_fused_equals_unfused_bit_for_bit(
    rt: Runtime, kind: str, x: str, gamma: str, out: str, shape: tuple[int, int], scaling: str, ways: tuple[bool, bool]
) -> None:
    case, (rowwise, columnwise) = Case(kind, x, gamma, shape, seed=3), ways
    fp8 = dtypes.float8_e5m2 if columnwise and not rowwise else dtypes.float8_e4m3
    scale = rt.tensor(np.array([37.5], np.float32)) if scaling == "delayed" else None

    def cast(amax: float) -> Cast:
        return Cast(
            fp8,
            rowwise=rowwise,
            columnwise=columnwise,
            scale=scale,
            amax=rt.tensor(np.array([amax], np.float32)),
            power_of_two=kind == "RMSNorm",
        )

    options = {"zero_centered": kind == "RMSNorm", "out_dtype": dtypes.dtype(out)}
    y, _, mean, rstd = case.forward(rt, **options)
    apart = cast(0.0)
    want = ops.quantize(rt, rt.tensor(y), apart)
    for keep in (True, False):
        fused = cast(0.0)
        kept, got, fused_mean, fused_rstd = case.forward(rt, cast=fused, keep=keep, **options)
        assert (kept is not None) == keep
        if keep:
            assert np.array_equal(bits(kept), bits(y))
        assert np.array_equal(fused_rstd, rstd)
        assert mean is None or np.array_equal(fused_mean, mean)
        assert_same_cast(rt, got, want)
        top = np.abs(y.astype(np.float32)).max()
        assert rt.numpy(fused.amax)[0] == rt.numpy(apart.amax)[0] == top
    # An amax is raised, never lowered.
    high = cast(1e6)
    case.forward(rt, cast=high, **options)
    assert rt.numpy(high.amax)[0] == 1e6


@pytest.mark.parametrize("columnwise", [False, True])
def test_the_maximum_may_stand_anywhere(rt: Runtime, columnwise: bool) -> None:
    """Whichever warp of a block has it."""
    case = Case("RMSNorm", "bf16", "bf16", (32, 1024))
    case.gamma[:] = 1
    for place in itertools.product(range(32), (5, 300, 700, 1020)):
        case.x[:] = 1
        case.x[place] = 1e4
        cast = Cast(
            dtypes.float8_e4m3, rowwise=True, columnwise=columnwise, amax=rt.tensor(np.zeros(1, np.float32)), scale=None
        )
        y, _, _, _ = case.forward(rt, cast=cast, keep=True)
        assert rt.numpy(cast.amax)[0] == y[place] > 30, place


@pytest.mark.parametrize("columnwise", [False, True])
def test_amax_passes_over_not_a_number(rt: Runtime, columnwise: bool) -> None:
    case = Case("LayerNorm", "bf16", "bf16", (40, 64))
    case.x[3, 5] = np.nan
    for scale in (rt.tensor(np.array([2.0], np.float32)), None):
        cast = Cast(
            dtypes.float8_e4m3,
            rowwise=True,
            columnwise=columnwise,
            scale=scale,
            amax=rt.tensor(np.zeros(1, np.float32)),
        )
        y, q, _, _ = case.forward(rt, cast=cast, keep=True)
        assert np.isnan(y[3].astype(np.float32)).all()
        assert rt.numpy(cast.amax)[0] == np.nanmax(np.abs(y.astype(np.float32)))
        assert_same_cast(rt, q, ops.quantize(rt, rt.tensor(y), cast))


# ---------------------------------------------------------------------------------------------- gradients


def test_the_reference_gradients_are_slopes() -> None:
    random = np.random.default_rng(5)
    for kind in KINDS:
        x, dy, gamma = (random.standard_normal((3, 6)), random.standard_normal((3, 6)), random.standard_normal(6))
        beta = random.standard_normal(6) if kind == "LayerNorm" else None
        operands = {"x": x, "gamma": gamma, **({} if beta is None else {"beta": beta})}
        grads = reference.backward(dy, x, gamma, kind=kind, eps=1e-3, zero_centered=True)
        for name, array in operands.items():
            for at in np.ndindex(array.shape):
                ends = []
                for step in (1e-6, -1e-6):
                    moved = {**operands, name: array.copy()}
                    moved[name][at] += step
                    y = reference.forward(
                        moved["x"], moved["gamma"], moved.get("beta"), kind=kind, eps=1e-3, zero_centered=True
                    ).y
                    ends.append((dy * y).sum())
                assert getattr(grads, f"d{name}")[at] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6, abs=1e-7)


def _sum_error(want: Array, terms: Array, dtype: str) -> Array:
    return SUMS * terms + (0 if dtype == "fp32" else 0.51 * _ulp(want, NUMPY[dtype]))


@pytest.mark.parametrize(("kind", "x", "dy", "gamma", "zero_centered", "shape"), BACKWARD_CASES)
def test_backward_is_the_gradient(
    rt: Runtime, kind: str, x: str, dy: str, gamma: str, zero_centered: bool, shape: tuple[int, int]
) -> None:
    case = Case(kind, x, gamma, shape, seed=1)
    grad = (case.random.standard_normal(shape) + 0.25).astype(NUMPY[dy])
    dx, dgamma, dbeta = case.backward(rt, grad, zero_centered=zero_centered)
    want = reference.backward(grad, case.x, case.gamma, kind=kind, eps=EPS, zero_centered=zero_centered)
    assert dx.dtype == NUMPY[x]
    assert dgamma.dtype == NUMPY[gamma]
    assert_close(dx, want.dx, rounding(want.dx, x, want.dx_scale))
    assert_close(dgamma, want.dgamma, _sum_error(want.dgamma, want.dgamma_terms, gamma))
    if kind == "RMSNorm":
        assert dbeta is None
    else:
        assert_close(dbeta, want.dbeta, _sum_error(want.dbeta, want.dbeta_terms, gamma))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_of_a_row_is_blind_to_the_rows_own_direction(rt: Runtime, kind: str) -> None:
    """y does not change along x (and along 1, for LayerNorm), so dx has no part in those directions (eps = 0)."""
    case = Case(kind, "fp32", "fp32", (20, 500))
    grad = case.random.standard_normal(case.x.shape).astype(np.float32)
    dx, _, _ = case.backward(rt, grad)
    x = case.x.astype(np.float64)
    size = np.sqrt((dx.astype(np.float64) ** 2).sum(1))
    centered = x - x.mean(1, keepdims=True) if kind == "LayerNorm" else x
    along = (dx * centered).sum(1) / np.sqrt((centered**2).sum(1)) / size
    assert np.abs(along).max() < 1e-2  # eps leaves a trace of itself in the smallest rows
    if kind == "LayerNorm":
        assert (np.abs(dx.astype(np.float64).sum(1)) / np.sqrt(500) / size).max() < 1e-6


@covering_lists(
    pytest.mark.parametrize("shape", [(1000, 768), (777, 4096), (30, 40000)]), pytest.mark.parametrize("kind", KINDS)
)
def test_the_same_twice(rt: Runtime, kind: str, shape: tuple[int, int]) -> None:
    case = Case(kind, "bf16", "fp32", shape)
    grad = case.random.standard_normal(shape).astype(ml_dtypes.bfloat16)
    first, second = case.backward(rt, grad), case.backward(rt, grad)
    for a, b in zip(first, second, strict=True):
        assert a is None or np.array_equal(bits(a), bits(b))


@covering_lists(
    pytest.mark.parametrize("shape", [(400, 48), (300, 1024), (40, 20000)]), pytest.mark.parametrize("kind", KINDS)
)
def test_a_margin_changes_no_value(rt: Runtime, kind: str, shape: tuple[int, int]) -> None:
    case = Case(kind, "bf16", "fp32", shape)
    grad = case.random.standard_normal(shape).astype(ml_dtypes.bfloat16)
    y, _, _, rstd = case.forward(rt)
    narrow_y, _, _, narrow_rstd = case.forward(rt, sm_margin=5)
    assert np.array_equal(bits(y), bits(narrow_y))
    assert np.array_equal(rstd, narrow_rstd)
    dx, dgamma, _ = case.backward(rt, grad)
    x, gamma = rt.tensor(case.x), rt.tensor(case.gamma)
    beta = None if case.beta is None else rt.tensor(case.beta)
    _, _, mean, rstd_there = ops.norm_forward(rt, x, gamma, beta, kind=kind, eps=EPS)
    other = ops.norm_backward(rt, rt.tensor(grad), x, gamma, mean, rstd_there, kind=kind, sm_margin=5)
    assert np.array_equal(bits(dx), bits(rt.numpy(other[0])))
    terms = np.abs(grad.astype(np.float64)).sum(0) * 8
    assert_close(rt.numpy(other[1]), dgamma.astype(np.float64), SUMS * terms)


# ---------------------------------------------------------------------------------------------- CUDA


@requires_cuda
@pytest.mark.parametrize(
    ("kind", "x", "gamma", "out", "zero_centered", "shape"),
    [pytest.param(*case, marks=[] if i % 4 == 0 else pytest.mark.full) for i, case in enumerate(FORWARD_CASES)],
)
def test_forward_agrees_with_the_cpu(
    kind: str, x: str, gamma: str, out: str, zero_centered: bool, shape: tuple[int, int]
) -> None:
    case = Case(kind, x, gamma, shape, seed=7)
    options = {"zero_centered": zero_centered, "out_dtype": dtypes.dtype(out)}
    y, _, _, rstd = case.forward(cuda_runtime(), **options)
    want, _, _, want_rstd = case.forward(Runtime.cpu(), **options)
    scale = reference.forward(case.x, case.gamma, case.beta, kind=kind, eps=EPS, zero_centered=zero_centered).scale
    exact = want.astype(np.float64)
    ulp = 0 if out == "fp32" else _ulp(np.maximum(np.abs(exact), np.abs(y.astype(np.float64))), NUMPY[out])
    assert_close(y, exact, ulp + STATISTICS * scale)
    assert_close(rstd, want_rstd.astype(np.float64), STATISTICS * want_rstd)


def _plans(rt: Runtime, run: Any) -> list[Any]:
    """The plans that `run` makes in an empty cache."""
    before, rt.plans = rt.plans, PlanCache()
    try:
        run()
        return [p for p in rt.plans.values() if getattr(p, "family", "").startswith("norm")]
    finally:
        rt.plans = before


@requires_cuda
@pytest.mark.parametrize(
    ("casts", "family"),
    [(None, "rows"), ("delayed rowwise", "rows"), ("delayed both", "transposed"), ("current both", "rows")],
)
def test_forward_takes_the_planned_kernel(casts: str | None, family: str) -> None:
    rt, case = cuda_runtime(), Case("RMSNorm", "bf16", "bf16", (512, 4096))
    cast = None
    if casts:
        scale = rt.tensor(np.ones(1, np.float32)) if "delayed" in casts else None
        cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise="both" in casts, scale=scale)
    (plan,) = _plans(rt, lambda: case.forward(rt, cast=cast))
    assert plan.family == f"norm_forward_{family}"
    assert plan.grid > 1


@requires_cuda
@pytest.mark.parametrize(("cols", "family"), [(4096, "rows"), (16383, "rows"), (16392, "wide"), (65535, "wide")])
def test_backward_takes_the_planned_kernel(cols: int, family: str) -> None:
    rt, case = cuda_runtime(), Case("RMSNorm", "bf16", "bf16", (64, cols))
    plans = _plans(rt, lambda: case.backward(rt, np.ones((64, cols), ml_dtypes.bfloat16)))
    assert [p.family for p in plans] == ["norm_forward_rows", f"norm_backward_{family}"]


@requires_cuda
def test_a_margin_leaves_multiprocessors_alone() -> None:
    from te_core.backends.cuda.norm import limits

    rt, case = cuda_runtime(), Case("LayerNorm", "bf16", "bf16", (4000, 1024))
    grad = np.ones(case.x.shape, ml_dtypes.bfloat16)
    all_of_them = limits(rt).multiprocessors
    for plan in _plans(rt, lambda: case.backward(rt, grad, sm_margin=16)):
        assert plan.grid == all_of_them - 16, plan.family


# ---------------------------------------------------------------------------------------------- refusals and tables


def test_refusals_name_the_argument(rt: Runtime) -> None:
    x, gamma = rt.tensor(np.ones((2, 8), np.float32)), rt.tensor(np.ones(8, np.float32))
    for message, wrong in [
        ("beta", {"beta": gamma, "kind": "RMSNorm"}),
        ("kind", {"kind": "BatchNorm"}),
        ("gamma", {"gamma": rt.tensor(np.ones(7, np.float32))}),
        ("orientation", {"cast": Cast(dtypes.float8_e4m3, rowwise=False, columnwise=False)}),
        ("FP8", {"cast": Cast(dtypes.float32, rowwise=True, columnwise=False)}),
    ]:
        options = {"gamma": gamma, "beta": None, "kind": "RMSNorm", "eps": EPS, **wrong}
        with pytest.raises(ArgumentError, match=message):
            ops.norm_forward(rt, x, options.pop("gamma"), options.pop("beta"), **options)
    wide = rt.tensor(np.ones((1, 65537), np.float32))
    with pytest.raises(ArgumentError, match="65536"):
        ops.norm_forward(rt, wide, rt.tensor(np.ones(65537, np.float32)), None, kind="RMSNorm", eps=EPS)


H200 = (132, 2048, 233472, 232448, 62914560)


def test_every_row_length_is_covered_by_its_team() -> None:
    from te_core.backends.cuda import norm_tiling as tiling

    limits = tiling.Limits(*H200)
    lengths = [*range(1, 300), *(2**n + d for n in range(8, 17) for d in (-1, 0, 1, 8) if 2**n + d <= 65536)]
    for cols in lengths:
        for size in (2, 4):
            for alignment in (0, 2 * size, size):
                width = tiling.vector_width(cols, alignment, (size, size), 16 // size)
                assert cols % width == 0
                assert alignment % (width * size) == 0
                forward = tiling.forward_team(cols, width, size)
                backward = tiling.backward_team(cols, width)
                turning = tiling.transposing_team(forward)
                assert tiling.TILE_ROWS % turning.teams == 0
                for team in (*(forward.in_blocks_of(n) for n in (256, 1024)), turning, backward or turning):
                    assert 32 <= team.threads <= 1024
                    assert team.threads % 32 == 0
                    assert team.size % 32 == 0 or 32 % team.size == 0
                    assert team.size <= 32 or team.teams <= tiling.MAX_TEAMS
                    assert team.iters == 0 or team.size * team.iters * width >= cols
                    stages = tiling.stages(team.row_bytes(size), 1, 4, limits)
                    assert stages * team.row_bytes(size) < limits.shared_per_block_optin
                assert backward or cols > 16384, "these rows have a kernel that reads them once"
    assert tiling.forward_team(4096, 8, 2).is_full(4096)
    assert tiling.forward_team(5120, 8, 2).is_full(5120)
    assert not tiling.forward_team(4104, 8, 2).is_full(4104)
    assert tiling.backward_team(16392, 8) is None
