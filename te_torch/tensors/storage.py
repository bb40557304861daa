"""Base of quantized storages: buffers, a format and a nominal type, without being a torch tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch

from te_core.errors import ArgumentError
from te_core.quantized import Format, QuantizedTensor
from te_torch.doors import door
from te_torch.runtime import FLOATS
from te_torch.tensors import pickling, run
from te_torch.tensors.buffers import (
    NAMES,
    Buffers,
    core_of,
    form_key,
    form_of,
    matrix_of,
    matrix_of_data,
    memory_of,
    packed,
    resolve_shape,
    rows_of,
    without,
)
from te_torch.tensors.sharding import Shards, first_rows, same_memory
from te_torch.tensors.tracing import AsConstant
from te_torch.tensors.transposing import columnwise_of
from te_torch.tensors.views import WHOLE, CoreViews, Look, Memory, Part, Place, Seen
from te_torch.tensors.whole import check_whole


class QuantizedTensorStorage:
    """A quantized matrix (leading dimensions count as one), as plain Python holds it.

    The buffers `_row_data`, `_row_scale`, `_row_amax`, `_col_data`, `_col_scale`, `_col_amax` are the truth; their
    documented names are views of the part that is not padding. Assigning one adopts the given tensor.
    """

    _INNER_TENSORS: ClassVar[tuple[str, ...]] = NAMES
    _WIDTH: ClassVar[int] = 1  # elements a byte
    _dtype: torch.dtype
    _format: Format  # None of what holds no buffers of a format of the core
    _options: tuple[Any, ...]
    _quantizer: Any
    _shape: tuple[int, ...]
    _core_views: CoreViews | None = None
    _CHANGES: ClassVar[bool] = False  # whether a change in place needs no more than `changing.Kept` knows
    _kept: Any = None  # by it
    _shards: Shards | None = None  # of a parameter that is spread over processes
    _group_of_shards: Any = None  # the processes that agree on the maximum of the values, if several do
    _looks: dict[str, Look]
    _memory: Memory
    _seen: Seen = WHOLE
    _row_data: Any = None
    _row_scale: Any = None
    _row_amax: Any = None
    _col_data: Any = None
    _col_scale: Any = None
    _col_amax: Any = None

    @classmethod
    def _of(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        form: Any,
        buffers: Any,
        quantizer: Any = None,
        options: tuple[Any, ...] = (),
        place: Place | None = None,
        device: Any = None,
    ) -> Any:
        made = object.__new__(cls)
        made._shape = shape
        made._hold(dtype, form, buffers, quantizer, options)
        return made

    def _hold(self, dtype: torch.dtype, form: Any, buffers: Any, quantizer: Any, options: tuple[Any, ...]) -> None:
        self._dtype, self._format, self._quantizer, self._options = dtype, form, quantizer, options
        self._looks, self._memory, self._seen = {}, Memory(), WHOLE
        self._set_buffers(buffers)

    def _take(self, dtype: torch.dtype, form: Format, given: Buffers, quantizer: Any, options: tuple = ()) -> None:
        """Hold buffers that somebody gave, if they are all of a tensor."""
        data = given.row_data if given.row_data is not None else given.col_data
        shape = (0,) if data is None else tuple(data.shape)
        if self._WIDTH > 1:
            shape = (*shape[:-1], self._WIDTH * shape[-1])
        turned = form.transposed and given.row_data is None
        self._shape = (*shape[1:], shape[0]) if turned else shape
        self._hold(dtype, form, Buffers(), quantizer, options)
        for name, t in zip(NAMES, given, strict=True):
            self._adopt(name, t)
        self._set_buffers(check_whole(type(self).__name__, form, tuple(self.shape), self._buffers))

    # -------------------------------------------------------------------------------------------- buffers

    @property
    def _buffers(self) -> Buffers:
        return Buffers(*[getattr(self, n) for n in NAMES])

    def _set_buffers(self, buffers: Buffers) -> None:
        for name, t in zip(NAMES, buffers, strict=True):
            setattr(self, name, t)
        if self._looks:  # what is no longer held is let go of
            self._looks = {n: look for n, look in self._looks.items() if look.buffer is getattr(self, n)}
        if self._core_views is not None:
            self._core_views = None

    def _matrix(self) -> tuple[int, int]:
        return self._folded() or matrix_of(self.shape)

    def _folded(self) -> tuple[int, int] | None:
        """The matrix that the buffers are, if it is not that of the shape."""
        return self._seen.matrix

    def _shown(self, name: str) -> torch.Tensor | None:
        """The documented view of a buffer: the same object each time, and that of all tensors over the buffer."""
        buffer = getattr(self, name)
        return None if buffer is None else self._view(name, buffer)

    @partial(door, traced=lambda self, name, buffer: self._show(name, buffer))  # which a program keeps for nobody
    def _view(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        return self._look(name, buffer).seen(partial(self._show, name))

    def _look(self, name: str, buffer: torch.Tensor) -> Look:
        look = self._looks.get(name)
        if look is None or look.buffer is not buffer:
            look = self._looks[name] = Look(buffer)
        return look

    def _share_looks(self, made: Any) -> None:
        """Let another storage of this shape show the same views of the buffers that both have."""
        for name in NAMES:
            buffer = getattr(self, name)
            if buffer is not None and buffer is getattr(made, name):
                made._looks[name] = self._look(name, buffer)

    def _show(self, name: str, data: torch.Tensor) -> torch.Tensor:
        """The documented view of a buffer, made now: data without padding, in the tensor's shape. Transposed data is
        [K, ...], or [K, M / 2] where a byte holds two.
        """
        if not name.endswith("data"):
            return data
        m, k = self._matrix()
        if name == "_row_data" or not self._format.transposed:
            k = -(-k // self._WIDTH)
            shape = (*self.shape[:-1], -(-self.shape[-1] // self._WIDTH)) if self.shape else ()
            if data.shape == shape:
                return data
            whole = data[:m, :k]
            return whole if self._folded() and not whole.is_contiguous() else whole.view(shape)
        m = -(-m // self._WIDTH)
        leading = (m,) if self._folded() or self._WIDTH > 1 else self.shape[:-1]
        shape = (k, *leading) if self.shape else ()
        return data if data.shape == shape else data[:k, :m].view(shape)

    def _adopt(self, name: str, t: torch.Tensor | None) -> None:
        """Hold a buffer that somebody gave, as the matrix that the core reads; it is shown as it was given."""
        if t is None or name not in ("_row_data", "_col_data"):
            flat = t is not None and t.ndim != 1 and (name.endswith("amax") or self._format.scaling == "tensor")
            setattr(self, name, t.reshape(-1) if flat else t)  # type: ignore[union-attr]
        else:
            data = t if t.dtype is torch.uint8 else t.view(torch.uint8)
            setattr(self, name, self._as_matrix(data, name == "_col_data" and self._format.transposed))
        mine = getattr(self, name)
        if t is not None and memory_of(mine) == memory_of(t):
            self._looks[name] = Look(mine, t)

    def _move_data(self, data: torch.Tensor) -> None:
        """Hold the rowwise data in this memory, to which it was copied. Nothing of it keeps the old one."""
        old = self._buffers
        self._adopt("_row_data", data)
        row = without(old.row, old.row._replace(row_data=self._row_data))
        self._set_buffers(Buffers(*row[:3], *without(old.row, old.col)[3:]))

    def _as_matrix(self, t: torch.Tensor, turned: bool) -> torch.Tensor:
        """Data of a documented shape as a matrix."""
        return t.reshape(matrix_of_data(t.shape, turned))

    def flatten_inner(self) -> list[torch.Tensor]:
        """The buffers that are there, in fixed order."""
        return [getattr(self, n) for n in self._inner_names()]

    def _inner_names(self) -> list[str]:
        return [n for n in NAMES if getattr(self, n) is not None]

    def inner_meta(self) -> tuple[Any, ...]:
        """What `core_from_inner` needs besides the buffers; hashable."""
        names = self._inner_names()
        there = tuple(n in names for n in NAMES)
        return (form_key(self._format), tuple(self._matrix()), there)

    def to_core(self) -> QuantizedTensor:
        """The core's view of the buffers. Its pieces are kept for the next call, if they need no copies."""
        views = self._core_views
        if views is None or not views.fit(self):
            q = core_of(self._format, *self._to_read())
            self._core_views = views = CoreViews.of(self, q)
            if views is None:
                return q
        return views.view()

    def _views_to_write(self) -> QuantizedTensor | None:
        """The core's view of the buffers where all of it may be written; None where it reads a copy of some."""
        first = self._row_data if self._row_data is not None else self._col_data
        if first is None or not run.is_real(first) or first.is_meta or self._shares_scale():
            return None
        q = self.to_core()
        return None if self._core_views is None else q

    def _to_read(self) -> tuple[tuple[int, int], Buffers]:
        """The matrix that a GEMM reads, and its buffers."""
        return self._matrix(), self._buffers

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickling.reduced(self)

    def _to_pickle(self, requires_grad: bool, is_param: bool) -> tuple[Any, ...]:
        """The arguments of the function that unpickles it."""
        return self.dtype, tuple(self.shape), pickling.contents(self), self._quantizer, (requires_grad, is_param)

    def _as_part(self) -> tuple[Any, ...]:
        """The same of a storage inside another one."""
        return (*pickling.contents(self), self._quantizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = self.make_copy()
        return made

    def __copy__(self) -> Any:
        return self._like(self.shape, self._buffers)

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
        row, column = self._shown("_row_data"), self._shown("_col_data")
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

    def _get_quantizer(self) -> Any:
        """The quantizer of this tensor, or a new one by the rule that its format tells."""
        return self._build_default_quantizer() if self._quantizer is None else self._quantizer

    def _build_default_quantizer(self) -> Any:
        raise NotImplementedError

    # -------------------------------------------------------------------------------------- values, usages

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor."""
        return self._dense_values(dtype or self._dtype)

    def _dense_values(self, dtype: torch.dtype) -> torch.Tensor:
        first = self._row_data if self._row_data is not None else self._col_data
        if first is None:
            raise RuntimeError(f"{type(self).__name__} holds no data to dequantize")
        kind = dtype if dtype in FLOATS else torch.float32
        if self._core_views is not None and run.is_real(first):  # a GEMM, or a change, has read it
            dense = run.values(self.to_core(), first, kind).view(self.shape)
        else:
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
        # What stays stays where it is: others may hold views of it.
        if rowwise_usage is False and self._buffers.row_data is not None:
            self._set_buffers(without(self._buffers.row, self._buffers.col))
        if columnwise_usage is False and self._buffers.col_data is not None:
            self._set_buffers(without(self._buffers.col, self._buffers.row))

    def _derives_columnwise(self) -> bool:
        """Whether the columnwise copy can be made of the rowwise one without loss."""
        return self._format.tiled

    def _make_columnwise(self) -> None:
        """Tiles share scales both ways, so that the copy is the transpose of data and scales."""
        made = columnwise_of(self._format, self._matrix(), self._buffers)
        self._set_buffers(Buffers(*self._buffers[:3], *made[3:]))

    # ----------------------------------------------------------------------------------- changes in place

    def quantize_(self, tensor: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Replace the values by those of `tensor`, quantized by this tensor's quantizer."""
        return self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)

    def _update(self, quantizer: Any, src: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
        if not any((usages := self.get_usages()).values()):
            raise RuntimeError(f"{type(self).__name__} holds no buffers to quantize into")
        if noop_flag is None and quantizer._cast_into(src.reshape(self._matrix()), self):
            self._wrote()
            return
        noted = () if noop_flag is None else quantizer._notes()
        before = [t.clone() for t in noted]
        self._write(quantizer._cast(src.reshape(self._matrix()), usages["rowwise"], usages["columnwise"]), noop_flag)
        for t, old in zip(noted, before, strict=True):
            t.copy_(old_or_new(noop_flag, old, t))

    def _requantize(self, values: torch.Tensor) -> None:
        """The same below autograd, where torch has counted the change already."""
        self._update(self._get_quantizer(), values, None)

    def _write(self, new: Buffers, noop_flag: torch.Tensor | None = None) -> None:
        """Copy buffers of the core's shapes into ours, which may be smaller."""
        for name in self._inner_names():
            mine, given = getattr(self, name), getattr(new, name[1:])
            if given is None:
                continue
            part = given if given.shape == mine.shape else _part(given, mine, name == "_col_data")
            mine.copy_(old_or_new(noop_flag, mine, part))
        self._wrote()

    def _wrote(self) -> None:
        """Note a change of the data."""
        memory = self._memory
        memory.writes += 1
        if memory.blank or memory.alone is not None:
            which = self._which_part()
            memory.alone = which if memory.blank or memory.alone == which else None
            memory.blank = False

    def _takes_bytes_of(self, src: Any) -> bool:
        """Whether `src` holds the same copies in the same way."""
        return (
            getattr(src, "_format", None) is self._format
            and src._options == self._options
            and type(src._quantizer) is type(self._quantizer)
            and src.shape == self.shape
            and src.get_usages() == self.get_usages()
            and self._may_take_scale(src._row_amax, self._row_amax)
        )

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        """Take over the bytes of a storage of the same format and copies."""
        self._copy_bytes(src)

    def _copy_bytes(self, src: Any) -> None:
        if src._format is not self._format or src.get_usages() != self.get_usages() or src.shape != self.shape:
            raise ArgumentError(
                "copy_from_storage",
                f"{src._format} {tuple(src.shape)} with {src.get_usages()}",
                f"{self._format} {tuple(self.shape)} with {self.get_usages()}",
                "use quantize_() instead",
            )
        for name in self._inner_names():
            mine, given = getattr(self, name), getattr(src, name)
            if mine.shape == given.shape:
                mine.copy_(given)
            else:
                rows, columns = (min(a, b) for a, b in zip(_two(mine), _two(given), strict=True))
                mine.view(_two(mine))[:rows, :columns].copy_(given.view(_two(given))[:rows, :columns])
        self._wrote()

    # ------------------------------------------------------------------------------------- shapes, copies

    def _like(
        self,
        shape: Sequence[int],
        buffers: Buffers,
        dtype: torch.dtype | None = None,
        place: Place | None = None,
        kind: Any = None,
    ) -> Any:
        """Another storage of this kind, or of another class of the same format."""
        quantizer = None if self._quantizer is None else self._quantizer.copy()
        nominal = dtype or self._dtype
        made = (kind or self)._of(tuple(shape), nominal, self._format, buffers, quantizer, self._options, place=place)
        made._memory = self._memory
        if self._shards is not None:
            made._shards = self._shards
        if tuple(shape) == tuple(self.shape):
            made._seen = self._seen
            self._share_looks(made)
        else:
            made._seen = Seen(None, self._seen.part)
        return made

    def _viewed(self, shape: Sequence[int]) -> Any:
        """The same buffers in another shape: with the same last side, or flat. None if they cannot be seen so."""
        if matrix_of(shape) == self._matrix():
            return self._like(shape, self._buffers)
        if len(shape) == 1 and shape[0] == self._matrix()[0] * self._matrix()[1]:
            return self._flattened(shape)
        return None

    def _flattened(self, shape: Sequence[int]) -> Any:
        """The same buffers in another shape, which stay the matrix that they are."""
        made = self._like(shape, self._buffers)
        made._seen = made._seen._replace(matrix=self._matrix())
        return made

    def view(self, *shape: Any) -> Any:
        """The same buffers in another shape, whose last side has to be the same."""
        sizes = resolve_shape(self.shape, shape)
        made = self._viewed(sizes)
        if made is None:
            raise NotImplementedError(f"{type(self).__name__}: {tuple(self.shape)} cannot be viewed as {sizes}")
        return made

    def _part(self, part: Part, rows: tuple[int, int] | None, look: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """A part of the values over the same buffers; None where it cannot be one.

        `rows`: which of the first dimension it is, if it is rows; only they can be cut out of a format with blocks,
        between these. `look` cuts the same part out of a tensor of the same shape.
        """
        if rows is None:
            return None
        each = self._matrix()[0] // max(self.shape[0], 1)
        buffers = rows_of(self._format, self._matrix(), self._buffers, rows[0] * each, rows[1] * each)
        return None if buffers is None else self._like(part.shape, buffers, place=part.place)._part_of(self)

    def _part_of(self, whole: Any) -> Any:
        """This storage, as a part of another one: what they share may be more than their memory."""
        form = self._format
        one_for_all = form.scaling == "tensor" or (form.scaling == "nvfp4" and not form.row_scaled)
        part = whole._seen.part or (one_for_all and prod(self.shape) != prod(whole.shape))
        self._seen = self._seen._replace(part=part)
        self._memory.size = max(self._memory.size, prod(whole.shape))
        return self

    def _by_itself(self) -> Any:
        """This storage, in memory of its own."""
        self._memory, self._seen = Memory(), self._seen._replace(part=False)
        return self

    def _shares_scale(self) -> bool:
        """Whether other values would change with the scale."""
        memory = self._memory
        if not self._seen.part or memory.blank:
            return False
        return memory.alone is None or memory.alone != self._which_part()

    def _which_part(self) -> Any:
        """Where in its memory a part lies; None of what is no part."""
        return (self.storage_offset(), tuple(self.shape)) if self._seen.part else None  # type: ignore[attr-defined]

    def _may_take_scale(self, theirs: torch.Tensor | None, mine: torch.Tensor | None) -> bool:
        """Whether bytes that were made with another scale may come here, and their scale with them."""
        if not self._shares_scale() or theirs is None or mine is None:
            return True
        return memory_of(theirs) == memory_of(mine)

    def _zero(self) -> None:
        """Make all values of a new tensor 0."""
        for data in (self._row_data, self._col_data):
            if data is not None:
                data.zero_()
        self._memory.blank = True

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same data with another nominal type."""
        return self._like(self.shape, self._buffers, dtype)

    def make_copy(self, device: torch.device | None = None, non_blocking: bool = False) -> Any:
        """The same values in memory of their own, on a device."""
        return self._like(self.shape, packed(self._buffers, device, non_blocking))._by_itself()

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
        """The buffers that an all-gather along the first dimension moves, by their documented names."""
        raise NotImplementedError

    def fsdp_extract_buffers(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """These buffers, dense and without padding, and what else the gathered tensor needs."""
        metadata = {**self._to_all(), "format": self._format, "options": self._options}
        return [self._to_gather(n).contiguous() for n in metadata["field_names"]], metadata

    def _to_all(self) -> dict[str, Any]:
        """What a gathered tensor of any format needs besides the buffers."""
        return {
            "field_names": self.fsdp_buffer_fields(),
            "usages": self.get_usages(),
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
        }

    def _to_gather(self, field: str) -> torch.Tensor:
        return getattr(self, field)

    def fsdp_assign_gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any]) -> None:
        """Hold gathered buffers in the place of those that are here: what is over the same memory stays."""
        shape = matrix_of(self.shape)
        gathered_rows = shape[0] // max(self.shape[0], 1) * gathered[0].shape[0]
        new = self._of_gathered(gathered, meta, (gathered_rows, shape[1]))
        new = first_rows(meta["format"], (gathered_rows, shape[1]), new, shape[0])
        if any(a is not b and not same_memory(a, b) for a, b in zip(self._buffers, new, strict=True)):
            self._set_buffers(new)
        elif self._core_views is not None and not self._core_views.follow():
            self._core_views = None
        self._wrote()

    def _gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any]) -> Any:
        """A new one of this kind over the gathered buffers of all shards."""
        shape = (gathered[0].shape[0], *self.shape[1:])
        buffers = self._of_gathered(gathered, meta, matrix_of(shape))
        return self._of(shape, meta["fake_dtype"], meta["format"], buffers, meta["quantizer"], meta["options"])

    def _of_gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any], shape: tuple[int, int]) -> Buffers:
        raise NotImplementedError

    def _note_shards(self, group: Any) -> None:
        """Called with the processes of the other shards: as a parameter is cut, and before shards are gathered."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        meta = (self._dtype, form_key(self._format), self._options, self._seen, AsConstant(self._quantizer))
        return self._inner_names(), meta

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, outer_size: Any, outer_stride: Any) -> Any:
        dtype, key, options, seen, constant = meta
        buffers = Buffers(*[inner.get(n) for n in NAMES])
        place = None if outer_stride is None else (tuple(outer_stride), 0)
        made = cls._of(tuple(outer_size), dtype, form_of(key), buffers, constant.quantizer, options, place=place)
        made._seen = seen
        return made

    def __repr__(self) -> str:
        try:
            values = str(self.dequantize())
        except Exception as error:  # a repr is for looking at broken things too
            values = f"<{type(error).__name__}>"
        return f"{type(self).__name__}({self._label()}, data={values})"

    def _label(self) -> str:
        return f"{self._format}, shape={tuple(self.shape)}"


def _two(t: torch.Tensor) -> tuple[int, int]:
    return (t.shape[0], t.shape[1]) if t.ndim == 2 else (1, t.numel())


def old_or_new(noop_flag: torch.Tensor | None, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What an update leaves, which a flag of 1 on the device skips."""
    return new if noop_flag is None else torch.where(noop_flag.reshape(()) == 1, old, new)


def _part(given: torch.Tensor, mine: torch.Tensor, turned: bool) -> torch.Tensor:
    """The part of a padded buffer that a smaller one holds, in its shape."""
    if given.ndim == mine.ndim:
        return given[tuple(slice(0, n) for n in mine.shape)]
    if given.ndim == 2 and mine.numel():  # a matrix for data that is held in its own shape
        first, last = (mine.shape[0], mine.shape[-1]) if mine.ndim else (1, 1)
        rows, columns = (first, mine.numel() // first) if turned else (mine.numel() // last, last)
        given = given[:rows, :columns]
    return given.reshape(mine.shape)
