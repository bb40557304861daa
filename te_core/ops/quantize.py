"""Quantization: cast to a narrow format in one or both copies, back again, and the scale update.

Rules (all bit-exact on every backend), per tensor: amax = max |x| over elements that are not NaN; q = saturating
cast, round to nearest even, of float32(x) * scale; scale_inv = 1 / scale in float32. Block formats have a rule for
each block, at the head of `te_core/backends/cpu/quantize_block.py`, `quantize_mxfp8.py`, `quantize_nvfp4.py`. Storage:
`te_core.quantized`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.errors import ArgumentError
from te_core.ops import _check, quantize_nvfp4
from te_core.ops.declare import operation, rules
from te_core.quantized import ONE_BLOCK, PAD, Cast, CastKey, Copy, Format, QuantizedTensor, padded, pieces_of
from te_core.runtime import Runtime
from te_core.tensor import Device, Tensor

#: How a cast's values are scaled, by the names of formats.
ALGOS = ("max", "most_recent")
SCALINGS = ("tensor", "block", "mxfp8", "nvfp4")


def key_of(cast: Cast | None) -> CastKey | None:
    """The key of a cast that may be missing."""
    return None if cast is None else cast.key


def is_apart(cast: Cast | None, keep: bool, in_blocks: bool = True) -> bool:
    """Whether a cast of what another kernel computes is a launch of its own, from the rounded values.

    `keep`: the values are wanted besides. `in_blocks`: the kernel can deliver them with a scale for each block.
    """
    if cast is None or cast.nonfinite is not None:
        return cast is not None
    return cast.format.scaling != "tensor" and (keep or not in_blocks or cast.format.scaling != "block")


def needs_values(cast: Cast | None, keep: bool) -> bool:
    """Whether the rounded values are written: current scaling needs all of them before it can cast."""
    return cast is None or keep or (cast.scale is None and cast.format.scaling == "tensor")


def _named(what: str, form: Format) -> str:
    """What a backend calls an operation on this format."""
    return what if form.scaling == "tensor" else what + "_" + form.scaling


def allocate(rt: Runtime, shape: tuple[int, int], cast: Cast) -> QuantizedTensor:
    """Uninitialised storage for the copies that `cast` asks for: one block or, where it is large, two."""
    if cast.format.scaling != "tensor":
        return _allocate_blocks(rt, shape, cast)
    m, k = padded(shape[0]), padded(shape[1])
    size = m * k
    both = cast.rowwise and cast.columnwise
    shared = both and rt.joins and size <= ONE_BLOCK
    block = rt.empty((2 * size + PAD if shared else size + PAD,), dtypes.uint8)
    ptr, device, dtype = block.ptr, block.device, cast.dtype
    scale_inv = Tensor(ptr + size, (1,), dtypes.float32, device, block)  # one for both
    rowwise = columnwise = None
    if cast.columnwise:
        columnwise = Copy(Tensor(ptr, (k, m), dtype, device, block), scale_inv, None)
    if shared:
        rowwise = Copy(Tensor(ptr + size + PAD, (m, k), dtype, device, block), scale_inv, None)
    elif both:
        rowwise = Copy(rt.empty((m, k), dtype), scale_inv, None)
    elif cast.rowwise:
        rowwise = Copy(Tensor(ptr, (m, k), dtype, device, block), scale_inv, None)
    return QuantizedTensor(cast.format, shape, rowwise, columnwise, block)


def _allocate_blocks(rt: Runtime, shape: tuple[int, int], cast: Cast) -> QuantizedTensor:
    column = pieces_of(rt.device, cast.format, shape, True) if cast.columnwise else None
    row = pieces_of(rt.device, cast.format, shape, False) if cast.rowwise else None
    if column is None:
        assert row is not None  # check_cast refuses a cast to neither
        block = rt.empty((row.nbytes,), dtypes.uint8)
        return QuantizedTensor(cast.format, shape, Copy.at(block, 0, row), None, block)
    if row is None:
        block = rt.empty((column.nbytes,), dtypes.uint8)
        return QuantizedTensor(cast.format, shape, None, Copy.at(block, 0, column), block)
    if rt.joins and row.data_bytes <= ONE_BLOCK:
        block = rt.empty((column.nbytes + row.nbytes,), dtypes.uint8)
        rowwise = Copy.at(block, column.nbytes, row)
    else:
        block = rt.empty((column.nbytes,), dtypes.uint8)
        rowwise = Copy.at(rt.empty((row.nbytes,), dtypes.uint8), 0, row)
    return QuantizedTensor(cast.format, shape, rowwise, Copy.at(block, 0, column), block)


@rules("""
    must cast.key.device in (None, device): tensors of one device, the runtime's; move them to the runtime's device
    must cast.format.scaling in SCALINGS: formats whose scaling is one of {SCALINGS}; choose an FP8 or FP4 format
    must cast.format.dtype is dtypes.float4_e2m1 if cast.format.scaling == "nvfp4" else cast.format.dtype.is_fp8:
        float8_e4m3 or float8_e5m2 (tensor, block, mxfp8), float4_e2m1 (nvfp4); choose an FP8 or FP4 format
    must cast.rowwise or cast.columnwise: rowwise, columnwise or both; ask for an orientation
    must cast.rng is not None or not cast.stochastic: rng, an int64 tensor (seed, offset); pass rng=
    must cast.format.scaling == "tensor" or (cast.scale is None and cast.amax is None): a given scale and amax with
        per-tensor formats only; leave scale and amax out
    must cast.format.scaling == "nvfp4" or not (cast.transform or cast.stochastic or cast.four_over_six): these with
        nvfp4 only; leave them out
""")
def check_cast(op: str, device: Device, cast: Cast) -> None:
    """A cast names a narrow type and at least one orientation; its tensors, which `Cast` has checked, lie here."""
    if cast.format.scaling == "nvfp4":
        quantize_nvfp4.check(op, cast)


def check_out(operation: str, device: Device, out: QuantizedTensor, x: Tensor, cast: Cast) -> None:
    """`out` has room for x by this cast."""
    held = (out.rowwise is not None, out.columnwise is not None)
    if out.format is not cast.format or tuple(out.shape) != tuple(x.shape) or held != (cast.rowwise, cast.columnwise):
        got = f"out = {out!r} for {x!r} and a cast to {cast.format}, rowwise={cast.rowwise}, columnwise="
        allowed = "an out of x's shape and the cast's format that holds the cast's copies"
        raise ArgumentError(operation, f"{got}{cast.columnwise}", allowed, "correct out or the cast")
    _check.stored(operation, device, "out", out, writes=True)


@operation(
    """
    x [M, K] act
    cast: How x is quantized (`Cast`).
    column_sum? [K] act written
""",
    runs="quantize quantize_block.quantize_block quantize_mxfp8.quantize_mxfp8 quantize_nvfp4.quantize_nvfp4",
)
def quantize(
    rt: Runtime, x: Tensor, cast: Cast, *, column_sum: Tensor | None = None, out: QuantizedTensor | None = None
) -> QuantizedTensor:
    """Quantize the matrix x [M, K] as `cast` says, into fresh storage or `out`, which holds the cast's copies.

    column_sum [K], if given, is set to the column sums of x itself (not of its quantized values), added in
    float32: the bias gradient, when x is an output gradient.
    """
    op = "quantize"
    check_cast(op, rt.device, cast)
    if out is None:
        out = allocate(rt, x.shape, cast)  # type: ignore[arg-type]
    else:
        check_out(op, rt.device, out, x, cast)
        out.rowwise_swizzled = out.columnwise_swizzled = None
    getattr(rt.backend, _named("quantize", cast.format))(rt, x, cast, out, column_sum)
    if cast.nonfinite is not None:
        count_nonfinite(rt, x, cast.nonfinite)
    return out


@operation(
    """
    q: Quantized matrix.
    dtype in ACTIVATION_DTYPES: Type of the result.
    columnwise: Whether the columnwise copy is read. None reads the rowwise one where it is there.
""",
    runs="dequantize quantize_block.dequantize_block quantize_mxfp8.dequantize_mxfp8 quantize_nvfp4.dequantize_nvfp4",
)
def dequantize(rt: Runtime, q: QuantizedTensor, dtype: DType, *, columnwise: bool | None = None) -> Tensor:
    """The values of a quantized matrix, dense [M, K]; of the rowwise copy where there is one, unless said otherwise.

    Of a columnwise nvfp4 copy: [padded(M), K], and in the domain of its Hadamard transform, if it has one (the
    transform mixes the rows of a block of 16, so none of them can be left out).
    """
    if columnwise is None:
        columnwise = q.rowwise is None
    if (q.columnwise if columnwise else q.rowwise) is None:
        raise ArgumentError("dequantize", repr(q), "a tensor that holds the wanted copy", "keep that copy")
    _check.stored("dequantize", rt.device, "q", q)
    m, k = q.shape
    out = rt.empty((padded(m) if columnwise and q.format.scaling == "nvfp4" else m, k), dtype)
    getattr(rt.backend, _named("dequantize", q.format))(rt, q, out, columnwise)
    return out


def dense_columns(rt: Runtime, x: Tensor | QuantizedTensor, dtype: DType, columns: bool) -> Tensor:
    """The values of an operand that meets a plain one, from the copy that the GEMM would have read."""
    if isinstance(x, Tensor):
        return x
    there = x.columnwise is not None if columns else x.rowwise is not None
    return dequantize(rt, x, dtype, columnwise=columns if there else not columns).rows(0, x.shape[0])


@operation("""
    x [M, N]
    must x.dtype.bits in (8, 16, 32): elements of 8, 16 or 32 bits
    out? [N, M] x written
""")
def transpose(rt: Runtime, x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """A dense transposed copy of a matrix of any 1-, 2- or 4-byte type."""
    if out is None:
        out = rt.empty((x.shape[1], x.shape[0]), x.dtype)
    rt.backend.transpose(rt, x, out)
    return out


@operation("""
    x [...] act
    must column_sum is None or x.ndim == 2: a matrix x with column_sum; flatten the leading dimensions of x
    out? [1] f32 written
    column_sum? [x.shape[1]] act written
""")
def amax(rt: Runtime, x: Tensor, *, out: Tensor | None = None, column_sum: Tensor | None = None) -> Tensor:
    """Max |x| over all elements that are not NaN, as float32 [1]; 0 for an empty tensor.

    `column_sum` [N] receives the column sums of a matrix x in the same pass, as `quantize` has them.
    """
    if out is None:
        out = rt.empty((1,), dtypes.float32)
    rt.backend.amax(rt, x, out, column_sum)
    return out


@operation("""
    tensors: Tensors of one type.
    out? [len(tensors)] f32 written
""")
def amax_many(rt: Runtime, tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Max |x| of each of several tensors of one type, as float32 [n]."""
    op, n = "amax_many", len(tensors)
    for t in tensors:
        _check.dense(op, "a tensor", t)
        if t.dtype is not tensors[0].dtype or t.device is not rt.device:
            allowed = f"tensors of one type on {rt.device}"
            raise ArgumentError(op, f"{t!r} beside {tensors[0]!r}", allowed, "call it for each sort")
    if out is None:
        out = rt.empty((n,), dtypes.float32)
    if n:
        _check.one_of(op, "dtype of the tensors", tensors[0].dtype, ACTIVATION_DTYPES)
        rt.backend.amax_many(rt, tensors, out)
    return out


@operation("""
    x [...] act
    out [2] i64 written: Counts of NaNs and infinities, which are raised.
""")
def count_nonfinite(rt: Runtime, x: Tensor, out: Tensor) -> None:
    """Raise out (int64 [2]) by the number of NaNs and of infinities among the elements of x."""
    rt.backend.count_nonfinite(rt, x, out)


@dataclass(frozen=True, slots=True)
class ScalingState:
    """The delayed-scaling state of one module and direction, as the update reads and writes it.

    scale [n], history [L, n] (row 0 is where casts put this step's amax), used [n]: the scale before the
    update, kept because recomputed forwards quantize with it. limit = format maximum * 2^-margin.
    """

    scale: Tensor
    history: Tensor
    used: Tensor
    limit: float

    def __post_init__(self) -> None:
        history: Any = self.history
        rows, n = history.shape if isinstance(history, Tensor) and history.ndim == 2 else (0, 0)
        for name, t, shape in (
            ("scale", self.scale, (n,)),
            ("used", self.used, (n,)),
            ("history", self.history, (rows, n)),
        ):
            right = rows and isinstance(t, Tensor) and t.shape == shape
            if not right or t.dtype is not dtypes.float32 or not t.is_contiguous:
                allowed = "a dense float32 history [rows, slots], scale and used [slots]"
                raise ArgumentError("ScalingState", f"{name} = {t!r}", allowed, f"correct {name}")
            _check.written("ScalingState", name, t)
        _check.on_device("ScalingState", self.scale.device, self.history, self.used)


@operation(
    """
    states: States of delayed scaling (`ScalingState`).
    algo in ALGOS: How the amax follows from the history: "max" or "most_recent".
""",
    runs="",
)
def update_scales(rt: Runtime, states: list[ScalingState], algo: str) -> None:
    """The delayed-scaling step of all modules at once (one launch).

    For every column of every history (L rows, write row 0): last = history[0]. If last is 0 the column is left
    as it is. Otherwise amax = last ("most_recent") or max(history[1:], last) ("max"); then the column rolls:
    rows 1..L-2 take the row above them (new[i] = old[i+1]), row L-1 takes last, row 0 becomes 0 (L = 1: just
    reset to 0). NaN loses every maximum. The scale becomes limit / amax when amax is finite and > 0 (float32
    maximum if that overflows), else it stays. `used` receives the scale from before.
    """
    run_update(rt, plan_update(rt, states, algo))


@operation("""
    algo in ALGOS
""")
def plan_update(rt: Runtime, states: list[ScalingState], algo: str) -> Any:
    """The update of these states as a plan, for callers who repeat it every step (it keeps pointers: see there)."""
    twice = len(states) - len({state.scale.ptr for state in states})
    if twice:  # a GPU would update it in two blocks at once
        raise ArgumentError(
            "update_scales", f"{twice} of {len(states)} states twice", "each once", "leave out the repetitions"
        )
    _check.on_device("update_scales", rt.device, *[state.scale for state in states])
    return rt.backend.plan_update(rt, states, algo)


@operation("""
plan: What `plan_update` gave.
""")
def run_update(rt: Runtime, plan: Any) -> None:
    """Carry out a planned update. The states' memory must still be where it was."""
    rt.backend.run_update(rt, plan)
