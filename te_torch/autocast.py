"""Regions of low precision: `autocast`, `fp8_autocast`; and which precision a forward runs in now (`precision_now`).

The outermost region collects weak references to the states of the modules that ran in it, and updates their
forward scales when it ends. A module asks for its precision in its forward only; backward knows all it needs.

The active region is an attribute of a `threading.local`, so it belongs to its thread and goes with it. A tracing
compiler follows it and guards on it (it does where the class gives the attribute a beginning in each thread).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from te_core import device
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from te_core.spelling import ArgumentNameError, name_error
from te_torch import amax_reduction, shape_runs, updates
from te_torch import state as scaling
from te_torch.availability import current_device
from te_torch.export.mode import exporting
from te_torch.precisions import CALIBRATE, CHECK, EMULATE, STRICT, number_at_trace, number_of, precision_of, recipe_of
from te_torch.reruns import Read, Running, called, in_backward, may_run_again
from te_torch.runtime import constant_at_trace, deprecated
from te_torch.values import check_flags


@dataclass(eq=False, repr=False, slots=True)
class Region:
    """What a module has to know of the region that it runs in."""

    recipe: Recipe
    precision: int  # by number; 0: high precision
    calibrating: bool
    ran: Ran | None  # None: inside a compiler's trace in an eager region, which finds by itself what ran
    recompute: bool  # inside a backward pass: the forward of a checkpoint, run again
    traced: bool  # inside a compiler's trace
    outer: Region | None
    group: Any = None  # over which processes maxima are reduced; None: the default group


class Ran:
    """What ran in an outermost region and those inside it.

    `states` holds tokens, which are weak references. A region inside a compiler's trace, which ends with it, has the
    states themselves in `traced`, with the numbers of their precisions. (States that ran in a compiled function inside
    an eager region are found by updates.traced_that_ran: what a trace writes into a container, it also guards on.)
    """

    __slots__ = ("open", "states", "traced")

    def __init__(self) -> None:
        self.states: dict[int, None] = {}
        self.traced: list[tuple[Any, int]] = []
        self.open = 0  # regions that have not ended


class _Active(threading.local):
    """The innermost region of the calling thread."""

    def __init__(self) -> None:
        self.region: Region | None = None
        self.running: Running | None = None  # of te_torch.checkpoint's, the innermost
        # Whether this is what a checkpoint runs; and what it runs again.
        self.checkpointed = self.recomputing = False
        self.suspended = False  # inside of `suspended`


active = _Active()
_suspensions = 0  # of all threads: a backward may run in another one
_graph_task = torch._C._current_graph_task_id


@constant_at_trace
def _refuse_traced_reduction(number: int) -> None:
    """Raise for a region inside a compiled function whose update would have to communicate."""
    precision = precision_of(number)
    history = None if precision is None else precision.history
    if history is not None and history.reduce_amax and amax_reduction.spans_ranks(None):
        raise UnsupportedError(
            "autocast",
            "a region inside a compiled function, in a job of several processes, with reduce_amax=True",
            "such a region around the compiled function, or DelayedScaling(reduce_amax=False)",
            "move the region out of the compiled function",
        )


# ------------------------------------------------------------------------------------- which precision, now

#: Precision by number, whether a checkpoint runs this forward again, the region, whether a compiler traces it, and what
#: the forward leaves for a checkpoint, or takes from its first run.
Now = tuple[int, bool, "Region | None", bool, "Read | None"]
NOWHERE: Now = (0, False, None, False, None)  # of what no region changes


def precision_now(module: Any, peek: bool = False) -> Now:
    """How a forward of this module runs: the one rule of it.

    With `peek` it only looks, for one who acts on what it will do.
    """
    if torch.compiler.is_compiling():
        region = active.region
        return (
            (0, False, None, True, None) if region is None else (region.precision, region.recompute, region, True, None)
        )
    return precision_in_eager(module, peek)


def precision_in_eager(module: Any, peek: bool = False) -> Now:
    """The same where no compiler traces."""
    region = active.region
    number, again = (0, False) if region is None else (region.precision, region.recompute)
    if active.running is None and _graph_task() == -1 and (peek or not may_run_again()):
        return number, again, region, False, None
    read, ran = called(module, number, active.running, peek)
    if not ran:
        return number, again, region, False, read
    # A region around the backward pass is none of those that a checkpoint runs again in it.
    return number if read is None else read.number, True, region if again else None, False, read


# ---------------------------------------------------------------------------------------- the default recipe


def get_default_recipe() -> Recipe:
    """The recipe of an `autocast` region that names none: MXFP8 where the GPU has it, else per-tensor FP8."""
    info = current_device()
    if info is not None and device.mxfp8_supported(info)[0]:
        return MXFP8BlockScaling()
    if info is not None and info.capability >= (12, 0):
        return Float8CurrentScaling()
    return DelayedScaling()


# One object for all regions, which resolves once; traced code could make none. Not made at import: that would ask the
# driver what the GPU is.
_default: Recipe | None = None


def prepare_default() -> Recipe:
    """Make the default recipe, if it is not there yet (the first module does, so that traced code finds it)."""
    global _default
    if _default is None:
        _default = get_default_recipe()
    return _default


# --------------------------------------------------------------------------------------------------- regions


def _refuse_names(operation: str, given: dict[str, Any], names: dict[str, str], allowed: tuple[str, ...]) -> None:
    """Raise for keyword arguments that this function does not have, some of which another function calls so."""
    for name, value in given.items():
        if name in names:
            raise ArgumentNameError(operation, f"{name}={value!r}", ", ".join(allowed), f"pass {names[name]}=")
    raise name_error(operation, given, allowed)


class autocast:  # noqa: N801  the documented name
    """Context: modules inside run their GEMMs as `recipe` says.

    enabled=False runs them in high precision, also inside an enabled region. The outermost region, if it is enabled,
    updates the forward scales of delayed scaling when it ends in grad mode.

    calibrating=True with enabled=False runs in high precision and collects what delayed scaling starts from: maxima
    and, when the region ends, scales.
    strict=True makes an error of everything that is not computed as the recipe asks; emulate=True lets formats that
    the device cannot multiply be dequantized and multiplied in float32: exact, and slow.
    check_finite=True has every cast count the NaNs and infinities among its values (te_torch.nonfinite_report).

    A region ends with its block, whatever ends that: after an exception nothing is updated or reduced. A generator
    that is left suspended inside a region leaks it to its caller, as with torch.autocast.

    In a job of several processes the maxima of delayed scaling are reduced over `amax_reduction_group` (None: over all
    processes) before each update, unless the recipe says reduce_amax=False. All ranks of the group have to run the same
    modules in the same order. A region inside a compiled function cannot do that and is refused; put it around.

    Raises:
        ArgumentError: An argument is of a wrong kind, or has an older name.

    Example:
        from te_torch.recipe import DelayedScaling

        layer = te.Linear(256, 256, device="cpu")
        with te.autocast(recipe=DelayedScaling(), emulate=True):
            loss = layer(torch.randn(32, 256)).square().mean()
        loss.backward()
    """

    __slots__ = ("_graph", "_mode", "_region", "amax_reduction_group", "calibrating", "enabled", "recipe")

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
        *,
        strict: bool = False,
        emulate: bool = False,
        check_finite: bool = False,
        **misnamed: Any,
    ) -> None:
        if misnamed:
            _refuse_names("autocast", misnamed, _NEWER_NAMES, _ALLOWED)
        if enabled is not True and enabled is not False:
            raise ArgumentError("autocast", f"enabled={enabled!r}", "True or False", "pass a recipe as recipe=")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise ArgumentError(
                "autocast", f"recipe={recipe!r}", "a recipe of te_core.recipe, or None", "pass DelayedScaling(), say"
            )
        if calibrating is not False or strict is not False or emulate is not False or check_finite is not False:
            check_flags("autocast", calibrating=calibrating, strict=strict, emulate=emulate, check_finite=check_finite)
        self.enabled = enabled
        self.calibrating = calibrating
        if recipe is None:
            recipe = _default or prepare_default()
        self.recipe = recipe
        group = amax_reduction_group
        self.amax_reduction_group = None if group is None else amax_reduction.checked_group(group)
        self._graph = _graph
        self._mode = EMULATE * bool(emulate) + STRICT * bool(strict) + CHECK * bool(check_finite)
        self._region: Region | None = None

    def __enter__(self) -> None:
        if self._region is not None:
            raise RuntimeError("this autocast is already active: make another one for a nested region")
        tracing = torch.compiler.is_compiling()
        outer = active.region
        precision = 0
        if active.suspended or (not tracing and _suspensions and in_backward()):
            pass
        elif self.enabled or (self.calibrating and self.recipe.delayed()):  # other recipes have nothing to calibrate
            mode = self._mode if self.enabled else CALIBRATE
            precision = number_at_trace(self.recipe.token, mode) if tracing else number_of(self.recipe, mode)
        recompute = not tracing and (in_backward() or active.recomputing)
        ran: Ran | None = None
        if not tracing or outer is None or outer.ran is not None and outer.traced:
            # A region around a backward pass is none of the regions that a checkpoint runs again in that pass.
            ran = Ran() if outer is None or recompute and not outer.recompute else outer.ran
            ran.open += 1  # type: ignore[union-attr]
        if outer is None:
            if not tracing:
                updates.region_begins()
                if shape_runs.STAGES in sys.modules and not shape_runs.watching:
                    shape_runs.watch(suspended)
            elif not exporting.on:
                _refuse_traced_reduction(precision)
        group = None if tracing else self.amax_reduction_group
        self._region = active.region = Region(
            self.recipe, precision, self.calibrating, ran, recompute, tracing, outer, group
        )

    def __exit__(self, kind: Any, *exc: object) -> None:
        region = self._region
        if region is None:
            return
        if active.region is region:  # nearly always; a call would let a KeyboardInterrupt in before
            active.region = region.outer
        else:  # take it out of those that this thread is in
            inner = active.region
            while inner is not None and inner.outer is not region:
                inner = inner.outer
            if inner is not None:
                inner.outer = region.outer
        self._region = None
        ran = region.ran
        if ran is None:
            return
        ran.open -= 1
        if ran.open or not region.precision or self._graph:
            return
        if self.enabled and not torch.is_grad_enabled():  # calibration also runs without gradients
            return
        if region.traced:
            if kind is None:
                rules = [(state, precision_of(number), recipe_of(number)) for state, number in ran.traced]
                updates.update_traced(rules)
            return
        tokens = [*ran.states, *updates.traced_that_ran(region.group, ran)]
        # What a recomputation runs was updated before, unless its first forward ran without grad mode.
        if kind is None:
            updates.update(tokens, scaling.FORWARD, only_due=region.recompute)
        else:
            rule = precision_of(region.precision)
            assert rule is not None  # so has every region that is on
            updates.abandon(tokens, region.group, rule, only_due=region.recompute)


@contextmanager
def suspended() -> Iterator[None]:
    """Nothing inside runs in low precision or counts as run, whatever regions are around it or entered there."""
    global _suspensions
    before, region = active.suspended, active.region
    active.suspended = True
    _suspensions += 1
    if region is not None:
        active.region = Region(region.recipe, 0, False, region.ran, region.recompute, region.traced, region)
    try:
        yield
    finally:
        _suspensions -= 1
        active.suspended, active.region = before, region


#: The documented names of fp8_autocast's arguments, and what autocast calls them.
_NEWER_NAMES = {"fp8_recipe": "recipe", "fp8_group": "amax_reduction_group"}
_ALLOWED = ("enabled", "calibrating", "recipe", "amax_reduction_group", "strict", "emulate", "check_finite")
_OLDER_NAMES = {newer: older for older, newer in _NEWER_NAMES.items()}


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
    **misnamed: Any,
) -> autocast:
    """The documented older name of `autocast`."""
    if misnamed:
        _refuse_names("fp8_autocast", misnamed, _OLDER_NAMES, ("enabled", "calibrating", "fp8_recipe", "fp8_group"))
    deprecated("fp8_autocast", "autocast(recipe=...)")
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
