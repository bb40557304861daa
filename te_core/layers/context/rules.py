"""What attention over ranks refuses, in words: small rules, each with its reason, and what to choose instead.

A rule looks at the attention, at how sequences lie cut, and at the sizes of this rank's tensors. An adapter puts the
same rules to what it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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


def _refusals(cut: Cut) -> Iterator[tuple[Any, Refusal]]:
    """The rules, one after another: what each refuses, if it does, as an error of what a caller passes or of what there
    is. A rule counts on those before it."""
    core, c, ranks = cut.core, cut.context, cut.context.heads
    if c.mode not in MODES:
        yield ArgumentError, choice_error("", "cp_comm_type", c.mode, MODES, lambda _, *parts: Refusal(*parts))
    if c.size < 1 or c.inner < 1 or c.size % c.inner or (c.inner > 1 and c.mode != "a2a+p2p"):
        yield (
            ArgumentError,
            Refusal(
                f"{c.size} ranks, {c.inner} of which exchange heads, with cp_comm_type={c.mode!r}",
                "for a2a+p2p a number of ranks that divides all of them, 1 otherwise",
                "correct the groups",
            ),
        )
    if core.q_format != core.kv_format:
        got = f"queries in {core.q_format} and keys in {core.kv_format}"
        yield ArgumentError, Refusal(got, "one format", "bring both into one")
    for n, form in zip(cut.tokens, (core.q_format, core.kv_format), strict=True):
        if form != "thd" and n % 2:
            allowed = "an even number: two chunks of each sequence"
            yield ArgumentError, Refusal(f"{n} tokens on this rank", allowed, "pad the sequences")
    if cut.heads % ranks or (cut.groups % ranks and ranks % cut.groups):
        yield (
            ArgumentError,
            Refusal(
                f"{cut.heads} heads in {cut.groups} groups that {ranks} ranks would share by {c.mode}",
                "heads that the ranks divide, and groups that they divide, or that divide them",
                "choose p2p or all_gather, which split no heads",
            ),
        )
    if core.masked:
        yield (
            UnsupportedError,
            Refusal(
                "a mask that is a tensor (attention_mask, or the type arbitrary)",
                "no_mask, causal, padding, padding_causal",
                "pass cu_seqlens of the whole sequences",
            ),
        )
    if core.bottom_right and core.causal:  # of other windows both ends are in corners: lengths are equal
        got, allowed = "a diagonal that ends bottom-right", "one that ends top-left"
        yield UnsupportedError, Refusal(got, allowed, "use causal or padding_causal")
    if core.banded and cut.tokens[0] != cut.tokens[1]:
        yield (
            ArgumentError,
            Refusal(
                f"a causal mask or a window with {cut.tokens[0]} queries and {cut.tokens[1]} keys on this rank",
                "as many keys as queries",
                "use no_mask or padding for cross attention",
            ),
        )
    if core.windowed and c.ring > 1:
        window, do = f"window_size=({core.left}, {core.right})", "use a2a"
        if c.mode != "all_gather":
            got, allowed = f"{window} with cp_comm_type={c.mode!r}", "windows with all_gather or a2a"
            yield UnsupportedError, Refusal(got, allowed, "use all_gather or a2a")
        if core.right != 0 and core.padded:
            got, allowed = f"{window} with padding or thd, by all_gather", "a window that ends with its query"
            yield UnsupportedError, Refusal(got, allowed, do)
        if core.dropout:
            yield UnsupportedError, Refusal(f"{window} with dropout, by all_gather", "one of the two", do)
    if core.bias == "alibi" and c.ring > 1:
        yield UnsupportedError, Refusal(f"ALiBi with cp_comm_type={c.mode!r}", "ALiBi with a2a", "use a2a")
    if core.bias not in ("no_bias", "alibi"):
        if c.mode != "p2p":
            yield UnsupportedError, Refusal(f"a bias with cp_comm_type={c.mode!r}", "a bias with p2p", "use p2p")
        if core.padded:
            yield UnsupportedError, Refusal("a bias with padding or thd", "one of the two", "leave one out")


def refusal(cut: Cut) -> Refusal | None:
    """The first of the rules' refusals."""
    return next((found for _, found in _refusals(cut)), None)


def check(cut: Cut) -> None:
    """Raise what the rules refuse."""
    for kind, found in _refusals(cut):
        raise kind(OPERATION, *found)


def check_context(
    core: AttentionSpec, context: Context, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
) -> None:
    """The same for tensors; a bias has the rows of this rank's queries and the columns of all keys."""
    rows, keys = (t.shape[DIMENSIONS[form][1]] for t, form in ((q, core.q_format), (k, core.kv_format)))
    check(Cut(core, context, q.shape[-2], k.shape[-2], (rows, keys)))
    columns = context.size * keys
    if bias is not None and context.size > 1 and bias.shape[2:] != (rows, columns):
        raise ArgumentError(
            OPERATION,
            f"a bias of shape {bias.shape} on this rank",
            f"[.., {rows}, {columns}]: this rank's queries, and all keys in the order of the sequence",
            "pass the rows of this rank's two chunks, with all columns",
        )
