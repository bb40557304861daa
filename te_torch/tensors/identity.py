"""The quantizer that does not quantize: high precision where a recipe wants a quantizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.recipe import CustomRecipe
from te_torch.runtime import to_core
from te_torch.tensors import kinds
from te_torch.tensors.base import Quantizer, _dense
from te_torch.tensors.buffers import Buffers
from te_torch.tensors.pickling import marked
from te_torch.tensors.storage import QuantizedTensorStorage, old_or_new
from te_torch.tensors.tensor import QuantizedTensor, constructor
from te_torch.tensors.tracing import AsConstant
from te_torch.tensors.views import Part
from te_torch.tensors.whole import loading


class IdentityTensorStorage(QuantizedTensorStorage):
    """`_hp_data`: the values as they are. Serves both usages."""

    _INNER_TENSORS = ("_hp_data",)
    _hp_data: torch.Tensor | None

    def __init__(
        self, *, hp_data: torch.Tensor | None, fake_dtype: torch.dtype | None = None, quantizer: Any = None
    ) -> None:
        self._shape = (0,) if hp_data is None else tuple(hp_data.shape)
        dtype = fake_dtype or (torch.float32 if hp_data is None else hp_data.dtype)
        self._hold(dtype, None, Buffers(hp_data), quantizer, ())

    @property
    def _buffers(self) -> Buffers:
        return Buffers(self._hp_data)

    def _set_buffers(self, buffers: Buffers) -> None:
        self._hp_data = buffers.row_data

    def _move_data(self, data: torch.Tensor) -> None:
        self._hp_data = data

    def flatten_inner(self) -> list[torch.Tensor]:
        """The values."""
        return [] if self._hp_data is None else [self._hp_data]

    def inner_meta(self) -> tuple[Any, ...]:
        """That these are no quantized buffers."""
        return ("identity", tuple(self._matrix()))

    def to_core(self) -> Any:
        """The core's view: a plain matrix."""
        assert self._hp_data is not None
        return to_core(self._hp_data.contiguous()).matrix()

    def get_usages(self) -> dict[str, bool]:
        """Both, as long as there are values."""
        there = self._hp_data is not None
        return {"rowwise": there, "columnwise": there}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Nothing can be dropped: the one copy serves both."""

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The values, for each copy that is asked for."""
        return (self._hp_data, self._hp_data) if rowwise_data and columnwise_data else self._hp_data

    def get_metadata(self) -> dict[str, Any]:
        """The constructor's keyword arguments that make a storage of the same values."""
        return {"hp_data": self._hp_data, "fake_dtype": self._dtype, "quantizer": self._quantizer}

    def _dense_values(self, dtype: torch.dtype) -> torch.Tensor:
        if self._hp_data is None:
            raise RuntimeError(f"{type(self).__name__} holds no data")
        return self._hp_data.to(dtype) if self._hp_data.dtype != dtype else self._hp_data.clone()

    def _update(self, quantizer: Any, src: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
        assert self._hp_data is not None
        self._hp_data.copy_(old_or_new(noop_flag, self._hp_data, src.to(self._hp_data.dtype)))

    def _takes_bytes_of(self, src: Any) -> bool:
        return isinstance(src, IdentityTensorStorage)

    def _copy_bytes(self, src: Any) -> None:
        self._hp_data.copy_(src._hp_data)  # type: ignore[union-attr]

    def _viewed(self, shape: Sequence[int]) -> Any:
        assert self._hp_data is not None
        same = tuple(shape) == tuple(self._hp_data.shape)
        return self._like(shape, Buffers(self._hp_data if same else self._hp_data.view(tuple(shape))))

    def _part(self, part: Part, rows: tuple[int, int] | None, look: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        assert self._hp_data is not None
        values = look(self._hp_data)
        return None if values is None else self._like(part.shape, Buffers(values), place=part.place)

    def _to_pickle(self, requires_grad: bool, is_param: bool) -> tuple[Any, ...]:
        return self._hp_data, self.dtype, tuple(self.shape), self._quantizer, requires_grad, is_param

    def _as_part(self) -> tuple[Any, ...]:
        return "identity", self._hp_data, self._quantizer

    def _build_default_quantizer(self) -> Any:
        return IdentityQuantizer()

    def _zero(self) -> None:
        assert self._hp_data is not None
        self._hp_data.zero_()

    def make_copy(self, device: torch.device | None = None, non_blocking: bool = False) -> Any:
        """The same values in memory of their own, on a device."""
        assert self._hp_data is not None
        dense = torch.contiguous_format
        moved = self._hp_data.to(device, non_blocking=non_blocking, copy=True, memory_format=dense)
        return self._like(self.shape, Buffers(moved))

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Any]:
        """The values, of which this object is stripped, and the object."""
        values, self._hp_data = self._hp_data, None
        return [values], self

    def restore_from_saved(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take the values back from the head of the list; what is left of it."""
        self._hp_data = tensors[0]
        return list(tensors[1:])

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The values."""
        return ("_hp_data",)

    def fsdp_extract_buffers(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The values, and what else the gathered tensor needs."""
        assert self._hp_data is not None
        return [self._hp_data.contiguous()], self._to_all()

    def fsdp_assign_gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any]) -> None:
        """Hold gathered values in the place of those that are here."""
        (self._hp_data,) = gathered

    def _gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any]) -> Any:
        (values,) = gathered
        return self._of(tuple(values.shape), meta["fake_dtype"], None, Buffers(values), meta["quantizer"])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_hp_data"], (self._dtype, AsConstant(self._quantizer))

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: Any, outer_size: Any, outer_stride: Any) -> Any:
        dtype, constant = meta
        place = None if outer_stride is None else (tuple(outer_stride), 0)
        return cls._of(tuple(outer_size), dtype, None, Buffers(inner["_hp_data"]), constant.quantizer, place=place)

    def _label(self) -> str:
        return f"shape={tuple(self.shape)}"


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):  # type: ignore[misc]
    """A tensor in high precision with the interface of a quantized one."""

    __init__ = constructor(IdentityTensorStorage)

    @classmethod
    def _of(
        cls, shape: Any, dtype: Any, form: Any, buffers: Buffers, *more: Any, place: Any = None, **named: Any
    ) -> Any:
        """Lies as the values do, unless it is a view that says otherwise."""
        first: Any = buffers.row_data
        place = place or (first.stride(), 0)
        return super()._of(shape, dtype, form, buffers, *more, place=place, **named)  # type: ignore[misc]

    def clear(self) -> None:
        """Let go of the values."""
        self._hp_data = None


class IdentityQuantizer(Quantizer):
    """Leaves tensors in high precision: in their own type, or in `dtype`, which then is that of the result."""

    _RECIPE = CustomRecipe

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(
                "IdentityQuantizer", f"dtype={dtype!r}", "a floating-point dtype, or None", "correct it"
            )
        self.dtype = dtype

    @property
    def operand(self) -> None:
        """No rule: high precision."""
        return None

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """The tensor itself, wrapped."""
        data = tensor.detach() if self.dtype is None else tensor.detach().to(self.dtype)
        kind: Any = IdentityTensorStorage if self.internal else IdentityTensor
        return kind._of(tuple(tensor.shape), data.dtype, None, Buffers(data), self.copy())

    def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Copy `src` into `dst`."""
        with torch.no_grad():
            dst._update(self, _dense(src), noop_flag)
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """An uninitialised tensor."""
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        data = torch.empty(tuple(shape), dtype=self.dtype or dtype, device=place, pin_memory=pin_memory)
        kind: Any = IdentityTensorStorage if self.internal else IdentityTensor
        made = kind._of(tuple(data.shape), data.dtype, None, Buffers(data), self.copy())
        return made.requires_grad_() if requires_grad else made

    def is_requantization_safe(self) -> bool:
        """Nothing is lost."""
        return True


@kinds.made_by(IdentityTensorStorage, IdentityTensor, IdentityQuantizer)
def _make_identity_tensor_in_reduce_ex(
    hp_data: torch.Tensor, dtype: torch.dtype, shape: Any, quantizer: Any, requires_grad: bool, is_param: bool
) -> Any:
    """Unpickles an `IdentityTensor`."""
    with loading():
        if tuple(hp_data.shape) != tuple(shape) or not dtype.is_floating_point:
            raise TypeError(f"values of shape {tuple(hp_data.shape)} for {tuple(shape)} in {dtype}")
        made = IdentityTensor._of(tuple(shape), dtype, None, Buffers(hp_data), quantizer)
        return marked(made, requires_grad, is_param)
