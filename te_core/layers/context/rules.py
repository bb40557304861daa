"""What attention over ranks refuses, in words: small rules, each with its reason, and what to choose instead.

A rule looks at the attention, at how sequences lie cut, and at the sizes of this rank's tensors. An adapter puts the
same rules to what it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from te_core.attention import DIMENSIONS, AttentionSpec
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.context.schedule import MODES, Context
from te_core.spelling import choice_error
from te_core.tensor import Tensor

OPERATION = "context parallelism"


class Cut(NamedTuple):
    """One attention over ranks, as far as the rules look at it."""

    core: AttentionSpec
    context: Context
    heads: int
    groups: int
    tokens: tuple[int, int]  # of queries and of keys, of this rank, in a row (thd: all)


class Refusal(NamedTuple):
    """What came, what is allowed, and what to do."""

    got: str
    allowed: str
    do: str


def _mode(cut: Cut) -> Refusal | None:
    mode = cut.context.mode
    if mode in MODES:
        return None
    refusal: Refusal = choice_error("", "cp_comm_type", mode, MODES, lambda _, *parts: Refusal(*parts))
    return refusal


def _sizes(cut: Cut) -> Refusal | None:
    c = cut.context
    if c.size >= 1 and c.inner >= 1 and c.size % c.inner == 0 and (c.inner == 1 or c.mode == "a2a+p2p"):
        return None
    return Refusal(
        f"{c.size} ranks, {c.inner} of which exchange heads, with cp_comm_type={c.mode!r}",
        "for a2a+p2p a number of ranks that divides all of them, 1 otherwise",
        "correct the groups",
    )


def _halves(cut: Cut) -> Refusal | None:
    forms = cut.core.q_format, cut.core.kv_format
    odd = [n for n, form in zip(cut.tokens, forms, strict=True) if form != "thd" and n % 2]
    if not odd:
        return None
    return Refusal(f"{odd[0]} tokens on this rank", "an even number: two chunks of each sequence", "pad the sequences")


def _heads(cut: Cut) -> Refusal | None:
    ranks = cut.context.heads
    if cut.heads % ranks == 0 and (cut.groups % ranks == 0 or ranks % cut.groups == 0):
        return None
    return Refusal(
        f"{cut.heads} heads in {cut.groups} groups that {ranks} ranks would share by {cut.context.mode}",
        "heads that the ranks divide, and groups that they divide, or that divide them",
        "choose p2p or all_gather, which split no heads",
    )


def _diagonal(cut: Cut) -> Refusal | None:
    core = cut.core
    if not core.banded or cut.tokens[0] == cut.tokens[1]:
        return None
    return Refusal(
        f"a causal mask or a window with {cut.tokens[0]} queries and {cut.tokens[1]} keys on this rank",
        "as many keys as queries",
        "use no_mask or padding for cross attention",
    )


def _formats(cut: Cut) -> Refusal | None:
    core = cut.core
    if core.q_format == core.kv_format:
        return None
    return Refusal(f"queries in {core.q_format} and keys in {core.kv_format}", "one format", "bring both into one")


def _mask(cut: Cut) -> Refusal | None:
    if not cut.core.masked:
        return None
    return Refusal(
        "a mask that is a tensor (attention_mask, or the type arbitrary)",
        "no_mask, causal, padding, padding_causal",
        "pass cu_seqlens of the whole sequences",
    )


def _corner(cut: Cut) -> Refusal | None:
    if not (cut.core.bottom_right and cut.core.causal):  # of other windows both ends are in corners: lengths are equal
        return None
    return Refusal("a diagonal that ends bottom-right", "one that ends top-left", "use causal or padding_causal")


def _windows(cut: Cut) -> Refusal | None:
    core, context = cut.core, cut.context
    if not core.windowed or context.ring == 1:
        return None
    window = f"window_size=({core.left}, {core.right})"
    if context.mode != "all_gather":
        return Refusal(
            f"{window} with cp_comm_type={context.mode!r}", "windows with all_gather or a2a", "use all_gather or a2a"
        )
    if core.right != 0 and core.padded:
        return Refusal(f"{window} with padding or thd, by all_gather", "a window that ends with its query", "use a2a")
    return Refusal(f"{window} with dropout, by all_gather", "one of the two", "use a2a") if core.dropout else None


def _bias(cut: Cut) -> Refusal | None:
    core, context = cut.core, cut.context
    if core.bias == "alibi" and context.ring > 1:
        return Refusal(f"ALiBi with cp_comm_type={context.mode!r}", "ALiBi with a2a", "use a2a")
    if core.bias not in ("no_bias", "alibi"):
        if context.mode != "p2p":
            return Refusal(f"a bias with cp_comm_type={context.mode!r}", "a bias with p2p", "use p2p")
        if core.padded:
            return Refusal("a bias with padding or thd", "one of the two", "leave one out")
    return None


def bias_refusal(
    core: AttentionSpec, context: Context, shape: tuple[int, ...], tokens: tuple[int, int]
) -> Refusal | None:
    """Why a bias of this shape is none for a rank with so many queries and keys in a row."""
    wanted = tokens[0], context.size * tokens[1]
    if context.size == 1 or shape[2:] == wanted:
        return None
    return Refusal(
        f"a bias of shape {shape} on this rank",
        f"[.., {wanted[0]}, {wanted[1]}]: this rank's queries, and all keys in the order of the sequence",
        "pass the rows of this rank's two chunks, with all columns",
    )


RULES: tuple[Callable[[Cut], Refusal | None], ...] = (
    _mode,
    _sizes,
    _formats,
    _halves,
    _heads,
    _mask,
    _corner,
    _diagonal,
    _windows,
    _bias,
)


def refusal(cut: Cut) -> Refusal | None:
    """The first of the rules' refusals."""
    return next(filter(None, (rule(cut) for rule in RULES)), None)


#: Rules whose refusals are of what a caller passes, not of what there is.
_ARGUMENTS = frozenset((_mode, _sizes, _halves, _heads, _diagonal, _formats))


def check(cut: Cut) -> None:
    """Raise what the rules refuse."""
    for rule in RULES:
        found = rule(cut)
        if found is not None:
            kind = ArgumentError if rule in _ARGUMENTS else UnsupportedError
            raise kind(OPERATION, *found)


def check_context(
    core: AttentionSpec, context: Context, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
) -> None:
    """The same for tensors."""
    tokens = tuple(t.shape[DIMENSIONS[form][1]] for t, form in ((q, core.q_format), (k, core.kv_format)))
    check(Cut(core, context, q.shape[-2], k.shape[-2], (tokens[0], tokens[1])))
    wrong = None if bias is None else bias_refusal(core, context, bias.shape, (tokens[0], tokens[1]))
    if wrong is not None:
        raise ArgumentError(OPERATION, *wrong)
