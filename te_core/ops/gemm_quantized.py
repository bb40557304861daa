"""Products of quantized matrices: out = A B^T, where A and B are two copies quantized along the contraction.

What a layer need not know is settled here: which copies lie how in memory, the padding of the storage, odd widths,
and what happens when the device cannot multiply a pair of formats:

    native     cuBLASLt multiplies the stored bytes (the reference backend: per-tensor formats)
    emulated   both operands are dequantized to float32 and multiplied there: exact, slow. On the CPU always, on a
               GPU only when asked for (`emulate`)
    dequantized  E5M2 by E5M2, which no tensor core multiplies: dequantized to the dtype of `out`, unless `strict`

`gemm_route` says which it is and why, without running anything.
"""

from __future__ import annotations

from typing import NamedTuple

from te_core import device, dtypes
from te_core.dtypes import ACTIVATION_DTYPES
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import _check
from te_core.ops.declare import exported, operation
from te_core.ops.elementwise import add
from te_core.ops.gemm import gemm
from te_core.ops.matrix import resize
from te_core.ops.quantize import dequantize
from te_core.ops.swizzle import Scales
from te_core.quantized import Format, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import META, Device, Tensor


class Route(NamedTuple):
    """How a pair of formats is multiplied on a device: "native", "emulated", "dequantized" or "refused", and why."""

    how: str
    reason: str


@exported("""
    place: Device that multiplies.
    a: Format, or type, of the first operand.
    b: Format, or type, of the second operand.
""")
def gemm_route(place: Device, a: Format, b: Format) -> Route:
    """What a product of these formats takes on this device."""
    if a.scaling == b.scaling == "tensor" and a.dtype is b.dtype is dtypes.float8_e5m2:
        return Route("dequantized", "no tensor core multiplies E5M2 by E5M2")
    if place.kind != "cuda":
        if a.scaling == b.scaling == "tensor":
            return Route("native", "")
        return Route("emulated", "the CPU backend multiplies dequantized values")
    able, reason = device.gemm_supported(device.info(place.index), a, b)
    return Route("native", "") if able else Route("refused", reason)


def _refuse(place: Device, a: Format, b: Format, reason: str) -> None:
    info = device.info(place.index)
    can = [f"{recipe}: {'yes' if able else why}" for recipe, (able, why) in device.gemm_table(info).items()]
    raise UnsupportedError(
        "gemm",
        f"{a} x {b} on {info.name} ({reason})",
        f"on this device: {'; '.join(can)}",
        "choose a recipe that runs here, or autocast(emulate=True): dequantized, exact and slow",
    )


@operation(
    """
    out: Where the result is written.
    a_columnwise: Whether the columnwise copy of a is read.
    b_columnwise: Whether the columnwise copy of b is read.
    turned: "b" or "out", which says how the product relates to another one that has the same bits. None relates to
        none.
""",
    runs="",
)
def gemm_quantized(
    rt: Runtime,
    a: QuantizedTensor,
    b: QuantizedTensor,
    out: Tensor,
    *,
    a_columnwise: bool = False,
    b_columnwise: bool = False,
    bias: Tensor | None = None,
    accumulate: bool = False,
    split_accumulator: bool = True,
    emulate: bool = False,
    strict: bool = False,
    turned: str | None = None,
) -> None:
    """out [r, c] = A B^T + bias, added to what out held if `accumulate`; `turned` as `gemm` has it.

    A is the rowwise copy of a [r, P] (contracted along P) or the columnwise copy of a [P, r]; likewise B.
    """
    place = rt.device
    if place is META:
        return
    how, reason = gemm_route(place, a.format, b.format)
    if how == "dequantized" and strict:
        raise UnsupportedError(
            "gemm",
            f"{a.format} x {b.format} under strict ({reason})",
            "at most one operand in E5M2",
            "choose Format.HYBRID or Format.E4M3, or leave strict out",
        )
    if how == "refused" and not emulate:
        _refuse(place, a.format, b.format, reason)
    _check_shapes(place, a, b, out, (a_columnwise, b_columnwise), bias)
    if how == "native":
        _native(rt, a, b, out, (a_columnwise, b_columnwise), bias, (accumulate, split_accumulator, turned))
        return
    dtype = out.dtype if how == "dequantized" else dtypes.float32
    left, right = dequantize(rt, a, dtype, columnwise=a_columnwise), dequantize(rt, b, dtype, columnwise=b_columnwise)
    # A columnwise nvfp4 copy comes with its padding: kept where both operands have it (a transform spreads into it).
    length = min(left.shape[0 if a_columnwise else 1], right.shape[0 if b_columnwise else 1])
    if a_columnwise:
        left = left.rows(0, length)
    if b_columnwise:
        right = right.rows(0, length)
    gemm(
        rt,
        left,
        right,
        trans_a=a_columnwise,
        trans_b=not b_columnwise,
        bias=bias,
        out=out,
        accumulate=accumulate,
        turned=turned,
    )


def _check_shapes(
    place: Device, a: QuantizedTensor, b: QuantizedTensor, out: Tensor, columns: tuple[bool, bool], bias: Tensor | None
) -> None:
    """Sizes fit as they are, not as storage rounds them up; what is multiplied is what the formats say."""
    op = "gemm_quantized"
    (left, rows), (right, cols) = (
        q.shape if columnwise else q.shape[::-1] for q, columnwise in zip((a, b), columns, strict=True)
    )
    if left != right or tuple(out.shape) != (rows, cols):
        turned = [" by its columns" if columnwise else "" for columnwise in columns]
        raise ArgumentError(
            op,
            f"a {tuple(a.shape)}{turned[0]}, b {tuple(b.shape)}{turned[1]}, out {tuple(out.shape)}",
            "operands of one contraction size, and an out with the other size of each",
            "check the shapes, and which copies are multiplied",
        )
    _check.stored(op, place, "a", a)
    _check.stored(op, place, "b", b)
    _check.result(op, place, "out", out, (rows, cols), ACTIVATION_DTYPES)
    _check.vector(op, place, "bias", bias, cols, ACTIVATION_DTYPES)


def _native(
    rt: Runtime,
    a: QuantizedTensor,
    b: QuantizedTensor,
    out: Tensor,
    columns: tuple[bool, bool],
    bias: Tensor | None,
    how: tuple[bool, bool, str | None],
) -> None:
    (a_columnwise, b_columnwise), (accumulate, split_accumulator, turned) = columns, how
    left, left_scale, left_amax = _copy(a, a_columnwise)
    right, right_scale, right_amax = _copy(b, b_columnwise)
    rows, cols = out.shape
    form = a.format
    high = left.shape[0] if form.transposed or not a_columnwise else left.shape[1]
    blocks = form.scaling != "tensor"
    if not blocks and rows != high:  # a GEMM takes any number of rows but columns by 16 only
        left, high = left.rows(0, rows), rows
    two_orders = form.scaling in ("mxfp8", "nvfp4")
    wide = right.shape[0] if b.format.transposed or not b_columnwise else right.shape[1]
    exact = (high, wide) == (rows, cols)
    if bias is not None and wide != cols:
        bias = resize(rt, bias.reshape(1, cols), 1, wide).reshape(wide)
    full = out if exact else rt.empty((high, wide), out.dtype)
    gemm(
        rt,
        left,
        right,
        trans_a=a_columnwise and not form.transposed,
        trans_b=b.format.transposed or not b_columnwise,
        a_scale=Scales(a, a_columnwise) if two_orders else left_scale,
        b_scale=Scales(b, b_columnwise) if two_orders else right_scale,
        bias=bias,
        out=full,
        accumulate=accumulate and exact,
        split_accumulator=split_accumulator,
        a_format=form if blocks else None,
        b_format=b.format if blocks else None,
        a_amax=left_amax,
        b_amax=right_amax,
        turned=turned,
    )
    if exact:
        return
    if accumulate:
        add(rt, out, resize(rt, full, rows, cols), out=out)
    else:
        resize(rt, full, rows, cols, out=out)


def _copy(q: QuantizedTensor, columnwise: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    if columnwise:
        data, scale, amax = q.columnwise, q.columnwise_scale, q.columnwise_amax
    else:
        data, scale, amax = q.rowwise, q.rowwise_scale, q.rowwise_amax
    if data is None or scale is None:  # never of our own casts, which make what is read
        side, there = ("rowwise", "columnwise") if not columnwise else ("columnwise", "rowwise")
        raise ArgumentError(
            "gemm_quantized",
            f"an operand of shape {q.shape} with its {there} copy alone",
            f"one with its {side} copy",
            f"quantize it with that copy (of a tensor that a module holds: update_usage({side}_usage=True))",
        )
    return data, scale, amax
