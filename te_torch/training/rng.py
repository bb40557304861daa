"""`CudaRNGStatesTracker`: named streams of random numbers beside torch's own.

Ranks of a tensor-parallel group give one name different seeds: what is drawn in its fork differs between them (weights
that are cut into pieces, dropout of attention's heads), and what is drawn outside agrees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import index
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_torch.draws import trackers
from te_torch.runtime import default_device

#: A stream: a generator, which a CUDA graph can hold, or the numbers of one.
State = torch.Generator | torch.Tensor

_owners: weakref.WeakValueDictionary[str, CudaRNGStatesTracker] = weakref.WeakValueDictionary()


class NameInUseError(ArgumentError, RuntimeError):
    """A name or a seed is given to a second stream. Also the documented RuntimeError."""


class UnknownNameError(ArgumentError, KeyError):
    """No stream has this name. Also the usual KeyError."""

    __str__ = Exception.__str__  # a KeyError's would show the message in quotes


class CudaRNGStatesTracker:
    """Named streams of random numbers, each of which goes on from fork to fork.

    Streams are those of one device: `device`, or the current CUDA device where there is one when a stream is added, and
    else the CPU. (A model on the CPU of a machine with a GPU needs device="cpu".) On CUDA a stream is a
    `torch.Generator`; register it with a graph to fork under capture: `graph.register_generator_state(state)` for each
    of get_all_rng_states(). On the CPU it is a tensor of bytes.

    A fork exchanges torch's generator of the device, which all threads share.

    Example:
        tracker = te.CudaRNGStatesTracker(device="cpu")
        tracker.add("model-parallel-rng", seed=1234)
        with tracker.fork():
            noise = torch.randn(4)
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self.states_: dict[str, State] = {}
        self.seeds_: set[int] = set()
        self._forked: str | None = None  # the stream that torch's generator has now, where it has a copy of one
        trackers.add(self)

    def reset(self) -> None:
        """Forget all streams and seeds."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, State]:
        """The streams by their names. Generators are the ones in use: what is drawn later changes them."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, State]) -> None:
        """Have these streams from now on, and have get_all_rng_states() return them."""
        operation = f"{type(self).__name__}.set_states"
        if not isinstance(states, Mapping):
            raise ArgumentError(operation, repr(states)[:100], "streams by their names", "pass what get_states() gave")
        self.states_ = {name: self._in_own_form(operation, name, state) for name, state in states.items()}
        _owners.clear()
        _owners.update(dict.fromkeys(self.states_, self))

    def add(self, name: str, seed: int) -> None:
        """A new stream that begins at this seed. torch's generators are left alone."""
        try:
            seed = index(seed)
        except TypeError:
            raise ArgumentError(f"{type(self).__name__}.add", f"seed={seed!r}", "an integer", "pass one") from None
        for what, value, taken in (("seed", seed, self.seeds_), ("name", name, self.states_)):
            if value in taken:
                raise NameInUseError(
                    f"{type(self).__name__}.add",
                    f"the {what} {value!r}, which a stream has",
                    f"a {what} that none has: not one of {sorted(taken)}",
                    f"choose another {what}",
                )
        generator = torch.Generator(self._place())
        generator.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = generator if _holds_generators(generator.device) else generator.get_state()
        _owners[name] = self

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Inside, torch draws from this stream; afterwards it goes on where it was. Forks nest, of one name too."""
        state = self.states_.get(name)
        if state is None:
            raise UnknownNameError(
                f"{type(self).__name__}.fork",
                f"the name {name!r}",
                f"the name of a stream: one of {sorted(self.states_)}",
                f"add({name!r}, seed) first",
            )
        with self._exchanged(state) if isinstance(state, torch.Generator) else self._copied(name):
            yield

    @contextmanager
    def _exchanged(self, generator: torch.Generator) -> Iterator[None]:
        """torch's generator of the GPU refers to the numbers of this one: no copy, so it works in a capture."""
        torch.cuda.init()  # a process that has not used its GPU yet has no generator there
        index = generator.device.index  # None for one of "cuda", whose numbers are the current device's
        default = torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        try:
            yield
        except RuntimeError as error:
            if "not in capture mode" in str(error) and not isinstance(error, UnsupportedError):
                raise UnsupportedError(
                    f"{type(self).__name__}.fork",
                    "a capture by a CUDA graph that does not know this stream",
                    "streams that are registered with the graph before its capture",
                    "call graph.register_generator_state(state) for each of get_all_rng_states().values()",
                ) from error
            raise
        finally:
            default.graphsafe_set_state(before)

    @contextmanager
    def _copied(self, name: str) -> Iterator[None]:
        """torch's generator has a copy of the stream's bytes, which go back when the fork ends."""
        place = self._place()
        before, outer = _read(place), self._forked
        if outer is not None:  # it has moved on inside its own fork, and this may be the same one
            self.states_[outer] = before
        self._forked = name
        _write(place, self.states_[name])
        try:
            yield
        finally:
            self._forked = outer
            self.states_[name] = _read(place)
            _write(place, before if outer is None else self.states_[outer])

    def _mark(self) -> Callable[[], None]:
        """A function that sets all streams back to where they stand now."""
        states, forked = dict(self.states_), self._forked
        generators = [(state, state.get_state()) for state in states.values() if isinstance(state, torch.Generator)]

        def restore() -> None:
            self.states_, self._forked = dict(states), forked
            for generator, numbers in generators:  # in place: a CUDA graph knows the object
                generator.set_state(numbers)

        return restore

    def _place(self) -> torch.device:
        return self._device or default_device()

    def _in_own_form(self, operation: str, name: str, state: State) -> State:
        """A stream as this device has them: a checkpoint may come from another release of torch, or another device."""
        place = self._place()
        if isinstance(state, torch.Generator) and state.device.type == place.type:
            return state if _holds_generators(place) else state.get_state()
        generator = torch.Generator(place)
        numbers = state.get_state() if isinstance(state, torch.Generator) else state
        try:
            generator.set_state(numbers)
        except (TypeError, RuntimeError) as error:
            shown = repr(state)[:100]
            if isinstance(state, torch.Tensor):
                shown = f"{state.dtype} {tuple(state.shape)}"
            raise ArgumentError(
                operation,
                f"the stream {name!r} as {shown} ({str(error).splitlines()[0]})",
                f"a torch.Generator, or the numbers of one in a tensor of uint8, of {place}",
                "pass what get_states() of a tracker of this kind of device gave",
            ) from error
        return generator if _holds_generators(place) else numbers


def graph_safe_rng_available() -> bool:
    """Whether a CUDA graph can hold generators (with torch built for CUDA)."""
    return hasattr(torch.cuda.CUDAGraph, "register_generator_state") and hasattr(torch.Generator, "graphsafe_set_state")


def is_graph_safe_rng_state(state: Any) -> bool:
    """Whether a tracker's state is a generator, which a CUDA graph can hold."""
    return isinstance(state, torch.Generator)


def get_all_rng_states() -> dict[str, State]:
    """The streams of all trackers by their names; of those with one name the one that was added last."""
    return {name: owner.states_[name] for name, owner in list(_owners.items()) if name in owner.states_}


def set_all_rng_states(states: Mapping[str, State]) -> None:
    """Have the trackers of these names go on from these streams."""
    for name, state in states.items():
        owner = _owners.get(name)
        if owner is None:
            known = sorted(get_all_rng_states())
            raise UnknownNameError(
                "set_all_rng_states", f"the name {name!r}", f"names of streams: {known}", "add them to a tracker first"
            )
        owner.states_[name] = owner._in_own_form("set_all_rng_states", name, state)


def _holds_generators(device: torch.device) -> bool:
    return device.type == "cuda" and graph_safe_rng_available()


def _read(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _write(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
