"""`python -m te_core.doctor --test`: one step of a small linear layer on the device at hand, beside another answer.

The CPU backend is held against NumPy: casts of ml_dtypes, products in float64. A GPU is held against the CPU backend,
in every recipe whose products it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from te_core import device, dtypes, libraries
from te_core.errors import LibraryError
from te_core.layers import linear
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe, resolve
from te_core.runtime import Runtime
from te_core.tensor import Tensor

ROWS, INNER, OUTER = 64, 128, 96
#: How far a result may be from the other answer, by the norm of the difference: its bfloat16 is 2^-9 wide. One step of
#: FP8 is 2^-4.
WITHIN = 2.0**-8
#: By the names of `te_core.device`'s table; None: no quantization.
RECIPES: dict[str, Recipe | None] = {
    "bfloat16 / float16": None,
    "Float8CurrentScaling": Float8CurrentScaling(),
    "Float8BlockScaling": Float8BlockScaling(),
    "MXFP8BlockScaling": MXFP8BlockScaling(),
}

Array = np.ndarray[Any, Any]
Results = dict[str, Array]


class Row(NamedTuple):
    """One comparison."""

    device: str
    against: str
    recipe: str
    ok: bool
    difference: float | None  # the largest of all results; None where there are none
    said: str  # which result it is, or why there is none


def run() -> Iterator[Row]:
    """All comparisons that can be made here."""
    found = step(Runtime.cpu(), RECIPES["Float8CurrentScaling"])
    yield _compared("CPU backend", "NumPy", "Float8CurrentScaling", found, by_numpy())
    if libraries.driver_version() == (0, 0):
        return
    try:
        count = libraries.driver().device_count
    except LibraryError as error:
        yield Row("GPU", "the CPU backend", "", False, None, str(error))
        return
    for index in range(count):
        info = device.info(index)
        for recipe, rule in RECIPES.items():
            able, _ = device.can(info, recipe, "gemm")
            if able:
                yield _on_gpu(index, f"cuda:{index} {info.name}", recipe, rule)


def _on_gpu(index: int, name: str, recipe: str, rule: Recipe | None) -> Row:
    against = "the CPU backend"
    try:
        return _compared(name, against, recipe, step(Runtime.cuda(index), rule), step(Runtime.cpu(), rule))
    except Exception as error:  # of whatever library: that is what the test is for
        return Row(name, against, recipe, False, None, f"{type(error).__name__}: {error}")


def inputs() -> tuple[Array, Array, Array]:
    """x, the weight and the gradient of y: the same numbers everywhere, of different sizes."""
    rng = np.random.default_rng(38)
    shapes = ((ROWS, INNER), (OUTER, INNER), (ROWS, OUTER))
    sizes = (3.0, 0.05, 1e-3)
    return tuple((rng.standard_normal(s) * k).astype(ml_dtypes.bfloat16) for s, k in zip(shapes, sizes, strict=True))  # type: ignore[return-value]


def step(rt: Runtime, recipe: Recipe | None) -> Results:
    """y = x w^T, dx, dw and the gradient of a bias, in bfloat16."""
    x, w, dy = map(rt.tensor, inputs())
    precision = None if recipe is None else resolve(recipe)
    spec = linear.LinearSpec(dtypes.bfloat16, precision, linear.Needs(True, True, True))
    bias = rt.zeros((OUTER,), dtypes.bfloat16)
    (y,), saved = linear.forward(rt, x, w, bias, spec=spec)
    dx, dw, db = linear.backward(rt, dy, saved, spec=spec)
    found = {"y": y, "dx": dx, "dw": dw, "db": db}
    return {name: rt.numpy(t).astype(np.float64) for name, t in found.items() if isinstance(t, Tensor)}


def by_numpy() -> Results:
    """The same in current scaling, by NumPy alone."""
    x, w, dy = (a.astype(np.float32) for a in inputs())
    x8, w8 = (_rounded(a, ml_dtypes.float8_e4m3fn, 448.0) for a in (x, w))
    dy8 = _rounded(dy, ml_dtypes.float8_e5m2, 57344.0)
    return {"y": x8 @ w8.T, "dx": dy8 @ w8, "dw": dy8.T @ x8, "db": dy.astype(np.float64).sum(0)}


def _rounded(a: Array, kind: Any, largest: float) -> Array:
    """The values as the format holds them, with one scale that its largest number takes up."""
    scale = np.float32(largest) / np.abs(a).max()
    values: Array = (a * scale).astype(kind).astype(np.float64)
    return values / np.float64(scale)


def _compared(name: str, against: str, recipe: str, found: Results, wanted: Results) -> Row:
    # The norm of the difference, beside that of the other answer; infinite where there is a NaN.
    apart = {what: float(np.linalg.norm(found[what] - b) / np.linalg.norm(b)) for what, b in wanted.items()}
    apart = {what: one if np.isfinite(one) else float("inf") for what, one in apart.items()}
    worst = max(apart, key=lambda what: apart[what])
    return Row(name, against, recipe, apart[worst] <= WITHIN, apart[worst], worst)


def lines(rows: list[Row]) -> Iterator[str]:
    """The comparisons, to be read."""
    yield f"one step of a linear layer, {ROWS} x {INNER} to {OUTER}, forward and backward, in bfloat16:"
    for row in rows:
        verdict = "ok" if row.ok else "DIFFERS" if row.difference is not None else "FAILED"
        told = row.said if row.difference is None else f"largest difference {row.difference:.2%}, of {row.said}"
        yield f"  {row.device}, against {row.against}: {row.recipe} {verdict} ({told})"
