"""When scales are updated, and how: those of forward where the outermost region ends, gradients' after backward.

`te_core.ops.update_scales` states the rule. Where several processes train together the maxima are reduced first
(te_torch.amax_reduction).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.ops.quantize import ScalingState as CoreState
from te_core.plan_cache import drop_oldest
from te_core.precision import Operand, Precision
from te_torch import amax_reduction, handovers
from te_torch import state as scaling
from te_torch.runtime import runtime_for, to_core
from te_torch.state import BACKWARD, FORWARD, ScalingState, States, by_token, noted, to_resize, watched

#: Whose compiled code was run again as a CUDA graph: no operator says that it ran, nor that its backward did.
_replayed: dict[int, None] = {}


def region_begins() -> None:
    """What compiled code wrote before is none of this region's. Backwards that nobody told of have ended."""
    if _replayed:
        tokens = list(_replayed)
        _replayed.clear()
        update(tokens, BACKWARD)
    for token in list(watched):
        state = by_token(token)
        if state is None:
            watched.pop(token, None)
        elif not (state.told and state.told.open):  # of another thread's region
            state.seen_version = state.amax_history_fwd._version


def traced_that_ran(group: Any, ran: Any) -> list[int]:
    """The states into whose history compiled code has merged maxima since their last update, in a region of `group`.

    Compiled code leaves no other trace that it would not have to be compiled again for: it writes the history as any
    tensor, which autograd counts. `ran`: what ran in the region as far as operators told; of what they told another
    thread's region, that one takes care.
    """
    found = []
    for token in list(watched):
        state = by_token(token)
        if state is None:
            watched.pop(token, None)
        elif state.amax_history_fwd._version != state.seen_version:
            if token not in ran.states:
                if state.told and state.told.open:
                    continue
                _replayed[token] = None
            state.group = group
            found.append(token)
    return found


def update(tokens: Iterable[int], direction: int, only_due: bool = False) -> None:
    """The delayed-scaling step of these states, each once: one launch per device and rule."""
    if to_resize:
        _resize(tokens := list(tokens), direction)
    found: dict[int, ScalingState] = {}  # by their layouts, of which plans are
    for token in tokens:
        state = by_token(token)
        if state is None or state.precision is None or (only_due and not state.due):
            continue
        if _operand(state.precision, direction) is None:
            continue
        found[state.layout] = state
    states = list(found.values())
    if not states:
        return
    # A step usually updates the states that the last one did: its plan is kept with the first of them.
    key = (direction, scaling.moves, *found)
    plans = states[0].update_plans
    plan = plans.get(key)
    if plan is None:
        if len(plans) > 16:
            plans.clear()
        plan = plans[key] = _plan_update(states, direction)
    handed, launches, tokens_by_callables = plan
    for receivers, givers in handed:
        torch._foreach_maximum_(receivers, givers)
    amax_reduction.reduce(states, direction, key)
    if direction == FORWARD:
        for state in states:
            state.__dict__["due"] = False
    for anchor, launch in launches:
        ops.run_update(runtime_for(anchor), launch)
    for token in tokens_by_callables:
        with_callables: Any = by_token(token)
        if (rule := with_callables.precision) is not None:
            _update_by_callables(with_callables, direction, rule, with_callables.recipe)
    if direction == FORWARD:
        for state in states:
            if state.seen_version is not None:
                state.seen_version = state.amax_history_fwd._version


def _resize(tokens: list[int], direction: int) -> None:
    """Make the histories of these states as long as their rules say: the maxima of this step stay.

    Each direction in its own update: a backward that is still to come writes the history that its forward was given.
    """
    for token in [token for token in to_resize if by_token(token) is None]:
        del to_resize[token]
    for token in tokens:
        state, left = by_token(token), to_resize.get(token, ())
        if state is None or direction not in left:
            continue
        kept = {name: getattr(state, name) for name in ("precision", "recipe", "due")}
        watched, rule = state.seen_version is not None, kept["precision"].history
        state.resize_history(rule.length, direction)
        state.__dict__.update(kept)
        if watched:
            state.watch()
        del to_resize[token]
        if others := tuple(d for d in left if d != direction):
            to_resize[token] = others


def abandon(tokens: Iterable[int], group: Any, precision: Precision, only_due: bool = False) -> None:
    """An exception has ended a region of this group in which these states ran: there is no update."""
    states = [state for token in tokens if (state := by_token(token)) is not None]
    if only_due and not any(state.due for state in states):  # as torch's checkpoint stops what it runs again
        return
    amax_reduction.abandoned({group, *[state.group for state in states]}, precision)


def _plan_update(states: list[ScalingState], direction: int) -> tuple[list[Any], list[Any], list[int]]:
    """(maxima of receivers and of those who hand over to them, launches with a tensor of each, states by callables)."""
    groups: dict[Any, list[tuple[ScalingState, Precision]]] = {}
    by_callables = []
    for state in states:
        precision = state.precision
        if precision is None:  # another thread runs the module in another recipe from now on
            continue
        state.begins = None  # here, where each state comes once
        rule = precision.history
        assert rule is not None
        if state.scale_fwd.is_meta:  # nothing was computed
            continue
        if callable(rule.amax_algo) or rule.scale_algo is not None:
            by_callables.append(state.token)
        else:
            groups.setdefault((state.scale_fwd.device, rule.amax_algo), []).append((state, precision))
    launches = []
    for (_, algo), members in groups.items():
        anchor = members[0][0].scale_fwd
        parts = [state.core(direction, _limit(precision, direction)) for state, precision in members]
        launches.append((anchor, ops.plan_update(runtime_for(anchor), parts, algo)))
    return handovers.pairs(states, direction), launches, by_callables


def update_traced(ran: list[tuple[ScalingState, Any, Any]]) -> None:
    """The forward update of the states that ran in a region inside a compiled function, with rules and recipes."""
    for algo in ("max", "most_recent"):
        of_algo = [(s, p) for s, p, _ in ran if p.history.amax_algo == algo and p.history.scale_algo is None]
        if of_algo:
            torch.ops.te_runtime.update(
                [s.scale_fwd for s, _ in of_algo],
                [s.amax_history_fwd for s, _ in of_algo],
                [s.used_fwd for s, _ in of_algo],
                [_limit(p, FORWARD) for _, p in of_algo],
                [p.history.length for _, p in of_algo],
                algo,
            )
    for s, p, recipe in ran:
        if callable(p.history.amax_algo) or p.history.scale_algo is not None:
            _update_by_callables(s, FORWARD, p, recipe)


_library = torch.library.Library("te_runtime", "FRAGMENT")
_library.define(
    "update(Tensor(a!)[] scales, Tensor(b!)[] histories, Tensor(c!)[] used, float[] limits, int[] lengths, "
    "str algo) -> ()"
)


def _update_op(
    scales: list[torch.Tensor],
    histories: list[torch.Tensor],
    used: list[torch.Tensor],
    limits: list[float],
    lengths: list[int],
    algo: str,
) -> None:
    for history, length in zip(histories, lengths, strict=True):
        if len(history) < length:
            raise UnsupportedError(
                "autocast inside a compiled function",
                f"an amax history of {len(history)} rows and a recipe that asks for {length}",
                "a history that is long enough",
                "call te_torch.prepare_state(model, recipe) before, or put the region around the compiled function",
            )
    rows = [history[:length] for history, length in zip(histories, lengths, strict=True)]
    parts = zip(scales, rows, used, limits, strict=True)
    states = [CoreState(to_core(s), to_core(h), to_core(u), limit) for s, h, u, limit in parts]
    ops.update_scales(runtime_for(scales[0]), states, algo)


_library.impl("update", _update_op, "CompositeExplicitAutograd")
torch.library.register_fake("te_runtime::update", lambda *args: None, lib=_library)


def _operand(precision: Precision, direction: int) -> Operand | None:
    """The rule whose format the scales of a direction fill; None where the precision quantizes nothing."""
    return precision.input if direction == FORWARD else precision.grad


def _limit(precision: Precision, direction: int) -> float:
    operand, history = _operand(precision, direction), precision.history
    assert operand is not None and history is not None
    return operand.dtype.max * 2.0**-history.margin


def _update_by_callables(state: ScalingState, direction: int, precision: Precision, recipe: Any) -> None:
    """The documented order for user-supplied rules: amax from the whole history, roll, scale, in torch."""
    suffix = ("fwd", "bwd")[direction]
    scale, history, used = (getattr(state, f"{n}_{suffix}") for n in ("scale", "amax_history", "used"))
    operand, rule = _operand(precision, direction), precision.history
    assert operand is not None and rule is not None
    before = scale.clone()
    if callable(rule.amax_algo):
        amax = _one_each("amax_compute_algo", rule.amax_algo(history), scale)
    else:
        amax = history.amax(dim=0) if rule.amax_algo == "max" else history[0].clone()
    if rule.scale_algo is not None:
        found = rule.scale_algo(amax, scale, operand.dtype.max, recipe)
        new = _one_each("scaling_factor_compute_algo", found, scale)
    else:
        new = (operand.dtype.max / amax) / 2.0**rule.margin
        new = torch.where((amax > 0) & torch.isfinite(amax), new, scale)
        new = torch.where(torch.isinf(new), torch.full_like(new, torch.finfo(torch.float32).max), new)
    # Only now: what a rule returned may be a view of the history, or be refused.
    used.copy_(before)
    if history.shape[0] > 1:
        history.copy_(torch.roll(history, -1, 0))
    history[0].zero_()
    scale.copy_(new)


def _one_each(name: str, found: Any, scale: torch.Tensor) -> torch.Tensor:
    """What a user's rule returned, where that is a number for each scale, or one for all."""
    if isinstance(found, torch.Tensor) and found.shape in (scale.shape, ()):
        return found
    got = f"of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else f"{found!r}"
    raise ArgumentError(
        "DelayedScaling",
        f"{name}, which returned {'a tensor ' * isinstance(found, torch.Tensor)}{got}",
        f"a tensor of shape {tuple(scale.shape)}: a number for each scale",
        "reduce the history [length, scales] over its first dimension",
    )


_pending: dict[int, list[int]] = {}  # backward pass -> states whose backward ran in it


def ran_backward(state: ScalingState | States, within: int = -1) -> None:
    """Called by a module's backward: its gradient state is updated once, when this backward pass ends.

    `within` is the pass in which the forward was recomputed, if it was: a reentrant checkpoint then runs the
    backward in an inner pass of its own, but it is the outer one that counts.
    """
    if isinstance(state, States):
        for each in state.each:
            if each is not None:
                ran_backward(each, within)
        return
    if noted and (ran := noted.get(state.token)) is not None:
        ran[state.token] = None
        return
    waiting = _pending.get(within)
    if waiting is None:
        waiting = _pending[this_pass()]
    waiting.append(state.token)


def this_pass() -> int:
    """The number of the running backward pass, at whose end the states that wait for it are updated; -1 outside of one.

    (What a user runs again by himself need not run in one.)
    """
    task = torch._C._current_graph_task_id()
    if task != -1 and task not in _pending:
        while len(_pending) > 64:  # passes that an exception ended never called back
            drop_oldest(_pending)
        begun: list[int] = []
        if _pending.setdefault(task, begun) is begun:  # autograd has a thread for each device
            torch.autograd.Variable._execution_engine.queue_callback(lambda: update(_pending.pop(task, ()), BACKWARD))
    return task
