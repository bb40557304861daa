"""The players of recorded calls (TE_CORE_PLAYER) in one process, in turns: host times, peak memory, the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import attention, harness, modules
from benchmarks.modules import Case, build
from benchmarks.replay import REPLAYED, restored, results, same_bits
from te_core import c_library
from te_core.tape import taped
from te_core.tape.tape import Tape

PLAYERS = ("python", "c")
RECIPES = ("bf16", "delayed", "current")
VARIABLE = "TE_CORE_PLAYER"
CALLS = 300
SMALL = [attention.TINY[0], *(case for case in modules.TINY if case.name.startswith(("Linear", "LayerNormMLP")))]
LARGE = attention.LARGE[0]
IN_A_ROW = 3  # of a large layer: a stream takes no more launches ahead of the GPU


class Turns:
    """Which player replays. Each finds what it bound again."""

    def __init__(self) -> None:
        self._player = ""
        self._bound: dict[tuple[str, Tape], Any] = {}

    def begin(self, number: int) -> None:
        """For `harness.host_us`."""
        before, self._player = self._player, PLAYERS[number]
        os.environ[VARIABLE] = self._player
        for tape in taped.tapes():
            self._bound[before, tape] = tape._bound
            tape._bound = self._bound.get((self._player, tape), {})


@contextmanager
def turns() -> Iterator[Turns]:
    """Leave the player as it was, and no tapes."""
    was = os.environ.get(VARIABLE)
    try:
        with restored():
            taped.set_when(REPLAYED)
            yield Turns()
    finally:
        os.environ.pop(VARIABLE, None)
        os.environ.update({} if was is None else {VARIABLE: was})


def row(case: Case, recipe: str, calls: int) -> harness.Row:
    """A module's host times and peaks by each player."""
    found: harness.Row = {"case": case.name, "recipe": recipe}
    with turns() as each:
        for what, work in zip(("fwd", "fwd+bwd"), build(case, recipe), strict=True):
            python, c = harness.host_us(work, work, calls=calls, turn=each.begin)
            found |= {f"python {what} us": python, f"c {what} us": c, f"of_python {what}": c / python}
        for number, player in enumerate(PLAYERS):
            each.begin(number)
            found[f"{player} peak MiB"] = harness.peak_mib(work)
    harness.free()
    return found


def bits_row(case: Case, recipe: str) -> harness.Row:
    """Whether both give the same bits."""
    found = []
    for number in range(len(PLAYERS)):
        with turns() as each:
            each.begin(number)
            found.append(results(case, recipe, REPLAYED))
    equal = same_bits(*found)
    return {"case": f"same bits: {case.name}", "recipe": recipe, "equal": equal, "ok": equal}


def measure() -> list[harness.Row]:
    """All of it."""
    c_library.library("te_stretch_play")  # or all would be in vain
    rows = [row(case, recipe, CALLS) for case in SMALL for recipe in RECIPES]
    rows += [bits_row(case, recipe) for case in SMALL[1:] for recipe in RECIPES]
    return rows + [row(LARGE, recipe, IN_A_ROW * harness.HOST_ROUNDS) for recipe in RECIPES[:2]]
