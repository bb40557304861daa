"""A call of a layer that was replayed before, replayed on torch's tensors as they are.

The core's way makes a view of each tensor, asks it what a recording depends on, and makes views of the results. Here
the tensors are asked themselves, and addresses are all that goes in. What is not plain (a quantized tensor, one that
is not dense, one that is aligned to less than plans look at) goes the core's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import attrgetter, itemgetter, or_
from typing import Any

import torch

from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tape.tape import Tape
from te_core.tape.taped import Shortcut, Taped
from te_core.tape.walk import NotRecordedError, facts_of_scales

_NOT_THERE = type(None)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, _NOT_THERE))
#: By the types of a call's arguments, met before: what chooses those that are there; False if not all are plain.
_present: dict[tuple[type, ...], Any] = {}
# What a call asks of its tensors, each in one call in C for all of them.
_address_of, _is_dense = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_facts_of = attrgetter("shape", "dtype", "device")


#: A call's key, how such calls are replayed (None: not known yet), the addresses of its tensors, and what holds these.
Found = tuple[tuple[Any, ...], "Shortcut | None", list[Any], list[Any]]


def find(
    function: Taped, rt: Runtime, tensors: Sequence[torch.Tensor | None], scales: Scales | None, release: bool = False
) -> Found | None:
    """What is known of this call; None where it is not to be replayed, or not as it is.

    Tensors as the function takes them; with `release` it frees what it was given to keep.
    """
    if (taped._when or taped.when()) == "never":
        return None
    kinds = tuple(map(type, tensors))
    present = _present.get(kinds)
    if present is None:
        present = _present[kinds] = _chosen([i for i, kind in enumerate(kinds) if kind is not _NOT_THERE], kinds)
    if not present:
        return None
    there = present(tensors)
    at: list[Any] = list(map(_address_of, there))
    # An address of 0: nothing is in it, or it is a tensor without memory.
    if 0 in at or not all(map(_is_dense, there)):
        return None
    bits = reduce(or_, at)
    held: list[Any] = [*there]
    parts = "torch", function.number, rt.device, rt.joins, rt.alignment, release, kinds, *map(_facts_of, there), None
    if scales is not None:
        try:
            facts = facts_of_scales(scales, rt.device)
        except NotRecordedError:  # a state on another device: what the core says of it
            return None
        parts = *parts, facts.number
        at += facts.at
        held += facts.tensors
        bits |= facts.bits
    if bits & (taped.ALIGNED - 1) and rt.allocator.where >= 0:  # type: ignore[attr-defined]
        return None
    shortcut = taped.shortcut(parts)
    return None if shortcut is not None and shortcut.tape is None else (parts, shortcut, at, held)


def _chosen(where: list[int], kinds: tuple[type, ...]) -> Any:
    if not _PLAIN.issuperset(kinds):
        return False
    return itemgetter(*where) if len(where) > 1 else lambda tensors: [tensors[i] for i in where]


class _Made:
    """What a replay's memory is to be returned as: what chooses it, and of what the shape is another one."""

    __slots__ = ("choose", "others")

    def __init__(self, leaves: Sequence[Any], tape: Tape) -> None:
        self.choose = _chosen([leaf[0] if leaf else -1 for leaf in leaves], ())  # the last one held is None
        self.others = [
            (i, *leaf) for i, leaf in enumerate(leaves) if leaf and tuple(leaf[1]) != tuple(tape.slots[leaf[0]].shape)
        ]


def forward(
    shortcut: Shortcut, rt: Runtime, at: list[Any], held: list[Any]
) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor | None]]:
    """(outputs, what is saved). Outputs are tensors of their shape, not views, which nobody could change in place."""
    shortcut.replay(rt, at, held)
    made = shortcut.made
    if made is None:
        made = shortcut.made = [_Made(leaves, shortcut.tape) for leaves in shortcut.plain]  # type: ignore[arg-type]
    outputs, saved = made
    for _, slot, shape in outputs.others:
        held[slot].resize_(shape)
    held.append(None)
    return tuple(outputs.choose(held)), saved.choose(held)


def backward(shortcut: Shortcut, rt: Runtime, at: list[Any], held: list[Any]) -> Sequence[torch.Tensor | None]:
    """The gradients. One for two inputs is one tensor twice."""
    shortcut.replay(rt, at, held)
    made = shortcut.made
    if made is None:
        made = shortcut.made = _Made(shortcut.plain, shortcut.tape)  # type: ignore[arg-type]
    held.append(None)
    found: Sequence[torch.Tensor | None] = made.choose(held)
    if made.others:
        found = [*found]
        for i, slot, shape in made.others:
            found[i] = held[slot].view(shape)
    return found
