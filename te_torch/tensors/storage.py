"""Base of quantized storages: buffers, a format and a nominal type, without being a torch tensor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from te_core.errors import ArgumentError
from te_core.quantized import Copy, Format, QuantizedTensor
from te_torch.runtime import FLOATS, to_core, to_core_shape
from te_torch.tensors import run
from te_torch.tensors.buffers import NAMES, Buffers, core_of, form_key, form_of, matrix_of, packed, rows_of


class QuantizedTensorStorage:
    """A quantized matrix (leading dimensions count as one), as plain Python holds it.

    The buffers `_row_data`, `_row_scale`, `_row_amax`, `_col_data`, `_col_scale`, `_col_amax` are the truth; their
    documented names are views of the part that is not padding. Assigning one adopts the given tensor.
    """

    _INNER_TENSORS: ClassVar[tuple[str, ...]] = NAMES
    _dtype: torch.dtype
    _format: Format
    _options: tuple[Any, ...]
    _quantizer: Any
    _shape: tuple[int, ...]
    _core_views: CoreViews | None = None
    _row_data: Any
    _row_scale: Any
    _row_amax: Any
    _col_data: Any
    _col_scale: Any
    _col_amax: Any

    @classmethod
    def _of(
        cls, shape: tuple[int, ...], dtype: torch.dtype, form: Format, buffers: Buffers, quantizer: Any = None,
        options: tuple[Any, ...] = (),
    ) -> Any:  # fmt: skip
        made = object.__new__(cls)
        made._shape = shape
        made._hold(dtype, form, buffers, quantizer, options)
        return made

    def _hold(self, dtype: torch.dtype, form: Format, buffers: Buffers, quantizer: Any, options: tuple) -> None:
        self._dtype, self._format, self._quantizer, self._options = dtype, form, quantizer, options
        self._set_buffers(buffers)

    # -------------------------------------------------------------------------------------------- buffers

    @property
    def _buffers(self) -> Buffers:
        return Buffers(*[getattr(self, n) for n in NAMES])

    def _set_buffers(self, buffers: Buffers) -> None:
        for name, t in zip(NAMES, buffers, strict=True):
            setattr(self, name, t)

    def _matrix(self) -> tuple[int, int]:
        folded = self._folded()
        return folded or matrix_of(self.shape)

    def _folded(self) -> tuple[int, int] | None:
        """The matrix that a flattened tensor (`view(-1)`) still is, kept among its options."""
        for option in self._options:
            if type(option) is tuple:
                return option
        return None

    def _row_view(self, width: int = 1) -> torch.Tensor | None:
        """The rowwise data without padding, `width` elements a byte, in the tensor's shape."""
        data: torch.Tensor | None = self._row_data
        if data is None:
            return None
        m, k = self._matrix()
        if self._folded():
            return data[:m, : k // width]
        return data[:m, : k // width].view(*self.shape[:-1], k // width) if self.shape else data[0, 0]

    def _col_view(self, width: int = 1) -> torch.Tensor | None:
        """The columnwise data without padding: transposed formats as [K, ...], else in the tensor's shape."""
        data: torch.Tensor | None = self._col_data
        if data is None:
            return None
        m, k = self._matrix()
        if self._folded():
            return data[:k, : m // width] if self._format.transposed else data[:m, :k]
        if not self._format.transposed:
            return data[:m, :k].view(self.shape)
        if width > 1:
            return data[:k, : m // width]
        return data[:k, :m].view(k, *self.shape[:-1])

    def _adopt(self, name: str, t: torch.Tensor | None) -> None:
        """Hold a buffer that somebody gave, as the matrix that the core reads."""
        if t is not None and name in ("_row_data", "_col_data"):
            t = t.view(torch.uint8)
            rows = self._matrix()[1] if name == "_col_data" and self._format.transposed else None
            t = t.reshape(rows, -1) if rows is not None else t.reshape(-1, t.shape[-1] if t.ndim else 1)
        setattr(self, name, t)

    def flatten_inner(self) -> list[torch.Tensor]:
        """The buffers that are there, in fixed order."""
        return [getattr(self, n) for n in self._inner_names()]

    def _inner_names(self) -> list[str]:
        return [n for n in NAMES if getattr(self, n) is not None]

    def inner_meta(self) -> tuple[Any, ...]:
        """What `core_from_inner` needs besides the buffers; hashable."""
        there = self._inner_names()
        held = tuple(n in there for n in NAMES)
        return (form_key(self._format), tuple(self._matrix()), held)

    def to_core(self) -> QuantizedTensor:
        """The core's view of the buffers. Its pieces are kept for the next call, if they need no copies."""
        held = self._core_views
        if held is None or not held.fit(self):
            shape = self._matrix()
            q = core_of(self._format, shape, self._buffers)
            self._core_views = held = CoreViews.of(self, q)
            if held is None:
                return q
        return QuantizedTensor(self._format, held.shape, held.row, held.column, held.block)

    # ------------------------------------------------------------------------------------- what it is like

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        return torch.Size(self._shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one side of it."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """The nominal type."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        inner = self.flatten_inner()
        if not inner:
            raise RuntimeError(f"{type(self).__name__} holds no data")
        return inner[0].device

    def get_usages(self) -> dict[str, bool]:
        """Which copies are there."""
        return {"rowwise": self._buffers.row_data is not None, "columnwise": self._buffers.col_data is not None}

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The data of the wanted copies."""
        row, column = self._row_view(), self._col_view()
        if rowwise_data and columnwise_data:
            return row, column
        return row if rowwise_data else column

    def get_metadata(self) -> dict[str, Any]:
        """The constructor's keyword arguments that make a storage of the same buffers."""
        raise NotImplementedError

    def clear(self) -> None:
        """Let go of the buffers."""
        self._set_buffers(Buffers())

    def update_quantizer(self, quantizer: Any) -> None:
        """Let another quantizer requantize this tensor from now on."""
        if self._quantizer is None:
            raise RuntimeError(f"{type(self).__name__} has no quantizer that could be replaced")
        if self._quantizer is not quantizer:
            warnings.warn(f"{type(self).__name__}: its quantizer is replaced", stacklevel=2)
        self._quantizer = quantizer

    # -------------------------------------------------------------------------------------- values, usages

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor."""
        return self._dense_values(dtype or self._dtype)

    def _dense_values(self, dtype: torch.dtype) -> torch.Tensor:
        if not any(self.get_usages().values()):
            raise RuntimeError(f"{type(self).__name__} holds no data to dequantize")
        kind = dtype if dtype in FLOATS else torch.float32
        dense = run.dequantize(self._format, self._matrix(), self._buffers, kind).view(self.shape)
        return dense if kind == dtype else dense.to(dtype)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a copy (False), or make sure it is there (True)."""
        if columnwise_usage and self._buffers.col_data is None:
            if self._buffers.row_data is None or not self._derives_columnwise():
                raise RuntimeError(f"{type(self).__name__} has no columnwise copy and cannot make one")
            self._make_columnwise()
        if rowwise_usage and self._buffers.row_data is None:
            raise RuntimeError(f"{type(self).__name__} has no rowwise copy and cannot make one")
        # What stays gets memory of its own, so that the memory of what goes is free.
        if rowwise_usage is False and self._buffers.row_data is not None:
            self._set_buffers(packed(self._buffers.col))
        if columnwise_usage is False and self._buffers.col_data is not None:
            self._set_buffers(packed(self._buffers.row))

    def _derives_columnwise(self) -> bool:
        """Whether the columnwise copy can be made of the rowwise one without loss."""
        return self._format.tiled

    def _make_columnwise(self) -> None:
        """Tiles share scales both ways, so that the copy is the transpose of data and scales."""
        from te_torch.tensors.transposing import columnwise_of

        made = columnwise_of(self._format, self._matrix(), self._buffers)
        self._set_buffers(Buffers(*self._buffers[:3], *made[3:]))

    # ----------------------------------------------------------------------------------- changes in place

    def quantize_(self, tensor: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Replace the values by those of `tensor`, quantized by this tensor's quantizer."""
        if self._quantizer is None:
            raise RuntimeError(f"{type(self).__name__} has no quantizer to quantize with")
        return self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)

    def _update(self, quantizer: Any, src: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
        held = self.get_usages()
        if not any(held.values()):
            raise RuntimeError(f"{type(self).__name__} holds no buffers to quantize into")
        self._write(quantizer._cast(src.reshape(self._matrix()), held["rowwise"], held["columnwise"]), noop_flag)

    def _requantize(self, values: torch.Tensor) -> None:
        """The same below autograd, where torch has counted the change already."""
        if self._quantizer is None:
            raise RuntimeError(f"{type(self).__name__} has no quantizer to quantize a change in place with")
        self._update(self._quantizer, values, None)

    def _write(self, new: Buffers, noop_flag: torch.Tensor | None = None) -> None:
        """Copy buffers of the core's shapes into ours, which may be smaller."""
        for name in self._inner_names():
            mine, given = getattr(self, name), getattr(new, name[1:])
            if given is None:
                continue
            part = given if given.shape == mine.shape else _part(given, mine)
            if noop_flag is not None:
                part = torch.where(noop_flag.reshape(()) == 1, mine, part)
            mine.copy_(part)

    def _takes_bytes_of(self, src: Any) -> bool:
        """Whether `src` holds the same copies in the same way."""
        return (
            getattr(src, "_format", None) is self._format and src._options == self._options
            and type(src._quantizer) is type(self._quantizer) and src.shape == self.shape
            and src.get_usages() == self.get_usages()
        )  # fmt: skip

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        """Take over the bytes of a storage of the same format and copies."""
        self._copy_bytes(src)

    def _copy_bytes(self, src: Any) -> None:
        if src._format is not self._format or src.get_usages() != self.get_usages() or src.shape != self.shape:
            raise ArgumentError(
                "copy_from_storage", f"{src._format} {tuple(src.shape)} with {src.get_usages()}",
                f"{self._format} {tuple(self.shape)} with {self.get_usages()}", "use quantize_() instead",
            )  # fmt: skip
        for name in self._inner_names():
            mine, given = getattr(self, name), getattr(src, name)
            if mine.shape == given.shape:
                mine.copy_(given)
            else:
                rows, columns = (min(a, b) for a, b in zip(_two(mine), _two(given), strict=True))
                mine.view(_two(mine))[:rows, :columns].copy_(given.view(_two(given))[:rows, :columns])

    # ------------------------------------------------------------------------------------- shapes, copies

    def _like(self, shape: Sequence[int], buffers: Buffers, dtype: torch.dtype | None = None) -> Any:
        """Another storage of this kind."""
        quantizer = None if self._quantizer is None else self._quantizer.copy()
        options = self._options
        if tuple(shape) != tuple(self.shape):
            options = tuple(o for o in options if type(o) is not tuple)
        return self._of(tuple(shape), dtype or self._dtype, self._format, buffers, quantizer, options)

    def _viewed(self, shape: Sequence[int]) -> Any:
        """The same buffers in another shape: with the same last side, or flat. None if they cannot be seen so."""
        made = None
        if matrix_of(shape) == self._matrix():
            made = self._like(shape, self._buffers)
        elif len(shape) == 1 and shape[0] == self._matrix()[0] * self._matrix()[1]:
            made = self._like(shape, self._buffers)
            made._options = (*[o for o in self._options if type(o) is not tuple], self._matrix())
        return made

    def view(self, *shape: Any) -> Any:
        """The same buffers in another shape, whose last side has to be the same."""
        sizes = resolve_shape(self.shape, shape)
        made = self._viewed(sizes)
        if made is None:
            raise NotImplementedError(f"{type(self).__name__}: {tuple(self.shape)} cannot be viewed as {sizes}")
        return made

    def _rows(self, start: int, stop: int) -> Any:
        """Rows of the first dimension over the same buffers; None where that would cut through a block."""
        rows = self._matrix()[0] // max(self.shape[0], 1)
        buffers = rows_of(self._format, self._matrix(), self._buffers, start * rows, stop * rows)
        return None if buffers is None else self._like((stop - start, *self.shape[1:]), buffers)

    def _zero(self) -> None:
        """Make all values 0."""
        for data in (self._row_data, self._col_data):
            if data is not None:
                data.zero_()

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same data with another nominal type."""
        return self._like(self.shape, self._buffers, dtype)

    def make_copy(self, device: torch.device | None = None, non_blocking: bool = False) -> Any:
        """The same values in memory of their own, on a device."""
        return self._like(self.shape, packed(self._buffers, device, non_blocking))

    # --------------------------------------------------------------------------- saving, gathering, compiling

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Any]:
        """The buffers, of which this object is stripped, and the object."""
        inner = list(self._buffers)
        self.clear()
        return inner, self

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take the buffers back from the head of the list; what is left of it."""
        self._set_buffers(Buffers(*tensors[: len(NAMES)]))
        return list(tensors[len(NAMES) :])

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The buffers that an all-gather moves."""
        return tuple(self._inner_names())

    def fsdp_extract_buffers(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The buffers to gather, and what else a gathered tensor needs."""
        fields = self.fsdp_buffer_fields()
        return [getattr(self, n) for n in fields], {"fields": fields}

    def fsdp_assign_gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any]) -> None:
        """Hold gathered buffers."""
        self._set_buffers(Buffers())
        for name, t in zip(meta["fields"], gathered, strict=True):
            self._adopt(name, t)
        self._set_buffers(self._buffers)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self._inner_names(), (self._dtype, form_key(self._format), self._options, Kept(self._quantizer))

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, outer_size: Any, outer_stride: Any) -> Any:
        return cls._of(tuple(outer_size), *QuantizedTensorStorage._unflattened(inner, meta))

    @staticmethod
    def _unflattened(inner: dict[str, torch.Tensor], meta: Any) -> tuple[Any, ...]:
        dtype, key, options, quantizer = meta
        return dtype, form_of(key), Buffers(*[inner.get(n) for n in NAMES]), quantizer.quantizer, options

    def __repr__(self) -> str:
        try:
            values = str(self.dequantize())
        except Exception as error:  # a repr is for looking at broken things too
            values = f"<{type(error).__name__}>"
        return f"{type(self).__name__}({self._label()}, data={values})"

    def _label(self) -> str:
        return f"{self._format}, shape={tuple(self.shape)}"


class CoreViews:
    """The pieces of a core view, for as long as the buffers are the same and stay where they are."""

    __slots__ = ("block", "buffers", "column", "form", "row", "shape")

    @classmethod
    def of(cls, storage: Any, q: QuantizedTensor) -> CoreViews | None:
        """Those of a view just made; None if the core reads copies, which a change of the buffers would not reach."""
        b: Buffers = storage._buffers
        first = b.row_data if b.col_data is None else b.col_data
        pairs = ((b.row_data, q.rowwise), (b.col_data, q.columnwise), (first, q.block))
        if any(t is not None and (core is None or not t.numel() or core.ptr != t.data_ptr()) for t, core in pairs):
            return None
        scales = ((b.row_data, b.row_scale, q.rowwise_scale), (b.col_data, b.col_scale, q.columnwise_scale))
        if any(data is not None and core.ptr != scale.data_ptr() for data, scale, core in scales):  # type: ignore[union-attr]
            return None
        made = cls()
        made.buffers, made.form, made.shape, made.block = b, q.format, q.shape, q.block
        made.row = made.column = None
        if q.rowwise is not None and q.rowwise_scale is not None:
            made.row = Copy(q.rowwise, q.rowwise_scale, q.rowwise_amax)
        if q.columnwise is not None and q.columnwise_scale is not None:
            made.column = Copy(q.columnwise, q.columnwise_scale, q.columnwise_amax)
        return made

    buffers: Buffers
    form: Format
    shape: tuple[int, int]
    row: Copy | None
    column: Copy | None
    block: Any

    def fit(self, storage: Any) -> bool:
        """Whether the storage still has these buffers, in this memory."""
        b = self.buffers
        return (
            b[0] is storage._row_data and b[1] is storage._row_scale and b[2] is storage._row_amax
            and b[3] is storage._col_data and b[4] is storage._col_scale and b[5] is storage._col_amax
            and self.form is storage._format and (self.row is None or self.row.data.ptr == b[0].data_ptr())
            and (self.column is None or self.column.data.ptr == b[3].data_ptr())
        )  # fmt: skip

    def __deepcopy__(self, memo: Any) -> None:
        return None


class Kept:
    """A quantizer as a compiler's constant: guarded by its rule, and by the tensors it reads, not copied."""

    __slots__ = ("quantizer",)

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    def _key(self) -> tuple[Any, ...]:
        q = self.quantizer
        if q is None or q._VALUE is not None:
            return (q,)
        plain = {k: id(v) if isinstance(v, torch.Tensor) else v for k, v in vars(q).items()}
        return (type(q), *sorted(plain.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __deepcopy__(self, memo: Any) -> Kept:
        return self


def _two(t: torch.Tensor) -> tuple[int, int]:
    return (t.shape[0], t.shape[1]) if t.ndim == 2 else (1, t.numel())


def _part(given: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    if given.ndim != mine.ndim:
        return given.reshape(mine.shape)
    return given[tuple(slice(0, n) for n in mine.shape)]


def resolve_shape(old: Sequence[int], shape: Sequence[Any]) -> tuple[int, ...]:
    """The arguments of view() as sizes, a -1 worked out."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else tuple(shape)
    if -1 not in sizes:
        return sizes
    total = known = 1
    for n in old:
        total *= n
    for n in sizes:
        known *= 1 if n == -1 else n
    return tuple(total // known if n == -1 and known else max(n, 0) for n in sizes)


def core_from_inner(meta: tuple[Any, ...], tensors: Sequence[torch.Tensor], *, shapes_only: bool = False) -> Any:
    """The core's view of what `flatten_inner()` and `inner_meta()` of a storage gave.

    Of an identity storage: the plain matrix; of a hybrid one: the pair of its copies.
    """
    if meta[0] == "identity":
        convert = to_core_shape if shapes_only or tensors[0].is_meta else to_core
        return convert(tensors[0].contiguous()).matrix()
    if meta[0] == "hybrid":
        made, at = [], 0
        for part in meta[1:]:
            count, inner = part or (0, None)
            made.append(inner and core_from_inner(inner, tensors[at : at + count], shapes_only=shapes_only))
            at += count
        return tuple(made)
    key, shape, held = meta
    given = iter(tensors)
    buffers = Buffers(*[next(given) if h else None for h in held])
    return core_of(form_of(key), shape, buffers, shapes_only)
