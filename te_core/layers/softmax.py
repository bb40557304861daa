"""Softmax of attention scores as a layer, with a learnt sink's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core.arguments import explained
from te_core.ops import raw as ops
from te_core.ops.softmax import Band
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class SoftmaxSpec:
    """All that the layer's plan depends on besides shapes."""

    scale: float = 1.0
    band: Band = Band()
    sink_gradient: bool = False


class SoftmaxSaved(NamedTuple):
    """What backward reads."""

    y: Tensor
    share: Tensor | None  # of the sink in each row
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None


@explained
def forward(
    rt: Runtime,
    x: Tensor,
    mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    sink: Tensor | None,
    *,
    spec: SoftmaxSpec,
    scales: Scales | None = None,
) -> tuple[tuple[Tensor], SoftmaxSaved]:
    """((y,), saved) for scores x [b, h, sq, sk]."""
    y, share = ops.softmax_forward(
        rt,
        x,
        scale=spec.scale,
        band=spec.band,
        mask=mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        sink=sink,
    )
    return (y,), SoftmaxSaved(y, share if spec.sink_gradient else None, cu_seqlens_q, cu_seqlens_kv)


@explained
def backward(
    rt: Runtime, dy: Tensor, saved: SoftmaxSaved, *, spec: SoftmaxSpec, scales: Scales | None = None
) -> tuple[Tensor | None, ...]:
    """(dx, None, None, None, dsink)."""
    dx, dsink = ops.softmax_backward(
        rt,
        dy,
        saved.y,
        saved.share,
        scale=spec.scale,
        band=spec.band,
        cu_seqlens_q=saved.cu_seqlens_q,
        cu_seqlens_kv=saved.cu_seqlens_kv,
    )
    return dx, None, None, None, dsink
