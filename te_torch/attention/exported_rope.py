"""Rotary embedding and the split of a projection in torch's operators, as an exporter sees them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_core.attention import DIMENSIONS
from te_core.layers.rope import RopeSpec, SplitSpec
from te_torch.attention.layouts import heads_of
from te_torch.export.layers import Maybe, Outputs
from te_torch.export.mode import not_exported


def rope(inputs: Sequence[Maybe], spec: RopeSpec, scales: Maybe = None) -> Outputs:
    """(the heads turned,) of (heads, freqs, cu_seqlens, start_positions)."""
    t, freqs, cu, starts = inputs
    assert t is not None and freqs is not None
    return (_turned(t, freqs, cu, starts, spec),)


def split(inputs: Sequence[Maybe], spec: SplitSpec, scales: Maybe = None) -> Outputs:
    """(q, k, v) or (k, v) of (a packed projection, freqs of q and of k, cu_seqlens, start_positions)."""
    packed, q_freqs, k_freqs, cu, starts = inputs
    assert packed is not None
    lead = len(spec.rope.fmt) - 2
    _, dk, dv = spec.head_dims
    q, k, v = heads_of(packed, lead, (spec.heads, spec.groups, dk, dv), spec.interleaved_groups)
    if k_freqs is not None:
        k = _turned(k, k_freqs, cu, starts, spec.rope)
    if not spec.heads:
        return k, v
    return (q if q_freqs is None else _turned(q, q_freqs, cu, starts, spec.rope)), k, v


def _turned(t: torch.Tensor, freqs: torch.Tensor, cu: Maybe, starts: Maybe, spec: RopeSpec) -> torch.Tensor:
    """t * cos + rotate_half(t) * sin in float32, over as many channels as there are angles."""
    if spec.cp_size > 1:
        got, do = "rotary embedding of a rank's part of the sequences", "export on one rank"
        raise not_exported(got, "whole sequences", do)
    angles = _angles(t, freqs.float(), cu, starts, spec.fmt)
    width, x = angles.shape[-1], t.float()
    turned = x[..., :width] * angles.cos() + rotate_half(x[..., :width], spec.interleaved) * angles.sin()
    return torch.cat((turned, x[..., width:]), dim=-1).to(t.dtype)


def rotate_half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(a, b) -> (-b, a) for each pair of channels: neighbours, or one of each half."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _angles(t: torch.Tensor, freqs: torch.Tensor, cu: Maybe, starts: Maybe, fmt: str) -> torch.Tensor:
    """The angles of t's tokens, in dimensions that spread over its own; found without looking at cu or starts."""
    batch, token, _ = DIMENSIONS[fmt]
    table = freqs.flatten(1)  # [positions, channels]
    if batch is None:
        assert cu is not None
        places = torch.arange(t.shape[0], device=t.device)
        own = (cu[1:-1].long() <= places[:, None]).sum(1)  # the sequence that a token is of
        places = places - cu.long()[own]
        if starts is not None:
            places = places + starts.long()[own]
        return table[places][:, None]
    if starts is None:
        angles = table[: t.shape[token]][:, None]
    else:
        rows = torch.arange(t.shape[token], device=t.device)[:, None]
        angles = table[rows + starts[: t.shape[batch]].long()]
    angles = angles[:, :, None]  # [s, b|1, 1, channels]
    return angles if token == 0 else angles.transpose(0, 1)
