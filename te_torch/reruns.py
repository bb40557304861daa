"""What a checkpoint runs again in backward, and what its first run left for it.

A checkpoint keeps the arguments of a function, and runs the function again in backward. Each call of a module in the
first run leaves a `Read`: its precision, and the scales that it read. The same call in a later run takes these,
whatever ran in between. They are kept with the checkpoint, in a `FirstRun`: of `te_torch.checkpoint` by what it runs,
of torch's own by its frame, and of a checkpoint that is an autograd function by that function's `ctx`. So they go when
the graph goes, through a backward or a dropped loss; a forward without a graph leaves nothing.

`around` finds the checkpoints that a call is in. te_torch.checkpoint tells of itself (`Running`). Of torch's own, the
hooks that keep what is saved know the frame; that of an autograd function is on the stack of Python's calls.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from inspect import unwrap
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _CheckpointFrame

from te_core.quantize.state import Scales
from te_torch.runtime import to_core
from te_torch.state import ScalingState
from te_torch.surroundings import dispatch_modes

_graph_task = torch._C._current_graph_task_id
#: Off, like gradients, inside an autograd function's forward and in inference mode; on under torch.no_grad.
forward_ad = torch._C._is_fwd_grad_enabled
_hooks: Any = torch._C._autograd
_top_hooks: Any = getattr(_hooks, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return _graph_task() != -1


def first_of_a_checkpoint() -> bool:
    """Whether this is the first run of a checkpoint that keeps by hooks: where it runs again they have another name."""
    hooks = _top_hooks(True)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return False
    return hooks[0].__qualname__.startswith("_checkpoint_hook")


def may_run_again() -> bool:
    """Whether hooks of saved tensors, or an autograd function, are around a call: a checkpoint may run it again."""
    if torch.is_grad_enabled():  # nearly always: a call less
        return _top_hooks(True) is not None
    return _top_hooks(True) is not None or _in_a_forward()


def _in_a_forward() -> bool:
    """Whether this is inside of an autograd function's forward: gradients are off there, both ways."""
    return not forward_ad() and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# ------------------------------------------------------------------------------------------------- what is left


class Read:
    """What one call of a module read: its precision by number, and the scales of its state, if it has one."""

    __slots__ = ("number", "scales")

    def __init__(self, number: int) -> None:
        self.number = number
        self.scales: torch.Tensor | None = None

    def of_state(self, state: ScalingState, again: bool) -> Any:
        """The state as a call reads it: the first one keeps a copy of the scales, a later one reads the copy."""
        if again:
            return state if self.scales is None else _Again(state, self.scales)
        self.scales = _copy(state.scale_fwd)
        return state


def _copy(scales: torch.Tensor) -> torch.Tensor:
    """A copy that no mode sees: a selective checkpoint counts operators in both runs."""
    if not dispatch_modes():
        return scales.clone()
    with _disable_current_modes():
        return scales.clone()


class _Again:
    """A state as a call reads it that is run again: with the scales of its first run. It records nothing."""

    __slots__ = ("_scales", "state")

    def __init__(self, state: ScalingState, scales: torch.Tensor) -> None:
        back = state.backward_scales()
        self.state = state
        self._scales = Scales(to_core(scales), None, back.backward_scale, back.backward_amax)

    @property
    def token(self) -> int:
        return self.state.token

    def scales(self, recompute: bool) -> Scales:
        return self._scales

    def backward_scales(self) -> Scales:
        return self.state.backward_scales()


class FirstRun:
    """What the first run of a checkpoint's function left: for each module, what its calls read, in their order."""

    __slots__ = ("__weakref__", "_rerun", "reads")

    def __init__(self) -> None:
        self.reads: dict[Any, list[Read]] = {}
        self._rerun: tuple[Any, Rerun] | None = None

    def rerun(self, key: Any) -> Rerun:
        """The later run of this key; a new one begins with the first call."""
        if self._rerun is None or self._rerun[0] != key:
            self._rerun = key, Rerun(self.reads)
        return self._rerun[1]

    @property
    def ran_again(self) -> bool:
        """Whether there was a later run."""
        return self._rerun is not None


class Rerun:
    """A later run of a checkpoint's function, of whose first run this is left."""

    __slots__ = ("_calls", "_reads")

    def __init__(self, reads: dict[Any, list[Read]]) -> None:
        self._reads = reads
        self._calls: dict[Any, int] = {}

    def next(self, module: Any, peek: bool = False) -> Read | None:
        """What this module's next call read in the first run; None where there was no such call."""
        index, reads = self._calls.get(module, 0), self._reads.get(module, ())
        if not peek:
            self._calls[module] = index + 1
        return reads[index] if index < len(reads) else None


class Running:
    """A run of te_torch.checkpoint's that goes on now.

    `leaving`: the first runs that a call in it leaves its `Read` to; `source`: the later run that it takes one from.
    """

    __slots__ = ("alone", "hook", "leaving", "source")

    def __init__(self, leaving: list[FirstRun], source: Rerun | None) -> None:
        self.leaving, self.source = leaving, source
        hooks = _top_hooks(True)
        self.hook = None if hooks is None else hooks[0]  # what lies inside of it has others on top
        self.alone = not torch.is_grad_enabled()  # nothing inside of it has a backward of its own


def called(module: Any, number: int, running: Running | None, peek: bool = False) -> tuple[Read | None, bool]:
    """(what this call of a module reads by, whether it is run again). `number`: the precision of the region."""
    leaving, source = around(running)
    read = None if source is None else source.next(module, peek)
    if leaving and not peek:
        read = read or Read(number)
        for first in leaving:
            first.reads.setdefault(module, []).append(read)
    return read, source is not None


# --------------------------------------------------------------------------------- the checkpoints around a call


def around(running: Running | None) -> tuple[list[FirstRun], Rerun | None]:
    """(the first runs that this place is in, the later run that it is in).

    `running`: the innermost run of te_torch.checkpoint's. Inside of it are torch's own, if any.
    """
    found: dict[FirstRun, None] = {}
    source = None
    if running is None or not running.alone:
        of_function, of_hook = _of_functions(found, running), _of_hooks(found, running)
        source = of_function or of_hook
    if source is None and running is not None:
        found |= dict.fromkeys(running.leaving)
        source = running.source
    return [*found], source


def _of_functions(found: dict[FirstRun, None], running: Running | None) -> Rerun | None:
    """Checkpoints that are autograd functions: first runs into `found`; the later run that this is, if any."""
    if not _in_a_forward() and (running is not None or not in_backward()):
        return None
    for ctx, backward in _functions():
        if not backward:
            found[_of(ctx)] = None
        elif (first := getattr(ctx, "_te_first_run", None)) is not None:
            return first.rerun(_graph_task())
    return None


def _functions() -> Iterator[tuple[Any, bool]]:
    """The `ctx` of each autograd function that runs, the innermost first, and whether it is its backward."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code not in stops:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            ctx = frame.f_locals.get("ctx")
            if isinstance(ctx, FunctionCtx):
                yield ctx, code.co_name == "backward"
        frame = frame.f_back


#: Code beyond which nothing is looked for: that of a backward pass, which runs nothing again by itself, and that of
#: te_torch.checkpoint, which has found by itself what is around it.
stops = {_engine_run_backward.__code__}


def _of_hooks(found: dict[FirstRun, None], running: Running | None) -> Rerun | None:
    """The same of checkpoints that keep by hooks."""
    end = None if running is None else running.hook
    for hook in _pack_hooks(end):
        frame, again = _frame_of(hook)
        if again and frame is not None:
            return _of(frame).rerun(hook)
        if frame is not None:
            found[_of(frame)] = None
    return None


def _pack_hooks(end: Any) -> list[Any]:
    """The hooks that saved tensors go through, the innermost first, up to this one."""
    top = _top_hooks(True)
    if top is None or top[0] is end:
        return []
    taken = []
    try:
        while top is not None and top[0] is not end:
            taken.append(top)
            _hooks._pop_saved_tensors_default_hooks()
            top = _top_hooks(True)
    finally:
        for hooks in reversed(taken):
            _hooks._push_saved_tensors_default_hooks(*hooks)
    return [pack for pack, _ in taken]


def _frame_of(pack: Any) -> tuple[Any, bool]:
    """The frame of torch's checkpoint whose hook this is, and whether it runs again; None if it is another hook."""
    for cell in getattr(unwrap(pack), "__closure__", None) or ():
        held = cell.cell_contents
        again = isinstance(held, weakref.ref)
        frame = held() if again else held
        if isinstance(frame, _CheckpointFrame):
            return frame, again
    return None, False


def _of(owner: Any) -> FirstRun:
    """What is kept with this frame or `ctx`."""
    found: FirstRun | None = getattr(owner, "_te_first_run", None)
    if found is None:
        found = owner._te_first_run = FirstRun()
    return found
