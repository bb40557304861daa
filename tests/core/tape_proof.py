"""Two runs of a layer on a machine that is not there, one interpreted and one replayed: what each step was given, and
whether it is the same.

Addresses differ, so blocks of memory are matched: what one run calls a block is in the other a block, or a piece of
the one that small temporaries share, always the same, at equal offsets, and beside all that lives with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, NamedTuple

from te_core.layers.linear import Sink
from te_core.quantize.state import Scales
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tape.taped import FAILED, Taped
from te_core.tensor import Tensor
from tests.core.fake_cuda import Event, Machine, Place


class Call(NamedTuple):
    """A call of a layer's function."""

    name: str
    function: Callable[..., Any]
    spec: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


class Round(NamedTuple):
    """A forward, and the backward of what it gave."""

    forward: Call
    backward: Callable[[Any, Any], Call] | None


@dataclass
class Done:
    """A call that was made: what it was given, what ran, and what came of it."""

    call: Call
    given: list[tuple[str, Place | None]]  # each tensor of the arguments: its path, where it lay
    behind: list[tuple[str, Any]]  # the arguments when it was over
    events: list[Event]
    result: Any
    found: list[tuple[str, Any, Place | None]]  # each tensor of the result
    asked: dict[str, int]  # bytes of scratch memory
    peak: int  # bytes above those that were alive before
    left: int  # bytes alive behind it
    sizes: dict[int, int]  # of all blocks, by serial
    count: taped.Counts = field(default_factory=taped.Counts)


_NO_TENSORS = ("owner", "casts", "facts", "queue", "dtype", "format", "shape", "accumulate")


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The tensors in what layers take and give, each with its path; None stands for itself."""
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", range(len(value)))
        return [leaf for name, part in zip(names, value, strict=True) for leaf in leaves(part, f"{path}.{name}")]
    if isinstance(value, dict):
        return [leaf for name, part in value.items() for leaf in leaves(part, f"{path}.{name}")]
    if isinstance(value, (QuantizedTensor, Scales, Sink)):
        parts = {name: getattr(value, name) for name in type(value).__slots__ if name not in _NO_TENSORS}
        return [(f"{path} {type(value).__name__}", value), *leaves(parts, path)]
    return [(path, value)]


def made(machine: Machine, rt: Runtime, tape: Taped, call: Call, setting: str) -> Done:
    """Make a call."""
    arena = machine.arena
    given = [(path, place) for path, _, place in placed(machine, (call.args, call.options))]
    before = arena.peak = arena.bytes
    counts = taped.COUNTS = taped.Counts()
    taped.set_when(setting)
    with machine.noting() as events:
        result = tape(rt, *call.args, **call.options)
    asked = {name: nbytes for (thread, name), nbytes in machine.asked.copy().items() if thread == get_ident()}
    peak, left = arena.peak - before, arena.bytes - before
    found = placed(machine, result)
    for path, t, place in found:
        owner = getattr(t.memory, "ptr", None) if place is not None else None  # None: the caller's own
        assert owner is None or machine.place(owner) == place._replace(offset=0), (call.name, path, "another's owner")  # type: ignore[union-attr]
    behind = leaves((call.args, call.options))
    return Done(call, given, behind, events, result, found, asked, peak, left, arena.sizes, counts)


def placed(machine: Machine, value: Any) -> list[tuple[str, Any, Place | None]]:
    """Its tensors, and where each lies: its memory is alive."""
    return [(p, t, machine.place(t.ptr) if isinstance(t, Tensor) and t.size else None) for p, t in leaves(value)]


class Tapes:
    """The functions of a case, which both kinds of runs call."""

    def __init__(self) -> None:
        self._made: dict[str, Taped] = {}

    def of(self, call: Call) -> Taped:
        """That of a call."""
        found = self._made.get(call.name)
        if found is None:
            found = self._made[call.name] = Taped(call.name, call.function, call.spec)
        return found


def run(machine: Machine, rt: Runtime, tapes: Tapes, build: Callable[[Runtime], Round], setting: str) -> list[Done]:
    """The calls of a round."""
    begins = build(rt)
    done = [made(machine, rt, tapes.of(begins.forward), begins.forward, setting)]
    if begins.backward is not None:
        outputs, saved = done[0].result
        call = begins.backward(outputs, saved)
        done.append(made(machine, rt, tapes.of(call), call, setting))
    for path, t in leaves(begins.forward.args):
        assert not isinstance(t, Tensor) or t.owner is not None, (path, "let go of, and the caller's own")
    return done


def proved(machine: Machine, build: Callable[[Runtime], Round], reason: str = "") -> None:
    """Interpreted and replayed runs are the same, from two sets of bases, and nothing of either stays.

    `reason`: why nothing can be recorded, if nothing can.
    """
    before = machine.kept()
    _prove(machine, build, reason)
    assert machine.kept() == before, "memory of a call is held behind it"
    assert not machine.faults, machine.faults[:5]


def _prove(machine: Machine, build: Callable[[Runtime], Round], reason: str) -> None:
    tapes = Tapes()
    rt = machine.runtime()
    run(machine, rt, tapes, build, "never")  # makes plans and scratch memory
    interpreted = run(machine, rt, tapes, build, "never")
    for recorded in (not reason, False):
        machine.elsewhere()
        rt = machine.runtime()
        cold = run(machine, rt, tapes, build, "first")
        for one, other in zip(interpreted, cold, strict=True):
            went_as(other, recorded, reason)
            compare(one, without_scratch(other, one))
        del other, cold
    warm = run(machine, rt, tapes, build, "first")
    for one, other in zip(interpreted, warm, strict=True):
        went_as(other, False, reason)
        compare(one, other)


def went_as(done: Done, recorded: bool, reason: str) -> None:
    """A call was replayed, or not for this reason."""
    failed = [text for text in done.count.interpreted if text.startswith(FAILED)]
    assert not failed, (done.call.name, failed)
    wanted = taped.Counts(0, 0, Counter((reason,))) if reason else taped.Counts(1, int(recorded))
    assert done.count == wanted, (done.call.name, done.count)


def without_scratch(done: Done, like: Done) -> Done:
    """A runtime's first call as a later one: without the making of scratch memory, which begins as zeros where that is
    wanted."""
    events, used = [], set()
    for event in done.events:
        scratch = {place.scratch for _, place in event.places if place is not None and place.scratch}
        if event.kind == "fill" and scratch:
            assert not scratch & used, (done.call.name, scratch, "filled when it is in use")
        else:
            used |= scratch
            events.append(event)
    return replace(done, events=events, peak=like.peak, left=like.left)


# ------------------------------------------------------------------------------------------------------ comparing


class Piece(NamedTuple):
    """Where a block of the one run lies in the other, and when it is used there."""

    block: int
    offset: int
    nbytes: int


class Matching:
    """Which block of the one run is which of the other."""

    def __init__(self, one: Done, other: Done) -> None:
        self.one, self.other = one, other
        self.pieces: dict[int, Piece] = {}  # by the one run's block
        self.uses: dict[int, list[int]] = {}  # of that block: the moments
        self.kept: set[int] = set()  # blocks of the other run that nothing else may lie in: of the caller, of results

    def match(self, a: Place | None, b: Place | None, where: Any, moment: int) -> None:
        """Two addresses mean the same."""
        assert (a is None) == (b is None), (where, a, b)
        if a is None or b is None:
            return
        assert a.scratch == b.scratch, (where, a, b)
        if a.scratch:
            assert a.offset == b.offset, (where, a, b)
            return
        piece = self.pieces.get(a.serial)
        if piece is None:
            piece = Piece(b.serial, b.offset - a.offset, self.one.sizes[a.serial])
            self.pieces[a.serial] = piece
            assert 0 <= piece.offset and piece.offset + piece.nbytes <= self.other.sizes[b.serial], (where, piece)
        assert (b.serial, b.offset - a.offset) == piece[:2], (where, a, b, piece)
        self.uses.setdefault(a.serial, []).append(moment)

    def keep(self, a: Place | None) -> None:
        """Nothing shares the block."""
        if a is not None and not a.scratch:
            self.kept.add(self.pieces[a.serial].block)

    def finish(self) -> None:
        """No two blocks lie in the same bytes at the same time."""
        shared: dict[int, list[tuple[Piece, int, int]]] = {}
        for serial, piece in self.pieces.items():
            moments = self.uses[serial]
            shared.setdefault(piece.block, []).append((piece, min(moments), max(moments)))
        for block, members in shared.items():
            if block in self.kept:
                piece = members[0][0]
                assert len(members) == 1 and piece.offset == 0 and piece.nbytes == self.other.sizes[block], (
                    "not alone",
                    piece,
                )
            for i, (p, begin, end) in enumerate(members):
                for q, first, last in members[:i]:
                    apart = p.offset + p.nbytes <= q.offset or q.offset + q.nbytes <= p.offset
                    assert apart or end < first or last < begin, (self.one.call.name, "overlap", p, q)


def compare(one: Done, other: Done) -> None:
    """What ran is the same, step by step, on memory that is the same."""
    name = one.call.name
    matching = Matching(one, other)
    assert [path for path, _ in one.given] == [path for path, _ in other.given]
    for (path, a), (_, b) in zip(one.given, other.given, strict=True):
        matching.match(a, b, (name, path), 0)
    for _, a in one.given:
        matching.keep(a)
    assert [e.kind for e in one.events] == [e.kind for e in other.events], name
    for moment, (e, f) in enumerate(zip(one.events, other.events, strict=True), 1):
        assert (e.what, e.stream, e.context) == (f.what, f.stream, f.context), (name, moment)
        for (label, a), (also, b) in zip(e.places, f.places, strict=True):
            assert label == also
            matching.match(a, b, (name, moment, e.kind, label), moment)
    gone = [[path for path, t in d.behind if t is None or getattr(t, "owner", t) is None] for d in (one, other)]
    assert gone[0] == gone[1], (name, "what the caller gave and has not any more", *gone)
    _compare_results(matching)
    matching.finish()
    assert all(other.asked.get(scratch, 0) >= nbytes for scratch, nbytes in one.asked.items()), (one.asked, other.asked)
    assert other.peak <= one.peak, (name, "peak", other.peak, one.peak)
    assert other.left == one.left, (name, "left", other.left, one.left)


def _compare_results(matching: Matching) -> None:
    one, other = matching.one, matching.other
    name, end = one.call.name, len(one.events) + 1
    left, right = one.found, other.found
    assert [path for path, *_ in left] == [path for path, *_ in right], name
    inputs = [{id(t): i for i, (_, t) in reversed(list(enumerate(d.behind)))} for d in (one, other)]
    seen: list[dict[int, int]] = [{}, {}]
    for i, ((path, a, at), (_, b, there)) in enumerate(zip(left, right, strict=True)):
        where = (name, path)
        assert type(a) is type(b), (where, a, b)
        for t, known, met in zip((a, b), inputs, seen, strict=True):
            met.setdefault(id(t), i)
            known.setdefault(id(None), -1)
        if a is None:
            continue
        # The caller's own objects come back as themselves, and one object in two places is one in both runs.
        assert inputs[0].get(id(a)) == inputs[1].get(id(b)) and seen[0][id(a)] == seen[1][id(b)], (where, "identity")
        if isinstance(a, QuantizedTensor):
            assert (a.format, a.shape, a.owner is None) == (b.format, b.shape, b.owner is None), where
        if isinstance(a, Tensor):
            facts = [(t.shape, t.dtype, t.device, t.strides) for t in (a, b)]
            assert facts[0] == facts[1], (where, facts)
            matching.match(at, there, where, end)
            matching.keep(at)
