"""Data of context parallelism: padding sequences, this rank's tokens of a batch, and the order of tokens over ranks.

Each sequence is cut into 2 * cp chunks of one length. Rank r holds chunk r, then chunk 2 * cp - 1 - r, so that with a
causal mask all ranks have the same work. In a packed batch (thd) `cu_seqlens` are running sums of lengths, [b + 1], and
`cu_seqlens_padded` those of padded lengths, which 2 * cp has to divide.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from te_core.errors import ArgumentError
from te_torch.exchange import all_gather, reduce_scatter
from te_torch.parallel.groups import group_of

#: Under these names in the documented package's module, beside two of our own.
DOCUMENTED = (
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "get_cu_seqlens_on_cp_rank",
    "pad_thd_sequences_for_cp",
    "thd_cp_rank_order_to_sequence_order",
    "thd_sequence_order_to_cp_rank_order",
)
__all__ = ["context_part", "context_whole", "thd_get_partitioned_indices", *DOCUMENTED]


# ------------------------------------------------------------------------------------------------- before training


def pad_thd_sequences_for_cp(
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input_ids, labels, cu_seqlens_padded) with each packed sequence padded at its end to a multiple of the factor.

    `divisibility_factor` is 2 * cp, under sequence parallelism times the tensor-parallel ranks. `input_ids` and
    `labels` are [t] or [1, t]; the results are [t']. Keep `cu_seqlens`, too: attention is given both.
    """
    op = "pad_thd_sequences_for_cp"
    lengths, padded = _lengths(op, cu_seqlens, divisibility_factor)
    ids, targets = _packed(op, "input_ids", input_ids), _packed(op, "labels", labels)
    tokens = int(cu_seqlens[-1])
    for name, t in (("input_ids", ids), ("labels", targets)):
        if len(t) != tokens:
            allowed = f"the {tokens} tokens at which cu_seqlens ends"
            raise ArgumentError(op, f"{name} of {len(t)} tokens", allowed, f"correct {name} or cu_seqlens")
    sums = _running(padded, cu_seqlens)
    places = torch.arange(tokens, device=sums.device)
    places += torch.repeat_interleave(sums[:-1] - cu_seqlens[:-1], lengths, output_size=tokens)
    filled = []
    for t, value in ((ids, padding_token_id), (targets, padding_label_id)):
        out = t.new_full((int(sums[-1]),), value)
        out[places.to(t.device)] = t
        filled.append(out)
    return filled[0], filled[1], sums


def generate_positional_ids_for_cp(
    cu_seqlens: torch.Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """Positions in a batch as `pad_thd_sequences_for_cp` pads it, [t']: from 0 in each sequence, padding counted."""
    _, padded = _lengths("generate_positional_ids_for_cp", cu_seqlens, divisibility_factor)
    sums = _running(padded, cu_seqlens)
    tokens = int(sums[-1])
    begins = torch.repeat_interleave(sums[:-1], padded, output_size=tokens)
    return (torch.arange(tokens, device=sums.device) - begins).to(dtype)


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: torch.Tensor,
    input_ids_padded: torch.Tensor | None,
    labels_padded: torch.Tensor | None,
    position_ids_padded: torch.Tensor | None,
    cp_group: Any = None,
    qvk_format: str = "thd",
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """This rank's tokens of a padded, packed batch: (input_ids, labels, position_ids), None where None was given.

    Tokens are along dimension 1 of a tensor, or else along 0, whichever has as many as the batch. `cp_group` None is
    the default group. Dense batches: `context_part`. (The last argument is spelt as it is documented.)
    """
    op = "get_batch_on_this_cp_rank"
    if qvk_format != "thd":
        do = "for dense batches call te_torch.context_part(t, group, seq_dim)"
        raise ArgumentError(op, f"qvk_format={qvk_format!r}", "'thd'", do)
    size, rank = _place(op, [None] if cp_group is None else _groups(op, cp_group))
    given = input_ids_padded, labels_padded, position_ids_padded
    if size == 1:
        return given
    tokens = int(cu_seqlens_padded[-1])
    index = thd_get_partitioned_indices(cu_seqlens_padded, tokens, size, rank)
    found: list[torch.Tensor | None] = []
    for name, t in zip(("input_ids_padded", "labels_padded", "position_ids_padded"), given, strict=True):
        if t is None:
            found.append(None)
            continue
        dim = next((dim for dim in (1, 0) if dim < t.ndim and t.shape[dim] == tokens), None)
        if dim is None:
            allowed = f"a dimension 1 or 0 of the {tokens} tokens at which cu_seqlens_padded ends"
            raise ArgumentError(op, f"{name} of shape {tuple(t.shape)}", allowed, f"pad {name} like input_ids")
        found.append(t.index_select(dim, index.to(t.device)))
    return found[0], found[1], found[2]


def get_cu_seqlens_on_cp_rank(
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded_on_cp_rank: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> torch.Tensor:
    """Running sums of a rank's valid tokens in each sequence, of its first chunk, its second one, or both.

    `cu_seqlens` are those of whole sequences, `cu_seqlens_padded_on_cp_rank` those of the rank's padded parts: padded
    lengths of the whole, divided by cp. Nothing waits for the device.
    """
    _check_rank("get_cu_seqlens_on_cp_rank", cp_size, cp_rank)
    lengths, chunk = cu_seqlens.diff(), cu_seqlens_padded_on_cp_rank.diff() // 2
    valid = torch.zeros_like(lengths)
    for wanted, number in ((first_half, cp_rank), (second_half, 2 * cp_size - 1 - cp_rank)):
        if wanted:
            valid = valid + torch.minimum((lengths - number * chunk).clamp(min=0), chunk)
    return _running(valid, cu_seqlens)


# -------------------------------------------------------------------------------------------- the order of tokens


def thd_get_partitioned_indices(
    cu_seqlens_padded: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Which tokens of a packed batch a rank holds, in its order: int32 [total_tokens / cp], on the device of the sums.

    Tokens behind the last sequence are dealt out in order. On a GPU nobody waits for the sums: of a padded length that
    2 * cp does not divide some token is left out (attention gives NaN for such a sequence); on the CPU it is an error.
    """
    op = "thd_get_partitioned_indices"
    _check_rank(op, cp_size, cp_rank)
    return _tokens(op, cu_seqlens_padded, total_tokens, cp_size, cp_rank).to(torch.int32)


def thd_sequence_order_to_cp_rank_order(
    x: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, seq_dim: int = 0
) -> torch.Tensor:
    """A packed tensor in sequence order -> the tokens of rank 0, then of rank 1, and so on; differentiable.

    `cu_seqlens` are running sums of padded lengths.
    """
    op = "thd_sequence_order_to_cp_rank_order"
    return x.index_select(seq_dim, _rank_order(op, x, cu_seqlens, cp_size, seq_dim))


def thd_cp_rank_order_to_sequence_order(
    x: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, seq_dim: int = 0
) -> torch.Tensor:
    """Tokens of all ranks behind one another, as an all-gather brings them -> a packed tensor in sequence order."""
    order = _rank_order("thd_cp_rank_order_to_sequence_order", x, cu_seqlens, cp_size, seq_dim)
    inverse = torch.zeros_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return x.index_select(seq_dim, inverse)


def context_part(
    t: torch.Tensor, group: Any, seq_dim: int, cu_seqlens_padded: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's tokens of what all ranks hold: chunks r and 2 * cp - 1 - r of each sequence.

    t                   whole sequences along `seq_dim`, which every rank has alike
    group               a process group, a mesh of one dimension, or [a2a_group, p2p_group]; None: all of it is returned
    cu_seqlens_padded   running sums of padded lengths, where `seq_dim` holds packed sequences; without, one sequence

    Differentiable: a rank's gradient of t is its own tokens' gradient, zeros elsewhere. Like the gradient of a
    parameter it is a summand; the sum over the ranks is the whole.
    """
    op = "context_part"
    size, rank = _place(op, _groups(op, group))
    if size == 1:
        return t
    dim, tokens = _along(op, t, seq_dim)
    if cu_seqlens_padded is not None:
        return t.index_select(dim, _tokens(op, cu_seqlens_padded, tokens, size, rank).to(t.device))
    chunk = _chunk(op, t, dim, 2 * size)
    return torch.cat([t.narrow(dim, i * chunk, chunk) for i in (rank, 2 * size - 1 - rank)], dim)


def context_whole(
    t: torch.Tensor, group: Any, seq_dim: int, cu_seqlens_padded: torch.Tensor | None = None
) -> torch.Tensor:
    """The inverse of `context_part`: the whole sequences, gathered from all ranks, on each of them.

    Differentiable: the gradient of a rank's part is the sum of what all ranks' losses say of it. Where every rank
    computes one and the same loss from the whole, that is cp times its gradient: divide the loss by cp.
    """
    op = "context_whole"
    groups = _groups(op, group)
    size, _ = _place(op, groups)
    if size == 1:
        return t
    dim, tokens = _along(op, t, seq_dim)
    parts = t
    for one in groups:
        parts = _Gathered.apply(parts, one)
    parts = parts.reshape(size, *t.shape)
    if cu_seqlens_padded is None:
        chunk = _chunk(op, t, dim, 2)
        order = [(i, 0) for i in range(size)] + [(i, chunk) for i in reversed(range(size))]
        return torch.cat([parts[rank].narrow(dim, first, chunk) for rank, first in order], dim)
    packed = parts.movedim(0, dim).reshape(*t.shape[:dim], size * tokens, *t.shape[dim + 1 :])
    return thd_cp_rank_order_to_sequence_order(packed, cu_seqlens_padded, size, dim)


class _Gathered(torch.autograd.Function):
    """[..] -> [ranks, ..]."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, group: Any) -> torch.Tensor:
        """Gather."""
        ctx.group = group
        dense = t.detach().contiguous()
        out = dense.new_empty((dist.get_world_size(group), *t.shape))
        bytes_of = dense.element_size() == 1  # which backends know few types of
        rows = out.flatten(0, 1)
        moved = (rows.view(torch.uint8), dense.view(torch.uint8)) if bytes_of else (rows, dense)
        all_gather("context_whole", *moved, group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Add up, each rank its part."""
        part = grad.new_empty(grad.shape[1:])
        reduce_scatter("backward of context_whole", part, grad.contiguous().flatten(0, 1), ctx.group)
        return part, None


# ------------------------------------------------------------------------------------------------ groups and places


def _groups(op: str, given: Any) -> list[Any]:
    """The process groups, the innermost first; none for None."""
    if given is None:
        return []
    if not isinstance(given, (list, tuple)):
        return [group_of(op, given, "group")]
    groups = [group_of(op, group, "group") for group in given]
    if len(groups) != 2 or None in groups:
        got, allowed = f"group={given!r}", "one group, or a list of two: [a2a_group, p2p_group]"
        raise ArgumentError(op, got, allowed, "pass the groups that the attention modules have")
    return groups


def _place(op: str, groups: list[Any]) -> tuple[int, int]:
    """(how many ranks a sequence is spread over, which of them this one is). A group None is the default one."""
    size, rank = 1, 0
    for group in groups:
        try:
            ranks, mine = dist.get_world_size(group), dist.get_rank(group)
        except (RuntimeError, ValueError) as error:
            do = "call torch.distributed.init_process_group first"
            raise ArgumentError(op, f"no process group ({error})", "an initialised process", do) from error
        if mine < 0:
            do = "make the groups on all ranks, and pass each rank its own"
            raise ArgumentError(op, "a group that this process is not in", "a group with this rank in it", do)
        size, rank = size * ranks, mine * size + rank
    return size, rank


def _check_rank(op: str, size: int, rank: int) -> None:
    if not 0 <= rank < size:
        raise ArgumentError(op, f"cp_rank={rank} of cp_size={size}", "0 <= cp_rank < cp_size", "correct the rank")


def _along(op: str, t: torch.Tensor, seq_dim: int) -> tuple[int, int]:
    """(the dimension from the front, its tokens)."""
    if not -t.ndim <= seq_dim < t.ndim:
        allowed = f"a dimension of a tensor of {t.ndim}"
        raise ArgumentError(op, f"seq_dim={seq_dim}", allowed, "say which dimension the tokens are in")
    dim = seq_dim % t.ndim
    return dim, t.shape[dim]


def _chunk(op: str, t: torch.Tensor, dim: int, chunks: int) -> int:
    if t.shape[dim] % chunks:
        got = f"{t.shape[dim]} tokens in dimension {dim} of {tuple(t.shape)}"
        raise ArgumentError(op, got, f"a length that {chunks}, the number of chunks, divides", "pad the sequences")
    return t.shape[dim] // chunks


def _rank_order(op: str, x: torch.Tensor, cu: torch.Tensor, size: int, seq_dim: int) -> torch.Tensor:
    """The token that comes to each place of the order of ranks."""
    _check_rank(op, size, 0)
    return _tokens(op, cu, _along(op, x, seq_dim)[1], size).reshape(-1).to(x.device)


def _tokens(op: str, cu: torch.Tensor, total: int, size: int, rank: Any = None) -> torch.Tensor:
    """Which tokens a rank holds: int64 [total / size]; without a rank of each of them, [size, total / size]."""
    if cu.ndim != 1 or not len(cu) or cu.is_floating_point():
        got = f"cu_seqlens_padded of shape {tuple(cu.shape)} in {cu.dtype}"
        raise ArgumentError(op, got, "running sums [b + 1] of integers that begin with 0", "correct cu_seqlens_padded")
    if total % size:
        allowed = f"a number of tokens that {size}, the ranks, divide"
        raise ArgumentError(op, f"{total} tokens", allowed, "pad the batch")
    sums = cu.to(torch.int64)
    if sums.device.type == "cpu":
        wrong = (sums.diff() % (2 * size)).nonzero()
        if len(wrong):
            i = int(wrong[0])
            got = f"sequence {i} of padded length {int(sums[i + 1] - sums[i])}"
            do = "pad the sequences by pad_thd_sequences_for_cp, and pass cu_seqlens_padded"
            raise ArgumentError(op, got, f"padded lengths that {2 * size}, twice the ranks, divides", do)
        if int(sums[-1]) > total or int(sums[0]):
            got = f"cu_seqlens_padded from {int(sums[0])} to {int(sums[-1])}"
            allowed = f"running sums from 0 to at most the {total} tokens"
            raise ArgumentError(op, got, allowed, "correct them")
    row = torch.arange(total // size, device=sums.device)
    begins = sums // size
    sequence = torch.searchsorted(begins, row, right=True) - 1
    tail = total - sums[-1:]  # behind the last sequence, as if of twice the length: all of it in the first chunks
    chunk = torch.cat((sums.diff() // (2 * size), tail // size))[sequence]
    within, begin = row - begins[sequence], sums[sequence]
    if rank is None:
        rank = torch.arange(size, device=sums.device)[:, None]
    later = within >= chunk
    place = torch.where(later, (2 * size - 1 - rank) * chunk + within - chunk, rank * chunk + within)
    return (begin + place).clamp_(0, max(total - 1, 0))


# ------------------------------------------------------------------------------------------------------- lengths


def _lengths(op: str, cu: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the lengths, padded lengths)."""
    if cu.ndim != 1 or not len(cu) or cu.is_floating_point() or int(cu[0]):
        got = f"cu_seqlens of shape {tuple(cu.shape)} in {cu.dtype}"
        raise ArgumentError(op, got, "running sums [b + 1] of integers that begin with 0", "correct cu_seqlens")
    if factor < 1:
        got = f"divisibility_factor={factor}"
        raise ArgumentError(op, got, "2 * cp, or a multiple of that", "correct divisibility_factor")
    lengths = cu.diff()
    if bool((lengths < 0).any()):
        raise ArgumentError(op, "cu_seqlens that fall", "running sums of lengths", "correct cu_seqlens")
    return lengths, -(-lengths // factor) * factor


def _running(lengths: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Running sums of lengths, from 0 on."""
    sums = torch.zeros(len(lengths) + 1, dtype=like.dtype, device=like.device)
    torch.cumsum(lengths, 0, out=sums[1:])
    return sums


def _packed(op: str, name: str, t: torch.Tensor) -> torch.Tensor:
    """[t] of [t] or [1, t]."""
    if t.ndim == 2 and t.shape[0] == 1:
        t = t[0]
    if t.ndim != 1:
        raise ArgumentError(op, f"{name} of shape {tuple(t.shape)}", "[t] or [1, t]", "pack the sequences in one row")
    return t
