"""What the storages with a scale for each block share: the documented names of their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_core.precision import Operand
from te_core.quantized import Format, pieces, up
from te_torch.tensors import run
from te_torch.tensors.buffers import Buffers, matrix_of
from te_torch.tensors.storage import QuantizedTensorStorage
from te_torch.tensors.tensor import QuantizedTensor


def documented_scale_shape(form: Any, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
    """The documented shape of a scale buffer."""
    m, k = matrix_of(shape)
    rows, along = (k, m) if columnwise else (m, k)
    if form.scaling == "block":
        blocks = -(-along // 128)
        return (-(-rows // 128), up(blocks, 4)) if form.tiled else (blocks, up(rows, 4))
    return pieces(form, (m, k), columnwise).scale  # type: ignore[return-value]


class BlockScaledStorage(QuantizedTensorStorage):
    """`_rowwise_data`, `_rowwise_scale_inv`, `_columnwise_data`, `_columnwise_scale_inv`."""

    _WIDTH = 1  # elements a byte

    @property
    def _rowwise_data(self) -> torch.Tensor | None:
        return self._row_view(self._WIDTH)

    @_rowwise_data.setter
    def _rowwise_data(self, t: torch.Tensor | None) -> None:
        self._adopt("_row_data", t)

    @property
    def _columnwise_data(self) -> torch.Tensor | None:
        return self._col_view(self._WIDTH)

    @_columnwise_data.setter
    def _columnwise_data(self, t: torch.Tensor | None) -> None:
        self._adopt("_col_data", t)

    @property
    def _rowwise_scale_inv(self) -> torch.Tensor | None:
        return self._scale_view(False)

    @_rowwise_scale_inv.setter
    def _rowwise_scale_inv(self, t: torch.Tensor | None) -> None:
        self._adopt("_row_scale", t)

    @property
    def _columnwise_scale_inv(self) -> torch.Tensor | None:
        return self._scale_view(True)

    @_columnwise_scale_inv.setter
    def _columnwise_scale_inv(self, t: torch.Tensor | None) -> None:
        self._adopt("_col_scale", t)

    def _scale_view(self, columnwise: bool) -> torch.Tensor | None:
        scale = self._col_scale if columnwise else self._row_scale
        if scale is None:
            return None
        rows, columns = documented_scale_shape(self._format, self.shape, columnwise)
        return scale[:rows, :columns]

    @property
    def _with_gemm_swizzled_scales(self) -> bool:
        return False

    def _adopt_all(
        self, dtype: torch.dtype, form: Any, given: Buffers, quantizer: Any, options: tuple[Any, ...] = ()
    ) -> None:
        self._hold(dtype, form, Buffers(), quantizer, options)
        for name, t in zip(Buffers._fields, given, strict=True):
            self._adopt(f"_{name}", t)

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The data of the wanted copies."""
        row, column = self._rowwise_data, self._columnwise_data
        if rowwise_data and columnwise_data:
            return row, column
        return row if rowwise_data else column

    def _four(self) -> dict[str, Any]:
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        return {n: getattr(self, f"_{n}") for n in names}


class BlockScaledTensor(QuantizedTensor):
    """FSDP2 of the tensor classes: every buffer is gathered along the rows, without padding."""

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """FSDP2: the rowwise buffers, and columnwise ones that lie along the rows too."""
        form: Any = self._format  # type: ignore[attr-defined]
        step = {"block": 128, "mxfp8": 32, "nvfp4": 16}[form.scaling]
        m, k = self._matrix()  # type: ignore[attr-defined]
        if m % step:
            raise NotImplementedError(f"{type(self).__name__}: shards of {m} rows cut through a block of {step}")
        if form.scaling != "mxfp8" and not form.tiled:
            raise NotImplementedError(f"{type(self).__name__}: FSDP2 needs two-dimensional scaling")
        row, scale, _, column, column_scale, _ = self._buffers  # type: ignore[attr-defined]
        sent = []
        if row is not None:
            sent += [row[:m], scale[: m // step if form.scaling == "block" else m]]
        elif form.scaling != "mxfp8":
            raise NotImplementedError(
                f"{type(self).__name__}: FSDP2 gathers along the rows, a transposed copy has none"
            )
        if form.scaling == "mxfp8" and column is not None:
            sent += [column[:m], column_scale[: m // 32]]
        if form.scaling == "nvfp4":
            sent.append(self._row_amax)  # type: ignore[attr-defined]
        rest = (form, k, self._quantizer, self._options, self.dtype, self.get_usages())  # type: ignore[attr-defined]
        return tuple(t.contiguous() for t in sent), rest

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """FSDP2: the whole parameter over the gathered buffers."""
        form, k, quantizer, options, dtype, held = metadata
        gathered = list(all_gather_outputs)
        if form.scaling == "nvfp4":
            buffers = _one_amax(form, k, *gathered)
            gathered = []
        else:
            row, scale = (gathered.pop(0), gathered.pop(0)) if held["rowwise"] else (None, None)
            buffers = Buffers(row, scale, None, *gathered)
        made = out
        if out is None:
            made = type(self)._of((all_gather_outputs[0].shape[0], k), dtype, form, buffers, quantizer, options)
        else:
            out._set_buffers(buffers)
        if held["columnwise"] and not gathered:
            made._make_columnwise()
        return None if out is not None else (made, all_gather_outputs)


def _one_amax(form: Format, k: int, row: torch.Tensor, scale: torch.Tensor, amaxes: torch.Tensor) -> Buffers:
    """NVFP4 shards as one matrix. Where their amaxes differ the values are quantized again with that of the whole."""
    if bool((amaxes == amaxes[0]).all()):
        return Buffers(row, scale, amaxes[:1])
    m = row.shape[0]
    each = amaxes.repeat_interleave(m // amaxes.numel())
    by_row = Format(form.dtype, form.scaling, False, True, form.bound)
    values = run.dequantize(by_row, (m, k), Buffers(row, scale, each), torch.float32)
    return run.quantize(values, Operand(form.dtype, "nvfp4", tiled=form.tiled, bound=form.bound), True, False)
