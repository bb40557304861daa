"""Statistics of a tensor and of its quantized copy: float32 values, sums in float64."""

from __future__ import annotations

import numpy as np

from te_core import dtypes
from te_core.backends.cpu import codec
from te_core.backends.cpu.executor import F32, row_blocks, scratch
from te_core.quantized import Format
from te_core.runtime import Runtime
from te_core.statistics import SLOTS, empty, merge
from te_core.tensor import Tensor

_TOP_CODE = {dtypes.float8_e4m3: 0x7E, dtypes.float8_e5m2: 0x7B}


@np.errstate(all="ignore")
def statistics(
    rt: Runtime,
    x: Tensor,
    data: Tensor | None,
    scale: Tensor | None,
    form: Format | None,
    columnwise: bool,
    record: Tensor,
) -> None:
    """Merge what a matrix is like into a record."""
    ex, source, (m, k) = scratch(rt), x.numpy(), x.shape
    scales = None if scale is None or form is None else _spread(scale.numpy(), form, (m, k), columnwise)
    found = [record.numpy().copy()]
    for block in row_blocks(m, k):
        v = codec.decode(ex, source[block], ex.floats("statistics x", block.stop - block.start, k))
        part = empty()
        _of_values(v, part)
        if data is not None:
            codes = np.ascontiguousarray(data.numpy()[block, :k])
            q = codec.decode(ex, codes, ex.floats("statistics q", *codes.shape))
            part[7], part[12] = v.size, part[2]
            part[8] = ((v != 0) & (q == 0)).sum()
            if scales is not None and form is not None:
                s = np.broadcast_to(scales[block] if scales.ndim == 2 else scales, v.shape)
                part[9] = (np.abs(v) > np.float32(form.dtype.max) * s).sum()
                part[10] = ((codes.view(np.uint8) & 0x7F) == _TOP_CODE[form.dtype]).sum()
                q *= s
                part[15], part[18] = s.max(), s.min()
            d = v - q
            part[11] = (d * d).sum(dtype=np.float64)
        found.append(part)
    record.numpy()[:] = merge(np.stack(found).reshape(-1, SLOTS))


def _of_values(v: F32, part: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    magnitude = np.abs(v)
    part[0] = v.size
    part[1] = v.sum(dtype=np.float64)
    part[2] = (v * v).sum(dtype=np.float64)
    part[3] = magnitude.sum(dtype=np.float64)
    part[4] = np.count_nonzero(v)
    part[5], part[6] = np.isnan(v).sum(), np.isinf(v).sum()
    part[13] = np.fmax.reduce(v, axis=None, initial=-np.inf)
    part[14] = np.fmax.reduce(magnitude, axis=None, initial=-np.inf)
    part[16] = np.fmin.reduce(v, axis=None, initial=np.inf)
    part[17] = np.fmin.reduce(np.where(magnitude > 0, magnitude, np.float32(np.inf)), axis=None, initial=np.inf)


def _spread(
    scale: np.ndarray[tuple[int, ...], np.dtype[np.float32]], form: Format, shape: tuple[int, int], columnwise: bool
) -> F32:
    """The scale of each value."""
    m, k = shape
    if form.scaling == "tensor":
        return np.asarray(scale, np.float32)
    row, column = np.arange(m)[:, None], np.arange(k)[None, :]
    if form.scaling == "block":
        return scale[row // 128, column // 128] if form.tiled else scale[column // 128, row]
    codes = scale[row // 32, column] if columnwise else scale[row, column // 32]
    return np.where(codes == 255, np.float32(np.nan), np.ldexp(np.float32(1), codes.astype(np.int32) - 127))
