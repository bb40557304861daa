"""`checkpoint`: what is computed in forward is not kept but computed again in backward, in the precision it had.

What is computed again draws the same random numbers, touches neither histories nor scales, and reads the scales that
its first run read (te_torch.reruns).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from te_core.errors import ArgumentError, UnsupportedError
from te_core.tokens import enrolled, living
from te_torch.autocast import Ran, Region, active, prepare_default
from te_torch.base.module import CallingModule
from te_torch.doors import either
from te_torch.draws import Repeated, capturing
from te_torch.forks import not_a_tracker
from te_torch.quantized import QuantizedTorch
from te_torch.reruns import FirstRun, Rerun, Running, around, in_backward, stops
from te_torch.runtime import deprecated, warn
from te_torch.training.collectives import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks
from te_torch.values import is_flag

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

    As torch.utils.checkpoint, whose options it takes (`context_fn` with use_reentrant=True, too); besides, the
    `autocast` region that it is called in is carried along: what is computed again is computed in the same precision,
    whatever regions and forwards come in between. A module without any of ours in it goes to torch's.

    Random numbers are the same in both runs: torch's own, those of every CudaRNGStatesTracker, and those of the tracker
    that `get_rng_state_tracker` returns. With `distribute_saved_activations` each rank of `tp_group` (None: of all)
    keeps its equal part of the first tensor among the arguments, which has to be the same on all of them, and backward
    gathers it; for use_reentrant=True.

    Returns:
        What the function returns.

    Example:
        block = te.LayerNormMLP(256, 1024, device="cpu")
        y = te.checkpoint(block, torch.randn(32, 256, requires_grad=True))
        y.sum().backward()
    """
    if _is_older_form(args):
        names = "distribute_saved_activations, get_rng_state_tracker and tp_group"
        deprecated(f"checkpoint: {names} by position", "them by name")
        distribute_saved_activations, get_rng_state_tracker, tp_group, *rest = args
        args = tuple(rest)
    if not callable(function):
        raise ArgumentError("checkpoint", f"function={function!r}", "a callable", "pass the module or function first")
    if use_reentrant is not True and use_reentrant is not False and not is_flag(use_reentrant):
        raise ArgumentError("checkpoint", f"use_reentrant={use_reentrant!r}", "True or False", "correct use_reentrant")
    spreads = distribute_saved_activations and _distributes(tp_group, use_reentrant)
    if either(False, True):  # in a program the region is a part of it, in both runs, and each rank keeps its own
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    if spreads:
        with _spread_over(tp_group, args):
            return checkpoint(function, *args, get_rng_state_tracker=get_rng_state_tracker, **kwargs)
    options = {name: kwargs.pop(name) for name in _OF_TORCH if name in kwargs}
    global _reentrant
    _reentrant = bool(use_reentrant)
    others = () if get_rng_state_tracker is None else (_tracker_of(get_rng_state_tracker),)
    ours = has_te_modules(function) or bool(others) or capturing()
    if kwargs:
        function = _Bound(function, kwargs)
        args += tuple(function.tensors())
    if not ours:
        return torch_checkpoint(function, *args, use_reentrant=use_reentrant, **options)
    contexts = options.pop("context_fn", noop_context_fn)()
    if options.pop("preserve_rng_state", True):
        function = Repeated(function, others)
    run = _Run(function, contexts)
    return torch_checkpoint(run, *args, use_reentrant=use_reentrant, preserve_rng_state=False, **options)


class _Bound:
    """A function with keyword arguments. Those that are tensors come last of the others: a reentrant checkpoint keeps
    and differentiates what it is given by position."""

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        self._tensors = [kwargs[name] for name in self.names]
        self.rest = {name: value for name, value in kwargs.items() if name not in self.names}

    def tensors(self) -> list[torch.Tensor]:
        """Them, once: they are the checkpoint's to keep."""
        found, self._tensors = self._tensors, []
        return found

    def __call__(self, *args: Any) -> Any:
        first = len(args) - len(self.names)
        return self.function(*args[:first], **self.rest, **dict(zip(self.names, args[first:], strict=True)))


class _Run:
    """The function: first where it is called, then in backward as it was there."""

    def __init__(self, function: Callable[..., Any], contexts: tuple[AbstractContextManager[Any], ...]) -> None:
        self.function, self.contexts = function, contexts
        self.ran = False
        self.first = FirstRun()
        leaving, source = around(active.running)
        if torch.is_grad_enabled():  # otherwise there is no backward
            leaving.append(self.first)
        self.around: tuple[list[FirstRun], Rerun | None] = leaving, source
        region = self.region = active.region
        # In a backward pass it is called by another checkpoint, run again. torch's own does not know the region.
        self.knows = not in_backward() or (region is not None and region.recompute)

    def __call__(self, *args: Any) -> Any:
        again, self.ran = self.ran, True
        region, recomputing = active.region, active.recomputing
        before = active.running, region, active.checkpointed, recomputing
        if again:
            active.running = Running([], Rerun(self.first.reads))
            if self.knows:
                # Its Ran counts no open region: one that the function enters itself updates what its first run did not.
                active.region = _run_again(self.region, region)
        else:
            active.running = Running(*self.around)
            del self.around
        active.checkpointed, active.recomputing = True, again or recomputing
        try:
            with self.contexts[again]:
                return self.function(*args)
        finally:
            active.running, active.region, active.checkpointed, active.recomputing = before


stops.add(_Run.__call__.__code__)


def _run_again(then: Region | None, now: Region | None) -> Region:
    """The region `then`, for what ran in it and runs again inside of `now`."""
    recipe, precision, calibrating, group = prepare_default(), 0, False, None
    if then is not None:
        recipe, precision, calibrating, group = then.recipe, then.precision, then.calibrating, then.group
    return Region(recipe, precision, calibrating, Ran(), True, False, now, group)


def _is_older_form(args: tuple[Any, ...]) -> bool:
    """(bool, callable, group or None, argument, ...): the documented older order."""
    if len(args) <= 3 or not isinstance(args[0], bool) or not callable(args[1]):
        return False
    group = args[2]
    return group is None or (torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup))


def _distributes(group: Any, reentrant: bool) -> bool:
    """Whether what is kept is to be spread over the ranks of a group."""
    if not reentrant:
        warn("checkpoint: distribute_saved_activations changes nothing with use_reentrant=False", UserWarning, 3)
        return False
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise UnsupportedError(
            "checkpoint",
            "distribute_saved_activations=True without a process group",
            "it where torch.distributed is initialized",
            "call torch.distributed.init_process_group first, or leave it out",
        )
    return torch.distributed.get_world_size(group) > 1


def _spread_over(group: Any, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """What a reentrant checkpoint keeps of these arguments: of the first tensor, this rank's part.

    Nothing else is saved inside, where gradients are off.
    """
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    ranks = torch.distributed.get_world_size(group)
    if first is None or isinstance(first, QuantizedTorch) or first.numel() % ranks:
        got = "no tensor" if first is None else f"a {type(first).__name__} of shape {tuple(first.shape)}"
        raise ArgumentError(
            "checkpoint(distribute_saved_activations=True)",
            f"{got} as the first tensor argument",
            f"a plain tensor of a multiple of {ranks} elements, by position",
            "pass such a one first, or leave distribute_saved_activations out",
        )
    memory, shape = first.data_ptr(), first.shape

    def keep(t: torch.Tensor) -> Any:
        if t.data_ptr() != memory or t.shape != shape:
            return t
        return (split_tensor_into_1d_equal_chunks(t.detach(), group, new_buffer=True),)

    def whole(kept: Any) -> torch.Tensor:
        return gather_split_1d_tensor(kept[0], group).view(shape) if isinstance(kept, tuple) else kept

    return torch.autograd.graph.saved_tensors_hooks(keep, whole)


def _tracker_of(get_rng_state_tracker: Any) -> Any:
    tracker = get_rng_state_tracker() if callable(get_rng_state_tracker) else get_rng_state_tracker
    if not callable(get_rng_state_tracker) or any(
        not hasattr(tracker, name) for name in ("get_states", "set_states", "fork")
    ):
        raise not_a_tracker("checkpoint(get_rng_state_tracker=...)", tracker)
    return tracker


def has_te_modules(network: Any) -> bool:
    """Whether a checkpoint of this has to know regions: a module with one of ours in it, or any plain function.

    (What a function calls cannot be seen from outside.)
    """
    if not isinstance(network, torch.nn.Module):
        return True
    return any(isinstance(module, CallingModule) for module in network.modules())


# --------------------------------------------------------------------------------- phases, for whoever builds his own

_reentrant = True  # what the last checkpoint was


class activation_recompute_forward(ContextDecorator):  # noqa: N801  the documented name
    """Context around what a checkpoint of the user's own runs: first, and again with recompute_phase=True.

    What runs again reads the scales that its first run read, and records nothing; also where it is not a backward pass
    that runs it. Regions may be entered inside or outside of it. Which first run that was is known of a pair of
    `get_activation_recompute_contexts`, and inside the `forward(ctx, ...)` and `backward(ctx, ...)` of an autograd
    function; elsewhere runs are taken to come again in the order of the first ones.
    """

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        super().__init__()
        self.activation_recompute, self.recompute_phase = activation_recompute, recompute_phase
        self._pair: list[FirstRun] | None = None  # what the other one of a pair left
        self._before: list[tuple[bool, bool, Region | None, Running | None]] = []

    def __enter__(self) -> None:
        self._before.append((active.checkpointed, active.recomputing, active.region, active.running))
        again = self.activation_recompute and self.recompute_phase
        active.checkpointed, active.recomputing = self.activation_recompute, again
        if again and active.region is not None and not active.region.recompute:
            active.region = _run_again(active.region, active.region)
        if self.activation_recompute:
            self._find(again, *around(active.running))

    def _find(self, again: bool, leaving: list[FirstRun], source: Rerun | None) -> None:
        """Link a later run to its first one: of a pair by that, of an autograd function by its `ctx` (`around`). A run
        that is neither, such as a hook's, belongs to the oldest first run whose graph lives."""
        if again:
            found = None
            if source is None:
                found = self._pair[-1] if self._pair else next((f for f in living(FirstRun) if not f.ran_again), None)
            if found is not None:
                active.running = Running([], found.rerun(object()))
        elif self._pair is not None:
            self._pair[:] = [FirstRun()]
            active.running = Running([*self._pair, *leaving], source)
        elif leaving and active.running is None:
            enrolled(leaving[0])  # so that it is found, as long as its graph lives

    def __exit__(self, *exc: object) -> None:
        active.checkpointed, active.recomputing, active.region, active.running = self._before.pop()


def get_activation_recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A context for what a checkpoint runs first, and one for what it runs again: what a `context_fn` returns."""
    pair = [activation_recompute_forward(True, recompute_phase=again) for again in (False, True)]
    pair[0]._pair = pair[1]._pair = []
    return pair[0], pair[1]


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether this is what a checkpoint runs, in low precision."""
    return active.checkpointed and active.region is not None and active.region.precision != 0


def in_fp8_activation_recompute_phase() -> bool:
    """Whether it is what a checkpoint runs again."""
    return bool(active.recomputing)


def use_reentrant_activation_recompute() -> bool:
    """Whether the last checkpoint was a reentrant one."""
    return _reentrant
