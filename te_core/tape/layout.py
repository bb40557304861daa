"""When a tape takes its memory, and when it lets go of it.

Memory is taken before the first step that reads or writes it, and let go of behind the last; what the result holds
stays. Small temporaries lie in one block, side by side while they live together, where that takes no more bytes at the
peak than the layer itself took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.symbols import Patch
from te_core.tape.tape import Drop, Slot, Step, Take

#: Temporaries up to this many bytes may share the block, and the block has no more.
_SMALL, _BLOCK = 1 << 18, 1 << 20
#: Places in the block are multiples of this: of what every kernel's alignment may ask for.
_STEP = 256
#: What an allocator rounds up to: how bytes are counted here.
_ROUND = 512

Lives = dict[int, tuple[int, int]]  # of memory, by slot: its first step, and the one behind its last


class Places(NamedTuple):
    """A tape's slots and steps, takes and drops among them."""

    slots: list[Slot]
    steps: list[Any]
    peak: int


def laid_out(
    slots: Sequence[Slot],
    steps: Sequence[Step],
    interpreted: tuple[dict[int, int], dict[int, int]],
    kept: set[int],
    released: frozenset[int],
    alignment: int,
) -> Places:
    """The steps with takes and drops. `interpreted`: before which steps the layer took and let go of memory."""
    uses: Lives = {}
    for i, step in enumerate(steps):
        for patch in step.patches:
            first, _ = uses.get(patch.slot, (i, i))
            uses[patch.slot] = first, i + 1
    end = len(steps)
    lives: Lives = {}
    for i, slot in enumerate(slots):
        if slot.kind == "memory" and (i in uses or i in kept):
            first, last = uses.get(i, (end, end))
            lives[i] = first, end + 1 if i in kept else last
    begins, ends = interpreted
    before = {i: (begins[i], end + 1 if i in kept else ends.get(i, end)) for i in begins}
    size = {i: slots[i].nbytes for i in before}
    limit = _peak(before, size)
    places, block = _shared(lives, size, kept)
    if block:
        where = len(slots)
        alone = {i: life for i, life in lives.items() if i not in places}
        alone[where] = min(lives[i][0] for i in places), max(lives[i][1] for i in places)
        if _peak(alone, {**size, where: block}) <= limit:
            slots = [*slots, Slot("memory", "temporaries", (block,), dtypes.uint8, block, 0)]
            steps = [_moved(step, places, where) for step in steps]
            lives, size = alone, {**size, where: block}
    final: list[Any] = []
    for i in range(end + 1):
        final += [Take(s, slots[s].shape, slots[s].dtype, alignment) for s, life in lives.items() if life[0] == i]
        if i < end:
            final.append(steps[i])
            final += [Drop(s, False) for s, life in lives.items() if life[1] == i + 1 and s not in kept]
            final += [Drop(s, True) for s in released if s in uses and uses[s][1] == i + 1]
    return Places(list(slots), final, _peak(lives, size))


def _peak(lives: Lives, size: dict[int, int]) -> int:
    """The most bytes that live at once."""
    changes: dict[int, int] = {}
    for slot, (first, last) in lives.items():
        nbytes = -(-max(size[slot], 1) // _ROUND) * _ROUND
        changes[2 * first + 1] = changes.get(2 * first + 1, 0) + nbytes
        changes[2 * max(last, first + 1)] = changes.get(2 * max(last, first + 1), 0) - nbytes
    most = now = 0
    for moment in sorted(changes):
        now += changes[moment]
        most = max(most, now)
    return most


def _shared(lives: Lives, size: dict[int, int], kept: set[int]) -> tuple[dict[int, int], int]:
    """(where each small temporary lies in the block, the block's bytes); none if there are less than two."""
    small = [i for i in lives if i not in kept and size[i] <= _SMALL]
    places: dict[int, int] = {}
    block = 0
    for i in sorted(small, key=lambda i: -size[i]):
        (first, last), nbytes = lives[i], -(-max(size[i], 1) // _STEP) * _STEP
        beside = sorted(
            (places[j], places[j] + -(-max(size[j], 1) // _STEP) * _STEP)
            for j in places
            if lives[j][0] < last and first < lives[j][1]
        )
        at = 0
        for begin, stop in beside:
            if begin - at >= nbytes:
                break
            at = max(at, stop)
        if at + nbytes <= _BLOCK:
            places[i] = at
            block = max(block, at + nbytes)
    return (places, block) if len(places) > 1 else ({}, 0)


def _moved(step: Step, places: dict[int, int], block: int) -> Step:
    """The step with the temporaries in their block."""
    if any(patch.slot in places for patch in step.patches):
        step.patches = tuple(  # type: ignore[misc]
            Patch(p.number, block, p.offset + places[p.slot]) if p.slot in places else p for p in step.patches
        )
    return step
