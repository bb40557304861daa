"""What a call of `DotProductAttention` brings, made ready for its plan: packed sequences, cached keys, slopes."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from te_core.attention import alibi_slopes, canonical_mask
from te_torch.attention.masks import AttentionArgumentError, lasting, longest
from te_torch.attention.plan import OPERATION
from te_torch.runtime import amp_cast, constant_at_trace


class Given(NamedTuple):
    """The tensors of a call."""

    a: torch.Tensor
    b: torch.Tensor | None = None
    c: torch.Tensor | None = None
    mask: Any = None
    cu_q: torch.Tensor | None = None
    cu_kv: torch.Tensor | None = None
    cu_q_padded: torch.Tensor | None = None
    cu_kv_padded: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    pages: torch.Tensor | None = None

    def but(self, **changes: Any) -> Given:
        """With other tensors in some places. (torch 2.11 cannot carry what `_replace` makes over a graph break.)"""
        return Given(*[changes.get(name, held) for name, held in zip(Given._fields, self, strict=True)])


def autocast(given: Given) -> Given:
    """Queries, keys and values in the dtype of torch.autocast."""
    return given.but(
        **{
            name: amp_cast(t)
            for name, t in zip("abc", given[:3], strict=True)
            if t is not None and t.is_floating_point()
        }
    )


def packed_sequences(given: Given, options: tuple[Any, ...], gaps: bool | None) -> tuple[Given, tuple[Any, ...]]:
    """What packed sequences need besides: their longest lengths, and where they begin if tokens lie between them."""
    cu_q, cu_kv, q_padded, kv_padded = given[4:8]
    if cu_q is None or cu_kv is None:
        return given, options  # the plan complains
    if (q_padded is None) != (kv_padded is None):
        q_padded, kv_padded = (cu_q if q_padded is None else q_padded), (cu_kv if kv_padded is None else kv_padded)
    # With pad_between_seqs=True as without: sequences begin in memory where their sums say if nothing else does.
    if gaps is False or (q_padded is cu_q and kv_padded is cu_kv):
        q_padded = kv_padded = None
    *head, max_q, max_kv, checkpoint = options
    if max_q is None:
        max_q = longest(cu_q if q_padded is None else q_padded)
    if max_kv is None:
        max_kv = longest(cu_kv if kv_padded is None else kv_padded)
    given = given.but(cu_q_padded=q_padded, cu_kv_padded=kv_padded)
    return given, (*head, max_q, max_kv, checkpoint)


def from_cache(
    given: Given, options: tuple[Any, ...], inference: Any, stepped: tuple[Any, ...]
) -> tuple[Given, tuple[Any, ...]]:
    """The call with the keys and values that a cache holds: `stepped` is what its step gave for the new ones.

    (The step is taken before `given` is made: it breaks a tracing compiler's graph, and torch 2.11 shows a frame whose
    named tuples are not filled yet to code that reads them.)
    """
    form, _, mask, *rest = options
    mask = canonical_mask(OPERATION, mask)
    if "padding" not in mask:
        mask = {"no_mask": "padding", "causal": "padding_causal"}.get(mask, f"padding_{mask}")
    if mask == "padding_causal":
        mask = "padding_causal_bottom_right"
    if given.mask is not None:
        _say_unread()
    k, v, cu_q, cu_kv, capacity, _ = stepped
    pages = inference.cache_manager.page_table[: cu_q.shape[0] - 1] if inference.is_paged else None
    most = rest[-3] or getattr(inference, "max_seqlen_q", 0) or None
    rest = [*rest[:-3], most, capacity, rest[-1]]  # no slice of it assigned: after a graph break it may be a tuple
    given = given.but(b=k, c=v, mask=None, cu_q=cu_q, cu_kv=cu_kv, cu_q_padded=None, cu_kv_padded=None, pages=pages)
    return given, (form, "bshd", mask, *rest)


_said: list[bool] = []


@constant_at_trace
def _say_unread() -> None:
    """Once: programs that generate text give a mask at each step, and it changes nothing."""
    if not _said:
        _said.append(True)
        warnings.warn("attention_mask is not read with inference_params: lengths take its place", stacklevel=2)


def check_cached(mask: str, inference: Any) -> None:
    """A KV cache goes with mask types that have padding; its older form takes all, and means these."""
    if "padding" not in canonical_mask(OPERATION, mask) and not getattr(inference, "is_older_form", False):
        raise AttentionArgumentError(
            OPERATION,
            f"attn_mask_type={mask!r} with inference_params",
            "a mask type with padding",
            "choose padding_causal, say",
        )


def whole_mask(mask: torch.Tensor, keys: int) -> torch.Tensor:
    """A mask with all four dimensions and all keys, dense."""
    if mask.dtype != torch.bool:
        raise AttentionArgumentError(
            OPERATION,
            f"an attention_mask of {mask.dtype}",
            "torch.bool, True where a key is hidden",
            "convert it, or pass a mask of numbers as core_attention_bias",
        )
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask.expand(*mask.shape[:-1], keys).contiguous()


_slopes: dict[tuple[int, torch.device], torch.Tensor] = {}


def default_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The usual slopes, one tensor for each device."""
    found = _slopes.get((heads, device))
    if found is None:
        if torch.compiler.is_compiling():
            return _new_slopes(heads, device)
        found = lasting(lambda: _new_slopes(heads, device))
        # Neither a compiler's stand-in nor a tensor of a capture's memory may outlive its trace.
        if not (found.is_cuda and torch.cuda.is_current_stream_capturing()):
            _slopes[heads, device] = found
    return found


def _new_slopes(heads: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(alibi_slopes(heads), dtype=torch.float32, device=device)
