"""Matrix products with their epilogues in float64, from the formulas of te_core.ops.gemm's contract."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_C = 0.7978845608


class Result(NamedTuple):
    """What a product gives besides its output."""

    out: np.ndarray
    aux: np.ndarray  # the value before the activation
    a_sum: np.ndarray
    out_sum: np.ndarray


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form."""
    return 0.5 * x * (1 + np.tanh(_C * (x + 0.044715 * x**3)))


def gelu_slope(x: np.ndarray) -> np.ndarray:
    """Its derivative."""
    t = np.tanh(_C * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * _C * (1 + 3 * 0.044715 * x**2)


def gemm(a, b, *, trans_a=False, trans_b=False, scale=1.0, bias=None, epilogue=None, aux=None) -> Result:
    """out = epilogue(op(a) @ op(b) * scale + bias); what `out` held is the caller's to add."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    a, b = a.T if trans_a else a, b.T if trans_b else b
    value = a @ b * scale
    if bias is not None:
        value = value + np.asarray(bias, np.float64)
    out = value
    if epilogue == "gelu":
        out = gelu(value)
    elif epilogue == "dgelu":
        out = value * gelu_slope(np.asarray(aux, np.float64))
    return Result(out, value, a.sum(1), out.sum(0))
