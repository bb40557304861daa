"""MoE: tokens to their experts and back. The documented functions over the kernels of `te_core.ops.permute`.

Eager code calls the core; a compiler sees functional operators `te_runtime::moe_*` with shapes and derivatives of their
own, so that nothing here breaks a graph. Values never leave the device, and the host waits for nothing, but where a
result's size has to be found out: `num_out_tokens=-1` with a mask, and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.spelling import choice_error
from te_torch.doors import either
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import check_dtype, deprecated, warn
from te_torch.training.moe_operators import EAGER, TRACED, Moves, in_core

_MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a row for each token and expert it goes to, ordered by expert and then by token; the map back).

    routing_map: with map_type "mask" [tokens, experts], not 0 where a token goes to an expert; with "index" expert ids
    int32 [tokens, top k]. `num_out_tokens` is the number of rows: what lies behind is dropped, rows that are left are
    zeros. -1 or None drops nothing; with a mask the host then waits for the number, as it does for a number in a tensor
    on a GPU. `max_token_num` is not needed.

    Returns:
        (rows, map): the rows [num_out_tokens, features], and what `moe_unpermute` needs.

    Example:
        tokens, routing = torch.randn(32, 64), torch.rand(32, 4) > 0.5
        rows, row_map = te.moe_permute(tokens, routing)
        back = te.moe_unpermute(rows, row_map, restore_shape=tokens.shape)
    """
    op, by = "moe_permute", either(EAGER, TRACED)
    _check_tensors(op, inp=inp, routing_map=routing_map)
    _check_map_type(op, map_type)
    if by.is_empty(inp):
        return inp.clone(), _empty_map(inp)
    _check_tokens(op, inp, routing_map=routing_map)
    if map_type == "mask":
        routing = _mask(op, routing_map)
        rows = _rows_of_mask(by, op, num_out_tokens, routing)
        row_map, starts = by.mask_map(routing)
        out, _ = by.permute(op, inp, row_map, starts, rows=rows)
        return out, row_map
    if routing_map.dtype not in _INTEGERS:
        got = f"a routing_map of {routing_map.dtype} with map_type='index'"
        raise ArgumentError(op, got, "expert ids, int32", "pass the ids, or map_type='mask'")
    if routing_map.dtype != torch.int32:
        warn(f"{op}: routing_map is {routing_map.dtype}; made int32", UserWarning, 2)
        routing_map = routing_map.int()
    entries = routing_map.shape[0] * routing_map.shape[1]
    rows = 0 if num_out_tokens is None else by.number(op, "num_out_tokens", num_out_tokens)
    if rows in (-1, 0):
        rows = entries
    elif rows < 0:
        raise AssertionError(f"{op}: num_out_tokens={rows}; pass the rows of the result, or 0 to drop nothing")
    row_map = by.index_map(routing_map, rows)
    out, _ = by.permute(op, inp, row_map, rows=rows, fill=by.exceeds(rows, entries))
    return out, row_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int | None = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, the probability of each row, the map back) by a mask; probs [tokens, experts] of any float dtype.

    A copy whose probability is exactly 0 is a row of zeros, and gives no gradient to its token.
    """
    op, by = "moe_permute_with_probs", either(EAGER, TRACED)
    _check_tensors(op, inp=inp, probs=probs, routing_map=routing_map)
    if by.is_empty(inp):
        return inp.clone(), _no_probs(probs), _empty_map(inp)
    _check_tokens(op, inp, routing_map=routing_map, probs=probs)
    _check_probs(op, probs, routing_map)
    routing = _mask(op, routing_map)
    rows = _rows_of_mask(by, op, num_out_tokens, routing)
    row_map, starts = by.mask_map(routing)
    out, row_probs = by.permute(op, inp, row_map, starts, probs, rows=rows)
    return out, row_probs, row_map


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor | Sequence[int] | None,
    align_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(rows, their probabilities, the map back, pad_offsets, rows of each expert): as `moe_permute_with_probs`, with
    the rows of each expert filled up with zeros to a multiple of `align_size`.

    tokens_per_expert [experts] counts what the mask sends to each. `pad_offsets` is what `moe_unpermute` needs beside
    the map; None if nothing was to be padded. If the counts are on a GPU the host waits for their sum. Counts that are
    not the mask's are an error where both are on one device; for counts of the host a mask on a GPU is not counted.
    """
    op, by = "moe_permute_and_pad_with_probs", either(EAGER, TRACED)
    if tokens_per_expert is None:
        allowed = "how many tokens go to each expert, [experts]"
        raise ArgumentError(op, "tokens_per_expert=None", allowed, "pass routing_map.sum(dim=0)")
    align_size = by.number(op, "align_size", align_size)
    if align_size <= 0:
        raise ArgumentError(op, f"align_size={align_size}", "a positive number", "pass what the recipe needs, 16 or 32")
    _check_tensors(op, inp=inp, probs=probs, routing_map=routing_map)
    counts, experts = torch.as_tensor(tokens_per_expert), routing_map.shape[-1]
    if tuple(counts.shape) != (experts,) or counts.dtype not in _INTEGERS:
        got = f"tokens_per_expert {counts.dtype} {tuple(counts.shape)}"
        raise ArgumentError(op, got, f"{experts} whole numbers, one an expert", "correct tokens_per_expert")
    counts = counts.to(torch.int64)
    targets = torch.div(counts + (align_size - 1), align_size, rounding_mode="floor") * align_size
    both = torch.stack((targets, targets - counts))
    ends = both.cumsum(1)
    rows, inserted = by.sums(op, ends[:, -1], counts, routing_map) if experts else (0, 0)
    offsets = (ends[1] - both[1]).to(inp.device) if inserted else None  # what is inserted before each expert
    if by.is_empty(inp):
        return inp.clone(), _no_probs(probs), _empty_map(inp), offsets, targets
    _check_tokens(op, inp, routing_map=routing_map, probs=probs)
    _check_probs(op, probs, routing_map)
    row_map, starts = by.mask_map(_mask(op, routing_map))
    out, row_probs = by.permute(op, inp, row_map, starts, probs, offsets, rows=rows)
    return out, row_probs, row_map, offsets, targets


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of each token added up, weighted by `merging_probs` [tokens, experts] if given: the way back.

    With map_type "index" weights are float32 [tokens, top k]; without them nothing is added: row k * tokens + t of the
    result is copy k of token t, zeros if it was dropped. `restore_shape` (mask) is the shape of the result. `probs` is
    the older name of merging_probs.

    Returns:
        The tokens [tokens, features].

    Raises:
        ArgumentError: The map, the weights and the rows do not fit together.
    """
    op, by = "moe_unpermute", either(EAGER, TRACED)
    if probs is not None:
        if merging_probs is not None:
            raise ArgumentError(op, "probs and merging_probs", "one of them", "pass merging_probs alone")
        deprecated("moe_unpermute: probs", "merging_probs")
        merging_probs = probs
    _check_map_type(op, map_type)
    _check_tensors(op, inp=inp, row_id_map=row_id_map)
    if not row_id_map.numel() and by.is_empty(inp):
        out = inp.clone()
        return out if merging_probs is None else out + _no_probs(merging_probs).sum().to(out.dtype)
    if isinstance(inp, QuantizedTorch):
        raise AssertionError(f"{op}: got a {type(inp).__name__}, which cannot be added up; dequantize() it first")
    check_dtype(op, inp)
    _check_matrix(op, "inp", inp)
    _check_devices(op, inp, row_id_map=row_id_map, merging_probs=merging_probs, pad_offsets=pad_offsets)
    if map_type == "mask":
        if row_id_map.ndim != 2 or row_id_map.shape[1] % 2 == 0:
            got = f"row_id_map {tuple(row_id_map.shape)} with map_type='mask'"
            raise ArgumentError(op, got, "what moe_permute returned for a mask", "pass that map, or map_type='index'")
        tokens, experts = row_id_map.shape[0], (row_id_map.shape[1] - 1) // 2
        if merging_probs is not None and tuple(merging_probs.shape) != (tokens, experts):
            got = f"merging_probs {tuple(merging_probs.shape)}"
            raise ArgumentError(
                op, got, f"[{tokens}, {experts}], tokens and experts of the map", "correct merging_probs"
            )
        if restore_shape is not None:
            if prod(restore_shape) != tokens * inp.shape[1] or restore_shape[-1] != inp.shape[1]:
                got = f"restore_shape={tuple(restore_shape)} for {tokens} tokens of {inp.shape[1]}"
                raise ArgumentError(op, got, f"({tokens}, {inp.shape[1]}), those of the map", "correct restore_shape")
        if pad_offsets is not None and pad_offsets.dtype != torch.int64:
            pad_offsets = pad_offsets.to(torch.int64)
        weights = None if merging_probs is None else in_core(merging_probs)
        out = by.unpermute(inp, row_id_map, weights, pad_offsets, tokens)
        return out if restore_shape is None or len(restore_shape) == 2 else out.view(*restore_shape)
    if pad_offsets is not None:
        raise ArgumentError(op, "pad_offsets with map_type='index'", "a mask's map", "leave pad_offsets out")
    tokens = row_id_map.numel()
    if merging_probs is not None:
        tokens = merging_probs.shape[0]
        if merging_probs.ndim != 2 or merging_probs.numel() != row_id_map.numel():
            got = f"merging_probs {tuple(merging_probs.shape)} for a map of {row_id_map.numel()} entries"
            raise ArgumentError(op, got, "[tokens, top k], a weight for each entry", "correct merging_probs")
        if merging_probs.dtype != torch.float32:
            warn(f"{op}: merging_probs is {merging_probs.dtype}; made float32", UserWarning, 2)
            merging_probs = merging_probs.float()
    return by.unpermute(inp, row_id_map, merging_probs, None, tokens)


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """inp's rows in chunks of `split_sizes`, in the order of `sorted_index`; rows behind the chunks stay."""
    op, by = "moe_sort_chunks_by_index", either(EAGER, TRACED)
    _check_tensors(op, inp=inp, split_sizes=split_sizes, sorted_index=sorted_index)
    if by.is_empty(inp):
        return inp.clone()
    out, _ = by.permute(op, inp, _chunk_map(by, op, inp, split_sizes, sorted_index), rows=inp.shape[0], fill=False)
    return out


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """inp's rows in chunks of `split_sizes`, and probs [rows], in the order of `sorted_index`."""
    op, by = "moe_sort_chunks_by_index_with_probs", either(EAGER, TRACED)
    _check_tensors(op, inp=inp, probs=probs, split_sizes=split_sizes, sorted_index=sorted_index)
    if probs.shape[:1] != inp.shape[:1] or probs.numel() != inp.shape[0]:
        got = f"probs {tuple(probs.shape)} for {inp.shape[0]} rows"
        raise ArgumentError(op, got, "a probability for each row", "correct probs")
    if by.is_empty(inp):
        return inp.clone(), probs.clone()
    _check_devices(op, inp, probs=probs)
    row_map = _chunk_map(by, op, inp, split_sizes, sorted_index)
    rows = inp.shape[0]
    out, _ = by.permute(op, inp, row_map, rows=rows, fill=False)
    moved, _ = by.permute(op, in_core(probs).reshape(rows, 1), row_map, rows=rows, fill=False)
    return out, moved.reshape(probs.shape).to(probs.dtype)


# ------------------------------------------------------------------------------------------------- helpers


def _chunk_map(
    by: Moves, op: str, inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    _check_matrix(op, "inp", inp)
    _check_devices(op, inp, split_sizes=split_sizes, sorted_index=sorted_index)
    given = {"split_sizes": split_sizes, "sorted_index": sorted_index}
    for name, t in given.items():
        if t.ndim != 1 or t.shape != split_sizes.shape or t.dtype not in _INTEGERS:
            got = f"{name} {t.dtype} {tuple(t.shape)}"
            raise ArgumentError(op, got, "whole numbers, one for each chunk", f"correct {name}")
    sizes, order = (t if t.dtype in (torch.int32, torch.int64) else t.int() for t in given.values())
    return by.chunk_map(sizes, order, inp.shape[0])


def _mask(op: str, routing_map: torch.Tensor) -> torch.Tensor:
    if routing_map.dtype in _MASKS:
        return routing_map
    if routing_map.dtype not in _INTEGERS:
        allowed = "int32 or bool, not 0 where a token goes to an expert"
        raise ArgumentError(op, f"a routing_map of {routing_map.dtype}", allowed, "pass routing_map != 0, or its int()")
    return routing_map.int()


def _rows_of_mask(by: Moves, op: str, wanted: Any, routing: torch.Tensor) -> int:
    """The rows of the result."""
    rows = -1 if wanted is None else by.number(op, "num_out_tokens", wanted)
    if rows == -1:
        return by.count(op, routing)
    if rows <= 0:
        raise AssertionError(f"{op}: num_out_tokens={rows}; pass the rows of the result, or -1 to drop nothing")
    return rows


# -------------------------------------------------------------------------------------------------- checks


def _empty_map(inp: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int32, device=inp.device)


def _no_probs(probs: torch.Tensor) -> torch.Tensor:
    """None of these, which still get a gradient."""
    return probs.reshape(-1)[:0]


def _check_map_type(op: str, map_type: str) -> None:
    if map_type not in ("mask", "index"):
        raise choice_error(op, "map_type", map_type, ("mask", "index"))


def _check_tensors(op: str, **given: Any) -> None:
    for name, t in given.items():
        if not isinstance(t, torch.Tensor):
            do = f"pass torch.tensor({name}, device=inp.device)" if isinstance(t, Sequence) else f"correct {name}"
            raise ArgumentError(op, f"{name} of type {type(t).__name__}", "a tensor", do)


def _check_tokens(op: str, inp: torch.Tensor, **beside: torch.Tensor) -> None:
    """Matrices of as many rows, on one device."""
    shape, device = inp.shape, inp.device
    if len(shape) == 2 and all(
        [t.ndim == 2 and t.shape[0] == shape[0] and t.device == device for t in beside.values()]
    ):
        return
    _check_matrix(op, "inp", inp)
    _check_devices(op, inp, **beside)
    for name, t in beside.items():
        _check_matrix(op, name, t)
        if t.shape[0] != inp.shape[0]:
            got = f"{name} of {t.shape[0]} rows for {inp.shape[0]} tokens"
            raise ArgumentError(op, got, "a row for each token", f"correct {name}, or flatten inp to [tokens, hidden]")


def _check_probs(op: str, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
    if probs.shape != routing_map.shape or not probs.is_floating_point():
        got = f"probs {probs.dtype} {tuple(probs.shape)} with a routing_map {tuple(routing_map.shape)}"
        raise ArgumentError(op, got, "floats, [tokens, experts] as the map", "correct probs")


def _check_matrix(op: str, name: str, t: torch.Tensor) -> None:
    if t.ndim != 2:
        got = f"{name} of shape {tuple(t.shape)}"
        raise ArgumentError(op, got, "a matrix, a row for each token", f"flatten {name} with view(-1, its last size)")


def _check_devices(op: str, inp: torch.Tensor, **beside: torch.Tensor | None) -> None:
    """Kernels read what an address holds on their own device."""
    for name, t in beside.items():
        if t is not None and t.device != inp.device:
            got = f"{name} on {t.device} beside tokens on {inp.device}"
            raise ArgumentError(op, got, "all tensors on one device", f"move {name} to {inp.device}")


__all__ = [
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]
