"""Rotary position embedding: `RotaryPositionEmbedding` makes angles, two functions apply them.

`apply_rotary_pos_emb(fused=True)` and `apply_fused_qkv_rotary_pos_emb` are one launch of our kernel each, in float32;
`fused=False` is plain torch with cosines and sines rounded to the input's dtype. `split_heads` is what
MultiheadAttention uses: it takes any packed projection apart, and turns q and k on the way if there are angles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from te_core.attention import DIMENSIONS, FORMATS
from te_core.errors import ArgumentError
from te_core.layers import rope as core
from te_core.spelling import choice_error
from te_torch.attention.layouts import heads_of
from te_torch.attention.masks import AttentionArgumentError, check_beside
from te_torch.base.options import check_values
from te_torch.calls import made_of_constants
from te_torch.export.layers import Maybe, Outputs
from te_torch.export.mode import not_exported
from te_torch.function import Call, Layer, apply, of_table, register
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import check_dtype, default_device, nested, outside_autocast
from te_torch.values import NamedOptions

_wrong = partial(AttentionArgumentError, "apply_rotary_pos_emb")


class RotaryPositionEmbedding(NamedOptions, torch.nn.Module):
    """The angles of rotary position embedding: position * base^(-2i/dim) for channel pair i.

    Example:
        angles = te.RotaryPositionEmbedding(64)(max_seq_len=16)  # [16, 1, 1, 64], for rotary_pos_emb
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        check_values("RotaryPositionEmbedding", {k: v for k, v in locals().items() if k not in ("self", "__class__")})
        super().__init__()
        turned = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if turned < 2 or turned % 2:
            got = f"dim={dim} with rotary_percent={rotary_percent}, that is {turned} channels"
            allowed, do = "an even number of channels, which are turned in pairs", "correct dim, or rotary_percent"
            raise ArgumentError("RotaryPositionEmbedding", got, allowed, do)
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        exponents = torch.arange(0, turned, 2, dtype=torch.float32, device=default_device()) / turned
        self.register_buffer("inv_freq", 1.0 / (rotary_base**exponents))

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles [max_seq_len, 1, 1, dim], float32, of the positions from `offset` on."""
        frequencies: torch.Tensor = self.inv_freq  # type: ignore[assignment]
        with torch.autocast(enabled=False, device_type=frequencies.device.type):
            positions = torch.arange(max_seq_len, device=frequencies.device, dtype=torch.float32) + offset
            trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
            if trained is not None and factor is not None:
                # Longer than the factor provides for: all positions are squeezed into the trained range.
                positions = positions * (trained / max_seq_len if max_seq_len > trained * factor else 1 / factor)
            angles = torch.outer(positions, frequencies.float())
            if self.interleaved:
                table = angles.repeat_interleave(2, dim=1)
            else:
                table = torch.cat((angles, angles), dim=1)
        return table[:, None, None, :]


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """t [s, b, h, d], [b, s, h, d] or [t, h, d] turned by the angles of its positions, freqs [s2, 1, 1, d2].

    thd needs `cu_seqlens` (of the whole sequences, also with cp_size > 1) and starts each sequence at position 0;
    `start_positions` int32 [b] are added. Channels behind d2 pass through.
    """
    packed = tensor_format == "thd"
    if packed and cu_seqlens is None:
        raise AssertionError("apply_rotary_pos_emb: tensor_format 'thd' needs cu_seqlens, int32 [b + 1]")
    if fused and tensor_format not in FORMATS:
        got = f"tensor_format is {tensor_format!r}"
        raise AssertionError(f"apply_rotary_pos_emb: {got}, fused takes sbhd, bshd or thd")
    _check_heads("apply_rotary_pos_emb", t, tensor_format)
    cu_seqlens = cu_seqlens if packed else None
    if not fused:
        _check_shapes(t, freqs, tensor_format)
        with outside_autocast(t):
            angles = _angles(t, freqs, tensor_format, start_positions, cu_seqlens, (cp_size, cp_rank))
            turned, rest = t[..., : angles.shape[-1]], t[..., angles.shape[-1] :]
            cos, sin = angles.float().cos().to(t.dtype), angles.float().sin().to(t.dtype)
            turned = turned * cos + _rotate_half(turned, interleaved) * sin
            return torch.cat((turned, rest), dim=-1)
    check_dtype("apply_rotary_pos_emb", t)
    check_beside("apply_rotary_pos_emb", t, freqs=freqs, cu_seqlens=cu_seqlens, start_positions=start_positions)
    needs = torch.is_grad_enabled() and t.requires_grad
    call = _call(tensor_format, interleaved, cp_size, cp_rank, needs)
    (out,) = apply(call, None, False, t, _table(freqs), cu_seqlens, start_positions)
    return out


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: list[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v) of qkv [s, b, groups, dq + dk + dv] (or bshd), q and k turned; one launch.

    `qkv_split_arg_list` is [dq, dk, dv]; dq may be several heads of dk channels. `cu_seqlens` is not used.
    """
    operation = "apply_fused_qkv_rotary_pos_emb"
    _require(tensor_format in ("sbhd", "bshd"), f"{operation}: tensor_format {tensor_format!r}, not sbhd or bshd")
    _require(start_positions is None or cp_size == 1, f"{operation}: start_positions with cp_size={cp_size}")
    given = (qkv, q_freqs, k_freqs) if start_positions is None else (qkv, q_freqs, k_freqs, start_positions)
    _require(all(t.is_contiguous() for t in given), f"{operation}: inputs have to be contiguous")
    sizes = [int(n) for n in qkv_split_arg_list]
    if len(sizes) != 3 or qkv.ndim != 4 or sum(sizes) != qkv.shape[-1] or sizes[0] % sizes[1]:
        raise ArgumentError(
            operation,
            f"qkv {tuple(qkv.shape)} with qkv_split_arg_list={qkv_split_arg_list}",
            "[.., groups, dq + dk + dv] with dq a multiple of dk",
            "correct the sizes",
        )
    groups, (dq, dk, dv) = qkv.shape[2], sizes
    q, k, v = split_heads(
        qkv,
        q_freqs,
        k_freqs,
        heads=groups * dq // dk,
        groups=groups,
        head_dims=(dk, dk, dv),
        interleaved_groups=True,
        fmt=tensor_format,
        interleaved=interleaved,
        start_positions=start_positions,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    return q, k, v


def split_heads(
    packed: torch.Tensor,
    q_freqs: torch.Tensor | None = None,
    k_freqs: torch.Tensor | None = None,
    *,
    heads: int,
    groups: int,
    head_dims: tuple[int, int, int],
    interleaved_groups: bool,
    fmt: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    start_positions: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, ...]:
    """(q, k, v) of a packed projection [.., row], or (k, v) for heads=0; what has freqs is turned. One launch.

    `te_core.ops.rope_qkv` says how the row is laid out.
    """
    operation = "split_heads"
    _check_heads(operation, packed, fmt)
    check_dtype(operation, packed)
    rotates = q_freqs is not None or k_freqs is not None
    if rotates:
        check_beside(
            operation, packed, q_freqs=q_freqs, k_freqs=k_freqs, cu_seqlens=cu_seqlens, start_positions=start_positions
        )
    needs = torch.is_grad_enabled() and packed.requires_grad
    # Of one dimension it follows from the rest, and under tracing a size may be a symbol.
    row = packed.shape[len(fmt) - 2 :] if packed.ndim >= len(fmt) else ()
    call = _call(fmt, interleaved, cp_size, cp_rank, needs, heads, groups, *head_dims, interleaved_groups, *row)
    return apply(
        call,
        None,
        False,
        packed,
        _table(q_freqs),
        _table(k_freqs),
        cu_seqlens if rotates and fmt == "thd" else None,
        start_positions if rotates else None,
    )


@made_of_constants
def _call(fmt: str, interleaved: bool, cp_size: int, cp_rank: int, needs: bool, *split: int) -> Call:
    """A tensor turned, or, with `split`, a projection of these sizes taken apart."""
    rotation = core.RopeSpec(fmt, bool(interleaved), int(cp_size), int(cp_rank))
    if not split:
        return register(ROPE, rotation, needs)
    heads, groups, dq, dk, dv, interleaved_groups, *row = map(int, split)
    spec = core.SplitSpec(heads, groups, (dq, dk, dv), bool(interleaved_groups), tuple(row), rotation)
    return register(SPLIT_QKV if heads else SPLIT_KV, spec, needs)


def _table(freqs: torch.Tensor | None) -> torch.Tensor | None:
    """Angles as the kernel reads them."""
    return None if freqs is None else freqs.detach().float().contiguous()


# ---------------------------------------------------------------------------------------------- unfused


def _rows_of_rank(freqs: torch.Tensor, length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """The rows of a rank's local tokens: all, or chunk r and chunk 2 * cp_size - 1 - r of the whole sequence."""
    half, whole = length // 2, cp_size * length
    # Slices would end early, and one row that is left would spread to all positions.
    if not 0 <= cp_rank < cp_size or whole > freqs.shape[0] or (cp_size > 1 and length % 2):
        got = f"{length} tokens of rank {cp_rank} of {cp_size}, freqs of {freqs.shape[0]} rows"
        allowed = "a row of freqs for each position, and an even number of tokens on each of several ranks"
        raise _wrong(got, allowed, "make freqs for the longest sequence and start position")
    if cp_size == 1:
        return freqs[:length]
    first = freqs[cp_rank * half : (cp_rank + 1) * half]
    return torch.cat((first, freqs[whole - (cp_rank + 1) * half : whole - cp_rank * half]))


def _angles(
    t: torch.Tensor,
    freqs: torch.Tensor,
    fmt: str,
    starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cp: tuple[int, int],
) -> torch.Tensor:
    """The angles of t's tokens, in dimensions that spread over its own."""
    if cu_seqlens is not None:
        lengths = (cu_seqlens // cp[0]).diff().tolist()
        if sum(lengths) != t.shape[0]:
            got = f"{t.shape[0]} tokens in thd, sequences of {lengths}"
            raise ArgumentError("apply_rotary_pos_emb", got, "as many tokens in all", "correct cu_seqlens")
        begins = [0] * len(lengths) if starts is None else starts.tolist()
        rows = [_rows_of_rank(freqs[p:], n, *cp) for p, n in zip(begins, lengths, strict=True)]
        return torch.cat(rows).squeeze(1)
    batch, token, _ = DIMENSIONS[fmt]
    assert batch is not None
    length = t.shape[token]
    if starts is None:
        angles = _rows_of_rank(freqs, length, *cp)
    else:
        if starts.shape[0] < t.shape[batch]:
            got = f"{starts.shape[0]} start_positions for {t.shape[batch]} sequences"
            raise _wrong(got, "int32, one for each sequence", "correct start_positions")
        last = int(starts.max()) + length * cp[0]
        if last > freqs.shape[0]:
            raise AssertionError(f"apply_rotary_pos_emb: positions up to {last}, freqs has {freqs.shape[0]}")
        angles = torch.cat([_rows_of_rank(freqs[int(p) :], length, *cp) for p in starts[: t.shape[batch]]], dim=1)
    return angles if token == 0 else angles.transpose(0, 1)


def _check_shapes(t: torch.Tensor, freqs: torch.Tensor, fmt: str) -> None:
    """What the kernel's operation checks itself: torch would spread a wrong shape, or fail far from here."""
    width = freqs.shape[-1]
    if t.ndim != len(fmt) or freqs.ndim != 4 or width % 2 or width > t.shape[-1]:
        raise ArgumentError(
            "apply_rotary_pos_emb",
            f"t of shape {tuple(t.shape)} in {fmt}, freqs of {tuple(freqs.shape)}",
            f"t of {len(fmt)} dimensions, freqs [positions, 1, 1, an even number of channels, at most those of t]",
            "correct tensor_format, t or freqs",
        )


def _check_heads(operation: str, t: torch.Tensor, fmt: str) -> None:
    """Heads are in a known format and in high precision."""
    if fmt not in FORMATS:
        raise choice_error(operation, "tensor_format", fmt, FORMATS)
    if t.is_nested:
        raise nested(operation)
    if isinstance(t, QuantizedTorch):
        raise AttentionArgumentError(
            operation, f"a {type(t).__name__}", "float32, bfloat16 or float16", "dequantize() it before it is turned"
        )


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise AssertionError(text)


# ------------------------------------------------------------- in torch's operators, as an exporter sees them


def _plain_rope(inputs: Sequence[Maybe], spec: core.RopeSpec, scales: Maybe = None) -> Outputs:
    """(the heads turned,) of (heads, freqs, cu_seqlens, start_positions)."""
    t, freqs, cu, starts = inputs
    assert t is not None and freqs is not None
    return (_turned(t, freqs, cu, starts, spec),)


def _plain_split(inputs: Sequence[Maybe], spec: core.SplitSpec, scales: Maybe = None) -> Outputs:
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


def _turned(t: torch.Tensor, freqs: torch.Tensor, cu: Maybe, starts: Maybe, spec: core.RopeSpec) -> torch.Tensor:
    """t * cos + _rotate_half(t) * sin in float32, over as many channels as there are angles."""
    if spec.cp_size > 1:
        got, do = "rotary embedding of a rank's part of the sequences", "export on one rank"
        raise not_exported(got, "whole sequences", do)
    angles = _plain_angles(t, freqs.float(), cu, starts, spec.fmt)
    width, x = angles.shape[-1], t.float()
    turned = x[..., :width] * angles.cos() + _rotate_half(x[..., :width], spec.interleaved) * angles.sin()
    return torch.cat((turned, x[..., width:]), dim=-1).to(t.dtype)


def _rotate_half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(a, b) -> (-b, a) for each pair of channels: neighbours, or one of each half."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _plain_angles(t: torch.Tensor, freqs: torch.Tensor, cu: Maybe, starts: Maybe, fmt: str) -> torch.Tensor:
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


ROPE = of_table("rope", core.RopeSaved, plain=_plain_rope)
SPLIT_QKV, SPLIT_KV = (
    Layer(name, core.split_forward, core.split_backward, core.SplitSaved, n, partial=True, plain=_plain_split)
    for name, n in (("split_qkv", 3), ("split_kv", 2))
)
