"""What to tell the user whose ranks do not agree on what they reduce (te_torch.amax_reduction)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WHAT = ("the end of a region", "the end of a backward pass")
_SHOWN = 3  # names of a kind


class Entry(NamedTuple):
    """One state of a reduction: its module's name in the model, and what its scales are made of."""

    name: str
    rule: str


class Report(NamedTuple):
    """What a rank came to a reduction with."""

    rank: int
    direction: int
    abandoned: int  # regions that an exception ended
    entries: tuple[Entry, ...]


def told(
    mine: Report, all_ranks: Sequence[Report] | None, least: Sequence[float], most: Sequence[float], late: int
) -> tuple[str, str, str]:
    """What came, what is allowed, what to do.

    `least` and `most` are what the ranks had: direction, modules, regions abandoned. The reports are there where all
    ranks looked at once. `late` is how many reductions ago it was.
    """
    theirs = next((r for r in all_ranks or () if r[1:] != mine[1:]), None)
    here, kind = f"rank {mine.rank}", "out of step"
    if least[0] != most[0]:
        other = f"another rank at {WHAT[1 - mine.direction]}"
        if theirs is not None:
            other = f"rank {theirs.rank} at {WHAT[theirs.direction]} of {_some(theirs)}"
        what = f"{here} is at {WHAT[mine.direction]} of {_some(mine)}, {other}"
    elif least[2] != most[2]:
        other = f"{least[2]:.0f} to {most[2]:.0f} on all"
        if theirs is not None:
            other = f"{theirs.abandoned} on rank {theirs.rank}"
        what = f"exceptions have ended {mine.abandoned} regions on {here}, {other}"
    elif theirs is None:
        kind, other = "modules", f"the ranks ran {least[1]:.0f} to {most[1]:.0f} modules"
        if least[1] == most[1]:
            other = "the others as many, but not the same, or in another order, or under another rule"
        what = f"{here} ran {_some(mine)}; {other}"
    else:
        kind, what = _modules(mine, theirs)
    got, allowed, do = _KINDS[kind]
    if late:
        got += f", {late} reduction{'s' * (late > 1)} ago"
        do += "; then load a checkpoint, or call reset_fp8_meta_tensors(): histories hold maxima of other modules"
    return f"{got} ({what})", allowed, do


_KINDS = {
    "out of step": (
        "ranks of a group that are out of step",
        "the same regions and backward passes on all ranks, in the same order",
        "look for the rank that leaves out one, adds one, or goes on after an exception of its own",
    ),
    "modules": (
        "ranks of a group that ran different modules since the last update",
        "the same modules on all ranks",
        "pass the group of the ranks that run the same ones as amax_reduction_group, or use reduce_amax=False; "
        "modules that are in no model go by their name=, or else by the order of their making",
    ),
    "order": (
        "ranks of a group that ran their modules in different orders",
        "one order on all ranks",
        "call the modules in the same order everywhere; names are by first use where models look alike",
    ),
    "recipe": (
        "ranks of a group that ran a module under different rules",
        "one recipe and history length on all ranks",
        "give all ranks the same recipe, and the same adjust_amax_history_length",
    ),
}


def _modules(mine: Report, theirs: Report) -> tuple[str, str]:
    here, there = {e.name: e.rule for e in mine.entries}, {e.name: e.rule for e in theirs.entries}
    alone = ((mine.rank, [n for n in here if n not in there]), (theirs.rank, [n for n in there if n not in here]))
    if any(names for _, names in alone):
        return "modules", "; ".join(f"rank {rank} alone ran {_names(names)}" for rank, names in alone if names)
    for name, rule in here.items():
        if rule != there[name]:
            return "recipe", f"{name}: {rule} on rank {mine.rank}; {there[name]} on rank {theirs.rank}"
    place, a, b = next((i, a, b) for i, (a, b) in enumerate(zip(here, there, strict=True), 1) if a != b)
    return "order", f"as number {place} {a} on rank {mine.rank}, {b} on rank {theirs.rank}"


def _some(report: Report) -> str:
    return _names([e.name for e in report.entries])


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
