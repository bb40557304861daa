"""A call of a layer that was replayed before, replayed on torch's tensors as they are.

The core's way makes a view of each tensor, asks it what a recording depends on, and makes views of the results. Here
the tensors are asked themselves, and addresses are all that goes in. What is not plain (a quantized tensor, one that
is not dense, one that is aligned to less than plans look at) goes the core's way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import attrgetter, or_
from typing import Any

import torch

from te_core.quantize.state import Scales
from te_core.runtime import Runtime
from te_core.tape import taped
from te_core.tape.taped import Shortcut, Taped
from te_core.tape.walk import NotRecordedError, facts_of_scales

_NOT_THERE = type(None)
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, _NOT_THERE))
#: Which arguments are there and of what type, met before, and whether all are plain.
_plain: dict[tuple[type, ...], bool] = {}
# What a call asks of its tensors, each in one call in C for all of them.
_address_of, _device_of, _is_dense = torch.Tensor.data_ptr, torch.Tensor.get_device, torch.Tensor.is_contiguous
_facts_of = attrgetter("shape", "dtype")


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
    plain = _plain.get(kinds)
    if plain is None:
        plain = _plain[kinds] = _PLAIN.issuperset(kinds)
    if not plain:
        return None
    there = [t for t in tensors if t is not None] if _NOT_THERE in kinds else tensors
    at: list[Any] = list(map(_address_of, there))  # type: ignore[arg-type]
    where = rt.allocator.where  # type: ignore[attr-defined]
    # An address of 0: nothing is in it, or it is a tensor without memory.
    if 0 in at or set(map(_device_of, there)) != {where} or not all(map(_is_dense, there)):  # type: ignore[arg-type]
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
    if where >= 0 and bits & (taped.ALIGNED - 1):
        return None
    shortcut = taped.shortcut(parts)
    return None if shortcut is not None and shortcut.tape is None else (parts, shortcut, at, held)


def forward(
    shortcut: Shortcut, rt: Runtime, at: list[Any], held: list[Any]
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
    """(outputs, what is saved). Outputs are tensors of their shape, not views, which nobody could change in place."""
    shortcut.replay(rt, at, held)
    outputs, saved = shortcut.plain
    made = []
    for slot, shape in outputs:
        t = held[slot]
        if t.shape != shape:
            t.resize_(shape)
        made.append(t)
    return tuple(made), [held[leaf[0]] if leaf else None for leaf in saved]


def backward(shortcut: Shortcut, rt: Runtime, at: list[Any], held: list[Any]) -> list[torch.Tensor | None]:
    """The gradients. One for two inputs is one tensor twice."""
    shortcut.replay(rt, at, held)
    found: list[torch.Tensor | None] = []
    for leaf in shortcut.plain:
        if leaf:
            t = held[leaf[0]]
            found.append(t if t.shape == leaf[1] else t.view(leaf[1]))
        else:
            found.append(None)
    return found
