"""What an inspector changes of a linear's operands and results: what is quantized for it, kept for backward, and added.

Only products of an inspected spec come here; `inspector.py` says what an inspector is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from te_core.dtypes import DType
from te_core.errors import UnsupportedError
from te_core.layers.inspector import Request, answer, finished, offer_result
from te_core.ops import raw as ops
from te_core.ops.quantize import dense_columns
from te_core.precision import Operand, Precision
from te_core.quantize.operands import Uses, Value, dense, is_plain_rule, one_copy, quantize_forward, quantize_gradient
from te_core.quantize.state import INPUT, WEIGHT, Scales, backward_cast, forward_cast
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: An operand: the values that it was made of, and how the GEMMs read it.
Made = tuple[Value, Uses]
#: One weight in one call: the named tuple of te_core/layers/product.py.
Product = Any

INPUT_POINTS = frozenset((("fprop", "activation"), ("wgrad", "activation")))
WGRAD_POINTS = frozenset((("wgrad", "activation"), ("wgrad", "gradient")))

#: The GEMM that reads an operand along its rows, the one that reads its columns, and its slot in the scaling state.
_READ_BY = {"activation": ("fprop", "wgrad", INPUT), "weight": ("fprop", "dgrad", WEIGHT)}

#: The operand that a `Split` says is gathered, as inspectors know it.
_GATHERED = {"input": "activation", "grad": "gradient"}

#: The scaling state, if there is one, and the number of the GEMM in it.
Where = tuple[Scales | None, int]


def still_quantized(plain: Request, tensor: str, rows: bool, columns: bool) -> tuple[bool, bool]:
    """Which of these uses of an operand are quantized beside those that an inspector replaces."""
    row, column = ("dgrad", "wgrad") if tensor == "gradient" else _READ_BY[tensor][:2]
    return rows and (row, tensor) not in plain, columns and (column, tensor) not in plain


def partly_quantized(
    rt: Runtime, x: Value, rule: Operand | None, where: Where, plain: Request, tensor: str, wanted: bool
) -> Uses:
    """An operand of which an inspector replaces what a GEMM reads: quantized for the other one.

    `wanted`: whether backward reads a copy that is made now.
    """
    slot = _READ_BY[tensor][2]
    rows, columns = still_quantized(plain, tensor, True, wanted)
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
    rows, columns = still_quantized(plain, "gradient", *wanted)
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


def _replaced(
    rt: Runtime, product: Product, point: tuple[str, str], shown: Tensor, cast: Cast | None, current: Value
) -> Value | None:
    """What an inspector puts in the place of an operand; None where it leaves it."""
    made = answer(rt, product.inspector, point, shown, cast, current)
    return current if made is None and point in product.spec.plain else made


def _read(
    rt: Runtime, product: Product, point: tuple[str, str], shown: Tensor, cast: Cast | None, current: Value
) -> Value:
    """An operand as its GEMM reads it, or as it travels there, after an inspector has seen it."""
    made, parallel = _replaced(rt, product, point, shown, cast, current), product.parallel
    if made is None:
        return current
    if parallel is None or _GATHERED.get(parallel.gathered or "") != point[1]:
        return made
    put: Value = parallel.put(rt, point[0], made)
    return put


def shown_operands(rt: Runtime, product: Product, x: Made, w: Made) -> tuple[Value, Value]:
    """x and w as fprop reads them after an inspector has seen them."""
    (high_x, xs), (high_w, ws), dtype = x, w, product.spec.dtype
    a = _read(rt, product, ("fprop", "activation"), dense(rt, high_x, dtype), xs.cast, xs.rows)
    return a, _read(rt, product, ("fprop", "weight"), dense(rt, high_w, dtype), ws.cast, ws.rows)


def kept_for_backward(
    rt: Runtime, product: Product, x: Made, w: Made, kept: tuple[Value, Value]
) -> tuple[Value, Value]:
    """What backward will read of x and w after an inspector has seen it, so that `saved` can keep it.

    `kept`: what would be kept.
    """
    kept_x, kept_w = kept
    if product.spec.needs.weight:
        kept_x = _kept_operand(rt, product, "activation", x, kept_x)
    if product.spec.needs.input:
        kept_w = _kept_operand(rt, product, "weight", w, kept_w)
    return kept_x, kept_w


def _kept_operand(rt: Runtime, product: Product, tensor: str, operand: Made, kept: Value) -> Value:
    (high, uses), spec, parallel = operand, product.spec, product.parallel
    precision, dtype, point = spec.precision, spec.dtype, (_READ_BY[tensor][1], tensor)
    made = _replaced(rt, product, point, dense(rt, high, dtype), uses.cast, kept)
    if made is None:
        return kept
    if parallel is not None and tensor == "activation" and parallel.gathered == "input":
        part: Value = parallel.kept(rt, made)
        return part
    if made is kept or not isinstance(made, QuantizedTensor):
        return made
    rule = None
    if precision is not None and precision.backward is None:  # else a block is taken for the copy that forward read
        rule = precision.input if tensor == "activation" else precision.weight
    fits = rule is not None and made.format is (rule.columnwise or rule).format and made.format.scaling != "nvfp4"
    return one_copy(rt, made, True) if fits else dense_columns(rt, made, dtype, made.rowwise is None)


def shown_gradient(rt: Runtime, product: Product, shown: Tensor, made: Uses) -> Uses:
    """A gradient as its GEMMs read it after an inspector has seen it for both of them."""
    needs = product.spec.needs
    if product.inspector is None or not (needs.input or needs.weight):
        return made
    rows, columns, cast = made
    if needs.weight:
        columns = _read(rt, product, ("wgrad", "gradient"), shown, cast, columns)
    if needs.input:
        rows = _read(rt, product, ("dgrad", "gradient"), shown, cast, rows)
    finished(rt, product.inspector, "gradient")
    return Uses(rows, columns, cast)


def add_shown(
    rt: Runtime, product: Product, operands: tuple[Value, Value], main: Tensor, db: Tensor | None, accumulate: bool
) -> None:
    """A weight gradient that goes into memory of the caller's, after an inspector has seen it.

    What is shown is what this call adds. If it stays it is added by a GEMM of its own, as without an inspector. What
    ranks have parts of is gathered once for both.
    """
    inspector, parallel = product.inspector, product.parallel
    if parallel is not None:
        operands = parallel.gather(rt, "wgrad", *operands, inspector)
    multiplied = partial(product._replace(parallel=None)._multiplied, rt, "wgrad", *operands)
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
