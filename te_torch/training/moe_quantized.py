"""Rows of a quantized tensor moved as they are: codes and scales, the rowwise copy; the class stays."""

from __future__ import annotations

from typing import Any

import torch

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.ops import raw as ops
from te_core.quantized import up
from te_core.tensor import Tensor
from te_torch.quantized import core_of
from te_torch.runtime import runtime_for, to_core, to_torch
from te_torch.tensors import kinds
from te_torch.tensors.buffers import Buffers


def permute_quantized(
    operation: str,
    tokens: Any,
    row_map: torch.Tensor,
    probs: torch.Tensor | None,
    pad_offsets: torch.Tensor | None,
    starts: torch.Tensor | None,
    rows: int,
) -> tuple[Any, Any]:
    """`te_core.ops.permute` of a tensor in FP8: (the rows in its class, their probabilities or None).

    Rows that no token goes to, and those of probability 0, are codes of 0.
    """
    form = getattr(tokens, "_format", None)
    if form is None or form.scaling not in ("tensor", "block", "mxfp8") or form.tiled:
        raise ArgumentError(
            operation,
            f"Unsupported FP8 recipe: a {type(tokens).__name__}",
            "Float8Tensor, Float8BlockwiseQTensor with 1x128 pieces, MXFP8Tensor",
            "dequantize() the tokens first",
        )
    q, scale = core_of(tokens), tokens._buffers.row_scale
    if q.rowwise is None or scale is None:
        raise ArgumentError(
            operation, "tokens without a rowwise copy", "one along the rows", "quantize with rowwise=True"
        )
    rt, count = runtime_for(scale), q.shape[0]
    given = (row_map, probs, pad_offsets, starts)
    to, p, pad, first = (None if t is None else to_core(t.contiguous()) for t in given)
    assert to is not None
    stored = up(rows, form.pad)
    data, row_probs = ops.permute(rt, _rows(q.rowwise, count), to, rows=stored, probs=p, pad_offsets=pad, starts=first)

    def moved(scales: torch.Tensor, count: int) -> torch.Tensor:
        out, _ = ops.permute(rt, to_core(scales.contiguous()), to, rows=count, pad_offsets=pad, starts=first)
        return to_torch(out)

    if form.scaling == "block":  # a column a token
        scale = moved(scale[:, :count].t(), stored).t().contiguous()
    elif form.scaling == "mxfp8":
        scale = moved(scale[:count], up(rows, 128))
    quantizer = tokens._quantizer
    if quantizer is not None:
        quantizer = quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=False)
    made = kinds.of_class(type(tokens)).tensor._of(
        (rows, tokens.shape[-1]), tokens.dtype, form, Buffers(to_torch(data), scale), quantizer, tokens._options
    )
    return made, None if row_probs is None else to_torch(row_probs)[:rows]


def _rows(data: Tensor, count: int) -> Tensor:
    """The rows that hold tokens, as bytes."""
    return data.rows(0, count).view_as(dtypes.uint8)
