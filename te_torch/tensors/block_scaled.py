"""What the storages with a scale for each block share: the documented names of their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_core.precision import Operand
from te_core.quantized import BLOCK, Format, pieces, up
from te_torch.tensors import run
from te_torch.tensors.buffers import Buffers, matrix_of, with_whole_scales
from te_torch.tensors.storage import QuantizedTensorStorage
from te_torch.tensors.transposing import columnwise_of

_DOCUMENTED = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def documented_scale_shape(form: Any, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
    """The documented shape of a scale buffer."""
    m, k = matrix_of(shape)
    rows, along = (k, m) if columnwise else (m, k)
    if form.scaling == "block":
        blocks = -(-along // 128)
        return (-(-rows // 128), up(blocks, 4)) if form.tiled else (blocks, up(rows, 4))
    return pieces(form, (m, k), columnwise).scale  # type: ignore[return-value]


def scale_shape(self: Any, shape: Sequence[int], columnwise: bool) -> tuple[int, int]:
    """The shape of the scales of a tensor."""
    return documented_scale_shape(self.format, shape, columnwise)


def buffer(name: str) -> Any:
    """A buffer under its documented name: it is shown without padding, and what is assigned to it is adopted."""
    return property(lambda self: self._shown(name), lambda self, t: self._adopt(name, t))


class BlockScaledStorage(QuantizedTensorStorage):
    """`_rowwise_data`, `_rowwise_scale_inv`, `_columnwise_data`, `_columnwise_scale_inv`."""

    _rowwise_data, _columnwise_data = buffer("_row_data"), buffer("_col_data")
    _rowwise_scale_inv, _columnwise_scale_inv = buffer("_row_scale"), buffer("_col_scale")
    _with_gemm_swizzled_scales = property(lambda self: False)

    def _show(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        if not name.endswith("scale"):
            return super()._show(name, buffer)
        rows, columns = documented_scale_shape(self._format, self._matrix(), name == "_col_scale")
        return buffer if buffer.shape == (rows, columns) else buffer[:rows, :columns]

    def _given(self) -> dict[str, Any]:
        """What all their constructors take."""
        buffers = {n: getattr(self, f"_{n}") for n in _DOCUMENTED}
        return {**buffers, "quantizer": self._quantizer, "fake_dtype": self._dtype}

    # FSDP2 gathers along the rows, so every buffer that it moves has to lie along them.

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The rowwise buffers, and of MXFP8 the columnwise ones, which are not transposed."""
        scaling, name = self._format.scaling, type(self).__name__
        if scaling != "mxfp8" and not self._format.tiled:
            raise NotImplementedError(f"{name}: FSDP2 needs two-dimensional scaling")
        fields = [] if self._row_data is None else ["_rowwise_data", "_rowwise_scale_inv"]
        if scaling == "mxfp8" and self._col_data is not None:
            fields += ["_columnwise_data", "_columnwise_scale_inv"]
        if not fields:
            raise NotImplementedError(f"{name}: FSDP2 gathers along the rows, a transposed copy has none")
        return (*fields, "_amax_rowwise") if scaling == "nvfp4" else tuple(fields)

    def _to_gather(self, field: str) -> torch.Tensor:
        """A buffer without padding, which would come to lie between the shards."""
        scaling, m = self._format.scaling, self._matrix()[0]
        step = BLOCK[scaling]
        if m % step:
            raise NotImplementedError(f"{type(self).__name__}: a shard of {m} rows ends within a block of {step}")
        if field == "_rowwise_scale_inv":
            return self._row_scale[: m // step if scaling == "block" else m]
        return self._col_scale[: m // step] if field == "_columnwise_scale_inv" else super()._to_gather(field)

    def _of_gathered(self, gathered: Sequence[torch.Tensor], meta: dict[str, Any], shape: tuple[int, int]) -> Buffers:
        form, fields = meta["format"], zip(meta["field_names"], gathered, strict=True)
        halves = (shape[0], shape[1] // self._WIDTH)
        given = {n: t.view(halves) if n.endswith("data") else t for n, t in fields}
        row, scale, column, column_scale = (given.get(f"_{n}") for n in _DOCUMENTED)
        if form.scaling == "nvfp4":
            amax = given["_amax_rowwise"]
            buffers = with_whole_scales(form, shape, _one_amax(form, shape[1], row, scale, amax))  # type: ignore[arg-type]
            # Of the others a layer makes the columnwise copy when backward wants it, and lets it go.
            if meta["usages"]["columnwise"]:
                return Buffers(*buffers[:3], *columnwise_of(form, shape, buffers)[3:])
            return buffers
        return with_whole_scales(form, shape, Buffers(row, scale, None, column, column_scale))


def _one_amax(form: Format, k: int, row: torch.Tensor, scale: torch.Tensor, amaxes: torch.Tensor) -> Buffers:
    """NVFP4 shards as one matrix. Where their amaxes differ the values are quantized again with that of the whole."""
    if bool((amaxes == amaxes[0]).all()):
        return Buffers(row, scale, amaxes[:1])
    m = row.shape[0]
    each = amaxes.repeat_interleave(m // amaxes.numel())
    by_row = Format(form.dtype, form.scaling, False, True, form.bound)
    values = run.dequantize(by_row, (m, k), Buffers(row, scale, each), torch.float32)
    return run.quantize(values, Operand(form.dtype, "nvfp4", tiled=form.tiled, bound=form.bound), True, False)
