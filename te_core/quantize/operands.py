"""What each GEMM reads: a precision's rules applied to the tensors of a layer.

An operand is used twice: by one GEMM along its rows, by another along its columns (x: fprop and wgrad, w: fprop and
dgrad, dy: dgrad and wgrad). `quantize_forward` and `quantize_gradient` give both uses, which are one
`QuantizedTensor` with two copies, or two tensors where a recipe asks for two formats, or plain where it asks for none.
What backward needs is saved as one tensor (`saved`) and made an operand again (`restored`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import UnsupportedError
from te_core.ops import _check
from te_core.ops import raw as ops
from te_core.ops.quantize import allocate
from te_core.precision import Operand, Precision
from te_core.quantize.state import FORWARD_SLOTS, WEIGHT, Scales, backward_cast, element, forward_cast, without_state
from te_core.quantized import Cast, Copy, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

Value = Tensor | QuantizedTensor
#: The scaling state, if the recipe keeps one, and the GEMM's number in it.
Where = tuple[Scales | None, int]


class CustomQuantizer(Protocol):
    """A user's own quantizer: gives the values as its format can hold them."""

    def __call__(self, rt: Runtime, x: Tensor, rowwise: bool, columnwise: bool) -> Tensor:
        """x [M, K] rounded to the format, in x's dtype."""
        ...


class Uses(NamedTuple):
    """An operand as the two GEMMs read it, and how it was cast, if it was."""

    rows: Value
    columns: Value
    cast: Cast | None


def is_plain_rule(rule: Operand) -> bool:
    """Whether one cast does what the rule says, so that it can be fused into what computes the operand."""
    return rule.columnwise is None and rule.custom is None and rule.scaling != "calibrate"


def repeats(rule: Operand | None) -> bool:
    """Whether backward can quantize an input by this rule and get what forward would have kept for it.

    Not where the scale may have moved on, where values are rounded at random, and where only a user knows how.
    """
    column = None if rule is None else rule.columnwise or rule
    return column is None or not (column.scaling in ("delayed", "custom") or column.stochastic)


def quantize_forward(
    rt: Runtime, x: Value, rule: Operand | None, where: Where, slot: int, *, rowwise: bool, columnwise: bool
) -> Uses:
    """An input or weight (slot INPUT or WEIGHT) of a GEMM in this precision."""
    if rule is None:
        return Uses(x, x, None)
    scales, gemm = where
    if rule.scaling == "calibrate":
        if scales is None:
            raise without_state("calibration")
        if scales.forward_amax is not None:  # not in a recomputation, whose maxima were taken before
            _raise(rt, element(scales.forward_amax, FORWARD_SLOTS * gemm + slot), dense(rt, x, dtypes.float32))
        return Uses(x, x, None)
    if isinstance(x, QuantizedTensor):
        return _given(rt, x, rule, rowwise, columnwise, known=slot == WEIGHT)

    def cast_of(part: Operand, along_rows: bool, along_columns: bool) -> Cast:
        return forward_cast(part, scales, gemm, slot, rowwise=along_rows, columnwise=along_columns)

    return _both(rt, x, rule, rowwise, columnwise, cast_of)


def takes_turned(precision: Precision | None) -> bool:
    """Whether one layout of a quantized weight serves as the other."""
    rule = None if precision is None else precision.weight
    plain = ("delayed", "current", "block", "calibrate")
    return rule is None or (rule.scaling in plain and rule.columnwise is None)


def check_turned(precision: Precision | None, parallel: object, inspect: object) -> None:
    """Refuse a weight that lies [K, N] where nothing is made for it."""
    got = ""
    if not takes_turned(precision):
        got = f"weights quantized as {precision.weight.scaling}"  # type: ignore[union-attr]
    elif parallel is not None:
        got = "a weight that is spread over ranks"
    elif inspect is not None:
        got = "an inspector"
    if got:
        allowed = "no recipe, or delayed, current or block scaling; a whole weight; no inspector"
        do = "choose another recipe or layer, or pass the weight as [out, in] with turned=False"
        raise UnsupportedError("linear with turned=True", got, allowed, do)


def transpose_of(q: QuantizedTensor) -> QuantizedTensor:
    """Its transpose in the same memory: in formats that `check_turned` lets pass the two copies trade places.

    A block of both copies then begins with the rowwise one.
    """
    made = QuantizedTensor(q.format, q.shape[::-1], None, None, q.block)
    for piece in ("", "_scale", "_amax"):
        setattr(made, "rowwise" + piece, getattr(q, "columnwise" + piece))
        setattr(made, "columnwise" + piece, getattr(q, "rowwise" + piece))
    return made


def quantize_turned(
    rt: Runtime, w: Value, rule: Operand | None, where: Where, slot: int, *, rowwise: bool, columnwise: bool
) -> Uses:
    """A weight that lies [K, N], by a rule for both copies: quantized it is [N, K], as which its copies lie in memory.

    So `rowwise` is the copy along w's columns, and the block begins with that which backward reads.
    """
    if rule is None or rule.scaling == "calibrate" or isinstance(w, QuantizedTensor):
        return quantize_forward(rt, w, rule, where, slot, rowwise=rowwise, columnwise=columnwise)
    _check.matrix("quantize", "x", w)
    cast = forward_cast(rule, *where, slot, rowwise=columnwise, columnwise=rowwise)
    made = allocate(rt, w.shape[::-1], forward_cast(rule, *where, slot, rowwise=rowwise, columnwise=columnwise))  # type: ignore[arg-type]
    ops.quantize(rt, w, cast, out=transpose_of(made))
    return Uses(made, made, cast)


def _raise(rt: Runtime, amax: Tensor, x: Tensor) -> None:
    """Raise a noted maximum to that of x."""
    both = rt.empty((2,), dtypes.float32)
    ops.amax(rt, x, out=element(both, 0))
    ops.resize(rt, amax.reshape(1, 1), 1, 1, out=element(both, 1).reshape(1, 1))
    ops.amax(rt, both, out=amax)


def quantize_gradient(
    rt: Runtime,
    dy: Value,
    rule: Operand | None,
    where: Where,
    *,
    rowwise: bool,
    columnwise: bool,
    column_sum: Tensor | None = None,
    rng: Tensor | None = None,
) -> Uses:
    """An output gradient in this precision; `column_sum` is set to the sums of its columns on the way."""
    scales, gemm = where

    def cast_of(part: Operand, along_rows: bool, along_columns: bool) -> Cast:
        return backward_cast(part, scales, gemm, rowwise=along_rows, columnwise=along_columns, rng=rng)

    if isinstance(dy, Tensor) and rule is not None and is_plain_rule(rule):
        cast = cast_of(rule, rowwise, columnwise)
        q = ops.quantize(rt, dy, cast, column_sum=column_sum)
        return Uses(q, q, cast)
    if column_sum is not None:
        ops.column_sum(rt, dense(rt, dy, dtypes.float32), column_sum)
    if rule is None:
        return Uses(dy, dy, None)
    if isinstance(dy, QuantizedTensor):
        return _given(rt, dy, rule, rowwise, columnwise)
    return _both(rt, dy, rule, rowwise, columnwise, cast_of)


def _both(
    rt: Runtime,
    x: Tensor,
    rule: Operand,
    rowwise: bool,
    columnwise: bool,
    cast_of: Callable[[Operand, bool, bool], Cast],
) -> Uses:
    """Both uses of an operand that may have another rule for its columns."""

    def quantize(part: Operand, along_rows: bool, along_columns: bool) -> tuple[Value, Cast | None]:
        if part.custom is not None:
            return part.custom(rt, x, along_rows, along_columns), None
        cast = cast_of(part, along_rows, along_columns)
        return ops.quantize(rt, x, cast), cast

    if rule.columnwise is None:
        q, cast = quantize(rule, rowwise, columnwise)
        return Uses(q, q, cast)
    row: Value = x
    column: Value = x
    cast = None
    if rowwise and rule.scaling != "none":
        row, cast = quantize(rule, True, False)
    if columnwise and rule.columnwise.scaling != "none":
        column, other = quantize(rule.columnwise, False, True)
        cast = cast or other
    return Uses(row, column, cast)


def quantize_together(rt: Runtime, values: Sequence[Value], cast: Cast) -> list[QuantizedTensor]:
    """Matrices by one cast, in one launch where their widths agree; those that came quantized as they are."""
    plain = [x for x in values if isinstance(x, Tensor)]
    if len(plain) > 1 and len({x.shape[1] for x in plain}) == 1:
        made = iter(ops.quantize_many(rt, plain, [cast] * len(plain)))
    else:
        made = iter([ops.quantize(rt, x, cast) for x in plain])
    return [x if isinstance(x, QuantizedTensor) else next(made) for x in values]


def as_asked(rt: Runtime, x: Value, rule: Operand | None, dtype: DType) -> Value:
    """An operand that came quantized, if it came as this rule has it; else its values, to be quantized anew."""
    if isinstance(x, Tensor):
        return x
    fits = rule is not None and is_plain_rule(rule) and x.format is rule.format
    return x if fits else ops.dequantize(rt, x, dtype)


def _given(
    rt: Runtime, q: QuantizedTensor, rule: Operand, rowwise: bool, columnwise: bool, known: bool = False
) -> Uses:
    """An operand that came quantized, completed by the copies that will be read.

    wgrad needs both of its operands transformed, or none. Of a columnwise copy in NVFP4 nothing tells which it is, but
    where it is `known` to be plain (a weight's), so that one of our own is made.
    """
    makes = columnwise and (q.columnwise is None or (q.format.scaling == "nvfp4" and not known))
    if (rowwise or makes) and q.rowwise is None:
        got, allowed = f"{q!r} where its rowwise copy is read", "a tensor that holds the rowwise copy"
        raise UnsupportedError("gemm", got, allowed, "quantize it with rowwise=True")
    if makes:
        q = with_columnwise(rt, q, (rule.columnwise or rule).transform)
    return Uses(q, q, None)


def with_columnwise(rt: Runtime, q: QuantizedTensor, transform: bool = False) -> QuantizedTensor:
    """The tensor with a columnwise copy made of its rowwise one.

    Exact where both copies share their scales (per tensor, 128x128 tiles); else the values are quantized anew, and
    transformed first if asked (NVFP4).
    """
    assert q.rowwise is not None and q.rowwise_scale is not None
    cast = Cast(q.format, rowwise=False, columnwise=True, transform=transform)
    if q.format.scaling == "tensor" or q.format.scaling == "block" and q.format.tiled:
        made = allocate(rt, q.shape, cast)
        assert made.columnwise is not None and made.columnwise_scale is not None
        ops.transpose(rt, q.rowwise, out=made.columnwise)
        target = made.columnwise_scale.matrix() if q.format.tiled else made.columnwise_scale.reshape(1, 1)
        source = ops.transpose(rt, q.rowwise_scale) if q.format.tiled else q.rowwise_scale.reshape(1, 1)
        ops.resize(rt, source, *target.shape, out=target)
    else:
        made = ops.quantize(rt, ops.dequantize(rt, q, dtypes.float32), cast)
    assert made.columnwise is not None and made.columnwise_scale is not None
    row = Copy(q.rowwise, q.rowwise_scale, q.rowwise_amax)
    column = Copy(made.columnwise, made.columnwise_scale, made.columnwise_amax)
    return QuantizedTensor(q.format, q.shape, row, column, made.block)


def one_copy(rt: Runtime, q: QuantizedTensor, columns: bool) -> QuantizedTensor:
    """Its columnwise copy (or the rowwise one) in a block of its own, as `saved` keeps it; its copies lie anywhere."""
    if columns and q.columnwise is None:
        return with_columnwise(rt, q)
    made = allocate(rt, q.shape, Cast(q.format, rowwise=not columns, columnwise=columns))
    which = "columnwise" if columns else "rowwise"
    for name in (which, f"{which}_scale"):
        there, here = getattr(q, name), getattr(made, name)
        if there.shape == (1,):
            there, here = there.reshape(1, 1), here.reshape(1, 1)
        ops.resize(rt, there, *here.shape, out=here)
    return made


def flattened(x: Value) -> tuple[tuple[int, ...], Value]:
    """(leading dimensions, x as a matrix)."""
    return (x.shape[:-1], x.matrix()) if isinstance(x, Tensor) else ((x.shape[0],), x)


def dense(rt: Runtime, x: Value, dtype: DType) -> Tensor:
    """The values of an operand; of a quantized one in this dtype."""
    return x if isinstance(x, Tensor) else ops.dequantize(rt, x, dtype)


def drop_rows(uses: Uses) -> None:
    """Free the rowwise copy of a gradient once dgrad has read it: backward is where memory peaks.

    Without a cast it came quantized, and is the caller's.
    """
    q = uses.columns
    if uses.cast is not None and isinstance(q, QuantizedTensor) and q.columnwise is not None:
        q.rowwise = q.rowwise_scale = q.rowwise_amax = q.rowwise_swizzled = None


def kept(high: Value, uses: Uses, precision: Precision | None) -> Value:
    """What backward will read of an operand, by the recipe's `backward_override`."""
    if precision is None or precision.backward is None:
        return uses.columns
    if precision.backward == "high_precision" and isinstance(high, Tensor):
        return high
    return uses.rows


def saved(operand: Value | None, wanted: bool) -> Tensor | None:
    """An operand as one tensor: a quantized one as the block that begins with the copy backward reads."""
    if not wanted or operand is None:
        return None
    return operand.block if isinstance(operand, QuantizedTensor) else operand


def restored(
    rt: Runtime,
    kept: Tensor | None,
    shape: tuple[int, int],
    precision: Precision | None,
    role: str,
    dtype: DType,
    turned: bool = False,
) -> Value:
    """The operand of this role ("input", "weight") that `saved` kept, as backward's GEMM reads it along its columns.

    A `turned` one of this shape was quantized as its transpose.
    """
    assert kept is not None
    if kept.dtype is not dtypes.uint8:
        return kept.matrix()
    rule: Operand | None = getattr(precision, role)
    assert precision is not None and rule is not None
    shape = shape[::-1] if turned else shape
    if precision.backward is not None:  # then it is the copy that forward read which is kept, if it is quantized at all
        q = QuantizedTensor.rowwise_in(kept, shape, rule.format)
        return ops.dequantize(rt, transpose_of(q) if turned else q, dtype)
    return QuantizedTensor.columnwise_in(kept, shape, (rule.columnwise or rule).format)
