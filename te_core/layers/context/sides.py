"""What the calls of a schedule attend with: their queries and keys, their specs, and their places in the sums.

All of it is plain data, which follows from the schedule and from sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from te_core.attention import AttentionSpec, Sizes
from te_core.layers.context.schedule import Call, Context, Schedule, Step, chunks_of, ranges, schedule
from te_core.ops.context import Span


class Piece(NamedTuple):
    """A range of a rank's queries, as one of the calls that add up to its result."""

    half: int | None  # 0 or 1; None: both, or packed tensors as they are
    number: int  # of the call in this range, from 0
    last: bool


class Sides(NamedTuple):
    """What a call attends with: spans of its queries and keys where lengths matter, and its place in the sums."""

    call: Call
    source: int | None
    number: int  # among the rank's calls
    queries: Span
    keys: Span
    pieces: tuple[Piece, ...]


@lru_cache(maxsize=1024)
def planned(context: Context, rank: int, bounds: tuple[int, int], packed: bool) -> tuple[Schedule, tuple[Sides, ...]]:
    """(the schedule of a rank, what its calls attend with). `bounds`: of the band, left and right."""
    made = schedule(context, rank, AttentionSpec(1.0, left=bounds[0], right=bounds[1]))
    return made, sides(made, packed)


def sides(made: Schedule, packed: bool) -> tuple[Sides, ...]:
    """All calls of a schedule, in order."""
    size, rank = made.context.ring, made.rank // made.context.heads
    own = chunks_of(size, rank)
    listed = [(step, call) for step in made.steps for call in step.calls]
    pieces = _pieces([call for _, call in listed], own, packed)
    return tuple(
        Sides(
            call,
            step.source,
            number,
            Span(ranges(call.queries), size, own.index(call.queries[0])),
            _keys(step, call, size),
            pieces[number],
        )
        for number, (step, call) in enumerate(listed)
    )


def _keys(step: Step, call: Call, size: int) -> Span:
    if step.source is not None:
        return Span(ranges(call.keys), size, 0)
    return Span(ranges(call.keys), 1, call.keys[0], max(call.before, 0))


def _pieces(calls: Sequence[Call], own: tuple[int, int], packed: bool) -> list[tuple[Piece, ...]]:
    """For each call the ranges that its result goes to. Both halves are one range while they stand alike."""
    if packed:
        return [(Piece(None, i, i == len(calls) - 1),) for i in range(len(calls))]
    total = [sum(chunk in call.queries for call in calls) for chunk in own]
    done, found = [0, 0], []
    for call in calls:
        halves = [half for half in (0, 1) if own[half] in call.queries]
        made = [Piece(half, done[half], done[half] == total[half] - 1) for half in halves]
        if len({(min(piece.number, 2), piece.last) for piece in made}) < len(made):
            made = [made[0]._replace(half=None)]
        for half in halves:
            done[half] += 1
        found.append(tuple(made))
    return found


def call_spec(core: AttentionSpec, side: Sides, queries: int, keys: int, *, backward: bool = False) -> AttentionSpec:
    """What a call computes, of tensors with so many tokens in a row (thd: in all)."""
    call, packed = side.call, core.q_format == "thd"
    longest = core.max_q, core.max_kv
    if packed:  # a chunk has no more than half of a rank's tokens
        halves = len(call.queries) == 1, side.source is not None and len(call.keys) == 1
        longest = _bound(core.max_q, queries, halves[0]), _bound(core.max_kv, keys, halves[1])
    bounds = -1, 0 if call.mask == "causal" else -1
    if call.mask == "band":
        bounds = call.before, call.behind
        if not packed:  # by a band that begins top-left, which cuDNN has with all else
            shift = call.keys[0] * queries - band(call, queries, 0)[0]
            bounds = (bounds[0] - shift if bounds[0] >= 0 else -1), (bounds[1] + shift if bounds[1] >= 0 else -1)
    return replace(
        core,
        left=bounds[0],
        right=bounds[1],
        bottom_right=call.mask == "band" and packed,
        softmax="vanilla",
        max_logit=core.max_logit and not backward,
        partial=backward,
        max_q=longest[0],
        max_kv=longest[1],
    )


def attentions(core: AttentionSpec, context: Context, size: Sizes) -> list[tuple[AttentionSpec, Sizes]]:
    """All that the ranks compute forward, each kind once: what a backend has to be able to do.

    `size`: of a rank's tensors; in thd their tokens stand for its queries and keys.
    """
    parts, packed = context.heads, core.q_format == "thd"
    size = size._replace(
        sq=size.sq * parts, skv=size.skv * parts, heads=size.heads // parts, groups=max(1, size.groups // parts)
    )
    if parts > 1:
        core = replace(core, default_slopes=False)
    if context.ring == 1:
        return [(core, size._replace(sq=core.max_q, skv=core.max_kv) if packed else size)]
    found: dict[tuple[AttentionSpec, Sizes], None] = {}
    for rank in range(0, context.size, parts):
        for side in planned(context, rank, (core.left, core.right), packed)[1]:
            queries, keys = _call_tokens(side, context, size, packed)
            spec = call_spec(core, side, queries, keys)
            found[spec, size._replace(sq=spec.max_q or queries, skv=spec.max_kv or keys)] = None
    return [*found]


def _call_tokens(side: Sides, context: Context, size: Sizes, packed: bool) -> tuple[int, int]:
    """The tokens of a call's queries and keys in a row, of a rank with so many."""
    call, gathered = side.call, side.source is None
    if packed:
        return size.sq, size.skv * (context.ring if gathered else 1)
    if gathered:
        start, stop = band(call, size.skv // 2, size.skv * context.ring)
        return size.sq // 2 * len(call.queries), stop - start
    return size.sq // 2 * len(call.queries), size.skv // 2 * len(call.keys)


def _bound(longest: int, tokens: int, half: bool) -> int:
    """How long the parts of packed sequences are at most. A padded one may be longer than the longest real one."""
    return max(1, min(longest, tokens // 2 if half else tokens))


def band(call: Call, chunk: int, total: int) -> tuple[int, int]:
    """The first key of a call in sequence order, and the one behind its last."""
    start, stop = call.keys[0] * chunk, (call.keys[-1] + 1) * chunk
    if call.mask == "band":
        start = max(0, start - call.before) if call.before >= 0 else 0
        stop = min(total, stop + call.behind) if call.behind >= 0 else total
    return start, stop
