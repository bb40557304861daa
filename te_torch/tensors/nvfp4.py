"""NVFP4: E2M1 with an E4M3 scale for each 16 elements below a float32 amax. Storage, tensor, quantizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_core import dtypes
from te_core.errors import ArgumentError, UnsupportedError
from te_core.precision import Operand, rule_of
from te_core.quantized import Format
from te_core.recipe import NVFP4BlockScaling
from te_core.spelling import choice_error
from te_torch.tensors import kinds
from te_torch.tensors.base import Quantizer, spans
from te_torch.tensors.block_scaled import BlockScaledStorage, buffer, scale_shape
from te_torch.tensors.buffers import Buffers, matrix_of
from te_torch.tensors.dtype import DType
from te_torch.tensors.mxfp8 import refuse_swizzled
from te_torch.tensors.pickling import rebuilt
from te_torch.tensors.tensor import QuantizedTensor, constructor


class NVFP4TensorStorage(BlockScaledStorage):
    """Two E2M1 values a byte: rowwise (..., K/2), columnwise (K, M/2); E4M3 scales as uint8; an amax for each copy."""

    _WIDTH = 2

    def __init__(
        self,
        *,
        rowwise_data: torch.Tensor | None,
        rowwise_scale_inv: torch.Tensor | None,
        columnwise_data: torch.Tensor | None,
        columnwise_scale_inv: torch.Tensor | None,
        amax_rowwise: torch.Tensor | None,
        amax_columnwise: torch.Tensor | None,
        fp4_dtype: Any = DType.kFloat4E2M1,
        quantizer: Any = None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_swizzled(type(self).__name__, with_gemm_swizzled_scales)
        given = Buffers(
            rowwise_data, rowwise_scale_inv, amax_rowwise, columnwise_data, columnwise_scale_inv, amax_columnwise
        )
        tiled = bool(getattr(quantizer, "with_2d_quantization", False))
        form = Format(dtypes.float4_e2m1, "nvfp4", tiled, row_scaled_nvfp4, nvfp4_e4m3_max)
        self._take(fake_dtype or torch.float32, form, given, quantizer, (nvfp4_use_4over6,))

    _amax_rowwise, _amax_columnwise = buffer("_row_amax"), buffer("_col_amax")

    _fp4_dtype = property(lambda self: DType.kFloat4E2M1)
    _row_scaled_nvfp4 = property(lambda self: self._format.row_scaled)
    _nvfp4_use_4over6 = property(lambda self: bool(self._options and self._options[0]))
    _nvfp4_e4m3_max = property(lambda self: self._format.bound)

    def _build_default_quantizer(self) -> Any:
        made = NVFP4Quantizer(
            with_2d_quantization=self._format.tiled,
            row_scaled_nvfp4=self._row_scaled_nvfp4,
            nvfp4_use_4over6=self._nvfp4_use_4over6,
            nvfp4_e4m3_max=self._nvfp4_e4m3_max,
        )
        made.set_usage(**self.get_usages())
        return made

    def _update(self, quantizer: Any, src: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
        if self._shares_scale():
            raise UnsupportedError(
                f"a change of a part of an {type(self).__name__}",
                f"{tuple(self.shape)} of a tensor with one amax",
                "parts with an amax of their own (row_scaled_nvfp4), or the whole tensor",
                "change the whole: the blocks of the rest are scaled by the same amax",
            )
        super()._update(quantizer, src, noop_flag)

    def _dense_values(self, dtype: torch.dtype) -> torch.Tensor:
        """Of the rowwise copy: the columnwise one may be transformed."""
        if self._row_data is None and self._col_data is not None:
            raise NotImplementedError(f"{type(self).__name__}: only the rowwise copy can be dequantized")
        return super()._dense_values(dtype)

    def get_metadata(self) -> dict[str, Any]:
        """The constructor's keyword arguments that make a storage of the same buffers."""
        return {
            **self._given(),
            "amax_rowwise": self._row_amax,
            "amax_columnwise": self._col_amax,
            "fp4_dtype": self._fp4_dtype,
            "with_gemm_swizzled_scales": False,
            "row_scaled_nvfp4": self._row_scaled_nvfp4,
            "nvfp4_use_4over6": self._nvfp4_use_4over6,
            "nvfp4_e4m3_max": self._nvfp4_e4m3_max,
        }


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):  # type: ignore[misc]
    """A tensor in NVFP4."""

    __init__ = constructor(NVFP4TensorStorage)


class NVFP4Quantizer(Quantizer):
    """NVFP4 with its options; the transform is that of the recipe, with the documented signs."""

    _RECIPE = NVFP4BlockScaling
    _VALUE = (
        "dtype",
        "with_amax_reduction",
        "with_rht",
        "with_post_rht_amax",
        "with_2d_quantization",
        "stochastic_rounding",
        "row_scaled_nvfp4",
        "nvfp4_use_4over6",
        "nvfp4_e4m3_max",
        "nvfp4_4over6_err_mode",
        "with_random_sign_mask",
    )

    def __init__(
        self,
        fp4_dtype: Any = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._check(
            with_amax_reduction=with_amax_reduction,
            with_rht=with_rht,
            with_post_rht_amax=with_post_rht_amax,
            with_2d_quantization=with_2d_quantization,
            stochastic_rounding=stochastic_rounding,
            row_scaled_nvfp4=row_scaled_nvfp4,
            nvfp4_use_4over6=nvfp4_use_4over6,
            with_random_sign_mask=with_random_sign_mask,
        )
        if DType.cast(fp4_dtype) is not DType.kFloat4E2M1:
            raise ArgumentError("NVFP4Quantizer", f"fp4_dtype={fp4_dtype!r}", "DType.kFloat4E2M1", "correct it")
        if not nvfp4_use_4over6:
            nvfp4_e4m3_max = 448
        if nvfp4_e4m3_max not in (448, 256):
            raise ValueError(f"NVFP4Quantizer: nvfp4_e4m3_max={nvfp4_e4m3_max}; it is 448 or 256")
        mode = str(nvfp4_4over6_err_mode).upper()
        if mode not in ("MAE", "MSE"):
            raise choice_error("NVFP4Quantizer", "nvfp4_4over6_err_mode", nvfp4_4over6_err_mode, ("MAE", "MSE"))
        if nvfp4_use_4over6 and (with_rht or stochastic_rounding):
            raise ValueError("NVFP4Quantizer: nvfp4_use_4over6 excludes with_rht and stochastic_rounding")
        if with_rht and not with_random_sign_mask:
            raise UnsupportedError(
                "NVFP4Quantizer",
                "with_random_sign_mask=False",
                "the transform with the documented signs",
                "leave with_random_sign_mask at True, or with_rht at False",
            )
        self.dtype = DType.kFloat4E2M1
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = with_rht
        self.with_post_rht_amax = with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max
        self.nvfp4_4over6_err_mode = mode
        self.with_random_sign_mask = with_random_sign_mask

    @property
    def operand(self) -> Operand:
        """The rule as plain data."""
        return rule_of(
            dtypes.float4_e2m1,
            "nvfp4",
            tiled=self.with_2d_quantization,
            transform=self.with_rht,
            stochastic=self.stochastic_rounding,
            row_scaled=self.row_scaled_nvfp4,
            four_over_six=self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else None,
            bound=self.nvfp4_e4m3_max,
        )

    def _options(self) -> tuple[Any, ...]:
        return (self.nvfp4_use_4over6,)

    def _inputs(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        if spans(self.with_amax_reduction, self.amax_reduction_group):
            raise UnsupportedError(
                "NVFP4Quantizer",
                "with_amax_reduction over several processes",
                "the amax of each process",
                "gather the tensor first, then quantize it",
            )
        if not self.stochastic_rounding:
            return {}
        return {"rng": torch.randint(1 << 62, (2,), dtype=torch.int64, device=x.device)}

    def is_quantizable(self, inp: torch.Tensor) -> bool:
        """Whether a piece of this shape can be quantized by itself."""
        m, k = matrix_of(inp.shape)
        return inp.ndim >= 2 and m % 16 == 0 and k % 16 == 0 and not self.row_scaled_nvfp4

    get_scale_shape = scale_shape

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the values that the columnwise data holds (two a byte)."""
        m, k = matrix_of(shape)
        return (k, m)

    @staticmethod
    def convert_shape_for_fp4(shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the bytes."""
        return (*shape[:-1], shape[-1] // 2)

    def is_requantization_safe(self) -> bool:
        """All follows from the values, unless rounding draws."""
        return not self.stochastic_rounding


@kinds.made_by(NVFP4TensorStorage, NVFP4Tensor, NVFP4Quantizer, scaling="nvfp4")
def _make_nvfp4_tensor_in_reduce_ex(*args: Any) -> Any:
    """Unpickles an `NVFP4Tensor`."""
    return rebuilt(NVFP4Tensor, *args)
