"""Which FP8 states ran in a callable. Eager code marks them as it runs; a replay runs no code, so it marks what the
capture has recorded: the region of the replay updates and reduces these states at its end, as does the backward pass.

Captured kernels read scales from a state's own buffers and raise the maxima there. Where these have moved since, the
replay is refused: it would use freed memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe_fields import documented
from te_torch import state as scaling
from te_torch import updates
from te_torch.autocast import Ran, Region, active
from te_torch.base.module import BaseModule
from te_torch.precisions import precision_of, recipe_of
from te_torch.quantized import QuantizedTorch
from te_torch.reruns import around, in_backward
from te_torch.state import NAMES, ScalingState
from te_torch.training.graphs.arguments import How
from te_torch.training.graphs.traces import main_grad

OPERATION = "a graphed callable"
wrong = partial(ArgumentError, OPERATION)
unsupported = partial(UnsupportedError, OPERATION)


@contextmanager
def captured_in(how: How) -> Iterator[Ran]:
    """The region of a warm-up or capture, at whose end nothing is updated; nor at the end of those inside it."""
    before = active.region
    ran = Ran()
    ran.open = 1
    active.region = Region(how.recipe, how.number, how.calibrating, ran, False, False, None, how.group)
    try:
        yield ran
    finally:
        active.region = before


def versions() -> dict[int, int]:
    """How often the history of each state that compiled code may write was written."""
    found = ((token, scaling.by_token(token)) for token in list(scaling.watched))
    return {token: state.amax_history_fwd._version for token, state in found if state is not None}


def ran_since(before: dict[int, int], ran: Ran) -> list[int]:
    """The states that ran: those that eager code has marked, and those that compiled code has written since."""
    written = [token for token, version in versions().items() if before.get(token) != version]
    return list(dict.fromkeys([token for token in (*ran.states, *written) if token]))


class _Place:
    """A state as the capture found it."""

    __slots__ = ("addresses", "group", "layout", "owner", "recipe", "rule", "state", "token")

    def __init__(self, state: ScalingState, owner: torch.nn.Module | None) -> None:
        self.state, self.owner, self.token, self.layout = state, owner, state.token, state.layout
        self.rule, self.recipe, self.group = state.precision, state.recipe, state.group
        self.addresses = _addresses(state)

    def found(self) -> bool:
        """Whether its buffers are where they were; then it follows the rule of the capture again."""
        state = self.state
        if self.owner is not None and self.owner._modules.get("fp8_state") is not state:
            return False
        if state.precision is not self.rule:  # eager code ran it in another recipe, or its buffers were replaced
            assert self.rule is not None
            state.prepare(self.rule, self.recipe)
        if state.layout != self.layout:
            if _addresses(state) != self.addresses:
                return False
            self.layout = state.layout
        return True


class _Spot:
    """A parameter as the capture found it: its memory, and that of the buffer its gradient is written into."""

    __slots__ = ("addresses", "main", "name", "parameter", "parameters", "parts")

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.parameters, self.name = module._parameters, name
        parameter: Any = module._parameters[name]
        self.parameter = parameter
        #: The buffers of a quantized one that were there; another one may be made of them later.
        self.parts: list[str] | None = parameter._inner_names() if isinstance(parameter, QuantizedTorch) else None
        self.main = main_grad(parameter) if isinstance(module, BaseModule) and module.fuse_wgrad_accumulation else None
        self.addresses = self._addresses()

    def _addresses(self) -> list[int]:
        p = self.parameter
        if self.parts is not None:
            return [getattr(p, name).data_ptr() for name in self.parts]
        return [p.data_ptr()]

    def found(self) -> bool:
        """Whether all of it is where it was."""
        p = self.parameter
        same = self.parameters.get(self.name) is p and self._addresses() == self.addresses
        if self.main is None or not same:
            return same
        main = main_grad(p)
        return main is self.main or (main is not None and main.data_ptr() == self.main.data_ptr())


def _addresses(state: ScalingState) -> list[int]:
    return [getattr(state, name).data_ptr() for name in NAMES]


class Record:
    """What a captured callable uses besides its arguments, and what its replays have to tell others."""

    def __init__(self, how: How, module: torch.nn.Module) -> None:
        self.how, self.module = how, module
        self.forward: list[_Place] = []
        self.backward: list[_Place] = []
        self.memory: list[_Spot] = []

    def take(self, forward: Iterable[int], backward: Iterable[int]) -> None:
        """Keep which states ran, by their tokens, and where everything lies."""
        owners: dict[int, torch.nn.Module] = {id(m._modules.get("fp8_state")): m for m in self.module.modules()}
        places = {}
        for token in dict.fromkeys((*forward, *backward)):
            state = scaling.by_token(token)
            if state is not None:
                places[token] = _Place(state, owners.get(id(state)))
        self.forward = [places[token] for token in forward if token in places]
        self.backward = [places[token] for token in backward if token in places]
        self.memory = [
            _Spot(m, name) for m in self.module.modules() for name, p in m._parameters.items() if p is not None
        ]

    def check(self) -> None:
        """Raise where a replay would not be what the call says: another precision, or memory that has moved.

        Outside of every region a call says nothing: it is one in a region of its own, that of the capture.
        """
        number, region = self.how.number, active.region
        if number and region is not None and region.precision != number:
            raise wrong(
                f"a call in {_in_words(region.precision)}",
                f"the precision it was captured in: {_in_words(number)}",
                "enter te_torch.autocast with the recipe that make_graphed_callables was given, leave the region, or "
                "capture anew",
            )
        if self.forward and (in_backward() or any(around(active.running))):
            raise unsupported(
                "a call inside of a checkpoint, which would record its maxima twice",
                "a checkpoint inside of the callable, or a recipe without a history",
                "put the checkpoint into the module that is captured",
            )
        self.check_memory()

    def check_memory(self) -> None:
        """Raise where a graph would read or write memory that is no longer the module's."""
        for place in self.forward:
            if not place.found():
                _refuse(self.module, "whose FP8 state has other buffers than at the capture")
        for spot in self.memory:
            if not spot.found():
                _refuse(self.module, f"whose parameter {spot.name} lies elsewhere than at the capture")

    def mark_forward(self) -> bool:
        """Mark the states as an eager forward does; whether to update them now, as the caller is in no region."""
        region = active.region
        for place in self.forward:
            inner = not self.how.number  # the callable enters its own region, whose group it is
            group = place.group if inner or region is None else region.group
            place.state.__dict__.update(due=True, group=group)
            if region is not None and region.ran is not None:
                region.ran.states[place.token] = None
        return bool(self.forward) and region is None

    def update(self) -> None:
        """The forward update of a call outside of every region."""
        updates.update([place.token for place in self.forward], scaling.FORWARD)

    def mark_backward(self) -> None:
        """Let the states wait for the end of the running backward pass, as an eager backward does."""
        for place in self.backward:
            updates.ran_backward(place.state)


def _in_words(number: int) -> str:
    precision = precision_of(number)
    if precision is None:
        return "high precision"
    more = ", emulated" * precision.emulate + ", strict" * precision.strict
    return f"{documented(recipe_of(number))!r}{more}"


def _refuse(module: torch.nn.Module, what: str) -> None:
    raise unsupported(
        f"a {type(module).__name__} {what}",
        "a module whose parameters and FP8 states stay in their memory: load_state_dict without assign=True, no move "
        "to another device, one length of histories",
        "call reset() and make_graphed_callables again",
    )
