"""What an inspector changes of a linear's operands and results: what is quantized for it, kept for backward, and added.

Only products of an inspected spec come here; `inspector.py` says what an inspector is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from te_core.dtypes import DType
from te_core.errors import UnsupportedError
from te_core.layers.inspector import Inspector, Request, finished, offer, offer_result
from te_core.ops import raw as ops
from te_core.ops.quantize import dense_columns
from te_core.precision import Operand, Precision
from te_core.quantize.operands import (
    Uses,
    Value,
    columns_alone,
    dense,
    is_plain_rule,
    quantize_forward,
    quantize_gradient,
)
from te_core.quantize.state import INPUT, WEIGHT, Scales, backward_cast, forward_cast
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

INPUT_POINTS = frozenset((("fprop", "activation"), ("wgrad", "activation")))
WGRAD_POINTS = frozenset((("wgrad", "activation"), ("wgrad", "gradient")))

#: The GEMM that reads an operand along its rows, the one that reads its columns, and its slot in the scaling state.
_READ_BY = {"activation": ("fprop", "wgrad", INPUT), "weight": ("fprop", "dgrad", WEIGHT)}

#: The scaling state, if there is one, and the number of the GEMM in it.
Where = tuple[Scales | None, int]


def partly_quantized(
    rt: Runtime, x: Value, rule: Operand | None, where: Where, plain: Request, tensor: str, wanted: bool
) -> Uses:
    """An operand of which an inspector replaces what a GEMM reads: quantized for the other one.

    `wanted`: whether backward reads a copy that is made now.
    """
    row, column, slot = _READ_BY[tensor]
    rows, columns = (row, tensor) not in plain, wanted and (column, tensor) not in plain
    if not (rows or columns):
        return Uses(x, x, _unused(rule, partial(forward_cast, scales=where[0], gemm=where[1], slot=slot)))
    uses = quantize_forward(rt, x, rule, where, slot, rowwise=rows, columnwise=columns)
    return Uses(uses.rows if rows else x, uses.columns if columns or not wanted else x, uses.cast)


def partly_quantized_gradient(
    rt: Runtime,
    dy: Value,
    rule: Operand | None,
    where: Where,
    plain: Request,
    wanted: tuple[bool, bool],
    sums: tuple[DType, Tensor | None],
    rng: Tensor | None,
) -> Uses:
    """The same of a gradient. `sums`: its dtype, and where the sums of its columns go."""
    dtype, db = sums
    rows = wanted[0] and ("dgrad", "gradient") not in plain
    columns = wanted[1] and ("wgrad", "gradient") not in plain
    if rows or columns:
        uses = quantize_gradient(rt, dy, rule, where, rowwise=rows, columnwise=columns, column_sum=db, rng=rng)
        return Uses(uses.rows if rows else dy, uses.columns if columns else dy, uses.cast)
    if db is not None:
        ops.column_sum(rt, dense(rt, dy, dtype), db)
    return Uses(dy, dy, _unused(rule, partial(backward_cast, scales=where[0], gemm=where[1], rng=rng)))


def _unused(rule: Operand | None, cast: Callable[..., Cast]) -> Cast | None:
    """How an operand would be quantized: an inspector may do it."""
    if rule is None or not is_plain_rule(rule):
        return None
    return cast(rule, rowwise=True, columnwise=True)


def kept_for_backward(
    rt: Runtime,
    inspector: Inspector | None,
    dtype: DType,
    point: tuple[str, str],
    values: tuple[Value, Value],
    cast: Cast | None,
    rule: Operand | None,
) -> Value:
    """What backward will read of an operand after an inspector has seen it, so that `saved` can keep it.

    `values`: what the operand was made of, and what would be kept.
    """
    high, kept = values
    made = offer(rt, inspector, point, dense(rt, high, dtype), cast, kept)
    if made is kept or not isinstance(made, QuantizedTensor):
        return made
    fits = rule is not None and made.format is (rule.columnwise or rule).format and made.format.scaling != "nvfp4"
    return columns_alone(rt, made) if fits else dense_columns(rt, made, dtype, made.rowwise is None)


def shown_gradient(
    rt: Runtime, inspector: Inspector | None, shown: Tensor, made: Uses, wanted: tuple[bool, bool]
) -> Uses:
    """A gradient as its GEMMs (`wanted`: dgrad, wgrad) read it after an inspector has seen it for both of them."""
    if not any(wanted) or inspector is None:
        return made
    rows, columns, cast = made
    if wanted[1]:
        columns = offer(rt, inspector, ("wgrad", "gradient"), shown, cast, columns)
    if wanted[0]:
        rows = offer(rt, inspector, ("dgrad", "gradient"), shown, cast, rows)
    finished(rt, inspector, "gradient")
    return Uses(rows, columns, cast)


def add_shown(
    rt: Runtime,
    inspector: Inspector | None,
    multiplied: Callable[[Tensor, Tensor | None, bool], Tensor],
    main: Tensor,
    db: Tensor | None,
    accumulate: bool,
) -> None:
    """A weight gradient that goes into memory of the caller's, after an inspector has seen it.

    What is shown is what this call adds. If it stays it is added by a GEMM of its own, as without an inspector:
    `multiplied(out, db, accumulate)` runs it.
    """
    dw = multiplied(rt.empty(main.shape, main.dtype), db, False)
    made = offer_result(rt, inspector, ("wgrad", "wgrad"), dw)
    if not accumulate:
        ops.resize(rt, made, *main.shape, out=main)
    elif made is dw:
        multiplied(main, None, True)
    else:
        ops.add(rt, main, made, out=main)


def refuse_transformed(precision: Precision | None, a: Value, b: Value) -> None:
    """Operands that were transformed have no values of their own: a plain one beside them would not fit."""
    rules = [] if precision is None else [precision.grad, precision.input]
    for value, rule in zip((a, b), rules, strict=False):
        transformed = rule is not None and (rule.columnwise or rule).transform
        if transformed and isinstance(value, QuantizedTensor) and value.format.scaling == "nvfp4":
            raise UnsupportedError(
                "inspect wgrad",
                "another value for one operand (modify_tensor) where NVFP4 turns both (random Hadamard transform)",
                "both operands exchanged, wgrad in high precision, or no transform",
                "change both, disable the GEMM (fp8_gemm_enabled), or set disable_rht=True in the recipe",
            )
