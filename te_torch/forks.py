"""Forks of RNG trackers: contexts in which modules draw, and what a tracing compiler sees of a draw in one.

A compiler knows torch's own generators alone. It is given an operator for each draw, which has an effect: such are run
in the order of the program, once each, and a checkpoint that is part of the graph keeps what they gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.tokens import enrolled, of_token
from te_torch.doors import door, either
from te_torch.noting import noting
from te_torch.runtime import drawn


class Fork:
    """Called, a context in which torch draws from a tracker: `get_rng_state_tracker().fork(name)`."""

    def __init__(self, get_rng_state_tracker: Callable[[], Any], name: str | None = None) -> None:
        self.get_rng_state_tracker, self.name = get_rng_state_tracker, name
        number = enrolled(self)
        #: By which a program finds it. A tensor, and so an input: modules with trackers of their own share a program.
        with torch.inference_mode(False):
            self.number = torch.tensor(number, device="cpu")

    def __call__(self) -> AbstractContextManager[Any]:
        """The context."""
        tracker = self.get_rng_state_tracker()
        if not hasattr(tracker, "fork"):
            raise not_a_tracker("get_rng_state_tracker", tracker)
        found: AbstractContextManager[Any] = tracker.fork() if self.name is None else tracker.fork(self.name)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Fork, (self.get_rng_state_tracker, self.name)


def fork_of(get_rng_state_tracker: Callable[[], Any] | None, name: str | None) -> Fork | None:
    """A context in which a module draws, if an RNG tracker was given."""
    return None if get_rng_state_tracker is None else Fork(get_rng_state_tracker, name)


def not_a_tracker(operation: str, given: Any) -> ArgumentError:
    """The error for what a user's `get_rng_state_tracker` returned."""
    return ArgumentError(
        operation,
        f"a function that returns {given!r}",
        "one that returns an RNG tracker: an object with get_states, set_states and fork",
        "return a CudaRNGStatesTracker, say",
    )


# ------------------------------------------------------------------------------------------------- what is drawn


def new_pair(device: torch.device) -> torch.Tensor:
    """(seed, offset), from torch's generator of the device."""
    pair = torch.randint(1 << 62, (2,), dtype=torch.int64, device=device)
    either(noting.drawn, _nothing)(pair, None)
    return pair


def _nothing(*_: Any) -> None:
    """In traced code nobody notes."""


def uniform(subject: tuple[Sequence[int], torch.device]) -> torch.Tensor:
    """Numbers of [0, 1) in this shape, from torch's generator of the device."""
    shape, device = subject
    return torch.rand(shape, device=device)


def drawn_in(fork: Callable[[], AbstractContextManager[Any]], draw: Callable[[Any], Any], subject: Any) -> Any:
    """draw(subject) inside a tracker's fork."""
    with fork():
        return drawn(draw, subject)


@partial(door, traced=lambda fork, device: torch.ops.te_runtime.draw_pair(fork.number, device))
def pair_in(fork: Fork, device: torch.device) -> torch.Tensor:
    """`new_pair` inside a tracker's fork. (By an operator, as traced code has it, eager code would take 7 us more.)"""
    found: torch.Tensor = drawn_in(fork, new_pair, device)
    noting.drawn(found, fork)
    return found


@partial(door, traced=lambda fork, shape, device: torch.ops.te_runtime.draw_uniform(fork.number, shape, device))
def uniform_in(fork: Fork, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """`uniform` inside a tracker's fork."""
    found: torch.Tensor = drawn_in(fork, uniform, (shape, device))
    return found


# --------------------------------------------------------------------------------------------------- operators

_library = torch.library.Library("te_runtime", "FRAGMENT")
# What a program draws in its own CUDA graph would be of no generator that the graph knows.
_tags = [torch.Tag.nondeterministic_seeded]
_tags += [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
_library.define("draw_pair(Tensor fork, Device device) -> Tensor", tags=_tags)
_library.define("draw_uniform(Tensor fork, SymInt[] shape, Device device) -> Tensor", tags=_tags)


_library.impl(
    "draw_pair", lambda fork, device: drawn_in(of_token(int(fork)), new_pair, device), "CompositeExplicitAutograd"
)
_library.impl(
    "draw_uniform",
    lambda fork, shape, device: drawn_in(of_token(int(fork)), uniform, (shape, device)),
    "CompositeExplicitAutograd",
)


@torch.library.register_fake("te_runtime::draw_pair", lib=_library)
def _(fork: torch.Tensor, device: torch.device) -> torch.Tensor:
    _prepare_trace()
    return torch.empty(2, dtype=torch.int64, device=device)


@torch.library.register_fake("te_runtime::draw_uniform", lib=_library)
def _(fork: torch.Tensor, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    _prepare_trace()
    return torch.empty(shape, device=device)


def _prepare_trace() -> None:
    """Say, as the first of them is traced, that these operators have an effect (which imports the compiler)."""
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            "torch.export",
            "a module that draws from an RNG tracker, which is an object of this process",
            "a module that draws from torch's generators, or nothing",
            "call eval() before, or leave get_rng_state_tracker out",
        )
    if torch.ops.te_runtime.draw_pair.default.python_key_table:  # it has been done
        return
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    operators: tuple[Any, ...] = (torch.ops.te_runtime.draw_pair.default, torch.ops.te_runtime.draw_uniform.default)
    for operator in operators:
        _register_effectful_op(operator, _EffectType.ORDERED)
        keep_in_checkpoints(operator)


def keep_in_checkpoints(operator: Any) -> None:
    """Have a checkpoint in the graph keep what this operator gave, which is a few numbers, and not compute it again.

    (Such a checkpoint is a mark on the nodes in torch 2.11, and two modes in 2.13.)
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, _CachingTorchDispatchMode

    @operator.py_impl(FunctionalTensorMode)
    def on_its_way_into_a_graph(mode: Any, *args: Any) -> Any:
        current_meta: dict[str, Any] = traceback.current_meta  # another one in each trace
        before = current_meta.get("recompute")
        current_meta["recompute"] = CheckpointPolicy.MUST_SAVE
        try:
            return mode.__torch_dispatch__(operator, (), args, {})
        finally:
            if before is None:
                del current_meta["recompute"]
            else:
                current_meta["recompute"] = before

    @operator.py_impl(_CachingTorchDispatchMode)
    def first(mode: Any, *args: Any) -> Any:
        found = operator(*args)
        mode.storage.setdefault(operator, []).append(found)
        return found

    @operator.py_impl(_CachedTorchDispatchMode)
    def again(mode: Any, *args: Any) -> Any:
        kept = mode.storage[operator]
        kept.append(kept.pop(0))  # for a second backward, too
        return kept[-1]
