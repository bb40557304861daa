"""FP8 with one scale for the tensor: storage, tensor, and the quantizers of delayed and of current scaling."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from te_core.dtypes import DType as CoreType
from te_core.ops import raw as ops
from te_core.precision import Operand
from te_core.quantized import Format
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_torch.runtime import runtime_for, to_core, to_torch
from te_torch.tensors.base import Quantizer, spans
from te_torch.tensors.buffers import Buffers, matrix_of, packed
from te_torch.tensors.dtype import DType, fp8, of_core
from te_torch.tensors.storage import QuantizedTensorStorage
from te_torch.tensors.tensor import QuantizedTensor
from te_torch.tensors.transposing import columnwise_of


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 data with one float32 scale.

    `_data` uint8 of the tensor's shape, `_transpose` uint8 (K, ...), `_scale_inv` float32 [1].
    """

    amax_reduction_group: Any = None  # of the processes that hold the other shards of an FSDP2 parameter

    def __init__(
        self, *, data: torch.Tensor | None, fp8_scale_inv: torch.Tensor, fp8_dtype: Any,
        fake_dtype: torch.dtype | None = None, data_transpose: torch.Tensor | None = None, quantizer: Any = None,
    ) -> None:  # fmt: skip
        if data is not None:
            self._shape = tuple(data.shape)
        elif data_transpose is not None:
            self._shape = (*data_transpose.shape[1:], data_transpose.shape[0])
        else:
            self._shape = (0,)
        self._given(data, fp8_scale_inv, fp8_dtype, fake_dtype or torch.float32, data_transpose, quantizer)

    def _given(self, data: Any, scale: Any, fp8_dtype: Any, dtype: torch.dtype, turned: Any, quantizer: Any) -> None:
        self._hold(dtype, Format(fp8(fp8_dtype)), Buffers(), quantizer, ())
        self._adopt("_row_data", data)
        self._adopt("_col_data", turned)
        scale = None if scale is None else scale.reshape(1)
        self._set_buffers(Buffers(self._row_data, scale, None, self._col_data, scale))

    def _set_buffers(self, buffers: Buffers) -> None:
        """One scale serves both copies: that which lies behind the columnwise data, if there is one."""
        row, row_scale, _, column, column_scale, _ = buffers
        scale = row_scale if column is None or column_scale is None else column_scale
        super()._set_buffers(Buffers(
            row, None if row is None else scale, None, column, None if column is None else scale
        ))  # fmt: skip

    def _inner_names(self) -> list[str]:
        """The scale once, though both copies have it."""
        names = super()._inner_names()
        return [n for n in names if n != "_col_scale" or "_row_scale" not in names]

    @property
    def _data(self) -> torch.Tensor | None:
        return self._row_view()

    @_data.setter
    def _data(self, t: torch.Tensor | None) -> None:
        scale = self._scale_inv
        self._adopt("_row_data", t)
        self._row_scale = None if t is None else scale

    @property
    def _transpose(self) -> torch.Tensor | None:
        return self._col_view()

    @_transpose.setter
    def _transpose(self, t: torch.Tensor | None) -> None:
        scale = self._scale_inv
        self._adopt("_col_data", t)
        self._col_scale = None if t is None else scale

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
        t = t.reshape(1)
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
            "data": self._data, "fp8_scale_inv": self._scale_inv, "fp8_dtype": self._fp8_dtype,
            "fake_dtype": self._dtype, "data_transpose": self._transpose, "quantizer": self._quantizer,
        }  # fmt: skip

    def _derives_columnwise(self) -> bool:
        return True

    def _make_columnwise(self) -> None:
        made = packed(columnwise_of(self._format, self._matrix(), self._buffers))
        self._set_buffers(Buffers(*self._buffers[:3], *made[3:]))

    def _viewed(self, shape: Sequence[int]) -> Any:
        """Any shape, of rowwise data without padding; the transpose follows only where the last side stays."""
        if matrix_of(shape) == self._matrix():
            return super()._viewed(shape)
        data = self._row_view()
        if data is None or not data.is_contiguous():
            return super()._viewed(shape)
        return self._like(shape, Buffers(data.view(matrix_of(shape)), self._row_scale))

    def _like(self, shape: Sequence[int], buffers: Buffers, dtype: torch.dtype | None = None) -> Any:
        made = super()._like(shape, buffers, dtype)
        if self.amax_reduction_group is not None:
            made.amax_reduction_group = self.amax_reduction_group
        return made

    def _takes_bytes_of(self, src: Any) -> bool:
        """Also of a source without transpose: a shard must keep the scale of the whole (FSDP2 copies it so)."""
        return (
            getattr(src, "_format", None) is self._format
            and type(src._quantizer) is type(self._quantizer)
            and src.shape == self.shape
            and self._row_data is not None
            and src._row_data is not None
        )

    def _copy_bytes(self, src: Any) -> None:
        if src.get_usages() == self.get_usages():
            super()._copy_bytes(src)
            return
        if src.shape != self.shape or src._row_data is None or self._row_data is None:
            super()._copy_bytes(src)  # says what is wrong
        self._data.copy_(src._data)  # type: ignore[union-attr]
        self._scale_inv.copy_(src._scale_inv)  # type: ignore[union-attr]
        if self._col_data is not None:
            self._transpose.copy_(self._data.view(self._matrix()).t().view(self._transpose.shape))  # type: ignore[union-attr]

    def _update(self, quantizer: Any, src: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
        """A shard of a parameter with current scaling takes the maximum of all shards: they share one scale."""
        if self.amax_reduction_group is not None and isinstance(quantizer, Float8CurrentScalingQuantizer):
            quantizer = quantizer.copy()
            quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, self.amax_reduction_group
        super()._update(quantizer, src, noop_flag)

    def _label(self) -> str:
        scale = self._scale_inv
        # Not of a compiler's stand-in: it prints tensors while it traces, and reading a value would enter the graph.
        value = scale.item() if type(scale) is torch.Tensor and not scale.is_meta else None
        return f"fp8_dtype={self._format.dtype}, scale_inv={value}"


class Float8Tensor(QuantizedTensor, Float8TensorStorage):  # type: ignore[misc]
    """A tensor in FP8 with one scale."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, *, data: torch.Tensor | None, fp8_scale_inv: torch.Tensor,
        fp8_dtype: Any, fake_dtype: torch.dtype | None = None, data_transpose: torch.Tensor | None = None,
        quantizer: Any = None, requires_grad: bool = False, device: Any = None,
    ) -> None:  # fmt: skip
        self._given(data, fp8_scale_inv, fp8_dtype, dtype, data_transpose, quantizer)

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """FSDP2: the data to gather, and the scale, which is that of all shards."""
        quantizer = self._quantizer
        if isinstance(quantizer, Float8CurrentScalingQuantizer) and mesh is not None:
            self.amax_reduction_group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("shard")
        data = self._data
        if data is None:
            raise NotImplementedError(f"{type(self).__name__}: FSDP2 gathers rowwise data, and there is none")
        return (data.contiguous(),), (self._scale_inv, self._format, quantizer, self.dtype)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """FSDP2: the whole parameter over the gathered data."""
        (data,) = all_gather_outputs
        scale, form, quantizer, dtype = metadata
        if out is not None:
            out._set_buffers(Buffers(data.view(matrix_of(out.shape)), scale))
            return None
        buffers = Buffers(data.view(matrix_of(data.shape)), scale)
        made = type(self)._of(tuple(data.shape), dtype, form, buffers, quantizer)
        return made, all_gather_outputs


@cache
def _rule(dtype: CoreType, scaling: str, power_of_two: bool, epsilon: float) -> Operand:
    return Operand(dtype, scaling, power_of_two, epsilon)


class _PerTensor(Quantizer):
    """What both per-tensor quantizers share."""

    dtype: DType

    def is_requantization_safe(self) -> bool:
        """Whether quantizing a dequantized tensor gives it back."""
        return False

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether an all-gather moves the rowwise copy alone."""
        return True

    def create_tensor_from_data(
        self, data: torch.Tensor, fake_dtype: torch.dtype = torch.float32, requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:  # fmt: skip
        """A tensor over FP8 data (uint8 or a float8 type) that was made with this quantizer's scale."""
        kwargs: dict[str, Any] = {
            "data": data.view(torch.uint8), "fp8_scale_inv": self._scale_inv_for(data), "fp8_dtype": self.dtype,
            "quantizer": self.copy(),
        }  # fmt: skip
        if internal:
            return Float8TensorStorage(fake_dtype=fake_dtype, **kwargs)
        return Float8Tensor(data.shape, fake_dtype, requires_grad=requires_grad, device=data.device, **kwargs)

    def _scale_inv_for(self, data: torch.Tensor) -> torch.Tensor:
        return torch.ones(1, dtype=torch.float32, device=data.device)

    def onnx_quantize(self, tensor: torch.Tensor) -> torch.Tensor:
        """The cast in operators that ONNX knows: the data as uint8, with `onnx_scale_inv` beside it."""
        scale = self._onnx_scale(tensor)
        top = self.dtype.core.max
        kind = torch.float8_e4m3fn if self.dtype is DType.kFloat8E4M3 else torch.float8_e5m2
        data = (tensor.float() * scale).clamp(-top, top).to(kind).view(torch.uint8)
        return Float8Tensor(
            tensor.shape, tensor.dtype, data=data, fp8_scale_inv=1 / scale, fp8_dtype=self.dtype, quantizer=self.copy()
        )

    def onnx_dequantize(self, tensor: Any) -> torch.Tensor:
        """The way back in operators that ONNX knows."""
        kind = torch.float8_e4m3fn if self.dtype is DType.kFloat8E4M3 else torch.float8_e5m2
        return (tensor._data.view(kind).float() * tensor._scale_inv).to(tensor.dtype)

    def _onnx_scale(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Float8Quantizer(_PerTensor):
    """Delayed scaling: multiplies by `scale` and raises `amax`, both float32 tensors that somebody updates."""

    def __init__(
        self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax
        self.dtype = DType.cast(fp8_dtype)
        fp8(self.dtype)

    @property
    def operand(self) -> Operand:
        """The rule as plain data."""
        return _rule(self.dtype.core, "delayed", False, 0.0)

    def _inputs(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"scale": self.scale, "amax": self.amax.view(1)}

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set the amax to that of the tensor."""
        low, high = tensor.detach().aminmax()
        self.amax.copy_(torch.maximum(-low, high).reshape(self.amax.shape))

    def _scale_inv_for(self, data: torch.Tensor) -> torch.Tensor:
        return (1 / self.scale.detach()).reshape(1)

    def _onnx_scale(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.scale.reshape(1)

    def _get_compatible_recipe(self) -> Any:
        return DelayedScaling


class Float8CurrentScalingQuantizer(_PerTensor):
    """Current scaling: the scale follows from the tensor's own maximum, or from that over a process group."""

    _VALUE = ("dtype", "with_amax_reduction", "force_pow_2_scales", "amax_epsilon")

    def __init__(
        self, fp8_dtype: Any, device: Any = None, *, rowwise: bool = True, columnwise: bool = True,
        use_existing_amax: bool = False, with_amax_reduction: bool = False, amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False, amax_epsilon: float = 0.0, scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        for name, given in (("use_existing_amax", use_existing_amax), ("scale", scale), ("amax", amax)):
            if given is not None and given is not False:
                warnings.warn(f"Float8CurrentScalingQuantizer: {name} has no effect", DeprecationWarning, stacklevel=2)
        self.dtype = DType.cast(fp8_dtype)
        fp8(self.dtype)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    @property
    def operand(self) -> Operand:
        """The rule as plain data."""
        return _rule(self.dtype.core, "current", self.force_pow_2_scales, self.amax_epsilon)

    def _inputs(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        if not spans(self.with_amax_reduction, self.amax_reduction_group):
            return {}
        amax = to_torch(ops.amax(runtime_for(x), to_core(x)))
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.amax_reduction_group)
        return {"scale": scale_of(amax, self.dtype.core.max, self.force_pow_2_scales, self.amax_epsilon)}

    def _onnx_scale(self, tensor: torch.Tensor) -> torch.Tensor:
        amax = tensor.float().abs().amax().reshape(1)
        return scale_of(amax, self.dtype.core.max, self.force_pow_2_scales, self.amax_epsilon)

    def _get_compatible_recipe(self) -> Any:
        return Float8CurrentScaling


def scale_of(amax: torch.Tensor, top: float, power_of_two: bool, epsilon: float) -> torch.Tensor:
    """The scale of current scaling for maxima that are already reduced (float32)."""
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    usable = torch.isfinite(amax) & (amax > 0)
    scale = torch.where(usable, top / torch.where(usable, amax, torch.ones_like(amax)), torch.ones_like(amax))
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def _make_float8_tensor_in_reduce_ex(*args: Any) -> Any:
    """Unpickles a `Float8Tensor`."""
    from te_torch.tensors.pickling import rebuilt

    return rebuilt(Float8Tensor, *args)
