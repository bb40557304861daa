"""The FP8 state of a module: scales and amax histories, as buffers that move and are saved with the module.

A module that runs under a recipe with a history gets a child named `fp8_state`, so that its checkpoint has the
fixed float32 entries `fp8_state.scale_fwd`, `.amax_history_fwd`, `.scale_bwd`, `.amax_history_bwd`. Casts raise
row 0 of a history; the update (te_torch.updates), once a step, reads the histories and sets the scales. There is no
other FP8 state anywhere.

A state is referred to by its token, a number under which it is found as long as it lives: a weak reference. Compiled
code, which layers of one shape share, knows a state by its tensors alone: `of_tensor` finds it by one of them.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.ops.quantize import ScalingState as CoreState
from te_core.precision import Precision
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, Scales
from te_core.recipe_fields import documented
from te_torch.runtime import to_core, to_core_shape

NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
#: All of a state's: with those that are not saved.
BUFFERS = (*NAMES, "used_fwd", "used_bwd")
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


_place_of = torch.Tensor.data_ptr
_tokens, _layouts = itertools.count(1), itertools.count(1)
#: States that compiled code has run, in the order of running, which is every process's.
watched: dict[int, None] = {}
_by_token: weakref.WeakValueDictionary[int, ScalingState] = weakref.WeakValueDictionary()
by_token = _by_token.get  # the living state of this number, or None
_by_address: weakref.WeakValueDictionary[int, ScalingState] = weakref.WeakValueDictionary()  # of `scale_bwd`
moves = 0  # how often a state may have got other memory: plans of updates are of one such time


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

    #: Until the module runs or maxima make scales: the margin with which the scale of a weight held quantized starts
    #: anew, whatever is written to it. A copy of a module that has not run has not run either.
    begins: int | None = None
    receives = False  # updates of other states write its histories

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
        global moves
        if "token" not in self.__dict__:
            self.token = next(_tokens)
            _by_token[self.token] = self
            # Whose histories see maxima of this one, too (te_torch.handovers): (direction, column, token, its column).
            self.receivers: dict[tuple[int, int, int, int], None] = {}
        elif self.receives:
            moves += 1
        #: The buffers and the rule that it has now: what was made for those is not asked of a state that has others.
        self.layout = next(_layouts)
        if self.scale_bwd.data_ptr():
            _by_address[self.scale_bwd.data_ptr()] = self
        self.precision: Precision | None = None  # the recipe of the last forward: the rule of the next update
        self._views: tuple[Scales, Scales, Scales] | None = None
        self._places: list[int] = []  # where the buffers lay of which these are
        self._core: dict[tuple[int, float], CoreState] = {}
        self.update_plans: dict[tuple[int, ...], Any] = {}
        self.seen_version: int | None = None  # of the forward history, if compiled code writes it
        self.told: Any = None  # the `Ran` of the last region that compiled code told of its run
        self.due = False  # a forward ran whose maxima no update has read yet

    def __getstate__(self) -> dict[str, Any]:
        """Without what is derived."""
        global moves
        if self.scale_fwd.is_cpu:  # torch moves it into shared memory, in place, if this is for another process
            moves += 1
            self._views, self._core = None, {}
        derived = "token layout receivers receives precision _views _places _core update_plans seen_version told due"
        kept = {k: v for k, v in self.__dict__.items() if k not in derived.split()}
        return {**kept, "group": None, "recipe": None if self.recipe is None else documented(self.recipe)}

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
        for name in NAMES:
            require_usable("load_state_dict", prefix + name, state_dict.get(prefix + name))
        self.in_use = True
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
        new = self.start() if values is None else self._given(values)
        self.in_use = self.in_use or values is not None
        with torch.no_grad():
            for name, value in new.items():
                getattr(self, name).copy_(value)
        if self.seen_version is not None:
            self.seen_version = self.amax_history_fwd._version  # no run wrote it

    def _given(self, values: Any) -> dict[str, torch.Tensor]:
        """What `copies` gave, by the names of the buffers."""
        operation, keys = "reset_fp8_meta_tensors", ("scaling_fwd", "scaling_bwd")
        lists = [values.get(key) if isinstance(values, dict) else None for key in keys]
        given = [t for pair in lists if isinstance(pair, (list, tuple)) for t in pair]
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
            self._renew()  # plans of updates are of a layout, and follow its rule
        self.precision = precision
        self.recipe = recipe

    def watch(self) -> None:
        """Called as compiled code first runs: from now on its runs show in the history's version."""
        if self.seen_version is None:
            self.seen_version = self.amax_history_fwd._version
            watched[self.token] = None

    def ran_compiled(self, rule: Precision, recipe: Any, region: Any) -> None:
        """Called by compiled code as it runs: the updates follow its rule, as after `prepare`."""
        self.in_use = True
        if self.precision is not rule:
            if self.precision is not None:
                self._renew()
            self.precision, self.recipe = rule, recipe
            if self.amax_history_fwd.shape[0] != rule.history.length:  # type: ignore[union-attr]
                to_resize[self.token] = (FORWARD, BACKWARD)
        if region is not None:
            self.watch()  # where it is a CUDA graph that runs again, nobody calls this
            self.due = True
            self.group = region.group
            region.ran.states[self.token] = None
            self.told = region.ran

    def is_due(self) -> bool:
        """Whether a forward, eager or compiled, ran whose maxima no update has read yet."""
        return self.due or (self.seen_version is not None and self.amax_history_fwd._version != self.seen_version)

    def extra_repr(self) -> str:
        """What a printed module shows."""
        return f"gemms={len(self.scale_fwd) // FORWARD_SLOTS}, amax_history_len={len(self.amax_history_fwd)}"

    def _make_views(self) -> tuple[Scales, Scales, Scales]:
        global moves
        if self._views is not None:  # a buffer has other memory: buffer.data = ...
            moves += 1
            self._core = {}
        # FSDP1's MixedPrecision(buffer_dtype=...) exchanges the contents of all buffers.
        for buffer in [getattr(self, name) for name in BUFFERS]:
            if buffer.dtype != torch.float32:
                buffer.data = buffer.data.float()
        core = to_core_shape if self.scale_fwd.is_meta else to_core
        places = [*map(_place_of, self._buffers.values())]  # type: ignore[arg-type]
        # Of aliases, which hold the memory: a view that is left somewhere never writes into that of others.
        rows = [core(t.detach()) for t in (self.scale_fwd, self.amax_history_fwd[0], self.scale_bwd)]
        back = core(self.amax_history_bwd[0].detach())
        views = self._views = (
            Scales(rows[0], rows[1], rows[2], back),
            Scales(core(self.used_fwd.detach()), None, rows[2], back),
            Scales(rows[0], None, rows[2], back),
        )
        self._places = places  # last: another thread may look meanwhile whether the views are of these
        return views

    def backward_scales(self) -> Scales:
        """The core's view of the state for one backward."""
        views = self._views
        if views is None or self._places != [*map(_place_of, self._buffers.values())]:  # type: ignore[arg-type]
            views = self._make_views()
        return views[0]

    def scales(self, recompute: bool) -> Scales:
        """The core's view of the state for one forward.

        A recomputation records nothing, and reads what its forward read. Where nothing was left of that
        (te_torch.reruns), these are taken to be the scales before the last update.
        """
        views = self._views
        if views is None or self._places != [*map(_place_of, self._buffers.values())]:  # type: ignore[arg-type]
            views = self._make_views()
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
                to_core(getattr(self, f"{name}_{suffix}").detach()) for name in ("scale", "amax_history", "used")
            )
            found = self._core[direction, limit] = CoreState(scale, history, used, limit)
        return found


class States:
    """Those of the parts of a layer that runs as one; None of a part that has none."""

    __slots__ = ("each",)

    def __init__(self, each: list[ScalingState | None]) -> None:
        self.each = each

    def scales(self, recompute: bool) -> tuple[Scales | None, ...]:
        """The core's views for one forward."""
        return tuple([None if state is None else state.scales(recompute) for state in self.each])

    def backward_scales(self) -> tuple[Scales | None, ...]:
        """And for one backward."""
        return tuple([None if state is None else state.backward_scales() for state in self.each])


_making = RLock()  # two threads that begin to run a module share its state


def make_state(module: Any, device: torch.device, precision: Precision, recipe: Any = None) -> ScalingState:
    """The module's scaling state, following this precision's rule; made if there is none."""
    assert precision.history is not None
    with _making:
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
        with _making:
            state = _beginning(module, device, precision, in_use=False)
        if len(modules) == 1:
            make_state(module, device, precision, recipe)
            continue
        if state.scale_fwd.device != device and next(module.parameters(), None) is None:
            state.to(device)
        if not state.in_use:
            state.resize_history(precision.history.length)


#: Whose histories are longer or shorter than the rule of the next update says, with the directions in which they are.
to_resize: dict[int, tuple[int, ...]] = {}


def of_tensor(scale_bwd: torch.Tensor) -> ScalingState | None:
    """The living state with this tensor."""
    address = scale_bwd.data_ptr()
    found = _by_address.get(address)
    if found is None and address:  # memory that was moved in place, as on its way to another process
        _by_address.update({state.scale_bwd.data_ptr(): state for state in _by_token.values()})
        found = _by_address.get(address)
    return found if found is None or found.scale_bwd.data_ptr() == address else None


#: By token, of states in a backward that is warmed up or captured (te_torch.training.graphs): the tokens of those whose
#: backward ran, in this order. A capture must not mark them as run: only replays run.
noted: dict[int, dict[int, None]] = {}


@contextmanager
def noting(tokens: Iterable[int], ran: dict[int, None]) -> Iterator[None]:
    """Inside, a backward of these states is noted here, and no update waits for it."""
    own = dict.fromkeys(tokens, ran)
    noted.update(own)
    try:
        yield
    finally:
        for token in own:
            noted.pop(token, None)
