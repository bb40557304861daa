"""`QuantizedTensor`: a quantized storage that presents itself to torch as a tensor of its nominal type."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch.autograd.graph import increment_version

from te_core.errors import ArgumentError
from te_core.tape.walk import Facts
from te_torch.quantized import QuantizedTorch
from te_torch.tensors import pickling
from te_torch.tensors.buffers import Buffers
from te_torch.tensors.collectives import refuse_bucket
from te_torch.tensors.dispatch import dispatch
from te_torch.tensors.sharding import Arrived, Hook, Sent, apart, filled, in_one, rows_of_a_shard
from te_torch.tensors.storage import QuantizedTensorStorage
from te_torch.tensors.views import Place


class QuantizedTensor(QuantizedTorch):
    """A tensor without memory of its own: its values are those of the quantized buffers.

    An operation that its class does not know runs on the dequantized values; one that changes them in place quantizes
    the result into the same buffers.
    """

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        fake_dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        device: Any = None,
        stride: Sequence[int] | None = None,
        storage_offset: int = 0,
        **held: Any,
    ) -> Any:
        """The bare tensor; a concrete class gives it its buffers."""
        if device is None:
            device = next((t.device for t in held.values() if isinstance(t, torch.Tensor)), None)
        return torch.Tensor._make_wrapper_subclass(
            cls,
            tuple(shape),
            strides=stride,
            storage_offset=storage_offset or None,
            dtype=dtype,
            layout=torch.strided,
            requires_grad=requires_grad,
            device=device,
        )

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
        first = buffers.row_data if buffers.row_data is not None else buffers.col_data
        stride, offset = place or (None, 0)
        made = QuantizedTensor.__new__(
            cls, shape, dtype, device=device if first is None else first.device, stride=stride, storage_offset=offset
        )
        made._hold(dtype, form, buffers, quantizer, options)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(func, args, kwargs or {})

    # ---------------------------------------------------------------------------------------------- values

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as a plain tensor; to autograd the identity."""
        dtype = dtype or self.dtype
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self._dense_values(dtype)

    def float(self) -> torch.Tensor:
        """The values in float32."""
        return self.dequantize(dtype=torch.float32)

    def bfloat16(self) -> torch.Tensor:
        """The values in bfloat16."""
        return self.dequantize(dtype=torch.bfloat16)

    def half(self) -> torch.Tensor:
        """The values in float16."""
        return self.dequantize(dtype=torch.float16)

    def quantize_(self, tensor: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Replace the values by those of `tensor`, quantized by this tensor's quantizer."""
        super().quantize_(tensor, noop_flag=noop_flag)  # type: ignore[misc]
        increment_version(self)
        return self

    def copy_from_storage(self, src: Any) -> None:
        """Take over the bytes of a storage of the same format and copies."""
        super().copy_from_storage(src)  # type: ignore[misc]
        increment_version(self)

    def _core_facts(self, device: Any) -> Facts | None:
        """What recordings depend on of the core's view; None where that has to be made anew in each call."""
        views = self._core_views  # type: ignore[attr-defined]
        if views is None or not views.fit(self):
            self.to_core()  # type: ignore[attr-defined]
            views = self._core_views  # type: ignore[attr-defined]
        return None if views is None else views.facts_of(self, device)

    # ------------------------------------------------------------------------------------- tensors like it

    @classmethod
    def make_like(
        cls,
        tensor: Any,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> Any:
        """A tensor of this class over the buffers of another one, or of a storage of its format."""
        place = tensor._place if isinstance(tensor, QuantizedTensor) else None
        if shape is not None and tuple(shape) != tuple(tensor.shape):
            seen, place = tensor._viewed(tuple(shape)), None
            if seen is None:
                raise ArgumentError(
                    f"{cls.__name__}.make_like",
                    f"shape={tuple(shape)} for one of {tuple(tensor.shape)}",
                    "a shape in which the same buffers can be seen",
                    "see view()",
                )
            tensor = seen
        made = tensor._like(tensor.shape, tensor._buffers, dtype, place, cls)
        return made.requires_grad_(requires_grad) if requires_grad else made

    @property
    def _place(self) -> Place:
        return self.stride(), self.storage_offset()

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """The same data with another nominal type."""
        return type(self).make_like(self, dtype=dtype, requires_grad=self.requires_grad)

    def cpu(self, memory_format: Any = torch.preserve_format) -> Any:
        """The tensor with its buffers on the host."""
        return self.to(device="cpu")

    def expand_as(self, other: torch.Tensor) -> Any:
        """The tensor itself below a node of autograd, by which a gradient accumulator is reached."""
        if other is self:
            return _Identity.apply(self)
        return super().expand_as(other)

    def view(self, *shape: Any) -> Any:
        """The same buffers in another shape."""
        return torch.Tensor.view(self, *shape)

    def clear(self) -> None:
        """Let go of the buffers."""
        self._set_buffers(Buffers())  # type: ignore[attr-defined]

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage on the device: the buffers have their own."""
        return torch.UntypedStorage(0, device=self.device)

    @property
    def data(self) -> Any:
        """The tensor detached, over the same buffers. Assigning adopts another's buffers, or quantizes its values."""
        return self.detach()

    @data.setter
    def data(self, tensor: torch.Tensor) -> None:
        mine = (self.shape, self.dtype, self.device)
        like = (tensor.shape, tensor.dtype, tensor.device)
        with torch.no_grad():
            if type(tensor) is not type(self):
                refuse_bucket(self)
                if like == mine:
                    self.quantize_(tensor)
                    return
                quantizer = self._quantizer.copy()
                quantizer.set_usage(**self.get_usages())  # type: ignore[attr-defined]
                tensor = quantizer(tensor)
            if like != mine:
                torch.Tensor.data.__set__(self, tensor)  # type: ignore[attr-defined]
            self._adopt_from(tensor)

    def _adopt_from(self, other: Any) -> None:
        self._hold(self.dtype, other._format, other._buffers, other._quantizer, other._options)  # type: ignore[attr-defined]
        self._memory, self._seen = other._memory, other._seen
        other._share_looks(self)

    # -------------------------------------------------------------------------------------------------- FSDP2

    @Hook
    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """The buffers of this shard that FSDP2 gathers, and what else the whole parameter needs."""
        sent = self._sent
        if sent is not None and sent.fits(self, mesh, orig_size):
            return sent.tensors, sent.metadata
        rows = rows_of_a_shard(self, mesh, orig_size, module)
        if mesh is not None:  # of one dimension, also of HSDP's: that of the shards
            self._note_shards(mesh.get_group())  # type: ignore[attr-defined]
        tensors, metadata = self.fsdp_extract_buffers()  # type: ignore[attr-defined]
        if rows != self.shape[0]:
            tensors = [filled(t, rows) for t in tensors]
        if len(tensors) > 1 and mesh is not None and mesh.size() == 1:
            metadata["in one"] = [(t.shape, t.dtype) for t in tensors]
            tensors = [in_one(tensors)]
        self._sent = Sent.of(self, mesh, orig_size, tensors, metadata)
        return tuple(tensors), metadata

    _sent: Sent | None = None
    _arrived: Arrived | None = None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The whole parameter over what FSDP2 gathered. What was gathered FSDP2 frees by itself when it shards again,
        and there is nothing else that it would have to free.
        """
        gathered = all_gather_outputs
        if out is not None and out._arrived is not None and out._arrived.fits(out, gathered, metadata):
            out._arrived.note(out)
            return None
        if "in one" in metadata:
            gathered = tuple(apart(gathered[0], metadata["in one"]))
        if out is not None:
            out.fsdp_assign_gathered(gathered, metadata)
            out._arrived = None if "in one" in metadata else Arrived.of(out, gathered, metadata)
            return None
        made = self._gathered(gathered, metadata)  # type: ignore[attr-defined]
        # Of a mixed-precision policy, which leaves the bytes as they are: layers then compute in that type.
        return made if made.dtype == param_dtype else made.to_dtype(param_dtype), ()

    # --------------------------------------------------------------------------------- copies, files, compilers

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        made = self.detach().make_copy()  # type: ignore[attr-defined]
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        own = {*made.__dict__, "_arrived", "_core_views", "_kept", "_sent"} - {"_quantizer"}
        made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in own})
        return made

    def __copy__(self) -> Any:
        return type(self).make_like(self, requires_grad=self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickling.reduced(self)

    def _stable_hash_for_caching(self) -> str:
        """What a compiler's cache of graphs depends on."""
        names, meta = self.__tensor_flatten__()  # type: ignore[attr-defined]
        quantizer = self._quantizer
        rule = None if quantizer is None else (type(quantizer).__name__, getattr(quantizer, "operand", None))
        constant = meta[-1]._key()[1:]  # of a quantizer without a value: what it holds
        return f"{type(self).__name__} {names} {meta[:-1]} {rule} {constant}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return QuantizedTensorStorage.__repr__(self)  # type: ignore[arg-type]

    def __format__(self, spec: str) -> str:
        return format(self.detach().dequantize(), spec) if self.ndim == 0 else repr(self)


def constructor(storage: type) -> Any:
    """The `__init__` of a tensor class: the arguments of its storage's, below those of every tensor."""

    def __init__(  # noqa: N807
        self: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        device: Any = None,
        stride: Any = None,
        storage_offset: int = 0,
        **held: Any,
    ) -> None:
        storage.__init__(self, **{**held, "fake_dtype": dtype})  # type: ignore[misc]
        del self._shape  # torch has it

    told, own = signature(__init__), signature(storage).parameters.values()
    of_torch = [*told.parameters.values()][:-1]
    __init__.__signature__ = told.replace(parameters=[*of_torch[:3], *own, *of_torch[3:]])  # type: ignore[attr-defined]
    return __init__


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = tensor.dtype
        return tensor._dense_values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.to(ctx.dtype), None


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad
