"""Quantized storage as plain data: what a quantizer makes and a GEMM reads. No policy here.

A matrix [M, K] may be held in two copies: `rowwise`, quantized along K, and `columnwise`, quantized along M.
Which elements share a scale, and how the columnwise copy lies in memory, is the `Format`:

    tensor  one float32 scale; rowwise [M, K], columnwise its transpose [K, M] with the same scale
    block   FP8, a float32 scale for each 1x128 piece along the contraction, or 128x128 tile (`tiled`);
            columnwise is transposed. Scales lie as cuBLASLt reads them: piece-wise [blocks, rows] (of the copy),
            tiled [row blocks, blocks rounded up to 4]
    mxfp8   FP8, an E8M0 scale for each 32 elements (or 32x32); columnwise is NOT transposed: [M, K] with its scales
            along M. Scales [rows up to 128, blocks up to 4]; columnwise [blocks up to 4, columns up to 128]
    nvfp4   two E2M1 values a byte, low nibble first, an E4M3 scale for each 16 elements (or 16x16) below a float32
            amax for the copy (for each row, if `row_scaled`); columnwise is transposed. Scales [rows of the copy
            up to 128, blocks up to 4]

A scale here is what a value is multiplied by to get it back (scale_inv), except that nvfp4 also has the amax.
Data is stored with every side rounded up (to 16; mxfp8 32) and the tail filled with zeros, so any shape can enter any
GEMM; scales of the padding are those of zeros. `shape` is the real one.

In memory all pieces of a copy are one block of bytes: data, scale, amax. The columnwise copy, which backward reads,
begins its block, so the block alone is all that has to be kept for it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError
from te_core.tensor import META, Device, Tensor

#: Up to this many bytes a copy both lie in one block: an allocation costs a host 3 us, and keeping the
#: row-wise copy until backward costs less memory than the allocator's own rounding.
ONE_BLOCK = 1 << 16

#: cuBLASLt wants FP8 leading dimensions and addresses in multiples of 16 bytes.
PAD = 16

#: Elements along the contraction that share a scale.
BLOCK = {"block": 128, "mxfp8": 32, "nvfp4": 16}


def padded(n: int) -> int:
    """`n` rounded up to a whole number of PADs."""
    return (n + PAD - 1) // PAD * PAD


def up(n: int, step: int) -> int:
    """`n` rounded up to a multiple of `step`."""
    return (n + step - 1) // step * step


class Format:
    """How a quantized matrix is held. A singleton for each combination; compare with `is`."""

    __slots__ = ("bound", "dtype", "row_scaled", "scaling", "tiled")
    _known: dict[tuple[Any, ...], Format] = {}
    dtype: DType
    scaling: str
    tiled: bool
    row_scaled: bool
    bound: int

    def __new__(
        cls, dtype: DType, scaling: str = "tensor", tiled: bool = False, row_scaled: bool = False, bound: int = 448
    ) -> Format:
        """The format of this element type and scaling; `bound` is the largest E4M3 scale of nvfp4 (448 or 256)."""
        key = (dtype, scaling, tiled, row_scaled, bound)
        found = cls._known.get(key)
        if found is None:
            found = super().__new__(cls)
            found.dtype, found.scaling, found.tiled, found.row_scaled, found.bound = key
            found = cls._known.setdefault(key, found)
        return found

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Format, (self.dtype, self.scaling, self.tiled, self.row_scaled, self.bound)

    def __repr__(self) -> str:
        n = BLOCK.get(self.scaling)
        extra = ", an amax a row" if self.row_scaled else ""
        grain = f" {n if self.tiled else 1}x{n}" if n else " per tensor"
        return f"{self.dtype}{grain}{extra}"

    @property
    def pad(self) -> int:
        """Sides of the stored data are multiples of this."""
        return 32 if self.scaling == "mxfp8" else PAD

    @property
    def transposed(self) -> bool:
        """Whether the columnwise copy lies transposed in memory."""
        return self.scaling != "mxfp8"


class Pieces(NamedTuple):
    """The tensors of one copy of a matrix: shapes and types. In memory they follow one another."""

    data: tuple[int, int]
    data_type: DType
    scale: tuple[int, ...]
    scale_type: DType
    amax: int  # float32 elements; 0: none

    @property
    def data_bytes(self) -> int:
        """Bytes of the data."""
        return self.data[0] * self.data[1]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, up to the next multiple of 16."""
        count = self.scale[0] * (self.scale[1] if len(self.scale) > 1 else 1)
        return up(count * self.scale_type.itemsize, 16)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole copy, a multiple of 16."""
        return self.data_bytes + self.scale_bytes + up(4 * self.amax, 16)


def pieces(form: Format, shape: tuple[int, int], columnwise: bool) -> Pieces:
    """What a copy of a matrix of this shape consists of."""
    m, k = up(shape[0], form.pad), up(shape[1], form.pad)
    scaling = form.scaling
    if scaling == "mxfp8":
        scales = (up(m // 32, 4), up(k, 128)) if columnwise else (up(m, 128), up(k // 32, 4))
        return Pieces((m, k), form.dtype, scales, dtypes.uint8, 0)
    rows, along = (k, m) if columnwise else (m, k)
    if scaling == "tensor":
        return Pieces((rows, along), form.dtype, (1,), dtypes.float32, 0)
    if scaling == "block":
        blocks = (along + 127) // 128
        scales = ((rows + 127) // 128, up(blocks, 4)) if form.tiled else (blocks, rows)
        return Pieces((rows, along), form.dtype, scales, dtypes.float32, 0)
    amax = (shape[1] if columnwise else shape[0]) if form.row_scaled else 1
    return Pieces((rows, along // 2), dtypes.uint8, (up(rows, 128), up(along // 16, 4)), dtypes.uint8, amax)


cached_pieces = lru_cache(4096)(pieces)


def pieces_of(device: Any, form: Format, shape: tuple[int, int], columnwise: bool) -> Pieces:
    """The same from a cache; not on the meta device, whose sizes may be a compiler's symbols, which make no keys."""
    return (pieces if device is META else cached_pieces)(form, shape, columnwise)


def check_room(block: Tensor, nbytes: int, form: Format, shape: tuple[int, int]) -> None:
    """A block that was kept has the bytes of what it is said to begin with."""
    if block.device is META:  # its sizes may be symbols
        return
    if block.dtype is not dtypes.uint8 or not block.is_contiguous or block.size < nbytes:
        got, allowed = f"{block!r} as the memory of {form} {tuple(shape)}", f"a dense block of {nbytes} bytes (uint8)"
        do = "pass what forward saved, and a gradient of as many rows as forward's output has"
        raise ArgumentError("QuantizedTensor", got, allowed, do)


class Copy(NamedTuple):
    """One copy of a matrix in memory."""

    data: Tensor
    scale: Tensor
    amax: Tensor | None

    @classmethod
    def at(cls, block: Tensor, offset: int, parts: Pieces) -> Copy:
        """The copy whose pieces lie in a block of bytes from `offset` on."""
        ptr, device = block.ptr + offset, block.device
        scale_at = ptr + parts.data_bytes
        amax = None
        if parts.amax:
            amax = Tensor(scale_at + parts.scale_bytes, (parts.amax,), dtypes.float32, device, block)
        return cls(
            Tensor(ptr, parts.data, parts.data_type, device, block),
            Tensor(scale_at, parts.scale, parts.scale_type, device, block),
            amax,
        )


class QuantizedTensor:
    """A matrix in a narrow format: one or both copies, each with its scales."""

    __slots__ = (
        "block",
        "columnwise",
        "columnwise_amax",
        "columnwise_scale",
        "columnwise_swizzled",
        "dtype",
        "format",
        "owner",
        "rowwise",
        "rowwise_amax",
        "rowwise_scale",
        "rowwise_swizzled",
        "shape",
    )

    def __init__(
        self,
        form: Format,
        shape: tuple[int, int],
        rowwise: Copy | None,
        columnwise: Copy | None,
        block: Tensor | None = None,
    ) -> None:
        self.format = form
        self.dtype = form.dtype
        self.shape = shape  # (M, K)
        self.rowwise: Tensor | None
        self.rowwise_scale: Tensor | None
        self.rowwise_amax: Tensor | None
        self.columnwise: Tensor | None
        self.columnwise_scale: Tensor | None
        self.columnwise_amax: Tensor | None
        self.rowwise, self.rowwise_scale, self.rowwise_amax = rowwise or (None, None, None)
        self.columnwise, self.columnwise_scale, self.columnwise_amax = columnwise or (None, None, None)
        # Their scales in cuBLASLt's order, once a product asked for it (te_core/ops/swizzle.py).
        self.rowwise_swizzled: Tensor | None = None
        self.columnwise_swizzled: Tensor | None = None
        # uint8: the memory that begins with the columnwise copy (or with the rowwise one, if that is all there is)
        self.block = block
        self.owner: Any = None  # a framework's tensor of which this is the core's view

    @property
    def scale_inv(self) -> Tensor:
        """The scale of a per-tensor format, float32 [1]."""
        scale = self.rowwise_scale if self.rowwise_scale is not None else self.columnwise_scale
        assert scale is not None
        return scale

    @classmethod
    def rowwise_in(cls, block: Tensor, shape: tuple[int, int], form: Format) -> QuantizedTensor:
        """The rowwise copy that a block begins with."""
        parts = pieces_of(block.device, form, shape, False)
        check_room(block, parts.nbytes, form, shape)
        return cls(form, shape, Copy.at(block, 0, parts), None, block)

    @classmethod
    def columnwise_in(cls, block: Tensor, shape: tuple[int, int], form: Format) -> QuantizedTensor:
        """The columnwise copy that a block begins with."""
        parts = pieces_of(block.device, form, shape, True)
        check_room(block, parts.nbytes, form, shape)
        return cls(form, shape, None, Copy.at(block, 0, parts), block)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        do = "take te_core.ops.dequantize(rt, q, dtype), or a piece such as q.rowwise"
        raise ArgumentError("NumPy", repr(self), "te_core tensors of plain values", do)

    def __repr__(self) -> str:
        copies = [n for n in ("rowwise", "columnwise") if getattr(self, n) is not None]
        return f"QuantizedTensor({self.format} {tuple(self.shape)}, {' and '.join(copies) or 'empty'})"


class QuantizedRows(NamedTuple):
    """Rows of all groups in a narrow format, one group after the other; sizes are known to the device alone.

    rowwise [T, K] lies as the rows did. columnwise [K, C] is their transpose, in which a group begins at a multiple of
    128 columns and is followed by zeros up to the next one. Scales: per tensor [G], one for both copies; in blocks
    [K / 128, T up to 4] and [C / 128, K]. `block` is the memory of the columnwise copy and its scales, or of the
    rowwise one where there is no other.
    """

    format: Format
    shape: tuple[int, int]
    rowwise: Tensor | None
    rowwise_scale: Tensor | None
    columnwise: Tensor | None
    columnwise_scale: Tensor | None
    block: Tensor


def columns_of(rows: int, groups: int) -> int:
    """The columns of a transposed copy of so many rows, whatever the sizes of the groups are."""
    return (rows + 127 * groups) // 128 * 128


def row_pieces(shape: tuple[int, int], groups: int, form: Format, columnwise: bool) -> Pieces:
    """What one copy of `QuantizedRows` consists of."""
    rows, width = shape
    along = columns_of(rows, groups)
    data, scale = ((width, along), (along // 128, width)) if columnwise else (shape, (-(-width // 128), up(rows, 4)))
    return Pieces(data, form.dtype, (groups,) if form.scaling == "tensor" else scale, dtypes.float32, 0)


def rows_in(block: Tensor, shape: tuple[int, int], groups: int, form: Format) -> QuantizedRows:
    """The columnwise copy that a block of `quantize_rows` begins with."""
    parts = row_pieces(shape, groups, form, True)
    check_room(block, parts.nbytes, form, shape)
    return QuantizedRows(form, shape, None, None, *Copy.at(block, 0, parts)[:2], block)


class CastKey(NamedTuple):
    """What a plan depends on of a cast: its tensors and the epsilon are run-time values."""

    format: Format
    rowwise: bool
    columnwise: bool
    delayed: bool  # the scale is given
    amax: bool  # a maximum is raised
    transform: bool
    stochastic: bool
    four_over_six: str | None
    device: Device | None  # where its tensors lie, if it has any


@dataclass(eq=False, repr=False, slots=True)
class Cast:
    """How a producer (quantize, norm, activation) shall deliver its result.

    Per tensor: with `scale` (float32 [1], on the device) the value is multiplied by it and cast (delayed scaling);
    `amax`, if given, is raised to the maximum |value| (float32 [1], never lowered). Without `scale` the scale is
    worked out from the value's own maximum (current scaling). `epsilon` and `power_of_two` are the rule of current
    and block scaling. nvfp4: `transform` applies the random Hadamard transform to the columnwise copy, `stochastic`
    rounds the data so (`rng` int64 [2] and `site` say with which draws), `four_over_six` ("MAE" or "MSE") quantizes
    each block twice and keeps the better. `maxima`, if given, stand for the value's own (float32 [1], nvfp4 with
    `transform` [2]: of the rowwise copy, of the columnwise one): what ranks with parts of it agreed on. `nonfinite`
    (int64 [2]), if given, is raised by the NaNs and the infinities among the values. Not to be changed once made:
    casts are shared between calls.
    """

    form: InitVar[Format | DType]
    _: KW_ONLY
    rowwise: bool
    columnwise: bool
    scale: Tensor | None = None
    amax: Tensor | None = None
    epsilon: float = 0.0
    power_of_two: bool = False
    transform: bool = False
    stochastic: bool = False
    rng: Tensor | None = None
    site: int = 0
    four_over_six: str | None = None
    nonfinite: Tensor | None = None
    maxima: Tensor | None = None
    format: Format = field(init=False)
    dtype: DType = field(init=False)
    key: CastKey = field(init=False)

    def __post_init__(self, form: Format | DType) -> None:
        self.format = form if isinstance(form, Format) else Format(dtypes.dtype(form))
        self.dtype = self.format.dtype
        # Where the tensors lie. Operations take their addresses, so this is where a wrong one has to be noticed.
        device: Device | None = None
        most = 2 if self.transform and self.format.scaling == "nvfp4" else 1
        for name, t, length, kind in (
            ("scale", self.scale, 1, dtypes.float32),
            ("amax", self.amax, 1, dtypes.float32),
            ("rng", self.rng, 2, dtypes.int64),
            ("nonfinite", self.nonfinite, 2, dtypes.int64),
            ("maxima", self.maxima, most, dtypes.float32),
        ):
            if t is None:
                continue
            right = isinstance(t, Tensor) and t.dtype is kind and t.is_contiguous
            right = right and (t.shape == (length,) or (name == "maxima" and t.ndim == 1 and t.shape[0] >= length))
            if not right or (device is not None and t.device is not device):
                got = f"{name} = {t!r}" + (f" beside tensors on {device}" if right else "")
                allowed = f"a dense {kind.name} tensor [{length}] on the device of the others"
                raise ArgumentError("Cast", got, allowed, f"correct {name}")
            if name in ("amax", "nonfinite") and not t.writable:
                raise ArgumentError("Cast", f"{name} in read-only memory", "memory that is written to", "pass a copy")
            device = t.device
        given, how = (self.scale is not None, self.amax is not None), (self.transform, self.stochastic)
        self.key = CastKey(self.format, self.rowwise, self.columnwise, *given, *how, self.four_over_six, device)

    def scaled_by(self, maxima: Tensor) -> Cast:
        """A cast like this one that reads these maxima in the place of the value's own."""
        return replace(self, form=self.format, scale=None, amax=None, maxima=maxima)
