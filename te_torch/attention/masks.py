"""What masks say: canonical windows, lengths from padding masks, and the mask that a spec's rules come to.

What follows from a mask or from `cu_seqlens` (running sums of lengths, longest lengths, where the tokens lie) is worked
out in every call. Nothing would tell that a mask has changed in between: a collective, another library, an alias of
NumPy and `.data` write without a word to torch's version counter.
"""

from __future__ import annotations

import warnings
from functools import reduce
from typing import Any

import torch

from te_core.attention import AttentionSpec, Sizes, canonical_mask
from te_core.errors import ArgumentError


class AttentionArgumentError(ArgumentError, AssertionError):
    """An argument that attention does not take. Also the documented AssertionError."""


def check_beside(operation: str, first: torch.Tensor, **others: torch.Tensor | None) -> None:
    """The others are on the device of the first: a kernel would read what their address holds on its own."""
    device = first.device
    for name, t in others.items():
        if t is not None and t.device != device and device.type != "meta":
            raise AttentionArgumentError(
                operation, f"{name} on {t.device} beside {device}", "all tensors on one device", f"move it to {device}"
            )


def check_set_window_size(attn_mask_type: str, window_size: tuple[int, int] | None = None) -> tuple[int, int]:
    """The canonical (left, right) of a window with this mask type; a bound that the mask overrides is warned about."""
    causal = "causal" in canonical_mask("check_set_window_size", attn_mask_type)
    if window_size is None:
        return (-1, 0) if causal else (-1, -1)
    if len(window_size) != 2 or any(isinstance(n, (str, float)) for n in window_size):
        wrong, two = f"window_size={window_size!r}", "two integers (left, right)"
        raise AttentionArgumentError("window_size", wrong, two, "correct window_size")
    left, right = (int(n) for n in window_size)
    found = (left, right)
    if causal:
        if found == (-1, -1) or (left >= 0 and right != 0):
            found = (left, 0)
    elif found == (-1, 0):
        found = (-1, -1)
    if found != (left, right):
        warnings.warn(
            f"window_size {(left, right)} becomes {found} with attn_mask_type={attn_mask_type!r}", stacklevel=2
        )
    allowed = (-1, 0) if causal else (-1, -1)
    if found != allowed and min(found) < 0:
        bounds = f"{allowed}, or bounds >= 0" + (" with 0 on the right" if causal else "")
        got = f"{(left, right)} with attn_mask_type={attn_mask_type!r}"
        raise AttentionArgumentError("window_size", got, bounds, "correct window_size")
    return found


# ------------------------------------------------------------------------------------------------- lengths


def get_cu_seqlens(mask: torch.Tensor) -> torch.Tensor:
    """int32 [b + 1]: running sums of the lengths that a padding mask [b, 1, 1, s] leaves (True is padding)."""
    mask = mask.flatten(1)
    lengths = (~mask.bool()).sum(1, dtype=torch.int32)
    cu = torch.zeros(mask.shape[0] + 1, dtype=torch.int32, device=mask.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu[1:])
    return cu


def get_cu_seqlens_and_indices(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and where the tokens that are no padding lie in [b * s]: int64 [b * s, 1, 1], then b * s for the rest.

    The indices are as many for every mask, so nothing waits for the device.
    """
    flat = mask.reshape(-1).bool()
    order = torch.argsort(flat, stable=True)
    indices = torch.where(flat[order], flat.numel(), order)
    return get_cu_seqlens(mask), indices.reshape(-1, 1, 1)


def get_full_cu_seqlens(batch_size: int, max_seqlen: int, device: torch.device | str) -> torch.Tensor:
    """int32 [b + 1] of sequences that fill their rows."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * max_seqlen


def check_padding_mask(mask: torch.Tensor) -> None:
    """The mask is boolean: in numbers it would have meant something else."""
    if mask.dtype != torch.bool:
        raise AttentionArgumentError(
            "attention_mask", f"a mask of {mask.dtype}", "torch.bool, True where padding is", "convert it: mask.bool()"
        )


def longest(name: str, cu: torch.Tensor, begin: int | None = 0) -> int:
    """The longest sequence, rounded up to a multiple of 64, as documented. Waits for the device."""
    if cu.is_cuda and torch.cuda.is_current_stream_capturing():
        got = "packed sequences without max_seqlen inside a CUDA graph's capture"
        allowed, do = "max_seqlen_q and max_seqlen_kv, as numbers", "pass the longest length that may occur"
        raise AttentionArgumentError("DotProductAttention", got, allowed, do)
    sums = cu.tolist()
    check_running_sums(name, sums, begin)
    most = max([0, *[b - a for a, b in zip(sums, sums[1:], strict=False)]])
    return max(1, -(-most // 64)) * 64  # 64 where all sequences are empty, too


def check_running_sums(name: str, sums: list[int], begin: int | None = 0) -> None:
    """They begin with this number, and none is below the one before."""
    if (begin is not None and sums[:1] != [begin]) or any([a > b for a, b in zip(sums, sums[1:], strict=False)]):
        allowed = "running sums of lengths: 0 first, and none below the one before it"
        raise AttentionArgumentError("DotProductAttention", f"{name}={sums!s:.80}", allowed, "correct it")


# ------------------------------------------------------------------------------------------ the mask itself


Sums = tuple[Any, Any]  # cu_seqlens of queries and of keys, None both where none are given


def hidden(
    spec: AttentionSpec, size: Sizes, cu: Sums, mask: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """True where a key is not seen, [b|1, h|1, sq|1, skv]; None if every key is seen."""
    parts = [] if mask is None else [mask]
    if spec.padded:
        q, kv = _lengths(cu)
        parts.append((_places(size.sq, 2, device) >= q) | (_places(size.skv, 3, device) >= kv))
    if spec.banded:
        distance = diagonal(spec, size, cu, device)
        if spec.left >= 0:
            parts.append(distance < -spec.left)
        if spec.right >= 0:
            parts.append(distance > spec.right)
    return reduce(torch.bitwise_or, parts) if parts else None


def diagonal(spec: AttentionSpec, size: Sizes, cu: Sums, device: torch.device) -> torch.Tensor:
    """j - (i + shift): how far behind its diagonal a key lies, [b|1, 1, sq, skv]."""
    shift: Any = 0
    if spec.bottom_right:
        shift = size.skv - size.sq
        if spec.padded:
            q, kv = _lengths(cu)
            shift = kv - q
    return _places(size.skv, 3, device) - _places(size.sq, 2, device) - shift


def _places(count: int, dim: int, device: torch.device) -> torch.Tensor:
    """0, 1, ... along one of four dimensions."""
    return torch.arange(count, device=device).view([count if d == dim else 1 for d in range(4)])


def _lengths(cu: Sums) -> tuple[torch.Tensor, torch.Tensor]:
    q, kv = ((sums[1:] - sums[:-1]).view(-1, 1, 1, 1) for sums in cu)
    return q, kv


def alibi_bias(spec: AttentionSpec, size: Sizes, cu: Sums, slopes: torch.Tensor) -> torch.Tensor:
    """-slope |i + shift - j| in float32, [b|1, h, sq, skv]."""
    distance = diagonal(spec, size, cu, slopes.device).abs()
    return -slopes.view(-1, slopes.shape[-1], 1, 1) * distance


def loose_tokens(cu: torch.Tensor, begin: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Which of so many packed tokens belong to no sequence, [t, 1, 1]."""
    begin = cu if begin is None else begin
    places = torch.arange(tokens, device=cu.device, dtype=begin.dtype)
    last = cu.shape[0] - 2
    own = (torch.searchsorted(begin, places, right=True) - 1).clamp(0, last)  # the sequence that begins before it
    return (places - begin[own] >= (cu[1:] - cu[:-1])[own]).view(-1, 1, 1)


def token_positions(cu: torch.Tensor, begin: torch.Tensor | None, rows: int, tokens: int) -> torch.Tensor:
    """Where token i of sequence b lies in [t]: int64 [b, rows]; `tokens` (one behind the last) where there is none."""
    begin = cu if begin is None else begin
    places = torch.arange(rows, device=cu.device)
    inside = places < (cu[1:] - cu[:-1]).view(-1, 1)
    return torch.where(inside, begin[:-1].view(-1, 1) + places, tokens).long()
