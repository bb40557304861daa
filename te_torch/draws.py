"""Random numbers of modules: whose generator they come from, and how what was drawn is drawn again.

A module draws one pair (seed, offset) for a forward and its backward, from torch's generator of the device, or inside
the fork of an RNG tracker if it was given one. A tracker is anything with `fork`, `get_states` and `set_states`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from te_torch.forks import Fork, new_pair, pair_in
from te_torch.runtime import drawn

#: Trackers of our own that are alive: what is run again draws from them as it did, told of them or not.
trackers: weakref.WeakSet[Any] = weakref.WeakSet()


# ------------------------------------------------------------------------------------------ where they come from


def random_pair(like: torch.Tensor, fork: Fork | None = None) -> torch.Tensor:
    """(seed, offset) for the draws of one forward and its backward, from torch's generator of the device."""
    found: torch.Tensor = drawn(new_pair, like.device) if fork is None else pair_in(fork, like.device)
    return found


# --------------------------------------------------------------------------------------------- drawn once more


class Repeated:
    """A function that draws, each time it is run again, what it drew when it ran first.

    Eager code sets the generators back to where they stood. A capture cannot: what was drawn is kept there, as long as
    this object is.
    """

    def __init__(self, function: Callable[..., Any], others: Iterable[Any] = ()) -> None:
        self._function = function
        self._others = tuple(others)  # trackers that are not our own
        #: Of a capture the results of all operators that drew, in their order.
        self._drawn: Stand | list[tuple[Any, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: for the first time, or again."""
        if self._drawn is None and not capturing():
            self._drawn = Stand(_devices((*args, *kwargs.values())), self._others)
            return self._function(*args, **kwargs)
        around: AbstractContextManager[Any]
        if self._drawn is None:
            self._drawn = []
            around = _Keeping(self._drawn)
        else:
            around = self._drawn.again() if isinstance(self._drawn, Stand) else _Giving(iter(self._drawn))
        with around:
            return self._function(*args, **kwargs)


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _devices(values: Iterable[Any]) -> set[int]:
    """The GPUs of the tensors in here, and the current one."""
    if not torch.cuda.is_initialized():
        return set()
    found = {torch.cuda.current_device()}
    for value in values:
        if isinstance(value, torch.Tensor):
            found |= {value.get_device()} if value.is_cuda else set()
        elif isinstance(value, (tuple, list)):
            found |= _devices(value)
    return found


class Stand:
    """Where all generators stand: torch's own of the CPU and of these GPUs, and those of trackers.

    Inside a fork torch's generator of a GPU has the tracker's numbers, by reference: so the reference is noted too.
    """

    def __init__(self, gpus: Iterable[int], others: tuple[Any, ...]) -> None:
        self.others = others
        self.cpu = torch.get_rng_state()
        self.gpus: list[tuple[int, Any, torch.Tensor]] = []
        for index in gpus:
            default = torch.cuda.default_generators[index]
            self.gpus.append((index, default.graphsafe_get_state(), default.get_state()))
        self.trackers = [tracker._mark() for tracker in list(trackers)]
        self.trackers += [_mark(tracker) for tracker in others if tracker not in trackers]

    def restore(self) -> None:
        """Have all of them stand there again."""
        torch.set_rng_state(self.cpu)
        for index, reference, numbers in self.gpus:
            default = torch.cuda.default_generators[index]
            default.graphsafe_set_state(reference)
            default.set_state(numbers)
        for restore in self.trackers:
            restore()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Everything stands as then, and afterwards as before."""
        before = Stand([index for index, *_ in self.gpus], self.others)
        of_then = [(reference, reference.get_state()) for _, reference, _ in self.gpus]
        self.restore()
        try:
            yield
        finally:
            for reference, numbers in of_then:
                reference.set_state(numbers)
            before.restore()


def _mark(tracker: Any) -> Callable[[], None]:
    """What sets a tracker of somebody else's back to where it stands now."""
    states = dict(tracker.get_states())
    generators = [(state, state.get_state()) for state in states.values() if isinstance(state, torch.Generator)]

    def restore() -> None:
        if len(generators) < len(states):
            tracker.set_states(dict(states))
        for generator, numbers in generators:  # in place: a CUDA graph knows the object
            generator.set_state(numbers)

    return restore


class _Drawing(TorchDispatchMode):
    """Looks at the operators that draw, and keeps or gives their results."""

    def __init__(self, results: Any) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self.draw(func, args, kwargs)
        return func(*args, **kwargs)

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Keeping(_Drawing):
    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        # A copy: the function may change its own.
        self.results.append((func, tree_map_only(torch.Tensor, torch.clone, written or out)))
        return out


class _Giving(_Drawing):
    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        drew, kept = next(self.results, (None, ()))
        if drew is not func:
            raise RuntimeError(
                f"A function that is run again in a captured backward draws by {func}, and drew by {drew} when it ran "
                "first: it has to draw the same in both runs."
            )
        written = _written(func, args, kwargs)
        if not written:
            return tree_map_only(torch.Tensor, torch.clone, kept)
        for tensor, numbers in zip(written, kept, strict=True):
            tensor.copy_(numbers)
        return written[0] if len(written) == 1 else tuple(written)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs[argument.name])
    return found
