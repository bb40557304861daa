"""FP8 with one scale for the tensor: storage, tensor, and the quantizers of delayed and of current scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from threading import RLock
from typing import Any

import torch

from te_core.ops import raw as ops
from te_core.precision import Operand, rule_of
from te_core.quantized import Format
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_torch.exchange import all_reduce
from te_torch.runtime import deprecated, runtime_for, to_core, to_torch
from te_torch.tensors import kinds
from te_torch.tensors.base import Quantizer, spans
from te_torch.tensors.buffers import Buffers, matrix_of, matrix_of_data, memory_of, packed
from te_torch.tensors.dtype import DType, TE_DType_To_Torch, fp8, of_core
from te_torch.tensors.pickling import rebuilt
from te_torch.tensors.scales import scale_of, start_from
from te_torch.tensors.sharding import Shards
from te_torch.tensors.storage import QuantizedTensorStorage
from te_torch.tensors.tensor import QuantizedTensor, constructor
from te_torch.tensors.tracing import AsConstant
from te_torch.tensors.transposing import columnwise_of
from te_torch.tensors.views import WHOLE, Memory, Part

_catching_up = RLock()  # of transposes that have fallen behind


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 data with one float32 scale.

    `_data` uint8 of the tensor's shape, `_transpose` uint8 (K, ...), `_scale_inv` float32 [1].
    """

    _CHANGES = True

    def __init__(
        self,
        *,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: Any,
        fake_dtype: torch.dtype | None = None,
        data_transpose: torch.Tensor | None = None,
        quantizer: Any = None,
    ) -> None:
        given = Buffers(data, fp8_scale_inv, None, data_transpose, fp8_scale_inv)
        self._take(fake_dtype or torch.float32, Format(fp8(fp8_dtype)), given, quantizer)

    def _set_buffers(self, buffers: Buffers) -> None:
        """One scale serves both copies: that which lies behind the columnwise data, if there is one."""
        row, row_scale, _, column, column_scale, _ = buffers
        scale = row_scale if column is None or column_scale is None else column_scale
        of_row = None if row is None else scale
        super()._set_buffers(Buffers(row, of_row, None, column, None if column is None else scale))

    # The transpose may fall behind: a view in another shape has none, and what is written through it reaches the
    # rowwise data alone.

    def _catch_up(self) -> None:
        """Write the transpose anew if the rowwise data has changed since."""
        column = self._col_data
        if column is None or self._row_data is None:
            return
        look = self._look("_col_data", column)
        if look.as_of != self._memory.writes:
            with _catching_up, torch.no_grad():  # whoever comes meanwhile waits (its stream does not)
                writes = self._memory.writes
                if look.as_of != writes:
                    data: Any = super()._shown("_row_data")
                    super()._shown("_col_data").copy_(data.movedim(-1, 0))  # type: ignore[union-attr]
                    look.as_of = writes

    def _wrote(self) -> None:
        super()._wrote()
        if self._col_data is not None:
            self._look("_col_data", self._col_data).as_of = self._memory.writes

    @property
    def _buffers(self) -> Buffers:
        self._catch_up()
        return super()._buffers

    def _shown(self, name: str) -> torch.Tensor | None:
        if name == "_col_data":
            self._catch_up()
        return super()._shown(name)

    def to_core(self) -> Any:
        """The core's view of the buffers."""
        if self._col_data is not None:
            self._catch_up()
        return super().to_core()

    def _inner_names(self) -> list[str]:
        """The scale once, though both copies have it."""
        names = super()._inner_names()
        return [n for n in names if n != "_col_scale" or "_row_scale" not in names]

    @property
    def _data(self) -> torch.Tensor | None:
        return self._shown("_row_data")

    @_data.setter
    def _data(self, t: torch.Tensor | None) -> None:
        scale = self._scale_inv
        self._adopt("_row_data", t)
        self._row_scale = None if t is None else scale
        self._memory = Memory()
        if t is not None and self._col_data is not None:  # that of other data, which others may hold
            self._col_data = self._col_data.clone()
            self._look("_col_data", self._col_data).as_of = -1

    @property
    def _transpose(self) -> torch.Tensor | None:
        return self._shown("_col_data")

    @_transpose.setter
    def _transpose(self, t: torch.Tensor | None) -> None:
        scale = self._scale_inv
        self._adopt("_col_data", t)
        self._col_scale = None if t is None else scale
        if t is not None:
            self._look("_col_data", self._col_data).as_of = self._memory.writes

    @property
    def _transpose_invalid(self) -> bool:
        return self._col_data is None

    @_transpose_invalid.setter
    def _transpose_invalid(self, invalid: bool) -> None:
        if invalid and self._col_data is not None and self._row_data is not None:
            self.update_usage(columnwise_usage=False)

    @property
    def _scale_inv(self) -> torch.Tensor | None:
        return self._row_scale if self._row_scale is not None else self._col_scale

    @_scale_inv.setter
    def _scale_inv(self, t: torch.Tensor) -> None:
        t = t if t.ndim == 1 else t.reshape(1)
        self._row_scale = None if self._row_data is None else t
        self._col_scale = None if self._col_data is None else t

    @property
    def _fp8_dtype(self) -> DType:
        return of_core(self._format.dtype)

    @_fp8_dtype.setter
    def _fp8_dtype(self, dtype: Any) -> None:
        self._format = Format(fp8(dtype))

    def get_metadata(self) -> dict[str, Any]:
        """The constructor's keyword arguments that make a storage of the same buffers."""
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "fake_dtype": self._dtype,
            "data_transpose": self._transpose,
            "quantizer": self._quantizer,
        }

    def _build_default_quantizer(self) -> Any:
        scale = self._scale_inv
        if scale is None:
            raise RuntimeError(f"{type(self).__name__} holds no scale that a quantizer could be made of")
        return Float8Quantizer(scale.reciprocal(), torch.zeros_like(scale), self._fp8_dtype, **self.get_usages())

    def _derives_columnwise(self) -> bool:
        return not self._folded()  # rows that lie otherwise than they are seen: clone() first

    def _make_columnwise(self) -> None:
        made = packed(columnwise_of(self._format, self._matrix(), self._buffers))
        self._set_buffers(Buffers(*self._buffers[:3], *made[3:]))
        self._look("_col_data", self._col_data).as_of = self._memory.writes

    # -------------------------------------------------- one scale: any part of the data stands alone, in any shape

    def _as_matrix(self, t: torch.Tensor, turned: bool) -> torch.Tensor:
        """A view, or, of strided data that cannot be seen so, the data as it is: the core reads a copy of it."""
        try:
            return t.view(matrix_of_data(t.shape, turned))
        except (RuntimeError, ValueError):
            return t

    def _viewed(self, shape: Sequence[int]) -> Any:
        """Any shape, of rowwise data; the transpose follows only where the last side stays."""
        data = self._row_data
        if data is None or (data.ndim == 2 and matrix_of(shape) == self._matrix()):
            return super()._viewed(shape)
        if prod(shape) != prod(self.shape):
            return None
        if data.ndim == 2:
            data = data[: self._matrix()[0], : self._matrix()[1]]
        try:
            seen = data.view(tuple(shape))
        except (RuntimeError, ValueError):  # there is padding between the rows (ValueError: a compiler's stand-in)
            return self._flattened(shape) if data.ndim == 2 else None
        return self._like(shape, Buffers(self._as_matrix(seen, False), self._row_scale))

    def _flattened(self, shape: Sequence[int]) -> Any:
        made = super()._flattened(shape)
        if made._row_data is not None:
            made._set_buffers(made._buffers.row)
        return made

    def _to_read(self) -> tuple[tuple[int, int], Buffers]:
        shape = matrix_of(self.shape)
        if self._row_data is None or shape == self._matrix():
            return super()._to_read()
        return shape, Buffers(self._data.reshape(shape), self._row_scale)  # type: ignore[union-attr]

    def _part(self, part: Part, rows: tuple[int, int] | None, look: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        row, column = self._data, self._transpose
        if self._folded() or (row is None and column is None):
            return None
        if row is not None:
            row = look(row)
            if row is None:
                return None
            row = self._as_matrix(row, False)
        if column is not None:
            column = look(column.movedim(0, -1) if column.ndim else column)
            if column is not None:
                column = self._as_matrix(column.movedim(-1, 0) if column.ndim else column, True)
            elif row is None:
                return None
        buffers = Buffers(row, self._scale_inv, None, column, self._scale_inv)
        return self._like(part.shape, buffers, place=part.place)._part_of(self)

    def make_copy(self, device: torch.device | None = None, non_blocking: bool = False) -> Any:
        """The same values in memory of their own, on a device; rows lie as they are seen."""
        _, buffers = self._to_read()
        made = self._like(self.shape, packed(buffers, device, non_blocking))
        made._by_itself()._seen = WHOLE
        return made

    def _takes_bytes_of(self, src: Any) -> bool:
        """Also of a source without transpose: a shard must keep the scale of the whole (FSDP2 copies it so)."""
        return (
            getattr(src, "_format", None) is self._format
            and type(src._quantizer) is type(self._quantizer)
            and src.shape == self.shape
            and self._row_data is not None
            and src._row_data is not None
            and self._may_take_scale(src._scale_inv, self._scale_inv)
        )

    def _copy_bytes(self, src: Any) -> None:
        both_rows = self._row_data is not None and getattr(src, "_row_data", None) is not None
        if (
            src._format is not self._format
            or src.shape != self.shape
            or not (both_rows or src.get_usages() == self.get_usages())
        ):
            super()._copy_bytes(src)  # says what is wrong
        if self._data is not None:
            self._data.copy_(src._data.reshape(self._data.shape))
        self._scale_inv.copy_(src._scale_inv)  # type: ignore[union-attr]
        if self._transpose is not None:
            turned = src._transpose
            self._transpose.copy_(self._data.movedim(-1, 0) if turned is None else turned)  # type: ignore[union-attr]
        self._wrote()
        mine, other = self._quantizer, src._quantizer
        if isinstance(mine, Float8Quantizer) and isinstance(other, Float8Quantizer) and other.amax is not mine.amax:
            mine.take_amax_of(other)
        if self._memory.margin is not None and isinstance(mine, Float8Quantizer) and self._shards is None:
            values = self.dequantize()
            start_from(values, self._memory.margin, mine)
            mine.calibrate(values)

    def _update(self, quantizer: Any, src: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
        """A shard of a parameter with current scaling takes the maximum of all shards: they share one scale.

        A part of a tensor keeps the scale that it shares with the rest, whose values would change with it.
        """
        if self._shares_scale():
            made = self._build_default_quantizer()
            if isinstance(quantizer, Float8Quantizer):
                made.amax = quantizer.amax
            quantizer = made
        elif self._memory.margin is not None and isinstance(quantizer, Float8Quantizer) and noop_flag is None:
            start_from(src, self._memory.margin, quantizer, None if self._shards is None else self._shards.group)
        elif self._shards is not None and isinstance(quantizer, Float8CurrentScalingQuantizer):
            quantizer = quantizer.copy()
            quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, self._shards.group
        if not src.numel() and noop_flag is None:  # a shard without rows: its scale is that of the others all the same
            scale = quantizer._inputs(src.new_zeros(1, 1)).get("scale")
            if scale is not None:
                self._scale_inv.copy_(scale.reciprocal())  # type: ignore[union-attr]
            return
        super()._update(quantizer, src, noop_flag)

    def _write(self, new: Buffers, noop_flag: torch.Tensor | None = None) -> None:
        if self._shares_scale():
            new = new._replace(row_scale=None, col_scale=None)
        super()._write(new, noop_flag)

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The data: the scale is that of all shards."""
        if self._row_data is None:
            raise NotImplementedError(f"{type(self).__name__}: FSDP2 gathers rowwise data, and there is none")
        return ("_data",)

    def fsdp_extract_buffers(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The data, and what else the gathered tensor needs."""
        tensors, metadata = super().fsdp_extract_buffers()
        return tensors, {**metadata, "fp8_scale_inv": self._scale_inv}

    def _of_gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any], shape: tuple[int, int]) -> Buffers:
        return Buffers(gathered[0].view(shape), meta["fp8_scale_inv"])

    @property
    def _group_of_shards(self) -> Any:
        known = self._shards is not None and isinstance(self._quantizer, Float8CurrentScalingQuantizer)
        return self._shards.group if known else None  # type: ignore[union-attr]

    def _note_shards(self, group: Any) -> None:
        self._shards = Shards(group)

    def _label(self) -> str:
        scale = self._scale_inv
        # Not of a compiler's stand-in: it prints tensors while it traces, and reading a value would enter the graph.
        value = scale.item() if type(scale) is torch.Tensor and not scale.is_meta else None
        return f"fp8_dtype={self._format.dtype}, scale_inv={value}"


class Float8Tensor(QuantizedTensor, Float8TensorStorage):  # type: ignore[misc]
    """A tensor in FP8 with one scale."""

    __init__ = constructor(Float8TensorStorage)

    def _core_facts(self, device: Any) -> Any:
        if self._col_data is not None:
            self._catch_up()
        return super()._core_facts(device)

    # What a quantizer of delayed scaling reads and raises are inputs of a compiled program, not its constants: programs
    # are shared by tensors that differ in them.

    _scale_to_read = property(lambda self: self._quantizer.scale)
    _amax_to_raise = property(lambda self: self._quantizer.amax)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names, meta = super().__tensor_flatten__()
        if not isinstance(self._quantizer, Float8Quantizer):
            return names, meta
        return [*names, "_scale_to_read", "_amax_to_raise"], (*meta[:-1], AsConstant(self._quantizer.over(None, None)))

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, outer_size: Any, outer_stride: Any) -> Any:
        made = super().__tensor_unflatten__(inner, meta, outer_size, outer_stride)
        if "_scale_to_read" in inner:
            made._quantizer = meta[-1].quantizer.over(inner["_scale_to_read"], inner["_amax_to_raise"])
        return made


class _PerTensor(Quantizer):
    """What both per-tensor quantizers share."""

    dtype: DType

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether an all-gather moves the rowwise copy alone."""
        return True

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """A tensor over FP8 data (uint8 or a float8 type) that was made with this quantizer's scale."""
        kwargs: dict[str, Any] = {
            "data": data if data.dtype is torch.uint8 else data.view(torch.uint8),
            "fp8_dtype": self.dtype,
            "fp8_scale_inv": self._scale_inv_for(data),
            "quantizer": self.copy(),
        }
        if internal:
            return Float8TensorStorage(fake_dtype=fake_dtype, **kwargs)
        return Float8Tensor(data.shape, fake_dtype, requires_grad=requires_grad, device=data.device, **kwargs)

    def _scale_inv_for(self, data: torch.Tensor) -> torch.Tensor:
        return torch.ones(1, dtype=torch.float32, device=data.device)

    def onnx_quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        """The cast in operators that ONNX knows: the data as uint8, with `onnx_scale_inv` beside it."""
        scale = self._onnx_scale(tensor)
        top = self.dtype.core.max
        data = (tensor.float() * scale).clamp(-top, top).to(TE_DType_To_Torch[self.dtype]).view(torch.uint8)
        return Float8Tensor(
            tensor.shape, tensor.dtype, data=data, fp8_scale_inv=1 / scale, fp8_dtype=self.dtype, quantizer=self.copy()
        )

    def onnx_dequantize(self, tensor: Any) -> torch.Tensor:
        """The values of what `onnx_quantize` gave, in operators that ONNX knows."""
        return (tensor._data.view(TE_DType_To_Torch[self.dtype]).float() * tensor._scale_inv).to(tensor.dtype)

    def _onnx_scale(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Float8Quantizer(_PerTensor):
    """Delayed scaling: multiplies by `scale` and raises `amax`, both float32 tensors that somebody updates."""

    _RECIPE = DelayedScaling

    def __init__(
        self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax
        self.dtype = of_core(fp8(fp8_dtype))

    def over(self, scale: torch.Tensor | None, amax: torch.Tensor | None) -> Any:
        """A copy that reads and raises these; of None: the rule alone."""
        made = self.copy()
        made.scale, made.amax = scale, amax
        return made

    def take_amax_of(self, other: Float8Quantizer) -> None:
        """Raise the amax to that of another quantizer with this very scale: of what a program that returns its changes
        gives back for the tensor that it was given.
        """
        if memory_of(other.scale) == memory_of(self.scale):
            self.amax.copy_(torch.maximum(self.amax, other.amax))

    @property
    def operand(self) -> Operand:
        """The rule as plain data."""
        return rule_of(self.dtype.core, "delayed")

    def _inputs(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"scale": self.scale, "amax": self.amax.view(1)}

    def _lasting(self) -> tuple[torch.Tensor, ...] | None:
        cls = type(self)
        common = cls._inputs is Float8Quantizer._inputs and cls._cast is Quantizer._cast
        return (self.scale, self.amax) if common else None

    def _notes(self) -> tuple[torch.Tensor, ...]:
        return (self.amax,)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set the amax to that of the tensor."""
        low, high = tensor.detach().aminmax()
        self.amax.copy_(torch.maximum(-low, high).reshape(self.amax.shape))

    def _scale_inv_for(self, data: torch.Tensor) -> torch.Tensor:
        return (1 / self.scale.detach()).reshape(1)

    def _onnx_scale(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.scale.reshape(1)


class Float8CurrentScalingQuantizer(_PerTensor):
    """Current scaling: the scale follows from the tensor's own maximum, or from that over a process group."""

    _RECIPE = Float8CurrentScaling
    _VALUE = ("dtype", "with_amax_reduction", "force_pow_2_scales", "amax_epsilon")
    agreed: torch.Tensor | None = None  # the maximum that a group agreed on, of a quantizer for one update

    def __init__(
        self,
        fp8_dtype: Any,
        device: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        for name, given in (("use_existing_amax", use_existing_amax), ("scale", scale), ("amax", amax)):
            if given is not None and given is not False:
                deprecated(f"Float8CurrentScalingQuantizer: {name}", "none: the argument has no effect")
        self._check(amax_epsilon, with_amax_reduction=with_amax_reduction, force_pow_2_scales=force_pow_2_scales)
        self.dtype = of_core(fp8(fp8_dtype))
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    @property
    def operand(self) -> Operand:
        """The rule as plain data."""
        return rule_of(self.dtype.core, "current", self.force_pow_2_scales, self.amax_epsilon)

    def _inputs(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        amax = self.agreed
        if amax is None:
            if not spans(self.with_amax_reduction, self.amax_reduction_group):
                return {}
            amax = to_torch(ops.amax(runtime_for(x), to_core(x)))
            all_reduce("Float8CurrentScalingQuantizer", amax, self.amax_reduction_group, "max")
        return {"scale": scale_of(amax, self.dtype.core.max, self.force_pow_2_scales, self.amax_epsilon)}

    def _lasting(self) -> tuple[torch.Tensor, ...] | None:
        cls = type(self)
        common = cls._inputs is Float8CurrentScalingQuantizer._inputs and cls._cast is Quantizer._cast
        return () if common and not self.with_amax_reduction and self.agreed is None else None

    def _onnx_scale(self, tensor: torch.Tensor) -> torch.Tensor:
        amax = tensor.float().abs().amax().reshape(1)
        return scale_of(amax, self.dtype.core.max, self.force_pow_2_scales, self.amax_epsilon)

    def is_requantization_safe(self) -> bool:
        """The scale follows from the values."""
        return True


@kinds.made_by(Float8TensorStorage, Float8Tensor, Float8Quantizer, Float8CurrentScalingQuantizer, scaling="tensor")
def _make_float8_tensor_in_reduce_ex(*args: Any) -> Any:
    """Unpickles a `Float8Tensor`."""
    return rebuilt(Float8Tensor, *args)
