"""Regions of low precision: `autocast`, `fp8_autocast`.

The outermost region collects weak references to the states of the modules that ran in it, and updates their
forward scales when it ends. A module reads the active region in its forward only; backward knows all it needs.

The active region is one plain attribute, `active.region`, which a tracing compiler can follow and guard on. Eager
code, where several threads may each be in a region of their own, finds its region by thread instead.
"""

from __future__ import annotations

import copy
import warnings
from _thread import get_ident
from dataclasses import replace
from typing import Any

import torch

from te_core import device
from te_core.errors import ArgumentError
from te_core.precision import Precision
from te_core.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    by_token,
    resolve,
    the_one,
)
from te_torch import amax_reduction
from te_torch import state as scaling
from te_torch.availability import current_device
from te_torch.runtime import constant_at_trace

# Precisions by number, 0 being none: what a tracing compiler can hold as a constant and guard on.
_numbered: list[Precision | None] = [None]
_recipes: list[Recipe | None] = [None]  # what the precision of that number was resolved from
_numbers: dict[int, int] = {}
#: Those of custom recipes, which say something else for each module.
custom_numbers: set[int] = set()

#: How a region changes what its recipe says: nothing, `emulate`, `strict`, both; or high precision that only records
#: maxima.
PLAIN, EMULATE, STRICT, CALIBRATE = 0, 1, 2, 4


def precision_of(number: int) -> Precision | None:
    """The precision of this number; None for 0."""
    return _numbered[number]


def recipe_of(number: int) -> Recipe | None:
    """The recipe of this number, as it was when the number was given: what user-supplied rules are shown."""
    return _recipes[number]


def number_of(recipe: Recipe, mode: int = PLAIN) -> int:
    """The number of what this recipe says now, in a region of this mode."""
    precision = resolve(recipe)
    if mode:
        precision = _in_mode(precision, mode)
    return number_of_precision(precision, recipe)


def number_of_precision(precision: Precision, recipe: Recipe | None) -> int:
    """The number of a precision (one that `te_core.recipe.the_one` gave)."""
    number = _numbers.get(precision.serial)
    if number is None:
        _numbered.append(precision)
        _recipes.append(copy.copy(recipe))
        number = _numbers[precision.serial] = len(_numbered) - 1
        if precision.factory is not None:
            custom_numbers.add(number)
    return number


@constant_at_trace
def reads_quantized(number: int) -> bool:
    """Whether no GEMM of this precision reads the weight itself, which then need not be in the activation dtype."""
    precision = _numbered[number]
    rule = None if precision is None else precision.weight
    if rule is None or precision.backward == "high_precision":  # type: ignore[union-attr]
        return False
    parts = (rule, rule.columnwise or rule)
    return all(part.scaling not in ("calibrate", "custom", "none") for part in parts)


@constant_at_trace
def draws(number: int) -> bool:
    """Whether backward in this precision rounds stochastically, and so needs random numbers."""
    precision = _numbered[number]
    return precision is not None and precision.grad is not None and precision.grad.stochastic


_modes: dict[tuple[int, int], Precision] = {}


def _in_mode(precision: Precision, mode: int) -> Precision:
    found = _modes.get((precision.serial, mode))
    if found is None:
        if mode & CALIBRATE:
            x, w = (o and replace(o, scaling="calibrate") for o in (precision.input, precision.weight))
            changed = replace(
                precision, input=x, weight=w, grad=None, output=None, grad_input=None, attention=None
            )  # fmt: skip
        else:
            changed = replace(precision, emulate=bool(mode & EMULATE), strict=bool(mode & STRICT))
        found = _modes[precision.serial, mode] = the_one(changed)
    return found


@constant_at_trace
def _trace_number(token: int, mode: int) -> int:
    """The same at trace time, where the recipe is a constant of the program known by its token."""
    return number_of(by_token(token), mode)


@constant_at_trace
def _refuse_traced_reduction(number: int) -> None:
    precision = precision_of(number)
    if precision is not None:
        amax_reduction.refuse_traced(precision)


class Region:
    """What a module has to know of the region that it runs in."""

    __slots__ = ("calibrating", "group", "precision", "ran", "recipe", "recompute", "traced")

    def __init__(
        self,
        recipe: Recipe,
        precision: int,
        calibrating: bool,
        ran: dict[int, Any],
        recompute: bool,
        traced: bool,
        group: Any = None,
    ) -> None:
        self.recipe = recipe
        self.group = group  # over which processes maxima are reduced; None: the default group
        self.precision = precision  # by number; 0: high precision
        self.calibrating = calibrating
        # The states that ran, by token, which is a weak reference; a region inside a compiler's trace, which ends
        # with it, holds the states themselves. (States that ran in a compiled function inside an eager region are
        # found by scaling.traced_that_ran: what a trace writes into a container, it also guards on.)
        self.ran = ran
        self.traced = traced
        self.recompute = recompute  # inside a backward pass: the forward of a checkpoint, run again


class _Active:
    """Holds the plain attribute."""

    def __init__(self) -> None:
        self.region: Region | None = None


active = _Active()
_by_thread: dict[int, Region] = {}


def current_region() -> Region | None:
    """The innermost region of this thread."""
    return active.region if torch.compiler.is_compiling() else _by_thread.get(get_ident())


def thread_region() -> Region | None:
    """The same for eager code."""
    return _by_thread.get(get_ident())


def group_around_trace() -> Any:
    """At trace time: the group of the eager region that the traced code is in."""
    region = _by_thread.get(get_ident())
    return None if region is None else region.group


def _set_region(region: Region | None, tracing: bool) -> None:
    active.region = region
    if tracing:
        return
    if region is None:
        _by_thread.pop(get_ident(), None)
    else:
        _by_thread[get_ident()] = region


_graph_task = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward there is a checkpoint's recomputation."""
    return _graph_task() != -1


def get_default_recipe() -> Recipe:
    """The recipe of a region that names none: MXFP8 where the GPU has it, else per-tensor FP8."""
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


class autocast:  # noqa: N801  the documented name
    """Context: modules inside run their GEMMs as `recipe` says.

    enabled=False runs them in high precision, also inside an enabled region. The outermost enabled region
    updates the forward scales of delayed scaling when it ends in grad mode.

    calibrating=True with enabled=False runs in high precision and collects what delayed scaling starts from: maxima
    and, when the region ends, scales.
    strict=True makes an error of everything that is not computed as the recipe asks; emulate=True lets formats that
    the device cannot multiply be dequantized and multiplied in float32: exact, and slow.

    In a job of several processes the maxima of delayed scaling are reduced over `amax_reduction_group` (None: over all
    processes) before each update, unless the recipe says reduce_amax=False. All ranks of the group have to run the same
    modules in the same order. A region inside a compiled function cannot do that and is refused; put it around.
    """

    __slots__ = (
        "_entered", "_graph", "_mode", "_outermost", "_previous", "_region", "amax_reduction_group", "calibrating",
        "enabled", "recipe",
    )  # fmt: skip

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
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise ArgumentError(
                "autocast", f"recipe={recipe!r}", "a recipe of te_core.recipe, or None", "pass DelayedScaling(), say"
            )
        self.enabled = enabled
        self.calibrating = calibrating
        if recipe is None:
            recipe = _default or prepare_default()
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group
        self._graph = _graph
        self._mode = EMULATE * emulate + STRICT * strict
        self._entered = False
        self._outermost = False
        self._previous: Region | None = None
        self._region: Region | None = None

    def __enter__(self) -> None:
        if self._entered:
            raise RuntimeError("this autocast is already active: make another one for a nested region")
        tracing = torch.compiler.is_compiling()
        outer = active.region if tracing else _by_thread.get(get_ident())
        self._previous = outer
        precision = 0
        if self.enabled or (self.calibrating and self.recipe.delayed()):  # other recipes have nothing to calibrate
            mode = self._mode if self.enabled else CALIBRATE
            precision = _trace_number(self.recipe.token, mode) if tracing else number_of(self.recipe, mode)
        recompute = not tracing and in_backward()
        # A region around a backward pass is none of the regions that a checkpoint runs again in that pass.
        self._outermost = outer is None or recompute and not outer.recompute
        ran = {} if self._outermost else outer.ran  # type: ignore[union-attr]
        if tracing and outer is None:
            _refuse_traced_reduction(precision)
        group = None if tracing else self.amax_reduction_group
        self._region = Region(self.recipe, precision, self.calibrating, ran, recompute, tracing, group)
        _set_region(self._region, tracing)
        self._entered = True

    def __exit__(self, *exc: object) -> None:
        region = self._region
        _set_region(self._previous, torch.compiler.is_compiling())
        self._entered = False
        self._region = None
        self._previous = None
        if region is None or not self._outermost or not region.precision or self._graph:
            return
        if self.enabled and not torch.is_grad_enabled():  # calibration also runs without gradients
            return
        if region.traced:
            scaling.update_traced(list(region.ran.values()))
        else:
            # What a recomputation runs was updated before, unless its first forward ran without grad mode.
            ran = [*region.ran, *scaling.traced_that_ran(region.group)]
            scaling.update(ran, scaling.FORWARD, only_due=region.recompute)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """The documented older name of `autocast`."""
    warnings.warn("fp8_autocast is the older name of autocast(recipe=...)", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
