"""The columnwise copy of a matrix made of its rowwise one, where both share their scales: exact."""

from __future__ import annotations

import torch

from te_core.ops import raw as ops
from te_core.quantized import Format, pieces_of
from te_core.tensor import CPU
from te_torch.runtime import runtime_for, to_core, to_torch
from te_torch.tensors.buffers import Buffers
from te_torch.tensors.run import is_real


def columnwise_of(form: Format, shape: tuple[int, int], buffers: Buffers) -> Buffers:
    """Buffers with only the columnwise copy: of a per-tensor format, or of one with tiles."""
    data, scale, amax = buffers.of(False)
    assert data is not None and scale is not None
    if form.scaling == "tensor":
        return Buffers(col_data=_turned(data if data.ndim == 2 else data.reshape(shape)), col_scale=scale)
    if form.scaling == "block":
        rows, blocks = -(-shape[0] // 128), -(-shape[1] // 128)
        turned = scale.new_ones(pieces_of(CPU, form, shape, True).scale)
        turned[:blocks, :rows] = scale[:rows, :blocks].t()
        return Buffers(col_data=_turned(data), col_scale=turned)
    parts = pieces_of(CPU, form, shape, True)
    turned = scale.new_zeros(parts.scale)
    if form.scaling == "mxfp8":  # lies as the rowwise copy does, with the scales of the tiles once for each 32 rows
        blocks, columns = data.shape[0] // 32, data.shape[1]
        turned[:blocks, :columns] = scale[: data.shape[0] : 32, : columns // 32].repeat_interleave(32, 1)
        return Buffers(col_data=data.clone(), col_scale=turned)
    rows, columns = data.shape[0], data.shape[1] * 2
    values = torch.stack((data & 15, data >> 4), -1).view(rows, columns).t()
    packed = (values[:, ::2] | (values[:, 1::2] << 4)).contiguous()
    turned[:columns, : rows // 16] = scale[:rows:16, : columns // 16].t().repeat_interleave(16, 0)
    return Buffers(col_data=packed, col_scale=turned, col_amax=amax)


def _turned(data: torch.Tensor) -> torch.Tensor:
    if is_real(data) and not data.is_meta:
        return to_torch(ops.transpose(runtime_for(data), to_core(data.contiguous())))
    return data.t().contiguous()
