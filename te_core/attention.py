"""What one attention computes, as plain data: which keys a query sees, what is added to the scores, how they lie.

    scores   S[i, j] = softcap(q_i . k_j * scale) + bias[i, j]            softcap(x) = c tanh(x / c), or x without
    seen     j is seen by i when  i + shift - left <= j <= i + shift + right  (-1: no bound on that side),
             shift = len_kv - len_q of the sequence if `bottom_right`, else 0;
             and i < len_q, j < len_kv where lengths are given; and the boolean mask does not hide it
    weights  P = exp(S - m) / (sum of exp(S - m) over the seen j + sink term), the sink term being nothing ("vanilla"),
             exp(0 - m) ("off-by-one") or exp(sink_h - m) ("learnable")
    output   out_i = sum_j dropout(P)[i, j] v_j ; a query that sees no key gets zeros

Query head h reads key and value head h // (heads / groups). All in float32, rounded once to the dtype of q.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from te_core.spelling import choice_error
from te_core.tensor import Tensor

FORMATS = ("sbhd", "bshd", "thd")
SOFTMAX = ("vanilla", "off-by-one", "learnable")
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
MASK_ALIASES = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}

#: Where each dimension of a tensor in this format is: batch, token, head (thd has no batch).
DIMENSIONS = {"sbhd": (1, 0, 2), "bshd": (0, 1, 2), "thd": (None, 0, 1)}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """All that an attention depends on besides its tensors."""

    scale: float
    q_format: str = "sbhd"  # of q, the output and their gradients
    kv_format: str = "sbhd"  # of k and v
    left: int = -1
    right: int = -1  # 0: causal
    bottom_right: bool = False
    padded: bool = False  # lengths are given; always so in thd
    masked: bool = False  # a boolean mask [b|1, h|1, sq, skv] is given, True where hidden
    bias: str = "no_bias"  # or "post_scale_bias" (a tensor [b|1, h|1, sq|1, skv]), or "alibi" (slopes [h] or [b, h])
    default_slopes: bool = False  # alibi: they are `alibi_slopes(heads)`
    softmax: str = "vanilla"
    softcap: float = 0.0
    dropout: float = 0.0
    max_logit: bool = False  # also the largest seen score of each head
    deterministic: bool = False  # equal inputs give equal bits, backward included
    partial: bool = False  # backward: output and statistics are those over more keys, of which k has some
    max_q: int = 0  # thd: no sequence is longer than this
    max_kv: int = 0

    @property
    def causal(self) -> bool:
        """Whether no query sees a key behind its diagonal."""
        return self.right == 0

    @property
    def windowed(self) -> bool:
        """Whether a query's view is bounded otherwise than by causality."""
        return self.left >= 0 or self.right > 0

    @property
    def banded(self) -> bool:
        """Whether the diagonal matters at all."""
        return self.left >= 0 or self.right >= 0


@dataclass(frozen=True, slots=True)
class ScoreMod:
    """A user's functions that put operations on the scaled scores into a cuDNN graph, and on their gradients.

    Two of one key make the same graph of the same tensors; without a key, no graph of them is kept.
    """

    forward: Callable[[Any, Any, dict[str, Any]], Any] | None = field(
        compare=False, repr=False
    )  # (graph, score, tensors)
    backward: Callable[[Any, Any, dict[str, Any]], Any] | None = field(default=None, compare=False, repr=False)
    key: Hashable | None = None


class Lengths(NamedTuple):
    """Where sequences begin and end: int32 [b + 1] on the device, running sums of the lengths.

    In sbhd and bshd a sequence lies at the beginning of its row. In thd it begins at `cu_*_padded` where that is
    given (tokens between sequences belong to none), else at `cu_*`.
    """

    cu_q: Tensor
    cu_kv: Tensor
    cu_q_padded: Tensor | None = None
    cu_kv_padded: Tensor | None = None


class Sizes(NamedTuple):
    """The sizes of an attention; in thd `batch` is the number of sequences and `sq`, `skv` the longest allowed."""

    batch: int
    sq: int
    skv: int
    heads: int
    groups: int
    d_qk: int
    d_v: int


def canonical_mask(operation: str, name: str, argument: str = "attn_mask_type") -> str:
    """The canonical spelling of a mask's name, which came as this argument."""
    found = MASK_ALIASES.get(name, name)
    if found not in MASKS:
        raise choice_error(operation, argument, name, (*MASKS, *MASK_ALIASES))
    return found


def diagonal_is_bottom_right(mask: str, given: bool | None) -> bool:
    """Whether the diagonal ends in the last query and key (canonical mask name; `given` None is the default)."""
    if mask in ("causal", "padding_causal"):
        return False
    if mask.endswith("bottom_right"):
        return True
    return True if given is None else given


def with_mask(spec: AttentionSpec, mask: str, window: tuple[int, int], bottom_right: bool | None) -> AttentionSpec:
    """The spec seeing what a mask type (canonical name) and a canonical window let it see."""
    left, right = window
    return replace(
        spec,
        left=left,
        right=0 if "causal" in mask else right,
        padded="padding" in mask,
        masked=mask == "arbitrary",
        bottom_right=diagonal_is_bottom_right(mask, bottom_right),
    )


def alibi_slopes(heads: int) -> list[float]:
    """The usual slopes: powers of 2^(-8/n) for the first n = 2^floor(log2 heads), odd ones of 2^(-4/n) for the rest."""
    n = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 / n * k) for k in range(1, n + 1)]
    return first + [2.0 ** (-4.0 / n * k) for k in range(1, 2 * (heads - n), 2)]


def bucket(n: int, least: int = 64) -> int:
    """`n` rounded up to a power of two, at least `least`: plans of packed sequences are made for these sizes."""
    return max(least, 1 << (n - 1).bit_length())
