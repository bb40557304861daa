"""The rows of operations on matrices: elementwise ones, sums, norms, softmax and losses; and those of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from te_core import ops
from te_core.ops.activation import GATED, KINDS, Clamp
from te_core.ops.loss import LossTerms
from te_core.ops.norm import Branch
from te_core.ops.softmax import Band
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core import operation_cast_rows, operation_router_rows, operation_token_rows
from tests.core.inputs import SHAPES, numpy_dtype, values
from tests.core.operations import Array, Case, Found, Near, Put, Row, Run, close, drawn, sums, type_of
from tests.reference import activation as of_activation
from tests.reference import loss as of_loss
from tests.reference import norm as of_norm
from tests.reference import softmax as of_softmax
from tests.reference.elementwise import keep
from tests.reference.padding_order import padding_order
from tests.reference.quantize import amax
from tests.reference.rounding import spacing

# ------------------------------------------------------------------------------------------------ activations

FAR = np.array([[-3e4, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 3e4]])
CLAMPS = [Clamp(), Clamp(1.5, 1.0, 0.0), Clamp(0.0, 2.0, -0.25), Clamp(3.0, -0.5, 2.0)]
#: Rows and columns of the result.
RESULTS = [(1, 1), (5, 24), (17, 33), (0, 16), (16, 0), (33, 72), (130, 264), (64, 128)]
ACTIVATIONS: list[Any] = [(kind, shape, None) for kind in KINDS for shape in RESULTS]
ACTIVATIONS += [("clamped_swiglu", shape, clamp) for clamp in CLAMPS for shape in RESULTS]


def activation(size: Any, dtype: str, number: int) -> Case:
    """Forward and backward. Width 3, so that the tails of the sigmoid are met; a value at a limit has a gradient."""
    kind, shape, clamp = size
    columns = shape[1]
    x, dy = drawn((shape[0], columns * (2 if kind in GATED else 1)), dtype, number, 3), drawn(shape, dtype, number + 1)
    if clamp is not None and x.size:
        x[0, 0], x[0, columns] = clamp.limit, -clamp.limit
    formula = of_activation.Clamped(*(clamp or Clamp()))
    clamped = kind == "clamped_swiglu"
    y = formula.forward(x) if clamped else of_activation.forward(kind, x)
    dx = formula.backward(dy.astype(np.float64), x) if clamped else of_activation.backward(kind, dy, x)
    # Where the sigmoid is small, its exponent's own rounding counts, a part of its argument. And s + x s (1 - s) z'
    # cancels near its zero: its terms, not their sum, carry the error.
    wide = np.abs(x.astype(np.float64))
    argument, gate = wide[:, :columns], wide[:, columns:] if kind in GATED else 1.0
    part, grad = 1e-3, np.abs(dy.astype(np.float64))
    if clamped:
        gate, part = gate + 1 + abs(formula.offset), 1e-2
        slack = np.concatenate([grad * (1 + argument) * gate, grad * (1 + argument)], axis=1)
    else:
        slack = np.concatenate([grad * gate, part * grad * argument], axis=1) if kind in GATED else grad * gate
    sum_type = ("float32", dtype)[number % 2]

    def run(rt: Runtime, put: Put) -> Found:
        total = rt.empty((x.shape[1],), type_of(sum_type))
        forward, q = ops.activation_forward(rt, put(x), kind, clamp=clamp)
        backward, dq = ops.activation_backward(rt, put(dy), put(x), kind, clamp=clamp, column_sum=total)
        return {"y": forward, "q": q, "dx": backward, "dq": dq, "sums": total}

    def want(found: dict[str, Array]) -> dict[str, Near | None]:
        return {
            "y": in_ulps(y, dtype, part * argument * gate),
            "q": None,
            "dx": in_ulps(dx, dtype, slack),
            "dq": None,
            "sums": sums(found["dx"], sum_type),  # of the rounded gradient
        }

    return Case(run, want)


def in_ulps(value: Array, dtype: str, slack: Array | float) -> Near:
    """Within one unit in the last place, and 2e-6 of the value and of the slack."""
    unit = 0 if dtype == "float32" else spacing(value, numpy_dtype(dtype))
    return Near(value, 2e-6 * (np.abs(value) + slack) + unit, dtype)


def far_activation(kind: str, dtype: str, number: int) -> Case:
    """Far arguments neither overflow inside nor come out as NaN; a NaN comes out as one."""
    x = np.concatenate([FAR, np.ones_like(FAR)], axis=1) if kind in GATED else FAR
    x = x.astype(numpy_dtype(dtype))
    dy, spoiled = np.ones(FAR.shape, x.dtype), x.copy()
    spoiled[0, 3] = np.nan
    top = float(ml_dtypes.finfo(x.dtype).max)

    def near(exact: Array) -> Near:
        exact = np.where(np.abs(exact) >= top, np.copysign(np.inf, exact), exact)  # srelu of 3e4 is beyond float16
        finite = np.where(np.isfinite(exact), exact, 0)
        return Near(exact, 2 * spacing(finite, x.dtype) + 1e-4 * np.abs(finite) + 1e-30, dtype)

    def run(rt: Runtime, put: Put) -> Found:
        found = [ops.activation_forward(rt, put(t), kind)[0] for t in (x, spoiled)]
        return {"y": found[0], "nan": found[1], "dx": ops.activation_backward(rt, put(dy), put(x), kind)[0]}

    exact = of_activation.forward(kind, x), of_activation.forward(kind, spoiled), of_activation.backward(kind, dy, x)
    return Case(run, dict(zip(("y", "nan", "dx"), map(near, exact), strict=True)))


# ------------------------------------------------------------------------------------------------ elementwise


def add(shape: tuple[int, ...], dtype: str, number: int) -> Case:
    """Also in place, into either."""
    a, b = values(shape, dtype, number, special=number % 3 == 2), values(shape, dtype, number + 50)
    with np.errstate(over="ignore", invalid="ignore"):
        total = (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)

    def into(which: int) -> Run:
        def run(rt: Runtime, put: Put) -> Found:
            given = put(a), put(b)
            return {"sum": ops.add(rt, *given, out=given[which])}

        return run

    return Case(lambda rt, put: {"sum": ops.add(rt, put(a), put(b))}, {"sum": Near(total)}, (into(0), into(1)))


def rng_of(rt: Runtime, seed: int, offset: int) -> Tensor:
    """A pair of numbers for draws."""
    return rt.tensor(np.array([seed, offset], np.uint64).view(np.int64))


def dropped(x: Array, bias: Array | None, residual: Array | None, p: float, mask: Array) -> Array:
    """In float32, in the order of the contract; rounded once at the end. A dropped infinity is zero, not NaN."""
    f = x.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if bias is not None:
            f = f + bias.astype(np.float32)
        if p > 0:
            f = np.where(mask, f * np.float32(1 / (1 - p) if p < 1 else 0), np.float32(0))
        if residual is not None:
            f = f + residual.astype(np.float32)
        return f.astype(x.dtype)


def bias_dropout_add(size: Any, dtype: str, number: int) -> Case:
    """Backward draws the mask of forward."""
    shape, p = size
    x, residual, bias = (values(s, dtype, number + n) for s, n in ((shape, 0), (shape, 50), (shape[1:], 90)))
    if number % 2:
        x = values(shape, dtype, number, special=True)
    bias, residual = (None if number % 4 == 1 else bias), (None if number % 4 == 2 else residual)
    seed, offset, site = 2**64 - 1 - number, (number << 40) + 12345, (number * 0x9E3779B9) & 0x7FFFFFFF
    mask = keep(x.size, p, seed, offset, site).reshape(shape)
    sum_type, odd = (dtype, "float32")[number % 2], number % 2 == 1

    def run(rt: Runtime, put: Put) -> Found:
        options = {"p": p, "rng": rng_of(rt, seed, offset), "site": site}
        out = ops.bias_dropout_add(rt, put(x), put(bias), put(residual), **options)
        total = None if odd and p < 1 else rt.empty((shape[1],), type_of(sum_type))
        dx = ops.bias_dropout_add_backward(rt, put(x), column_sum=total, **options)
        return {"out": out, "dx": dx, "sums": total}

    def want(found: dict[str, Array]) -> dict[str, Near | None]:
        total = None if found["sums"] is None else sums(found["dx"], sum_type)
        given = dropped(x, bias, residual, p, mask), dropped(x, None, None, p, mask)
        return {"out": Near(given[0]), "dx": Near(given[1]), "sums": total}

    return Case(run, want)


def rank_sum(size: tuple[int, ...], dtype: str, number: int) -> Case:
    """Added in float32 in the order of ranks and rounded once, into a part of the columns; the others stay."""
    ranks, rows, width, pieces = size
    parts = drawn((ranks, rows, width), dtype, number)
    total = np.zeros((rows, width), np.float32)
    for part in parts:
        total = total + part.astype(np.float32)
    whole = np.full((rows, pieces * width), 7).astype(parts.dtype)

    def run(rt: Runtime, put: Put) -> Found:
        out = put(whole)
        ops.rank_sum(rt, put(parts), out=columns(out, pieces, pieces - 1))
        return {"out": out}

    return Case(run, {"out": Near(np.concatenate([whole[:, width:], total.astype(parts.dtype)], axis=1))})


def columns(out: Tensor, pieces: int, number: int) -> Tensor:
    """One of so many pieces of the columns."""
    width = out.shape[1] // pieces
    at = out.ptr + out.dtype.nbytes(number * width)
    return Tensor(at, (out.shape[0], width), out.dtype, out.device, out, out.row_major_strides())


# ---------------------------------------------------------------------------------------------------- matrices


def anything(shape: tuple[int, ...], dtype: str, number: int) -> Array:
    """Any bits."""
    dt = numpy_dtype(dtype)
    return np.random.default_rng(number).integers(0, 256, (*shape, dt.itemsize), np.uint8).view(dt)[..., 0]


def resize(size: Any, dtype: str, number: int) -> Case:
    """The common part is x's; what lies beyond x is zero."""
    given, (rows, cols) = size
    x, wanted = anything(given, dtype, number), np.zeros((rows, cols), numpy_dtype(dtype))
    wanted[: given[0], : given[1]] = x[:rows, :cols]
    return Case(lambda rt, put: {"out": ops.resize(rt, put(x), rows, cols)}, {"out": Near(wanted)})


def transpose(shape: tuple[int, int], dtype: str, number: int) -> Case:
    x = anything(shape, dtype, number)
    return Case(lambda rt, put: {"out": ops.transpose(rt, put(x))}, {"out": Near(x.T)})


def column_sum(shape: tuple[int, int], dtype: str, number: int) -> Case:
    """And those that come with a maximum and with a cast, to the bit."""
    x, sum_type = values(shape, dtype, number), (dtype, "float32")[number % 2]

    def run(rt: Runtime, put: Put) -> Found:
        alone, beside = (rt.empty((shape[1],), type_of(sum_type)) for _ in range(2))
        ops.column_sum(rt, put(x), alone)
        return {"sums": alone, "amax": ops.amax(rt, put(x), column_sum=beside), "beside": beside}

    of = sums(x, sum_type)
    return Case(run, {"sums": of, "amax": Near(np.array([amax(x)], np.float32)), "beside": of})


def largest(size: Any, dtype: str, number: int) -> Case:
    """At either end too, where vectors do not reach; NaN is none."""
    shape, place = size
    x = values(shape, dtype, number, special=number % 2 == 1)
    if place is not None:
        x = np.zeros_like(x)
        x.reshape(-1)[place] = -3
    elif number == 0:
        x = np.full_like(x, np.nan)
    return Case(lambda rt, put: {"amax": ops.amax(rt, put(x))}, {"amax": Near(np.array([amax(x)], np.float32))})


def count_nonfinite(size: tuple[int, int], dtype: str, number: int) -> Case:
    """Added to what is there; from any beginning."""
    count, start = size
    picks = np.random.default_rng(count).permutation(count)
    x = drawn(count, "float32", count)
    x[picks[: count // 3]] = np.nan
    x[picks[count // 3 : count // 2]] = np.where(picks[count // 3 : count // 2] % 2, np.inf, -np.inf)
    x = x.astype(numpy_dtype(dtype))
    seen = x[start:].astype(np.float32)

    def run(rt: Runtime, put: Put) -> Found:
        out = rt.tensor(np.array([5, 7], np.int64))
        for _ in range(2):
            ops.count_nonfinite(rt, put(x).rows(start, count), out)
        return {"counts": out}

    return Case(run, {"counts": Near(np.array([5, 7]) + 2 * np.array([np.isnan(seen).sum(), np.isinf(seen).sum()]))})


def padding(size: tuple[int, int, str], dtype: str, number: int) -> Case:
    """No padding, nothing else, behind the tokens, before them, anywhere; whole rows of tokens, and of padding."""
    rows, length, form = size
    random, places = np.random.default_rng(rows + length), np.arange(length)
    lengths = random.integers(0, length + 1, rows)[:, None]
    none, mixed = np.zeros((rows, length), bool), random.random((rows, length)) < random.random((rows, 1))
    mixed[1::3], mixed[2::3] = False, True
    masks = [places >= lengths, places < length - lengths, random.random((rows, length)) < 0.4, mixed]
    if rows * length <= 4000:
        masks += [none, ~none]
    if dtype == "uint8":  # any byte but 0 is padding, and the dimensions behind the first are a row's
        masks = [m * random.integers(1, 256, m.shape, np.uint8) for m in masks]

    def run(rt: Runtime, put: Put) -> Found:
        found = [ops.padding_order(rt, put(m.reshape(rows, 1, *m.shape[1:])), form=form) for m in masks]
        return {f"{i} {j}": t for i, of in enumerate(found) for j, t in enumerate(of)}

    orders = [padding_order(m.astype(bool), form) for m in masks]
    return Case(run, {f"{i} {j}": Near(t) for i, of in enumerate(orders) for j, t in enumerate(of)})


# ------------------------------------------------------------------------------------------------------- norms


def l2_norm(shape: tuple[int, int], dtype: str, number: int) -> Case:
    """Rows of very different lengths, one of them zero."""
    random, eps = np.random.default_rng([12, *shape]), (1e-3, 0.5, 12.0)[number % 3]
    x = random.standard_normal(shape) * np.exp2(random.integers(-5, 6, (shape[0], 1)))
    x[1:2] = 0
    x, dy = x.astype(numpy_dtype(dtype)), random.standard_normal(shape).astype(numpy_dtype(dtype))
    wide, g = np.abs(x.astype(np.float64)), np.abs(dy.astype(np.float64))
    length = np.sqrt((wide**2).sum(axis=1, keepdims=True) + eps)
    terms = (g + wide / length * (wide / length * g).sum(axis=1, keepdims=True)) / length
    y = of_softmax.l2_norm(x, eps)
    if shape[1] > 5000:  # the Jacobian would be too large
        dx = (dy - y * (y * dy).sum(axis=1, keepdims=True)) / length
    else:
        dx = of_softmax.l2_norm_gradient(dy, x, eps)
    return Case(
        lambda rt, put: {
            "y": ops.l2_norm_forward(rt, put(x), eps=eps),
            "dx": ops.l2_norm_backward(rt, put(dy), put(x), eps=eps),
        },
        {"y": close(y, dtype), "dx": close(dx, dtype, (2e-6 if shape[1] <= 5000 else 1e-5) * terms)},
    )


EPS = 1e-5
STATISTICS = 2e-6  # of the row's scale: targets.md, Numerics
#: kind, dtype of gamma (None: x's), of the output or of dy, zero-centered, shape, epsilon
Normed = tuple[str, str | None, str | None, bool, tuple[int, int]]
NORMS: list[Normed] = [
    ("LayerNorm", None, None, False, (5, 64)),
    ("RMSNorm", None, None, True, (3, 1)),
    ("LayerNorm", "bfloat16", "bfloat16", True, (33, 256)),
    ("RMSNorm", "float16", "float16", False, (4, 1023)),
    ("LayerNorm", None, None, False, (70, 1024)),
    ("LayerNorm", "float32", "bfloat16", True, (3, 4096)),
    ("RMSNorm", None, None, False, (9, 5120)),
    ("RMSNorm", "float32", "float32", True, (2, 8200)),
    ("LayerNorm", "float16", "float32", False, (3, 4097)),
    ("LayerNorm", None, None, False, (130, 24)),
    ("RMSNorm", "float32", "bfloat16", True, (17, 100)),
    ("LayerNorm", "bfloat16", "float32", False, (6, 7)),
    ("RMSNorm", None, None, False, (1, 65536)),
    ("LayerNorm", None, None, True, (2, 65535)),
    ("LayerNorm", None, None, False, (2, 65536)),
    ("RMSNorm", None, None, False, (5, 16383)),
    ("LayerNorm", None, None, True, (9001, 8)),
    ("RMSNorm", None, None, False, (3000, 33)),
    ("LayerNorm", None, None, False, (3, 16385)),
    ("RMSNorm", None, None, True, (2, 24576)),
    ("RMSNorm", None, "bfloat16", True, (300, 4096)),
    ("LayerNorm", None, None, False, (700, 1024)),
    ("RMSNorm", None, None, False, (2500, 768)),
    ("LayerNorm", None, None, True, (40, 16384)),
    ("LayerNorm", None, None, False, (5000, 1032)),  # several rows for each team of threads
    ("RMSNorm", None, None, False, (0, 72)),
    ("LayerNorm", None, None, False, (0, 72)),
]


def rounding(want: Array, dtype: str, scale: Array) -> Near:
    """What a correctly computed value may be off by: float32 arithmetic, then half an ulp (a whole one at a tie)."""
    unit = 0 if dtype == "float32" else 0.51 * spacing(want, numpy_dtype(dtype))
    return Near(want, STATISTICS * scale + unit, dtype)


def summed(want: Array, terms: Array, dtype: str) -> Near:
    """A gradient that is a sum over rows."""
    return Near(want, 1e-5 * terms + (0 if dtype == "float32" else 0.51 * spacing(want, numpy_dtype(dtype))), dtype)


def norm(size: Normed, dtype: str, number: int) -> Case:
    """Forward; backward alone, with another gradient added, and on fewer multiprocessors."""
    kind, gain, other, zero_centered, shape = size
    gain, other = gain or dtype, other or dtype
    random, (m, k), eps = np.random.default_rng([number, *shape]), shape, (EPS, 0.25, 1e-12)[number // 3 % 3]
    # Rows of very different sizes: a statistic taken from a neighbour's row shows.
    x = (random.standard_normal(shape) + 0.5) * np.exp2(random.integers(-4, 5, (m, 1)))
    x, gamma = x.astype(numpy_dtype(dtype)), random.uniform(-1.5, 1.5, k).astype(numpy_dtype(gain))
    # Rows of one value; far from zero, where E[x^2] - E[x]^2 in float32 loses every digit; with something no number.
    odd = np.repeat([[0.0], [1.0], [-3.7], [1e4], [4096], [1.0], [2.0]], k, axis=1)
    odd[4] += random.integers(-256, 257, k) / 64
    odd[5, k // 2] = np.nan
    odd = odd.astype(x.dtype)
    beta = random.standard_normal(k).astype(numpy_dtype(gain)) if kind == "LayerNorm" else None
    dy = (random.standard_normal(shape) + 0.25).astype(numpy_dtype(other))
    rule: dict[str, Any] = {"kind": kind, "zero_centered": zero_centered}
    with np.errstate(invalid="ignore"):
        y, of_odd = (of_norm.forward(t, gamma, beta, eps=EPS if t is odd else eps, **rule) for t in (x, odd))
        grads = of_norm.backward(dy, x, gamma, eps=eps, **rule)
    # Of the gradient's own size: where they cancel, a gradient rounded before shows.
    along = (-grads.dx * random.uniform(0.5, 1.5, shape)).astype(x.dtype)
    total, mean = grads.dx + along.astype(np.float64), np.abs(x.astype(np.float64)).max(axis=1, initial=0)
    layered = kind == "LayerNorm"

    def run(rt: Runtime, put: Put, margin: int = 0) -> Found:
        given, gain_there, more = put(x), put(gamma), {**rule, "sm_margin": margin}
        out_type = type_of(other)
        out, q, mean, rstd = ops.norm_forward(rt, given, gain_there, put(beta), eps=eps, out_dtype=out_type, **more)
        assert q is None
        kept = put(np.zeros_like(x))
        dx, dgamma, dbeta = ops.norm_backward(rt, put(dy), given, gain_there, mean, rstd, out=kept, **more)
        assert dx is kept
        added = ops.norm_backward(rt, put(dy), given, gain_there, mean, rstd, add=put(along), **more)
        found = {"y": out, "mean": mean, "rstd": rstd, "dx": dx, "dgamma": dgamma, "dbeta": dbeta}
        found["odd"] = ops.norm_forward(rt, put(odd), gain_there, put(beta), eps=EPS, **rule)[0]
        return {**found, "added": added[0], "same dgamma": added[1], "same dbeta": added[2]}

    def want(found: dict[str, Array]) -> dict[str, Near | None]:
        dbeta = summed(grads.dbeta, grads.dbeta_terms, gain) if layered else None
        return {
            "y": rounding(y.y, other, y.scale),
            "mean": Near(y.mean, STATISTICS * mean, "float32") if layered else None,
            "rstd": Near(y.rstd, STATISTICS * y.rstd, "float32"),
            "dx": rounding(grads.dx, dtype, grads.dx_scale),
            "dgamma": summed(grads.dgamma, grads.dgamma_terms, gain),
            "dbeta": dbeta,
            # Rounded once: nearer to the exact sum than two rounded parts. In float32 as a sum of its own.
            "added": Near(found["dx"] + along)
            if dtype == "float32"
            else rounding(total, dtype, grads.dx_scale + np.abs(along.astype(np.float64))),
            "odd": rounding(of_odd.y, dtype, of_odd.scale),
            "same dgamma": Near(found["dgamma"]),
            "same dbeta": Near(found["dbeta"]) if layered else None,
        }

    return Case(run, want, (partial(run, margin=5),) if m * k < 500_000 else ())


def branch_norm(size: Any, dtype: str, number: int) -> Case:
    """The sum is that of bias_dropout_add bit for bit, and what is normed is the rounded sum."""
    kind, gain, shape, has_bias, p = size
    gain = gain or dtype
    x, residual = drawn(shape, dtype, number), drawn(shape, dtype, number + 1)
    bias = drawn(shape[1], dtype, number) if has_bias else None
    gamma = drawn(shape[1], gain, number + 1)
    beta = drawn(shape[1], gain, number + 2) if kind == "LayerNorm" else None
    rule: dict[str, Any] = {"kind": kind, "eps": EPS}

    def run(rt: Runtime, put: Put, apart: bool = False) -> Found:
        rng, total, branch = rng_of(rt, 5, 2**40 + 3), put(np.zeros_like(x)), None
        if apart:
            total = given = ops.bias_dropout_add(rt, put(x), put(bias), put(residual), p=p, rng=rng, site=-7)
        else:
            given, branch = put(x), Branch(put(residual), total, put(bias), p, rng, -7)
        y, _, mean, rstd = ops.norm_forward(rt, given, put(gamma), put(beta), branch=branch, **rule)
        return {"sum": total, "y": y, "mean": mean, "rstd": rstd}

    on = Runtime.cpu()
    total = run(on, Put(on, 0), apart=True)["sum"].numpy()
    made = of_norm.forward(total, gamma, beta, zero_centered=False, **rule)
    mean = np.abs(total.astype(np.float64)).max(axis=1, initial=0)
    want = {
        "sum": Near(total),
        "y": rounding(made.y, dtype, made.scale),
        "mean": Near(made.mean, STATISTICS * mean, "float32") if kind == "LayerNorm" else None,
        "rstd": Near(made.rstd, STATISTICS * made.rstd, "float32"),
    }
    return Case(run, want, (partial(run, apart=True),))


BRANCHES: list[Any] = [  # kind, gamma, shape, bias, p
    ("LayerNorm", None, (70, 1024), True, 0.1),
    ("RMSNorm", "float32", (33, 4096), True, 0.0),
    ("RMSNorm", None, (50, 260), False, 0.5),
    ("LayerNorm", "bfloat16", (3, 4096), True, 0.9),
    ("LayerNorm", None, (129, 40), False, 0.0),
    ("RMSNorm", None, (31, 77), True, 0.3),  # an element at a time, at every place of a draw of four
    ("LayerNorm", None, (21, 90), False, 0.3),  # two at a time
    ("LayerNorm", None, (5, 1), True, 0.5),
    ("RMSNorm", None, (4, 8200), True, 0.2),
    ("LayerNorm", None, (35, 20000), True, 0.2),
    ("LayerNorm", None, (3, 65535), True, 0.2),  # too long to hold
    ("RMSNorm", None, (2, 65536), False, 0.0),
    ("LayerNorm", None, (9001, 8), True, 0.4),
    ("RMSNorm", None, (0, 64), True, 0.4),
    ("LayerNorm", None, (19, 512), True, 0.25),
]

# ----------------------------------------------------------------------------------------------------- softmax

LENGTHS = [(5, 9), (0, 4), (7, 0), (3, 7)]
# shape, band, lengths, mask shape, sink
SOFTMAXES: list[Any] = [
    ((2, 3, 5, 8), Band(), None, None, False),
    ((1, 2, 4, 2048), Band(), None, None, False),
    ((2, 2, 3, 1000), Band(), None, (2, 1, 1, 1000), False),
    ((1, 4, 33, 33), Band(-1, 0, False), None, None, True),
    ((2, 1, 5, 40), Band(-1, 0, True), None, None, False),
    ((1, 2, 40, 24), Band(3, 0, True), None, None, True),
    ((2, 3, 17, 64), Band(5, 2, False), None, (1, 3, 17, 64), False),
    ((1, 1, 9, 136), Band(0, 7, True), None, (1, 1, 9, 136), True),
    ((4, 2, 8, 16), Band(-1, 0, True), LENGTHS, None, False),
    ((4, 3, 7, 11), Band(2, 1, False), LENGTHS, (4, 1, 7, 11), True),
    ((4, 1, 9, 72), Band(), LENGTHS, None, True),
    ((1, 2, 2, 33000), Band(-1, 0, True), None, None, True),
    ((1, 1, 2, 40000), Band(), None, (1, 1, 2, 40000), False),
    ((1, 1, 3, 16385), Band(), None, None, False),
    ((3, 2, 4, 1), Band(), None, None, True),
    ((0, 2, 4, 8), Band(), None, None, True),
    ((2, 2, 3, 0), Band(), None, None, False),
    ((2, 3, 5, 0), Band(), None, None, True),
    ((1, 1, 1000, 12), Band(), None, None, False),
    ((1, 1, 3, 4104), Band(100, -1, True), None, None, False),
    ((3, 4, 37, 48), Band(), None, None, True),
]


def softmax(size: Any, dtype: str, number: int) -> Case:
    """NaN and infinity do not matter where nothing looks: behind the diagonal, behind lengths, under the mask."""
    shape, band, lengths, mask_shape, has_sink = size
    random, scale = np.random.default_rng([7, *shape]), 0.37
    # Small exponents: float32's own error in exp(v - m) grows with v.
    x = (random.standard_normal(shape) * 2).astype(numpy_dtype(dtype))
    dy = random.standard_normal(shape).astype(x.dtype)
    mask = None if mask_shape is None else random.random(mask_shape) < 0.3
    sink = random.standard_normal(shape[1]).astype(np.float32) if has_sink else None
    rule = {"left": band.left, "right": band.right, "bottom_right": band.bottom_right, "lengths": lengths}
    free = of_softmax.seen(shape, **rule)
    visible = free if mask is None else free & ~np.broadcast_to(mask, shape)
    y, share = of_softmax.softmax(x, visible, scale, sink)
    rounded = y.astype(x.dtype)
    weights = rounded.astype(np.float64)
    own = None if sink is None else share.transpose(0, 2, 1).astype(np.float32)
    dx, dsink = of_softmax.gradients(dy, weights, share, scale)
    terms = np.abs(weights * dy.astype(np.float64))
    slack = 1e-6 * scale * (terms + weights * terms.sum(axis=-1, keepdims=True))
    odd = np.resize(np.array([np.nan, np.inf, -np.inf]), shape).astype(x.dtype)

    def run(rt: Runtime, put: Put, spoiled: bool = False, in_place: bool = False) -> Found:
        cu = [None if lengths is None else np.cumsum([0, *[n[i] for n in lengths]]).astype(np.int32) for i in (0, 1)]
        more = {"scale": scale, "band": band, "cu_seqlens_q": put(cu[0]), "cu_seqlens_kv": put(cu[1])}
        scores, grads = (
            put(np.where(visible, x, odd) if spoiled else x),
            put(np.where(free, dy, odd) if spoiled else dy),
        )
        out = scores if in_place else None
        found, kept = ops.softmax_forward(rt, scores, mask=put(mask), sink=put(sink), out=out, **more)
        assert found is scores or not in_place
        back, of_sink = ops.softmax_backward(rt, grads, put(rounded), put(own), **more)
        return {"y": found, "share": kept, "dx": back, "dsink": of_sink}

    total = (terms.sum(axis=-1) * share).sum(axis=(0, 2))
    return Case(
        run,
        {
            "y": Near(y, np.where(visible, close(y, dtype).off, 0), dtype),
            "share": None if own is None else close(share.transpose(0, 2, 1), "float32"),
            "dx": close(dx, dtype, slack),
            "dsink": None if own is None else Near(dsink, 1e-6 * total + 1e-37, "float32"),
        },
        (partial(run, spoiled=True), partial(run, in_place=True)),
    )


# ------------------------------------------------------------------------------------------------------ losses

#: Blocks of 128 to 1024 threads; all of a row held, and a part of it; no whole vectors; one class.
LOGITS = [(1, 1), (5, 3), (7, 33), (40, 64), (9, 1000), (3, 8192), (2, 50257), (2, 131072), (1, 262144), (0, 8)]
FACTORS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-3), (1.0, 0.0)]


def logits(shape: tuple[int, int], dtype: str, spread: float = 4.0) -> tuple[Array, Array, Array]:
    """(logits, targets of which one is ignored, gradients of the losses)."""
    random = np.random.default_rng([3, *shape])
    target = random.integers(0, shape[1], shape[0])
    target[1:2] = -100
    x = random.standard_normal(shape) * spread + random.normal(0, 20, (shape[0], 1))
    return x.astype(numpy_dtype(dtype)), target, random.standard_normal(shape[0]).astype(np.float32)


def loss_gradient(expected: Array, size: Array, dtype: str) -> Near:
    """The float32 error of a term is that of an exponent around 50."""
    return close(expected, dtype, 2e-5 * size + {"float16": 2.0**-24}.get(dtype, 1e-9))


def loss(size: Any, dtype: str, number: int) -> Case:
    """In two steps by facts, and in one, in place."""
    shape, factors = size
    x, target, grad = logits(shape, dtype)
    losses, dx = of_loss.loss(x, target, grad, -100, *factors)
    terms = LossTerms(shape[1], 0, -100, *factors)
    goal = target.astype(("int64", "int32")[number % 2])

    def run(rt: Runtime, put: Put) -> Found:
        given, at = put(x), put(goal)
        facts = ops.loss_facts(rt, given, at, terms=terms)
        known = facts.reshape(1, *facts.shape)
        each, both = ops.loss_values(rt, known, at, terms=terms)
        first, none = ops.loss_gradient(rt, given, at, terms=terms, known=known, grad=put(grad))
        made, found = ops.loss_gradient(rt, given, at, terms=terms, grad=put(grad), out=given)
        assert none is None and made is given
        return {"losses": each, "total": both, "dx": first, "facts": facts, "in one": made, "found": found}

    def want(found: dict[str, Array]) -> dict[str, Near | None]:
        total = np.array([losses.sum(), 1])
        return {
            "losses": Near(losses, 2e-5 + 1e-5 * np.abs(losses), "float32"),
            "total": Near(total, 1e-4 + 1e-5 * np.abs(total), "float32"),
            "dx": loss_gradient(dx, of_loss.sizes(x, target, grad, -100, *factors), dtype),
            "facts": Near(found["facts"]),
            "in one": Near(found["dx"]),
            "found": Near(found["facts"]),
        }

    return Case(run, want)


def _resized() -> Iterator[Any]:
    sizes = [(1, 1), (3, 40), (20, 5), (32, 48), (33, 17), (0, 16), (16, 0)]
    yield from product(sizes, sizes)


#: (ranks, rows, width): vectors of 8 elements and of fewer, rows longer than a block, no rows.
RANKS = [(2, 6, 64), (3, 5, 12), (4, 3, 6), (8, 2, 16400), (9, 4, 7), (1, 2, 8), (2, 0, 8), (3, 33, 128)]
#: Around the 32, 512 and 4096 places and the 1024 rows that the kernel counts in, and nothing at all.
MASKS = [
    *[(1, 1), (5, 1), (3, 31), (2, 33), (4, 256), (3, 300), (1, 511), (2, 513), (3, 4096), (2, 4097), (1, 9001)],
    *[(1023, 3), (1024, 2), (1500, 7), (2049, 2), (0, 0), (0, 16), (3, 0), (1100, 0)],
]
L2 = [(1, 1), (5, 3), (40, 64), (9, 72), (33, 128), (3, 256), (2, 1000), (7, 4096), (2, 65536), (3, 20001), (0, 8)]
LARGEST = [(5, 9), (0,), (1,), (7,), (4096,), (3, 5, 7), (1000, 999), (40, 64), (33, 16), (16, 31), (2, 300)]
DROPPED = [(shape, (0.0, 0.1, 0.5, 0.9)[i % 4]) for i, shape in enumerate(SHAPES)] + [((65, 512), 1.0)] * 2
#: Blocks of the CPU's rows that begin within a draw of four.
DROPPED += [((50, 701), 0.4)]
ROWS: dict[str, Row] = {
    "activation": Row(activation, ACTIVATIONS, large=[(kind, (384, 1024), None) for kind in KINDS]),
    "far activation": Row(far_activation, KINDS, every=True),
    "add": Row(add, [*SHAPES, (7,), (3, 4, 5)], every=True),
    "bias_dropout_add": Row(bias_dropout_add, DROPPED, large=[((300, 1048), 0.3), ((77, 333), 0.3)], exact=True),
    "rank_sum": Row(rank_sum, [(*size, pieces) for size in RANKS for pieces in (1, 3)], every=True),
    "resize": Row(resize, [*_resized()], ("uint8", "bfloat16", "float32"), every=True),
    "transpose": Row(
        transpose,
        [*SHAPES, (16, 160), (144, 32), (320, 272)],
        ("uint8", "float8_e4m3", "bfloat16", "int16", "float32", "int32"),
        every=True,
    ),
    "column_sum": Row(column_sum, [*SHAPES, (1500, 72), (4100, 3)], every=True),
    "amax": Row(largest, [(s, place) for s in LARGEST for place in (None, 0, -1) if place is None or np.prod(s)]),
    "count_nonfinite": Row(
        count_nonfinite, [(0, 0), (1, 0), (7, 0), (1000, 0), (70_001, 0), *((50, n) for n in range(9))]
    ),
    "padding_order": Row(padding, [(*m, form) for m in MASKS for form in ("sbhd", "bshd")], ("bool", "uint8")),
    "l2_norm": Row(l2_norm, L2, large=[(65, 128)]),
    "norm": Row(norm, NORMS, large=NORMS[::6]),
    "norm of a branch": Row(branch_norm, BRANCHES, large=BRANCHES[::4]),
    "softmax": Row(softmax, SOFTMAXES, large=[((1, 2, 3, n), Band(), None, None, False) for n in (1024, 40000)]),
    "loss": Row(
        loss,
        [(shape, factors) for i, shape in enumerate(LOGITS) for factors in (FACTORS[i % 5], FACTORS[(i + 2) % 5])],
        large=[((67, classes), (0.1, 1e-4)) for classes in (32000, 128256, 50257)],
    ),
    **operation_token_rows.ROWS,
    **operation_router_rows.ROWS,
    **operation_cast_rows.ROWS,
}
