"""Quantized tensors from one module to the next, and the maxima that the receiver then does not see.

A module that is handed a quantized tensor casts nothing: nothing would raise the maximum of its own scale for that
tensor. It reads this scale as soon as it casts by itself: in a program that hands nothing over, under a hook, in
another recipe. So a state knows to which other states its tensors went, and each update of its scales begins by
raising its maxima in their histories (`te_torch.updates`). The gradient of such a tensor goes the other way, and so do
its maxima.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from te_torch import state as scaling
from te_torch.quantized import QuantizedTorch
from te_torch.state import ScalingState

_SUFFIXES = ("fwd", "bwd")


def note(direction: int, state: Any, came: Iterable[Any], its: int, went: Any, column: int) -> None:
    """Called as a layer has run forward or backward with a state (or with counters around one): what came and went.

    `its` and `column`: where the scales of both are in the state.
    """
    own: ScalingState | None = state if isinstance(state, ScalingState) else state.state
    if own is None:
        return
    for t in came:
        memory: Any = getattr(t, "_memory", None)
        giver = None if memory is None else scaling.by_token(memory.giver[0])
        if giver is None or giver.scale_fwd.device != own.scale_fwd.device:
            continue
        # From now on the maxima of what goes from one state's layer to the other's are noted in both.
        key = (direction, memory.giver[1], own.token, its)
        if key not in giver.receivers:
            begin_as(giver, memory.giver[1], own, its, direction)
            for gone in [other for other in giver.receivers if scaling.by_token(other[2]) is None]:
                del giver.receivers[gone]
            giver.receivers[key] = None
            own.receives = True
            scaling.moves += 1
    if isinstance(went, QuantizedTorch):
        went._memory.giver = own.token, column


def begin_as(giver: ScalingState, column: int, receiver: ScalingState, its: int, direction: int) -> None:
    """Let a scale that never saw a maximum begin as that of who hands over."""
    if giver.scale_fwd.is_meta or giver.scale_fwd.device != receiver.scale_fwd.device:
        return
    suffix = _SUFFIXES[direction]
    histories = [getattr(state, f"amax_history_{suffix}").data for state in (giver, receiver)]
    rows = min(map(len, histories))
    there, here = histories[0][:rows, column], histories[1][:rows, its]
    new = ~histories[1][:, its].any() & (getattr(receiver, f"scale_{suffix}").data[its] == 1)
    here.copy_(torch.where(new, there, here))
    for name in ("scale", "used"):
        there, here = (getattr(s, f"{name}_{suffix}").data for s in (giver, receiver))
        here[its] = torch.where(new, there[column], here[its])


def pairs(states: Iterable[ScalingState], direction: int) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Lists (maxima of receivers, maxima of those who hand over to them): no receiver is twice in a list."""
    found: list[dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]] = []
    name = f"amax_history_{_SUFFIXES[direction]}"
    for state in states:
        for way, column, token, its in state.receivers:
            receiver = scaling.by_token(token)
            there = state.scale_fwd.device
            if way != direction or receiver is None or receiver.scale_fwd.device != there or there.type == "meta":
                continue
            # .data: this is no change that autograd counts, by which runs of compiled code are told.
            both = [getattr(s, name).data[0, i : i + 1] for s, i in ((receiver, its), (state, column))]
            chosen = next((some for some in found if (token, its) not in some), None)
            if chosen is None:
                found.append(chosen := {})
            chosen[token, its] = both[0], both[1]
    return [(list(here), list(there)) for here, there in (zip(*chosen.values(), strict=True) for chosen in found)]


def merge(receiver: torch.Tensor, its: int, maxima: torch.Tensor, column: int) -> None:
    """The same in traced code: raise the first row of a history, in one column, to the maximum of a slot."""
    at = receiver[0, its]
    at.copy_(torch.maximum(at, maxima[column]))
