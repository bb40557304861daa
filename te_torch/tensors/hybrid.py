"""A tensor whose two copies are quantized by different rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from te_core import dtypes
from te_core.errors import ArgumentError, UnsupportedError
from te_core.precision import Operand, given_to, rule_of
from te_core.quantized import Copy
from te_core.quantized import QuantizedTensor as Core
from te_core.recipe import CustomRecipe
from te_core.spelling import choice_error
from te_torch.runtime import default_device
from te_torch.tensors import kinds
from te_torch.tensors.base import Quantizer, QuantizerRequest
from te_torch.tensors.buffers import NAMES, Buffers, form_of
from te_torch.tensors.identity import IdentityQuantizer, IdentityTensorStorage
from te_torch.tensors.pickling import marked, put_together
from te_torch.tensors.storage import QuantizedTensorStorage
from te_torch.tensors.tensor import QuantizedTensor, constructor
from te_torch.tensors.tracing import AsConstant
from te_torch.tensors.views import Part, Place
from te_torch.tensors.whole import loading

_SIDES = ("row", "col")
_SUB_NAMES = (*NAMES, "_hp_data")


class Parts(NamedTuple):
    """What holds each copy: where other tensors have their buffers."""

    row_data: Any = None
    col_data: Any = None


def _part_at(index: int) -> Any:
    """A copy's storage under its documented name, which may be assigned."""

    def put(self: Any, storage: Any) -> None:
        self._parts = self._parts._replace(**{Parts._fields[index]: storage})

    return property(lambda self: self._parts[index], put)


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """`rowwise_sub_storage` and `columnwise_sub_storage`: two storages of one copy each."""

    _parts: Parts

    def __init__(
        self,
        *,
        rowwise_storage: Any,
        columnwise_storage: Any,
        quantizer: Any = None,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        first = rowwise_storage if rowwise_storage is not None else columnwise_storage
        self._shape = (0,) if first is None else tuple(first.shape)
        dtype = fake_dtype or (torch.float32 if first is None else first._dtype)
        if not isinstance(quantizer, HybridQuantizer):
            raise TypeError(
                f"{type(self).__name__}: quantizer is {quantizer!r}. Allowed: a HybridQuantizer, which has one for "
                "each copy. To do: pass the one that made the storages."
            )
        self._hold(dtype, None, Parts(rowwise_storage, columnwise_storage), quantizer.copy(), ())

    @property
    def rowwise_sub_storage(self) -> Any:
        """What holds the rowwise copy."""
        return self._parts[0]

    @property
    def columnwise_sub_storage(self) -> Any:
        """What holds the columnwise copy."""
        return self._parts[1]

    _rowwise_storage, _columnwise_storage = _part_at(0), _part_at(1)

    def _build_default_quantizer(self) -> Any:
        row, column = (IdentityQuantizer() if p is None else p._get_quantizer().copy() for p in self._parts)
        return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)

    @property
    def _buffers(self) -> Any:
        return self._parts

    def _set_buffers(self, buffers: Any) -> None:
        self._parts = Parts(buffers.row_data, buffers.col_data)

    def _like(
        self,
        shape: Sequence[int],
        buffers: Any,
        dtype: torch.dtype | None = None,
        place: Place | None = None,
        kind: Any = None,
    ) -> Any:
        quantizer = None if self._quantizer is None else self._quantizer.copy()
        parts = Parts(*[None if p is None else p._like(shape, p._buffers, dtype) for p in buffers])
        nominal = dtype or self._dtype
        return (kind or self)._of(tuple(shape), nominal, None, parts, quantizer, place=place, device=self.device)

    def flatten_inner(self) -> list[torch.Tensor]:
        """The buffers of the rowwise copy, then those of the columnwise one."""
        return [b for p in self._parts if p is not None for b in p.flatten_inner()]

    def inner_meta(self) -> tuple[Any, ...]:
        """What `core_from_inner` needs besides the buffers; hashable."""
        return ("hybrid", *[None if p is None else (len(p.flatten_inner()), p.inner_meta()) for p in self._parts])

    def to_core_pair(self) -> tuple[Any, Any]:
        """The core's views of the two copies; a plain matrix where one is in high precision."""
        row, column = (None if p is None else p.to_core() for p in self._parts)
        return row, column

    def to_core(self) -> Core:
        """The core's view, if both copies are of one format."""
        row, column = self.to_core_pair()
        if row is None or column is None:
            return row if column is None else column
        if not (isinstance(row, Core) and isinstance(column, Core) and row.format is column.format):
            raise UnsupportedError(
                "HybridQuantizedTensor.to_core",
                f"copies of two kinds: {row!r}, {column!r}",
                "copies of one format",
                "take to_core_pair()",
            )
        return Core(
            row.format,
            row.shape,
            Copy(row.rowwise, row.rowwise_scale, row.rowwise_amax),  # type: ignore[arg-type]
            Copy(column.columnwise, column.columnwise_scale, column.columnwise_amax),  # type: ignore[arg-type]
            column.block,
        )

    def get_usages(self) -> dict[str, bool]:
        """Which copies are there."""
        return {"rowwise": self._parts[0] is not None, "columnwise": self._parts[1] is not None}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a copy; a missing one cannot be made."""
        parts = list(self._parts)
        for i, wanted in enumerate((rowwise_usage, columnwise_usage)):
            if wanted and parts[i] is None:
                raise RuntimeError(f"{type(self).__name__} has no {('rowwise', 'columnwise')[i]} copy")
            if wanted is False:
                parts[i] = None
        self._parts = Parts(*parts)

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The data of the wanted copies."""
        row, column = (None if p is None else p.get_data_tensors(i == 0, i == 1) for i, p in enumerate(self._parts))
        if rowwise_data and columnwise_data:
            return row, column
        return row if rowwise_data else column

    def get_metadata(self) -> dict[str, Any]:
        """The constructor's keyword arguments that make a storage of the same copies."""
        return {
            "rowwise_storage": self._parts[0],
            "columnwise_storage": self._parts[1],
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
        }

    def clear(self) -> None:
        """Let go of both copies."""
        self._parts = Parts()

    def _dense_values(self, dtype: torch.dtype) -> torch.Tensor:
        part = self._parts[0] if self._parts[0] is not None else self._parts[1]
        if part is None:
            raise RuntimeError(f"{type(self).__name__} holds no data")
        return part._dense_values(dtype)

    def _update(self, quantizer: Any, src: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
        row, column = self._parts
        if row is not None:
            row._update(quantizer.rowwise_quantizer, src, noop_flag)
        if column is not None:
            if quantizer.columnwise_source == "rowwise_dequantized":
                src = quantizer.rowwise_values(src)
            column._update(quantizer.columnwise_quantizer, src, noop_flag)

    def _takes_bytes_of(self, src: Any) -> bool:
        if not isinstance(src, HybridQuantizedTensorStorage) or src.get_usages() != self.get_usages():
            return False
        return all(a is None or a._takes_bytes_of(b) for a, b in zip(self._parts, src._parts, strict=True))

    def _copy_bytes(self, src: Any) -> None:
        for mine, given in zip(self._parts, src._parts, strict=True):
            if mine is not None:
                mine._copy_bytes(given)

    def _viewed(self, shape: Sequence[int]) -> Any:
        parts = tuple(None if p is None else p._viewed(shape) for p in self._parts)
        if any(p is not None and made is None for p, made in zip(self._parts, parts, strict=True)):
            return None
        return self._like(shape, parts)

    def _part(self, part: Part, rows: tuple[int, int] | None, look: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        parts = tuple(None if p is None else p._part(part, rows, look) for p in self._parts)
        if any(p is not None and made is None for p, made in zip(self._parts, parts, strict=True)):
            return None
        return self._like(part.shape, parts, place=part.place)

    def _to_pickle(self, requires_grad: bool, is_param: bool) -> tuple[Any, ...]:
        parts = [None if p is None else p._as_part() for p in self._parts]
        return self.dtype, tuple(self.shape), *parts, self._quantizer, requires_grad, is_param

    def _zero(self) -> None:
        for p in self._parts:
            if p is not None:
                p._zero()

    def make_copy(self, device: torch.device | None = None, non_blocking: bool = False) -> Any:
        """The same values in memory of their own, on a device."""
        parts = tuple(None if p is None else p.make_copy(device, non_blocking) for p in self._parts)
        return self._like(self.shape, parts)

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Any]:
        """The buffers of both copies, of which this object is stripped, and the object."""
        return [t for p in self._parts if p is not None for t in p.prepare_for_saving()[0]], self

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take the buffers back from the head of the list; what is left of it."""
        rest = list(tensors)
        for p in self._parts:
            if p is not None:
                rest = p.restore_from_saved(rest)
        return rest

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The buffers of both copies that an all-gather moves."""
        parts = zip(("_rowwise_storage", "_columnwise_storage"), self._parts, strict=True)
        return tuple(f"{name}.{n}" for name, p in parts if p is not None for n in p.fsdp_buffer_fields())

    def fsdp_extract_buffers(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """These buffers, and for each copy what else the gathered one needs."""
        each = [None if p is None else p.fsdp_extract_buffers() for p in self._parts]
        metadata = {**self._to_all(), "rowwise": each[0] and each[0][1], "columnwise": each[1] and each[1][1]}
        return [t for e in each if e is not None for t in e[0]], metadata

    def _each_gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
        """(copy, what was gathered of it, its metadata)."""
        rest = list(gathered)
        for p, own in zip(self._parts, (meta["rowwise"], meta["columnwise"]), strict=True):
            count = 0 if own is None else len(own["field_names"])
            yield p, rest[:count], own
            rest = rest[count:]

    def fsdp_assign_gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any]) -> None:
        """Hold gathered buffers in the place of those that are here."""
        for p, given, own in self._each_gathered(gathered, meta):
            if own is not None:
                p.fsdp_assign_gathered(given, own)

    def _gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any]) -> Any:
        each = self._each_gathered(gathered, meta)
        row, column = (None if own is None else p._gathered(given, own) for p, given, own in each)
        first: Any = row if row is not None else column
        return self._of(tuple(first.shape), meta["fake_dtype"], None, Parts(row, column), meta["quantizer"])

    def _note_shards(self, group: Any) -> None:
        for p in self._parts:
            if p is not None:
                p._note_shards(group)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names: list[str] = []
        parts: list[Any] = []
        for side, p in zip(_SIDES, self._parts, strict=True):
            if p is None:
                parts.append(None)
                continue
            inner, meta = p.__tensor_flatten__()
            names += [f"_{side}_part{n}" for n in inner]
            parts.append((type(p), tuple(p.shape), meta))
        return names, (self._dtype, tuple(parts), AsConstant(self._quantizer))

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, outer_size: Any, outer_stride: Any) -> Any:
        dtype, parts, constant = meta
        made: list[Any] = []
        for side, p in zip(_SIDES, parts, strict=True):
            if p is None:
                made.append(None)
                continue
            prefix = f"_{side}_part"
            given = {n.removeprefix(prefix): t for n, t in inner.items() if n.startswith(prefix)}
            made.append(p[0].__tensor_unflatten__(given, p[2], outer_size, None))
        place = None if outer_stride is None else (tuple(outer_stride), 0)
        return cls._of(tuple(outer_size), dtype, None, Parts(*made), constant.quantizer, place=place)

    def _label(self) -> str:
        return ", ".join("None" if p is None else type(p).__name__ for p in self._parts)


for _i, _side in enumerate(_SIDES):  # inner tensors have to be attributes for tracing compilers
    for _name in _SUB_NAMES:
        _buffer = property(lambda self, i=_i, name=_name: getattr(self._parts[i], name))  # type: ignore[misc]
        setattr(HybridQuantizedTensorStorage, f"_{_side}_part{_name}", _buffer)


class HybridQuantizedTensor(QuantizedTensor, HybridQuantizedTensorStorage):  # type: ignore[misc]
    """A tensor whose two copies are quantized by different rules."""

    __init__ = constructor(HybridQuantizedTensorStorage)

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, **kwargs: Any) -> Any:
        """The bare tensor, on the device of its storages."""
        parts = (kwargs.get("rowwise_storage"), kwargs.get("columnwise_storage"))
        device = next((p.device for p in parts if p is not None), kwargs.get("device"))
        rest = {n: kwargs[n] for n in ("requires_grad", "stride", "storage_offset") if n in kwargs}
        return QuantizedTensor.__new__(cls, shape, dtype, device=device, **rest)

    def clear(self) -> None:
        """Let go of both copies."""
        self._parts = Parts()


#: What a rule says of a side that stays in high precision.
_NONE = Operand(dtypes.float32, "none")


class HybridQuantizer(Quantizer):
    """One quantizer for the rowwise copy, another for the columnwise one.

    `columnwise_source`: the columnwise copy is made of the "original" values or of the "rowwise_dequantized" ones.
    """

    _RECIPE = CustomRecipe

    def __init__(
        self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer, columnwise_source: str = "original"
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        for name, q in (("rowwise_quantizer", rowwise_quantizer), ("columnwise_quantizer", columnwise_quantizer)):
            if isinstance(q, QuantizerRequest) or not isinstance(q, Quantizer):
                raise TypeError(f"HybridQuantizer: {name} is {q!r}; it has to be a Quantizer")
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError("HybridQuantizer: one object for both copies; pass two quantizers")
        if columnwise_source not in ("original", "rowwise_dequantized"):
            sources = "original", "rowwise_dequantized"
            raise choice_error("HybridQuantizer", "columnwise_source", columnwise_source, sources)
        rowwise_quantizer.set_usage(rowwise=True, columnwise=False)  # they are this one's from now on
        columnwise_quantizer.set_usage(rowwise=False, columnwise=True)
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer, columnwise_quantizer
        self.columnwise_source = columnwise_source

    @property
    def operand(self) -> Operand | None:
        """The rowwise rule with the columnwise one in it; scaling "none" stands for high precision."""
        row, column = self.rowwise_quantizer.operand, self.columnwise_quantizer.operand
        if row is None and column is None:
            return None
        if self.columnwise_source != "original" and column is not None:
            raise ArgumentError(
                "HybridQuantizer.operand",
                "columnwise_source='rowwise_dequantized' in a module",
                "'original' there",
                "quantize with it outside of modules",
            )
        *plain, _, custom = given_to(row or _NONE)
        return rule_of(*plain, column or _NONE, custom)

    def rowwise_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values as the rowwise copy holds them."""
        return _one_copy(self.rowwise_quantizer, tensor)._dense_values(tensor.dtype)

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """Both copies that are used, each by its own quantizer."""
        row = _one_copy(self.rowwise_quantizer, tensor) if self.rowwise_usage else None
        column = None
        if self.columnwise_usage:
            source = tensor
            if self.columnwise_source == "rowwise_dequantized":
                source = self.rowwise_values(tensor) if row is None else row._dense_values(tensor.dtype)
            column = _one_copy(self.columnwise_quantizer, source)
        return self._joined(Parts(row, column), tuple(tensor.shape), tensor.dtype, tensor.device)

    def _joined(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
        kind: Any = HybridQuantizedTensorStorage if self.internal else HybridQuantizedTensor
        return kind._of(shape, dtype, None, parts, self.copy(), device=device)

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """An uninitialised tensor of the copies that are used."""
        shape = tuple(shape)
        used = zip((self.rowwise_quantizer, self.columnwise_quantizer), self.get_usages().values(), strict=True)
        parts = [
            _internal(q).make_empty(shape, dtype=dtype, device=device, pin_memory=pin_memory) if wanted else None
            for q, wanted in used
        ]
        made = self._joined(Parts(*parts), shape, dtype, device or default_device())
        return made.requires_grad_() if requires_grad else made

    def copy(self) -> Any:
        """A quantizer of its own with copies of the two."""
        made = super().copy()
        made.rowwise_quantizer = self.rowwise_quantizer.copy()
        made.columnwise_quantizer = self.columnwise_quantizer.copy()
        return made

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Let both note the statistics."""
        self.rowwise_quantizer.calibrate(tensor)
        self.columnwise_quantizer.calibrate(tensor)

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether both can quantize a piece of this shape by itself."""
        return self.rowwise_quantizer.is_quantizable(inp) and self.columnwise_quantizer.is_quantizable(inp)

    def is_requantization_safe(self) -> bool:
        """Whether that holds for every quantizer that has a part in the result."""
        needs_row = self.rowwise_usage or (self.columnwise_usage and self.columnwise_source == "rowwise_dequantized")
        used = ((self.rowwise_quantizer, needs_row), (self.columnwise_quantizer, self.columnwise_usage))
        return all(q.is_requantization_safe() for q, wanted in used if wanted)


def _internal(quantizer: Quantizer) -> Any:
    """A quantizer that makes storages."""
    made = quantizer.copy()
    made.internal = True
    return made


def _one_copy(quantizer: Quantizer, tensor: torch.Tensor) -> Any:
    """The storage of the copy that is this quantizer's."""
    return _internal(quantizer).quantize_impl(tensor)


@kinds.made_by(HybridQuantizedTensorStorage, HybridQuantizedTensor, HybridQuantizer)
def _make_hybrid_quantized_tensor_in_reduce_ex(
    dtype: torch.dtype, shape: Any, row: Any, column: Any, quantizer: Any, requires_grad: bool, is_param: bool
) -> Any:
    """Unpickles a `HybridQuantizedTensor`."""

    def part(state: Any) -> Any:
        if state is None:
            return None
        if state[0] == "identity":
            return IdentityTensorStorage._of(tuple(shape), dtype, None, Buffers(state[1]), state[2])
        *contents, own = state
        return put_together(kinds.of_format(form_of(contents[0])).storage, dtype, shape, contents, own)

    with loading():
        made = HybridQuantizedTensor._of(tuple(shape), dtype, None, Parts(part(row), part(column)), quantizer)
        return marked(made, requires_grad, is_param)
