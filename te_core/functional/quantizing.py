"""Weights quantized by hand, and values back again."""

from __future__ import annotations

from typing import Any

from te_core import dtypes
from te_core.calls import precision_of
from te_core.dtypes import ACTIVATION_DTYPES
from te_core.errors import ArgumentError, UnsupportedError
from te_core.functional.arrays import library_of, read
from te_core.functional.scaling import Scaling
from te_core.ops import raw as ops
from te_core.quantize.operands import is_plain_rule
from te_core.quantize.state import WEIGHT, Scales, forward_cast
from te_core.quantized import QuantizedTensor
from te_core.recipe import Recipe
from te_core.runtime import Runtime


def quantize(
    x: Any, recipe: Recipe, *, scaling: Scaling | None = None, name: str = "weight", rt: Runtime | None = None
) -> QuantizedTensor:
    """A weight as the recipe has it, in both copies: for a weight's place, or for `quantized=`.

    With a history `scaling` has the scale: the one of the weight called `name` in its layer.

    Returns:
        A `te_core.QuantizedTensor`.

    Raises:
        ArgumentError: The recipe does not quantize weights, or x is no such matrix.

    Example:
        import numpy as np
        from te_core import functional
        from te_core.recipe import Float8CurrentScaling

        q = functional.quantize(np.ones((64, 64), np.float32), Float8CurrentScaling())
        values = functional.dequantize(q, like=np.zeros(1))
    """
    precision, t = precision_of("quantize", recipe), read("quantize", "x", x)
    rule = None if precision is None else precision.weight
    if rule is None:
        raise ArgumentError(
            "quantize", f"recipe={recipe!r}", "a recipe that quantizes weights", "choose another recipe"
        )
    if not is_plain_rule(rule):
        allowed, do = "one rule for both copies of a weight", "leave this weight to the layer"
        raise UnsupportedError("quantize", f"{type(recipe).__name__} with two rules", allowed, do)
    where = library_of(x).runtime(t.device) if rt is None else rt
    if t.ndim != 2 or t.dtype not in ACTIVATION_DTYPES or not t.is_contiguous or t.device is not where.device:
        allowed = f"a dense matrix of float32, bfloat16 or float16 on {where.device}"
        raise ArgumentError("quantize", f"x = {t!r}", allowed, "correct x")
    gemm, scales = 0, None
    if rule.scaling == "delayed":
        gemm, scales = _slot(scaling, name, precision)
    return ops.quantize(where, t, forward_cast(rule, scales, gemm, WEIGHT, rowwise=True, columnwise=True))


def _slot(scaling: Any, name: str, precision: Any) -> tuple[int, Scales]:
    """Which product of the state a weight is of, and the state."""
    if not isinstance(scaling, Scaling) or scaling.precision is not precision or scaling.scales is None:
        do = "pass the scaling= of the layer whose weight this is"
        raise ArgumentError("quantize", f"scaling={scaling!r}", "a Scaling of this recipe, for it has a history", do)
    names = scaling.layer.products
    if scaling.gemms > len(names):
        names = tuple(f"{names[0]}{i}" for i in range(scaling.gemms))
    if name not in names:
        raise ArgumentError("quantize", f"name={name!r}", ", ".join(names), "name the weight")
    return names.index(name), scaling.scales


def dequantize(q: QuantizedTensor, dtype: Any = dtypes.float32, *, like: Any = None, rt: Runtime | None = None) -> Any:
    """The values of a quantized tensor, as an array of the library of `like`; without one as a te_core.Tensor.

    Raises:
        ArgumentError: q is no quantized tensor, or holds no copy.
    """
    if not isinstance(q, QuantizedTensor):
        do = "pass what te.quantize gave"
        raise ArgumentError("dequantize", f"q of type {type(q).__name__}", "a te_core.QuantizedTensor", do)
    piece = q.rowwise if q.rowwise is not None else q.columnwise
    if piece is None:
        raise ArgumentError("dequantize", repr(q), "a tensor that holds a copy", "quantize it anew")
    home = library_of(piece if like is None else like)
    where = home.runtime(piece.device) if rt is None else rt
    found = ops.dequantize(where, q, dtypes.dtype(dtype))
    return home.give(found.rows(0, q.shape[0]))
