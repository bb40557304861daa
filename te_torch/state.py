"""The FP8 state of a module: scales and amax histories, as buffers that move and are saved with the module.

A module that runs under a recipe with a history gets a child named `fp8_state`, so that its checkpoint has the
fixed float32 entries `fp8_state.scale_fwd`, `.amax_history_fwd`, `.scale_bwd`, `.amax_history_bwd`. Casts raise
row 0 of a history; the update, once a step, reads the histories and sets the scales
(`te_core.ops.update_scales` states the rule). There is no other FP8 state anywhere. Where several processes train
together the maxima are reduced first (te_torch.amax_reduction).

A state is referred to by its token, a number under which it is found as long as it lives: a weak reference. Compiled
code, which layers of one shape share, knows a state by its tensors alone: `of_tensor` finds it by one of them.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.ops.quantize import ScalingState as CoreState
from te_core.precision import History, Operand, Precision
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, Scales
from te_torch import amax_reduction
from te_torch.runtime import runtime_for, to_core, to_core_shape

NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
FORWARD, BACKWARD = 0, 1


def require_usable(operation: str, entry: str, value: Any) -> None:
    """Refuse a scale that is not finite and above zero, and a history with NaN or less than zero.

    An infinity in a history is what a step that overflowed leaves, and the update passes over it.
    """
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        return  # values that are not here to be looked at
    numbers = value.detach().float()  # as it will be
    good = (numbers > 0) & torch.isfinite(numbers) if "scale_" in entry else numbers >= 0
    if good.all():
        return
    index = (~good).nonzero()[0].tolist()
    raise ArgumentError(
        operation,
        f"{entry}, whose {index} is {numbers[tuple(index)].item()}",
        "scales that are finite and above 0, and histories without NaN or anything below 0",
        "restore the entry from a sound checkpoint, or leave the four entries out to start scales anew",
    )


_tokens = itertools.count(1)
_by_token: weakref.WeakValueDictionary[int, ScalingState] = weakref.WeakValueDictionary()
_by_address: weakref.WeakValueDictionary[int, ScalingState] = weakref.WeakValueDictionary()  # of `scale_bwd`
_moves = 0  # how often a state may have got other memory: plans of updates are of one such time


class ScalingState(torch.nn.Module):
    """Delayed-scaling state of one module with `gemms` matrix products."""

    scale_fwd: torch.Tensor
    amax_history_fwd: torch.Tensor
    scale_bwd: torch.Tensor
    amax_history_bwd: torch.Tensor
    used_fwd: torch.Tensor
    used_bwd: torch.Tensor
    #: False: it was made beside that of another module, whose compiled code this one may run too, and nothing ran yet.
    in_use = True

    def __init__(self, gemms: int, history_length: int, device: torch.device) -> None:
        super().__init__()
        for suffix, slots in (("fwd", FORWARD_SLOTS), ("bwd", BACKWARD_SLOTS)):
            n = gemms * slots
            with torch.inference_mode(False):  # a state first used in inference is loaded and trained later
                scale, used = (torch.ones(n, dtype=torch.float32, device=device) for _ in range(2))
                history = torch.zeros(history_length, n, dtype=torch.float32, device=device)
            self.register_buffer(f"scale_{suffix}", scale)
            self.register_buffer(f"amax_history_{suffix}", history)
            # The scales before the last update: what a recomputed forward has to quantize with.
            self.register_buffer(f"used_{suffix}", used, persistent=False)
        self.recipe: Any = None  # the public one, for user-supplied rules
        self.group: Any = None  # of the last region: over which processes maxima are reduced
        self._renew()

    def _renew(self) -> None:
        """Everything derived from the buffers, after they were replaced."""
        self.token = next(_tokens)
        _by_token[self.token] = self
        if self.scale_bwd.data_ptr():
            _by_address[self.scale_bwd.data_ptr()] = self
        self.precision: Precision | None = None  # the recipe of the last forward: the rule of the next update
        self._views: tuple[Scales, Scales, Scales] | None = None
        self._core: dict[tuple[int, float], CoreState] = {}
        self.update_plans: dict[tuple[int, ...], Any] = {}
        self.seen_version: int | None = None  # of the forward history, if compiled code writes it
        self.due = False  # a forward ran whose maxima no update has read yet

    def __getstate__(self) -> dict[str, Any]:
        """Without what is derived."""
        global _moves
        if self.scale_fwd.is_cpu:  # torch moves it into shared memory, in place, if this is for another process
            _moves += 1
            self._views, self._core = None, {}
        derived = ("token", "precision", "_views", "_core", "update_plans", "seen_version", "due")
        return {**{k: v for k, v in self.__dict__.items() if k not in derived}, "group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in NAMES:
            require_usable("load a module", f"{type(self).__name__}.{name}", self._buffers[name])
        self._renew()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ScalingState:
        begins = self.scale_fwd.is_meta
        for name, buffer in self._buffers.items():
            if buffer is not None:
                # Follow the module to its device, but stay float32 under .half() and .bfloat16().
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == torch.float32 else buffer.to(moved.device)
        self._renew()
        if begins and not self.scale_fwd.is_meta:  # as a new state does: to_empty() leaves memory as it was
            self.assign(None)
            with torch.no_grad():
                self.used_fwd.fill_(1), self.used_bwd.fill_(1)
        return self

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        if self.in_use:
            super()._save_to_state_dict(*args, **options)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if not self.in_use and not any(prefix + name in state_dict for name in NAMES):
            return
        self.in_use = True
        for name in NAMES:
            require_usable("load_state_dict", prefix + name, state_dict.get(prefix + name))
        before = list(self._buffers.values())
        super()._load_from_state_dict(state_dict, prefix, *args)
        if any(a is not b for a, b in zip(before, self._buffers.values(), strict=True)):  # load(assign=True)
            for suffix in ("fwd", "bwd"):
                scale: torch.Tensor = getattr(self, f"scale_{suffix}")
                if getattr(self, f"used_{suffix}").device != scale.device:
                    self._buffers[f"used_{suffix}"] = torch.ones_like(scale)
            self._apply(lambda t: t.contiguous().float())
        elif self.seen_version is not None:
            self.seen_version = self.amax_history_fwd._version  # no run wrote it

    def start(self) -> dict[str, torch.Tensor]:
        """The values that a new state of this size has."""
        fill = {"scale": torch.ones_like, "amax_history": torch.zeros_like}
        return {name: fill[name[:-4]](getattr(self, name)) for name in NAMES}

    def copies(self) -> dict[str, list[torch.Tensor]]:
        """Scales and histories by the documented names of their directions."""
        pairs = {"scaling_fwd": ("scale_fwd", "amax_history_fwd"), "scaling_bwd": ("scale_bwd", "amax_history_bwd")}
        return {key: [getattr(self, name).clone() for name in names] for key, names in pairs.items()}

    def assign(self, values: dict[str, list[torch.Tensor]] | None) -> None:
        """Take over what `copies` gave, or begin anew."""
        self.in_use = self.in_use or values is not None
        new = self.start() if values is None else self._given(values)
        with torch.no_grad():
            for name, value in new.items():
                getattr(self, name).copy_(value)
        if self.seen_version is not None:
            self.seen_version = self.amax_history_fwd._version  # no run wrote it

    def _given(self, values: Any) -> dict[str, torch.Tensor]:
        """What `copies` gave, by the names of the buffers."""
        operation, keys = "reset_fp8_meta_tensors", ("scaling_fwd", "scaling_bwd")
        lists = [values.get(key) if isinstance(values, dict) else None for key in keys]
        given = [t for pair in lists for t in pair or ()]
        shapes = [tuple(getattr(self, name).shape) for name in NAMES]
        if [tuple(t.shape) if isinstance(t, torch.Tensor) else None for t in given] != shapes:
            raise ArgumentError(
                operation,
                repr(values)[:200],
                f"two lists {keys} of tensors of shapes {shapes}",
                "pass what get_fp8_meta_tensors() of this module gave, or None to begin anew",
            )
        found = dict(zip(NAMES, given, strict=True))
        for name, t in found.items():
            require_usable(operation, name, t)
        return found

    def resize_history(self, length: int, direction: int | None = None, *, quiet: bool = False) -> None:
        """Cut the histories (of one direction, or both), or fill them up with zeros, to `length` rows."""
        names = ("amax_history_fwd", "amax_history_bwd")
        changed = []
        for name in names if direction is None else names[direction : direction + 1]:
            old = self._buffers[name]
            assert old is not None
            if old.shape[0] != length:
                with torch.inference_mode(False):
                    new = torch.zeros(length, old.shape[1], dtype=torch.float32, device=old.device)
                rows = min(length, old.shape[0])
                new[:rows] = old[:rows]
                self._buffers[name] = new
                self._renew()
                changed.append(f"{name} from {old.shape[0]}")
        if changed and not quiet:
            warnings.warn(
                f"amax histories of another length: {', '.join(changed)} to {length} rows; rows beyond are dropped, "
                "missing ones are zeros",
                stacklevel=3,
            )

    def prepare(self, precision: Precision, recipe: Any = None) -> None:
        """Take over the rule of this precision (called when it is not the one of the last forward)."""
        assert precision.history is not None
        self.resize_history(precision.history.length)
        if self.precision is not None:
            self._renew()  # plans of updates name the state by its token, and follow its rule
        self.precision = precision
        self.recipe = recipe

    def watch(self) -> None:
        """Called as compiled code first runs: from now on its runs show in the history's version."""
        if self.seen_version is None:
            self.seen_version = self.amax_history_fwd._version
            _watched[self.token] = None

    def ran_compiled(self, rule: Precision, recipe: Any, region: Any) -> None:
        """Called by compiled code as it runs: the updates follow its rule, as after `prepare`."""
        self.in_use = True
        if self.precision is not rule:
            if self.precision is not None:
                self._renew()
            self.precision, self.recipe = rule, recipe
            if self.amax_history_fwd.shape[0] != rule.history.length:  # type: ignore[union-attr]
                _to_resize[self.token] = (FORWARD, BACKWARD)
        if region is not None:
            self.watch()  # where it is a CUDA graph that runs again, nobody calls this
            self.due = True
            self.group = region.group
            region.ran.states[self.token] = None

    def is_due(self) -> bool:
        """Whether a forward, eager or compiled, ran whose maxima no update has read yet."""
        return self.due or (self.seen_version is not None and self.amax_history_fwd._version != self.seen_version)

    def extra_repr(self) -> str:
        """What a printed module shows."""
        return f"gemms={len(self.scale_fwd) // FORWARD_SLOTS}, amax_history_len={len(self.amax_history_fwd)}"

    def _make_views(self) -> tuple[Scales, Scales, Scales]:
        core = to_core_shape if self.scale_fwd.is_meta else to_core
        rows = [core(t) for t in (self.scale_fwd, self.amax_history_fwd[0], self.scale_bwd)]
        back = core(self.amax_history_bwd[0])
        views = self._views = (
            Scales(rows[0], rows[1], rows[2], back),
            Scales(core(self.used_fwd), None, rows[2], back),
            Scales(rows[0], None, rows[2], back),
        )
        return views

    def backward_scales(self) -> Scales:
        """The core's view of the state for one backward."""
        return (self._views or self._make_views())[0]

    def scales(self, recompute: bool) -> Scales:
        """The core's view of the state for one forward.

        A recomputation records nothing, and reads the scales that the forward read: the ones before the update.
        """
        views = self._views or self._make_views()
        if not recompute:
            self.__dict__["due"] = True  # Module.__setattr__ would cost a microsecond
            return views[0]
        return views[2 if self.due else 1]

    def core(self, direction: int, limit: float) -> CoreState:
        """The state of one direction as the update operation takes it."""
        found = self._core.get((direction, limit))
        if found is None:
            suffix = ("fwd", "bwd")[direction]
            scale, history, used = (
                to_core(getattr(self, f"{name}_{suffix}")) for name in ("scale", "amax_history", "used")
            )
            found = self._core[direction, limit] = CoreState(scale, history, used, limit)
        return found


def make_state(module: Any, device: torch.device, precision: Precision, recipe: Any = None) -> ScalingState:
    """The module's scaling state, following this precision's rule; made if there is none."""
    assert precision.history is not None
    state = _beginning(module, device, precision)
    if state.precision is not precision:
        if state.scale_fwd.device != device:  # a module without parameters cannot tell where a checkpoint belongs
            state.to(device)
        state.prepare(precision, recipe)
        state.in_use = True
    return state


def _beginning(module: Any, device: torch.device, precision: Precision, in_use: bool = True) -> ScalingState:
    """The module's state, of any rule; made if there is none."""
    state: ScalingState | None = module.fp8_state
    if state is None or state.scale_fwd.is_meta and device.type != "meta":  # its module was materialised since
        assert precision.history is not None
        state = ScalingState(module.gemms, precision.history.length, device)
        state.in_use = in_use
        module.fp8_state = state
    return state


def make_states(modules: list[Any], device: torch.device, precision: Precision, recipe: Any) -> None:
    """States for modules of which a compiler traces one: all of them may run what it compiles, without being traced.

    Nothing shows of a state that was made for another one's sake until its module runs. One that is in use stays as it
    is, but where there is no doubt whose it is: `ran_compiled` says what the next update does.
    """
    assert precision.history is not None
    for module in modules:
        state = _beginning(module, device, precision, in_use=False)
        if len(modules) == 1:
            make_state(module, device, precision, recipe)
            continue
        if state.scale_fwd.device != device and next(module.parameters(), None) is None:
            state.to(device)
        if not state.in_use:
            state.resize_history(precision.history.length)


_watched: dict[int, None] = {}  # in the order of running, which is every process's
#: Whose histories are longer or shorter than the rule of the next update says, with the directions in which they are.
_to_resize: dict[int, tuple[int, ...]] = {}


#: Whose compiled code was run again as a CUDA graph: no operator says that it ran, nor that its backward did.
_replayed: dict[int, None] = {}


def region_begins() -> None:
    """What compiled code wrote before is none of this region's. Backwards that nobody told of have ended."""
    if _replayed:
        tokens = list(_replayed)
        _replayed.clear()
        update(tokens, BACKWARD)
    for token in list(_watched):
        state = _by_token.get(token)
        if state is not None:
            state.seen_version = state.amax_history_fwd._version


def traced_that_ran(group: Any, told: dict[int, None]) -> list[int]:
    """The states into whose history compiled code has merged maxima since their last update, in a region of `group`.

    Compiled code leaves no other trace that it would not have to be compiled again for: it writes the history as any
    tensor, which autograd counts. `told`: those of which an operator told as it ran.
    """
    ran = []
    for token in list(_watched):
        state = _by_token.get(token)
        if state is None:
            _watched.pop(token, None)
        elif state.amax_history_fwd._version != state.seen_version:
            state.group = group
            ran.append(token)
            if token not in told:
                _replayed[token] = None
    return ran


def of_tensor(scale_bwd: torch.Tensor) -> ScalingState | None:
    """The living state with this tensor."""
    address = scale_bwd.data_ptr()
    found = _by_address.get(address)
    if found is None and address:  # memory that was moved in place, as on its way to another process
        _by_address.update({state.scale_bwd.data_ptr(): state for state in _by_token.values()})
        found = _by_address.get(address)
    return found if found is None or found.scale_bwd.data_ptr() == address else None


# ------------------------------------------------------------------------------------------- the update


def update(tokens: Iterable[int], direction: int, only_due: bool = False) -> None:
    """The delayed-scaling step of these states, each once: one launch per device and rule."""
    tokens, states = list(dict.fromkeys(tokens)), []
    if _to_resize:
        tokens = _resized(tokens, direction)
    for token in tokens:
        state = _by_token.get(token)
        if state is None or state.precision is None or (only_due and not state.due):
            continue
        if _operand(state.precision, direction) is None:
            continue
        states.append(state)
    if not states:
        return
    # A step usually updates the states that the last one did: its plan is kept with the first of them.
    key = (direction, _moves, *[s.token for s in states])
    amax_reduction.reduce(states, direction, key)
    if direction == FORWARD:
        for state in states:
            state.__dict__["due"] = False
    plans = states[0].update_plans
    plan = plans.get(key)
    if plan is None:
        if len(plans) > 16:
            plans.clear()
        plan = plans[key] = _plan_update(states, direction)
    launches, tokens_by_callables = plan
    for anchor, launch in launches:
        ops.run_update(runtime_for(anchor), launch)
    for token in tokens_by_callables:
        state = _by_token[token]
        _update_by_callables(state, direction, state.precision, state.recipe)  # type: ignore[arg-type]
    if direction == FORWARD:
        for state in states:
            if state.seen_version is not None:
                state.seen_version = state.amax_history_fwd._version


def _resized(tokens: list[int], direction: int) -> list[int]:
    """The tokens of these states once their histories are as long as their rules say: the maxima of this step stay.

    Each direction in its own update: a backward that is still to come writes the history that its forward was given.
    """
    for token in [token for token in _to_resize if token not in _by_token]:
        del _to_resize[token]
    found = []
    for token in tokens:
        state = _by_token.get(token)
        left = _to_resize.get(token, ())
        if state is None or direction not in left:
            found.append(token)
            continue
        del _to_resize[token]
        kept = {name: getattr(state, name) for name in ("precision", "recipe", "due")}
        watched, rule = state.seen_version is not None, kept["precision"].history
        state.resize_history(rule.length, direction)
        state.__dict__.update(kept)
        if watched:
            state.watch()
        if others := tuple(d for d in left if d != direction):
            _to_resize[state.token] = others
        found.append(state.token)
    return found


def abandon(tokens: Iterable[int], group: Any, precision: Precision, only_due: bool = False) -> None:
    """An exception has ended a region of this group in which these states ran: there is no update."""
    states = [state for token in tokens if (state := _by_token.get(token)) is not None]
    if only_due and not any(state.due for state in states):  # as torch's checkpoint stops what it runs again
        return
    amax_reduction.abandoned({group, *[state.group for state in states]}, precision)


def _plan_update(states: list[ScalingState], direction: int) -> tuple[list[tuple[torch.Tensor, Any]], list[int]]:
    groups: dict[Any, list[ScalingState]] = {}
    by_callables = []
    for state in states:
        rule = _rule(state)
        if state.scale_fwd.is_meta:  # nothing was computed
            continue
        if callable(rule.amax_algo) or rule.scale_algo is not None:
            by_callables.append(state.token)
        else:
            groups.setdefault((state.scale_fwd.device, rule.amax_algo), []).append(state)
    launches = []
    for (_, algo), members in groups.items():
        anchor = members[0].scale_fwd
        parts = [s.core(direction, _limit(s.precision, direction)) for s in members]  # type: ignore[arg-type]
        launches.append((anchor, ops.plan_update(runtime_for(anchor), parts, algo)))
    return launches, by_callables


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


def _rule(state: ScalingState) -> History:
    assert state.precision is not None and state.precision.history is not None
    return state.precision.history


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
    used.copy_(scale)
    if callable(rule.amax_algo):
        amax = rule.amax_algo(history)
    else:
        amax = history.amax(dim=0) if rule.amax_algo == "max" else history[0].clone()
    if history.shape[0] > 1:
        history.copy_(torch.roll(history, -1, 0))
    history[0].zero_()
    if rule.scale_algo is not None:
        new = rule.scale_algo(amax, scale, operand.dtype.max, recipe)
    else:
        new = (operand.dtype.max / amax) / 2.0**rule.margin
        new = torch.where((amax > 0) & torch.isfinite(amax), new, scale)
        new = torch.where(torch.isinf(new), torch.full_like(new, torch.finfo(torch.float32).max), new)
    scale.copy_(new)


_pending: dict[int, list[int]] = {}  # backward pass -> states whose backward ran in it


def ran_backward(state: ScalingState, within: int = -1) -> None:
    """Called by a module's backward: its gradient state is updated once, when this backward pass ends.

    `within` is the pass in which the forward was recomputed, if it was: a reentrant checkpoint then runs the
    backward in an inner pass of its own, but it is the outer one that counts.
    """
    waiting = _pending.get(within)
    if waiting is None:
        waiting = _pending[this_pass()]
    waiting.append(state.token)


def this_pass() -> int:
    """The number of the running backward pass, at whose end the states that wait for it are updated."""
    task = torch._C._current_graph_task_id()
    if task not in _pending:
        while len(_pending) > 64:  # passes that an exception ended never called back
            _pending.pop(next(iter(_pending)), None)
        _pending[task] = []
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _pass_ended(task))
    return task


def _pass_ended(task: int) -> None:
    update(_pending.pop(task, ()), BACKWARD)
