"""Rotary position embedding as a layer, and with the split of a packed projection into q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from te_core.arguments import explained
from te_core.ops import raw as ops
from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How tokens lie and channels pair; the layer's plan depends on nothing else besides shapes."""

    fmt: str = "sbhd"
    interleaved: bool = False
    cp_size: int = 1
    cp_rank: int = 0


@dataclass(frozen=True, slots=True)
class SplitSpec:
    """The heads of a packed projection, and the rotation of q and k."""

    heads: int  # 0: the row is k and v only
    groups: int
    head_dims: tuple[int, int, int]  # of q, k, v
    interleaved_groups: bool
    row: tuple[int, ...] = ()  # the dimensions of a token's row in the packed tensor, if it has more than one
    rope: RopeSpec = RopeSpec()


class RopeSaved(NamedTuple):
    """What backward reads."""

    freqs: Tensor
    cu_seqlens: Tensor | None
    start_positions: Tensor | None


class SplitSaved(NamedTuple):
    """What backward reads; the shape of a gradient that is not given follows from one that is."""

    q_freqs: Tensor | None
    k_freqs: Tensor | None
    cu_seqlens: Tensor | None
    start_positions: Tensor | None


@explained
def forward(
    rt: Runtime,
    t: Tensor,
    freqs: Tensor,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    *,
    spec: RopeSpec,
    scales: Scales | None = None,
) -> tuple[tuple[Tensor], RopeSaved]:
    """((y,), saved) for heads t in the spec's format, of any strides."""
    saved = RopeSaved(freqs, cu_seqlens, start_positions)
    return (ops.rope(rt, t, freqs, **_positions(saved, spec)),), saved


@explained
def backward(
    rt: Runtime, dy: Tensor, saved: RopeSaved, *, spec: RopeSpec, scales: Scales | None = None
) -> tuple[Tensor]:
    """(dt,): the angles and positions have no gradient."""
    return (ops.rope(rt, dy, saved.freqs, backward=True, **_positions(saved, spec)),)


def _positions(saved: RopeSaved | SplitSaved, spec: RopeSpec) -> dict[str, Any]:
    """How an operation finds the position of a token, and the channels that are turned together."""
    return {
        "fmt": spec.fmt,
        "interleaved": spec.interleaved,
        "cu_seqlens": saved.cu_seqlens,
        "start_positions": saved.start_positions,
        "cp_size": spec.cp_size,
        "cp_rank": spec.cp_rank,
    }


@explained
def split_forward(
    rt: Runtime,
    qkv: Tensor,
    q_freqs: Tensor | None,
    k_freqs: Tensor | None,
    cu_seqlens: Tensor | None,
    start_positions: Tensor | None,
    *,
    spec: SplitSpec,
    scales: Scales | None = None,
) -> tuple[tuple[Tensor, ...], SplitSaved]:
    """((q, k, v), saved) for a packed `qkv`; ((k, v), saved) for no heads. What has freqs is turned."""
    saved = SplitSaved(q_freqs, k_freqs, cu_seqlens, start_positions)
    q, k, v = ops.rope_qkv(rt, qkv, q_freqs, k_freqs, **_options(saved, spec))
    return ((k, v) if q is None else (q, k, v)), saved


@explained
def split_backward(
    rt: Runtime, *grads_and_saved: Tensor | SplitSaved | None, spec: SplitSpec, scales: Scales | None = None
) -> tuple[Tensor]:
    """(dqkv,) from (dq, dk, dv, saved), or (dk, dv, saved) for no heads; a gradient that is None counts as zeros."""
    grads: list[Any] = list(grads_and_saved)
    saved: SplitSaved = grads.pop()
    if spec.heads == 0:
        grads = [None, *grads]
    known: Tensor = next(g for g in grads if g is not None)
    lead, counts = known.shape[: len(spec.rope.fmt) - 2], (spec.heads, spec.groups, spec.groups)
    dq, dk, dv = (
        rt.zeros((*lead, n, d), known.dtype) if g is None and n else g
        for g, n, d in zip(grads, counts, spec.head_dims, strict=True)
    )
    dqkv = ops.rope_qkv_backward(rt, dq, dk, dv, saved.q_freqs, saved.k_freqs, **_options(saved, spec))
    return (dqkv.reshape(*lead, *spec.row) if spec.row else dqkv,)


def _options(saved: SplitSaved, spec: SplitSpec) -> dict[str, Any]:
    return {
        "heads": spec.heads,
        "groups": spec.groups,
        "head_dims": spec.head_dims,
        "interleaved_groups": spec.interleaved_groups,
        **_positions(saved, spec.rope),
    }
