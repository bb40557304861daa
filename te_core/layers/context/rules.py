"""What attention over ranks refuses, in words: small rules, each with its reason, and what to choose instead.

A rule looks at the attention, at how sequences lie cut, and at the sizes of this rank's tensors. An adapter puts the
same rules to what it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from te_core.attention import DIMENSIONS, AttentionSpec, Sizes
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.context.schedule import MODES, Context, schedule
from te_core.tensor import Tensor


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
    return Refusal(f"cp_comm_type={mode!r}", ", ".join(map(repr, MODES)), "choose one of these")


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
    if cut.heads % ranks == 0 and cut.groups % ranks == 0:
        return None
    return Refusal(
        f"{cut.heads} heads in {cut.groups} groups that {ranks} ranks would share by {cut.context.mode}",
        "heads and groups that the ranks divide",
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
        return Refusal(f"a bias ({core.bias}) under context parallelism", "no bias, or ALiBi with a2a", "leave it out")
    return None


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
            raise kind("context parallelism", *found)


def check_context(core: AttentionSpec, context: Context, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The same for tensors."""
    tokens = tuple(t.shape[DIMENSIONS[form][1]] for t, form in ((q, core.q_format), (k, core.kv_format)))
    check(Cut(core, context, q.shape[-2], k.shape[-2], (tokens[0], tokens[1])))


def attentions(core: AttentionSpec, context: Context, rank: int, sizes: Sizes) -> list[tuple[AttentionSpec, Sizes]]:
    """What this rank computes, as whoever computes one of these is asked whether he can: `sizes` are this rank's."""
    ranks, packed = context.heads, core.q_format == "thd"
    inside = sizes._replace(heads=sizes.heads // ranks, groups=sizes.groups // ranks)
    if not packed:
        inside = inside._replace(sq=inside.sq * ranks, skv=inside.skv * ranks)
    if context.ring == 1:
        return [(core, inside)]
    found = []
    for call in (call for step in schedule(context, rank, core).steps for call in step.calls):
        bounds = {"full": (-1, -1), "causal": (-1, 0), "band": (call.before, call.behind)}[call.mask]
        spec = replace(core, left=bounds[0], right=bounds[1], bottom_right=packed and call.mask == "band")
        spec = replace(spec, softmax="vanilla")
        if packed:
            found.append((spec, inside))
            continue
        q, kv = (n // 2 * len(chunks) for n, chunks in ((inside.sq, call.queries), (inside.skv, call.keys)))
        found.append((spec, inside._replace(sq=q, skv=kv)))
    return found
