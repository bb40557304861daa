"""`checkpoint`: what is computed in forward is not kept but computed again in backward, in the precision it had."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_core.errors import ArgumentError, UnsupportedError
from te_torch.autocast import Ran, Region, active, in_backward, keeping_hook, may_run_again, prepare_default

#: Keyword arguments that are torch's own, not the function's.
_OF_TORCH = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """function(*args, **kwargs), of which only the inputs are kept; backward computes the rest again.

    As torch.utils.checkpoint, whose options it takes; besides, the region that it is called in is carried along:
    what is computed again is computed in the same precision, whatever regions and forwards come in between.
    """
    if _is_older_form(args):
        warnings.warn(
            "checkpoint: pass distribute_saved_activations, get_rng_state_tracker and tp_group by name",
            DeprecationWarning,
            stacklevel=2,
        )
        distribute_saved_activations, get_rng_state_tracker, tp_group, *rest = args
        args = tuple(rest)
    if not callable(function):
        raise ArgumentError("checkpoint", f"function={function!r}", "a callable", "pass the module or function first")
    _refuse_unbuilt(distribute_saved_activations, get_rng_state_tracker, tp_group)
    options = {name: kwargs.pop(name) for name in _OF_TORCH if name in kwargs}
    if torch.compiler.is_compiling():  # there the region is part of the program, in both runs
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    return torch_checkpoint(_Run(function, kwargs), *args, use_reentrant=use_reentrant, **options)


class _Run:
    """The function with its keyword arguments: first where it is called, then in backward as it was there."""

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.function, self.kwargs = function, kwargs
        self.ran = False
        region = self.region = active.region
        # In a backward pass it is called by another checkpoint, run again. torch's own does not know the region: then
        # the modules remember (te_torch.autocast.Outstanding), and they have to where such a one is around this call.
        self.knows = not in_backward() or (region is not None and region.recompute)
        self.carries = self.knows and not may_run_again()

    def __call__(self, *args: Any) -> Any:
        if self.ran and self.knows:
            return self._again(args)
        self.ran = True
        before = active.carried
        active.carried = (keeping_hook() or True) if self.carries else None
        try:
            return self.function(*args, **self.kwargs)
        finally:
            active.carried = before

    def _again(self, args: tuple[Any, ...]) -> Any:
        then, now = self.region, active.region
        recipe, precision, calibrating, group = prepare_default(), 0, False, None
        if then is not None:
            recipe, precision, calibrating, group = then.recipe, then.precision, then.calibrating, then.group
        # Its Ran counts no open region: one that the function enters itself updates what its first run did not.
        active.region = Region(recipe, precision, calibrating, Ran(), True, False, now, group)
        try:
            return self.function(*args, **self.kwargs)
        finally:
            active.region = now


def _is_older_form(args: tuple[Any, ...]) -> bool:
    """(bool, callable, group or None, argument, ...): the documented older order."""
    return len(args) > 3 and isinstance(args[0], bool) and callable(args[1]) and not isinstance(args[2], torch.Tensor)


def _refuse_unbuilt(distribute: bool, tracker: Any, group: Any) -> None:
    ranks = 1 if group is None or not torch.distributed.is_initialized() else torch.distributed.get_world_size(group)
    for name, value, on in (
        ("distribute_saved_activations", distribute, bool(distribute) and ranks > 1),
        ("get_rng_state_tracker", tracker, tracker is not None),
    ):
        if on:
            raise UnsupportedError(
                "checkpoint", f"{name}={value!r}", "its default in this release", f"leave {name} out"
            )
