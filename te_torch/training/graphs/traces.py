"""What warm-up and capture change on their way and must not leave behind: FP8 states, random numbers, gradients that
are written in place, weight gradients that wait, cached weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from te_torch import draws
from te_torch.base.module import BaseModule
from te_torch.base.weights import Gradients
from te_torch.runtime import drawn
from te_torch.state import NAMES, ScalingState
from te_torch.training.graphs import device as seam

_BUFFERS = (*NAMES, "used_fwd", "used_bwd")


class Traces:
    """Everything as it was: taken before the warm-up, put back after the last capture."""

    def __init__(self, modules: Iterable[torch.nn.Module], devices: Iterable[torch.device]) -> None:
        self.parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self.random = Random(self.parts, devices)
        self.states = {s: _Kept(s) for s in self.parts if isinstance(s, ScalingState)}
        self.counts = {t: t.clone() for part in self.parts for t in _counters(part)}
        self.of_modules = [
            (m, m.wgrad_store, m._weight_cache, m._special, m._microbatch)
            for m in self.parts
            if isinstance(m, BaseModule)
        ]
        self.mains = [(main, main.clone()) for _, main in main_grads(self.parts)]
        self.flags = [(p, p.grad_added_to_main_grad) for p in told(self.parts)]
        for module, *_ in self.of_modules:
            module.wgrad_store = Gradients(len(module.wgrad_store.queues))
            module._weight_cache = {}

    def put_back(self) -> None:
        """Undo what warm-up and capture did. A state that they made has the values of a new one."""
        with torch.no_grad():
            for part in self.parts:
                state = part._modules.get("fp8_state")
                if isinstance(state, ScalingState):
                    self.states.get(state, _NEW).put_back(state)
                for count in _counters(part):
                    count.copy_(self.counts[count]) if count in self.counts else count.zero_()
            for main, value in self.mains:
                main.copy_(value)
        for module, store, cache, special, microbatch in self.of_modules:
            module.wgrad_store, module._weight_cache = store, cache
            module._special, module._microbatch = special, microbatch
        for p, flag in self.flags:
            p.grad_added_to_main_grad = flag
        self.random.put_back()


class _Kept:
    """The values of a state; of a new one without it."""

    def __init__(self, state: ScalingState | None = None) -> None:
        self.values = {} if state is None else {name: getattr(state, name).clone() for name in _BUFFERS}
        self.due: bool = state is not None and state.due
        self.group: Any = None if state is None else state.group

    def put_back(self, state: ScalingState) -> None:
        # .data: autograd does not count it, and a compiled module's run is known by that count.
        for name in _BUFFERS:
            now, before = getattr(state, name).data, self.values.get(name)
            if before is None:
                now.fill_(0.0 if "history" in name else 1.0)
            elif before.shape == now.shape:
                now.copy_(before)
            else:  # the recipe's history has another length: as the first forward would have cut it
                rows = min(len(before), len(now))
                now.zero_()[:rows].copy_(before[:rows])
        state.__dict__.update(due=self.due, group=self.group)
        if state.seen_version is not None:
            state.seen_version = state.amax_history_fwd._version


_NEW = _Kept()


def _counters(part: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Of values that are no numbers."""
    counted = part.__dict__.get("_nonfinite")
    return () if counted is None else (counted.counts, counted.rounds)


def main_grad(weight: Any) -> torch.Tensor | None:
    """The buffer into which a weight's gradient is written."""
    found: torch.Tensor | None = weight.get_main_grad() if hasattr(weight, "get_main_grad") else None
    return getattr(weight, "main_grad", None) if found is None else found


def main_grads(parts: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Those that backwards of these modules write, behind their weights."""
    for module in parts:
        if isinstance(module, BaseModule) and module.fuse_wgrad_accumulation:
            for name in module._weight_names():
                weight: Any = getattr(module, name)
                main = main_grad(weight)
                if main is not None:
                    yield weight, main


def told(parts: Iterable[torch.nn.Module]) -> list[Any]:
    """The parameters whose `grad_added_to_main_grad` a trainer looks at."""
    found = (p for part in parts for p in part.parameters(recurse=False) if hasattr(p, "grad_added_to_main_grad"))
    return list(dict.fromkeys(found))


class Random:
    """The random numbers of the host, of the devices and of trackers: of all our own, and of others that modules have.

    A module may draw from a tracker that it was not given, in its own `forward`: so no tracker of ours is left out.
    """

    def __init__(self, parts: Iterable[torch.nn.Module], devices: Iterable[torch.device]) -> None:
        self.host = torch.get_rng_state()
        self.devices = {d: drawn(torch.cuda.get_rng_state, d) for d in devices if d.type == "cuda"}
        own = list(draws.trackers)
        others = {id(t): t for t in map(_tracker, parts) if t is not None and not any(t is one for one in own)}
        self.own = [tracker._mark() for tracker in own]
        self.others = [(tracker, dict(tracker.get_states())) for tracker in others.values()]
        states = [s for tracker in (*own, *others.values()) for s in tracker.get_states().values()]
        found = list(dict.fromkeys(s for s in states if isinstance(s, torch.Generator)))
        #: What a graph has to know of besides the device's own.
        self.generators = [g for g in found if seam.device.holds(g)]
        self.values = [(g, g.get_state()) for g in found]

    def put_back(self) -> None:
        """Set all of them to what they were."""
        torch.set_rng_state(self.host)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        for restore in self.own:
            restore()
        for tracker, states in self.others:
            tracker.set_states(states)
        for generator, state in self.values:
            generator.set_state(state)


def _tracker(part: torch.nn.Module) -> Any:
    """The tracker from which a module draws, if it was given one: whatever has get_states, set_states and fork."""
    fork = part.__dict__.get("_fork")
    get = getattr(part if fork is None else fork, "get_rng_state_tracker", None)
    return get() if callable(get) else None
