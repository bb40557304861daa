"""A weight that is spread over ranks: what stands around its products, in one process and without a socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.layers.linear import (
    LinearSpec,
    Made,
    Needs,
    Product,
    Sink,
    gradient_operand,
    input_operand,
    weight_operand,
)
from te_core.quantize.operands import Uses
from te_core.recipe import DelayedScaling, Float8CurrentScaling, resolve
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.core.face import scales

M, N, K = 32, 64, 48
#: Values and sums of them that every format holds exactly: a sum of parts is the sum of all.
RNG = np.random.default_rng(0)
X, W, DY = (RNG.integers(-2, 3, shape).astype(np.float32) for shape in ((M, K), (N, K), (M, N)))
RECIPES = {"plain": None, "current": Float8CurrentScaling(use_power_2_scales=True), "delayed": DelayedScaling()}


class Rank:
    """One rank's product, its parts of x, w and dy, and what it is to see of the others'."""

    def __init__(
        self, rt: Runtime, spec: LinearSpec, x: Any, w: Any, dy: Any, parallel: Any, sink: Sink | None
    ) -> None:
        self.rt, self.x, self.w, self.dy = rt, rt.tensor(x), rt.tensor(w), rt.tensor(dy)
        self.product = Product(spec, scales(rt, 1), sink=sink, parallel=parallel)

    def operands(self) -> tuple[Made, Made, Made]:
        """(x, w, dy) as the products read them."""
        rt, product = self.rt, self.product
        g, _ = gradient_operand(rt, self.dy, product, None, None)
        return (
            (self.x, input_operand(rt, self.x, product)),
            (self.w, weight_operand(rt, self.w, product, None)),
            (self.dy, g),
        )


class Gathers:
    """Column-parallel with sequences spread: fprop reads the rows of all ranks, wgrad too; dgrad's sum is spread."""

    def __init__(self, rank: int, whole: Uses, summands: list[Any]) -> None:
        self.rank, self.whole, self.summands, self.seen = rank, whole, summands, []

    def gather(self, rt: Runtime, gemm: str, a: Any, b: Any) -> tuple[Any, Any]:
        self.seen.append(("gather", gemm))
        return {"fprop": (self.whole.rows, b), "dgrad": (a, b), "wgrad": (a, self.whole.columns)}[gemm]

    def scatter(self, rt: Runtime, gemm: str, out: Tensor) -> Tensor:
        self.seen.append(("scatter", gemm))
        if gemm == "dgrad":
            self.summands.append(rt.numpy(out))
            out = out.rows(self.rank * M // 2, (self.rank + 1) * M // 2)
        return out


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_columns_of_a_spread_weight(recipe: str, sunk: bool) -> None:
    rt = Runtime.cpu()
    precision = None if RECIPES[recipe] is None else resolve(RECIPES[recipe])
    spec = LinearSpec(dtypes.float32, precision, Needs(True, True, False))
    alone = Product(spec, scales(rt, 1))
    whole = input_operand(rt, rt.tensor(X), alone)
    y, dw = np.empty((M, N), np.float32), np.empty((N, K), np.float32)
    summands: list[Any] = []
    for rank in range(2):
        half, rows = slice(rank * N // 2, (rank + 1) * N // 2), slice(rank * M // 2, (rank + 1) * M // 2)
        parallel = Gathers(rank, whole, summands)
        main = rt.tensor(np.ones((N // 2, K), np.float32))
        sink = Sink(main, accumulate=True) if sunk else None
        one = Rank(rt, spec, X[rows], W[half], DY[:, half], parallel, sink)
        x, w, dy = one.operands()
        y[:, half] = rt.numpy(one.product.fprop(rt, x, w, rt.empty((M, N // 2), dtypes.float32), None))
        _, kept_w = one.product.keep(rt, x, w)
        part = one.product.dgrad(rt, dy, one.w, kept_w, rt.empty((M, K), dtypes.float32))
        assert part.shape == (M // 2, K)
        got = one.product.wgrad(rt, dy, x[1].columns, one.w, None)
        assert (got is None) == sunk
        dw[half] = rt.numpy(main) - 1 if got is None else rt.numpy(got)
        assert parallel.seen == [(what, gemm) for gemm in ("fprop", "dgrad", "wgrad") for what in ("gather", "scatter")]
    assert np.array_equal(y, X @ W.T) and np.array_equal(dw, DY.T @ X) and np.array_equal(sum(summands), DY @ W)


class Sums:
    """Row-parallel: each rank's fprop is a summand."""

    def __init__(self) -> None:
        self.total: Any = 0

    def gather(self, rt: Runtime, gemm: str, a: Any, b: Any) -> tuple[Any, Any]:
        return a, b

    def scatter(self, rt: Runtime, gemm: str, out: Tensor) -> Tensor:
        if gemm == "fprop":
            self.total = self.total + rt.numpy(out)
            out = rt.tensor(self.total)
        return out


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_a_spread_weight(recipe: str) -> None:
    rt, shared = Runtime.cpu(), Sums()
    precision = None if RECIPES[recipe] is None else resolve(RECIPES[recipe])
    spec = LinearSpec(dtypes.float32, precision, Needs(True, True, False))
    for rank in range(2):
        half = slice(rank * K // 2, (rank + 1) * K // 2)
        one = Rank(rt, spec, X[:, half], W[:, half], DY, shared, None)
        x, w, dy = one.operands()
        y = rt.numpy(one.product.fprop(rt, x, w, rt.empty((M, N), dtypes.float32), None))
        _, kept_w = one.product.keep(rt, x, w)
        dx = one.product.dgrad(rt, dy, one.w, kept_w, rt.empty((M, K // 2), dtypes.float32))
        assert np.array_equal(rt.numpy(dx), (DY @ W)[:, half])
    assert np.array_equal(y, X @ W.T)
