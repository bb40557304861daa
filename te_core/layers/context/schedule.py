"""Who attends to what, and when, where sequences lie cut over ranks: plain data, known before anything runs.

Each sequence is cut into 2 * size chunks; rank r holds chunk r, then chunk 2 * size - 1 - r: so all ranks have the same
work under a causal mask. A `Schedule` is one rank's: its steps, in each of which keys have arrived, and the calls of
attention on them. Every (query, key) pair that the mask lets be seen stands in one call of one rank.

    p2p         K|V go round the ring. Step 0: the rank's own tokens; step i: the keys of rank r - i.
    all_gather  Step 0: the rank's own tokens, while all K|V are gathered; step 1: the others, in sequence order.
                With a window: step 1 alone, a band of keys for each chunk.
    a2a         Heads go to ranks: each has some heads of the whole sequence.
    a2a+p2p     a2a among `inner` ranks that follow one another; rings over the groups, whose "chunks" are runs of
                `inner` chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from te_core.attention import AttentionSpec

MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True, slots=True)
class Context:
    """How sequences lie cut over ranks, and how these attend to the whole."""

    mode: str  # of MODES
    size: int  # ranks
    inner: int = 1  # a2a+p2p: how many of them exchange heads; the others make the ring
    stream: str = ""  # p2p: the second stream of neighbouring steps, as `Runtime.side` knows it

    @property
    def heads(self) -> int:
        """Over how many ranks the heads are spread."""
        return self.size if self.mode == "a2a" else self.inner

    @property
    def ring(self) -> int:
        """Over how many ranks, or groups of them, a sequence stays cut while it is attended to."""
        return self.size // self.heads


class Call(NamedTuple):
    """One attention: some chunks of queries, some chunks of keys, each in the order of the sequence."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    mask: str  # "full"; "causal": both begin with the same token; "band": the keys around one chunk of queries
    before: int = 0  # band: so many tokens in front of the keys' chunk are keys, too; -1: all of them
    behind: int = 0  # and so many behind it


class Step(NamedTuple):
    """Calls on keys that have arrived."""

    source: int | None  # the rank, in its ring, whose keys these are; None: keys of several ranks
    calls: tuple[Call, ...]


class Transfer(NamedTuple):
    """What a rank hands over at once."""

    operation: str
    what: str
    nbytes: int


class Load(NamedTuple):
    """What lies on a rank: its tokens (batch included), its heads, and the bytes of an element that travels."""

    q_tokens: int
    kv_tokens: int
    heads: int
    groups: int
    d_qk: int
    d_v: int
    itemsize: int = 2

    @property
    def q(self) -> int:
        """Elements of q."""
        return self.q_tokens * self.heads * self.d_qk

    @property
    def out(self) -> int:
        """Elements of the output."""
        return self.q_tokens * self.heads * self.d_v

    @property
    def kv(self) -> int:
        """Elements of k and v."""
        return self.kv_tokens * self.groups * (self.d_qk + self.d_v)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part of an attention."""

    context: Context
    rank: int
    steps: tuple[Step, ...]

    def transfers(self, load: Load, backward: bool = False) -> list[Transfer]:
        """All that this rank hands over, in order. (Besides: maxima.)"""
        found = list(_inside(self.context, load, backward))
        middle = len(found) // 2
        return [*found[:middle], *_around(self.context, load, backward), *found[middle:]]

    def explain(self, load: Load) -> str:
        """Steps, calls and bytes in words; of backward what it hands over besides."""
        parts, forward = self.context.heads, self.transfers(load)
        around = [t for t in forward if t.operation != "all_to_all"]
        lines = [f"{self.context.mode} over {self.context.size} ranks, rank {self.rank}"]
        if parts > 1:
            lines[0] += f": 1 of {parts} parts of the heads, in chunks of {parts} chunks"
            lines.append(f"  before: {_bytes(forward[0])}")
        for number, step in enumerate(self.steps):
            source = "" if step.source is None else f": keys of {'group' if parts > 1 else 'rank'} {step.source}"
            meanwhile = f"; meanwhile {_bytes(around[number])}" if number < len(around) else ""
            lines.append(f"  step {number}{source}{meanwhile}")
            lines += [f"    {_said(call)}" for call in step.calls]
        if parts > 1:
            lines.append(f"  behind: {_bytes(forward[-1])}")
        back = Counter(self.transfers(load, backward=True))
        lines.append(f"  backward: {', '.join(f'{count} x {_bytes(t)}' for t, count in back.items()) or 'nothing'}")
        return "\n".join(lines)


def _bytes(t: Transfer) -> str:
    return f"{t.operation} of {t.what}: {t.nbytes} bytes"


def schedule(context: Context, rank: int, spec: AttentionSpec) -> Schedule:
    """The schedule of a rank. Masks and windows are the spec's; keys are as many as queries where it has either."""
    size, place = context.ring, rank // context.heads
    window = (spec.left, spec.right) if spec.windowed else None
    if context.mode == "all_gather":
        steps = _gathered(size, place, spec.causal, window)
    elif size == 1:
        mask = "band" if window else "causal" if spec.causal else "full"
        chunks = tuple(range(2))
        steps = [Step(None, (Call(chunks, chunks, mask, *(window or (0, 0))),))]
    else:
        steps = [Step((place - i) % size, (_met(size, place, (place - i) % size, spec.causal),)) for i in range(size)]
    return Schedule(context, rank, tuple(steps))


def chunks_of(size: int, rank: int) -> tuple[int, int]:
    """The chunks that a rank holds."""
    return rank, 2 * size - 1 - rank


def _met(size: int, rank: int, source: int, causal: bool) -> Call:
    """What a rank of a ring does with the keys of another one, or with its own."""
    own, theirs = chunks_of(size, rank), chunks_of(size, source)
    if not causal:
        return Call(own, theirs, "full")
    if source == rank:
        return Call(own, own, "causal")
    return Call(own, theirs[:1], "full") if source < rank else Call(own[1:], theirs, "full")


def _gathered(size: int, rank: int, causal: bool, window: tuple[int, int] | None) -> list[Step]:
    """The steps of all_gather."""
    first, second = chunks_of(size, rank)
    if window is not None:
        left, right = window
        calls = [Call((chunk,), (chunk,), "band", left, right) for chunk in (first, second)]
        return [Step(rank, ()), Step(None, tuple(calls))]
    both = (first, second)
    others = [(both, range(first)), ((second,) if causal else both, range(first + 1, second))]
    if not causal:
        others.append((both, range(second + 1, 2 * size)))
    calls = [Call(queries, tuple(keys), "full") for queries, keys in others if keys]
    return [Step(rank, (Call(both, both, "causal" if causal else "full"),)), Step(None, tuple(calls))]


def _said(call: Call) -> str:
    """A call in words."""
    queries, keys = (
        " and ".join(f"{start}" if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in ranges(chunks))
        for chunks in (call.queries, call.keys)
    )
    if call.mask != "band":
        return f"queries {queries} x keys {keys}, {call.mask}"
    sides = ("all" if n < 0 else f"{n}" for n in (call.before, call.behind))
    return f"queries {queries} x keys {keys}, {' before and '.join(sides)} behind each query"


def ranges(chunks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Chunks that follow one another, as ranges."""
    found: list[tuple[int, int]] = []
    for chunk in chunks:
        if found and found[-1][1] == chunk:
            found[-1] = found[-1][0], chunk + 1
        else:
            found.append((chunk, chunk + 1))
    return tuple(found)


# ------------------------------------------------------------------------------------------------ what travels


def _inside(context: Context, load: Load, backward: bool) -> Iterator[Transfer]:
    """What goes from heads to ranks, and back: before and after all else."""
    parts = context.heads
    if parts == 1:
        return
    shared = max(1, parts // load.groups)  # a group may go to several ranks
    q, out, kv = load.q * load.itemsize, load.out * load.itemsize, load.kv * shared * load.itemsize
    if backward:
        yield Transfer("all_to_all", "the gradient of the output", out)
        yield Transfer("all_to_all", "the gradients of q, k and v", q + kv)
    else:
        yield Transfer("all_to_all", "q, k and v", q + kv)
        yield Transfer("all_to_all", "the output", out)


def _around(context: Context, load: Load, backward: bool) -> Iterator[Transfer]:
    """What goes round a ring, or is gathered."""
    size = context.ring
    if size == 1:
        return
    kv, grads = load.kv * load.itemsize, load.kv * gradient_bytes(size, load.itemsize)
    if context.mode == "all_gather":
        yield Transfer("all_gather", "k and v", kv)
        if backward:
            yield Transfer("reduce_scatter", "the gradients of k and v", size * grads)
        return
    for i in range(size - 1):
        yield Transfer("send_recv", "k and v", kv)
        if backward and i:
            yield Transfer("send_recv", "the gradients of k and v", grads)
    if backward:
        yield Transfer("send_recv", "the gradients of k and v", grads)


def gradient_bytes(size: int, itemsize: int) -> int:
    """The bytes of an element of dK|dV on its way: of two ranks, one partial sum each way; else float32, so that the
    error does not grow with the ranks."""
    return itemsize if size == 2 else 4
