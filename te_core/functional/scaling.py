"""The state of delayed scaling, by hand: four small arrays of the caller's library, and their update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from te_core import dtypes
from te_core.calls import precision_of
from te_core.errors import ArgumentError, UnsupportedError
from te_core.functional.arrays import library_of, read
from te_core.layers.entries import Layer
from te_core.ops import raw as ops
from te_core.ops.quantize import ScalingState
from te_core.precision import Precision
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, Scales
from te_core.recipe import Recipe
from te_core.runtime import Runtime
from te_core.tensor import Tensor

NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


class Scaling:
    """Scales and histories of maxima of one layer, as `te_torch` has them in checkpoints (`fp8_state.scale_fwd`, ...).

    A call of the layer reads the scales and raises row 0 of the histories; `update` makes the next scales. Of a recipe
    without a history it has no arrays, and nothing to update. `like` says of which library and on which device the
    arrays are, `gemms` how many products a layer of several weights has.

    Raises:
        ArgumentError: The function has no products, or the recipe is None.

    Example:
        import numpy as np
        from te_core import functional
        from te_core.recipe import DelayedScaling

        x, weight = np.random.randn(32, 64).astype(np.float32), np.random.randn(64, 64).astype(np.float32)
        recipe = DelayedScaling()
        scaling = functional.Scaling(recipe, functional.linear, like=x)
        y, back = functional.linear(x, weight, recipe=recipe, scaling=scaling)
        grads = back(np.ones_like(y))  # {"x": ..., "weight": ...}
        functional.update(scaling)
    """

    scale_fwd: Any
    amax_history_fwd: Any
    scale_bwd: Any
    amax_history_bwd: Any

    def __init__(self, recipe: Recipe, function: Any, *, like: Any, gemms: int | None = None) -> None:
        layer = getattr(function, "layer", None)
        if not isinstance(layer, Layer) or not layer.products:
            allowed = "te.linear, te.transformer_layer, or another function with weights that are multiplied"
            do = "pass the function that takes this state"
            raise ArgumentError("Scaling", f"function = {function!r}", allowed, do)
        precision = precision_of("Scaling", recipe)
        if precision is None:
            raise ArgumentError("Scaling", "recipe = None", "a recipe", "leave scaling out where there is no recipe")
        several = any(a.several for a in layer.arguments)
        count = gemms if several and gemms is not None else len(layer.products)
        if type(count) is not int or count < 1 or (gemms is not None and gemms != count) or (several and gemms is None):
            allowed = "how many weights the call has" if several else f"{len(layer.products)}, which is known"
            raise ArgumentError("Scaling", f"gemms={gemms!r} for {layer.name}", allowed, "correct gemms")
        self.layer, self.precision, self.gemms = layer, precision, count
        self.scales: Scales | None = None  # as the core takes them
        self.states: tuple[ScalingState, ...] = ()
        self._tensors: dict[str, Tensor] = {}
        self._arrays: dict[str, Any] = {}
        if precision.history is None:
            return
        self._home, self.device = library_of(like), read("Scaling", "like", like).device
        self.states = new_states(self.runtime(), precision, count)
        tensors = [t for state in self.states for t in (state.scale, state.history)]
        self._tensors = dict(zip(NAMES, tensors, strict=True))
        self._arrays = {name: self._home.give(t) for name, t in self._tensors.items()}
        self.scales = views_of(self.states)

    def runtime(self) -> Runtime:
        """Where its arrays' library works now."""
        return self._home.runtime(self.device)

    def __getattr__(self, name: str) -> Any:
        if name in NAMES and "_arrays" in self.__dict__:
            return self._arrays.get(name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NAMES:
            do = "write into the array, or call load({...})"
            raise ArgumentError("Scaling", f"another array as {name}", "the arrays that the state was made with", do)
        object.__setattr__(self, name, value)

    def arrays(self) -> dict[str, Any]:
        """The arrays by name: what a checkpoint keeps."""
        return dict(self._arrays)

    def load(self, values: Mapping[str, Any]) -> None:
        """Take over what `arrays` gave, of any library; nothing changes where one of them is wrong."""
        wanted = {name: t.shape for name, t in self._tensors.items()}
        if not isinstance(values, Mapping) or set(values) != set(wanted):
            got = f"{sorted(map(str, values))}" if isinstance(values, Mapping) else type(values).__name__
            do = "pass what arrays() of such a state gave"
            raise ArgumentError("Scaling.load", got, f"exactly {list(wanted)}", do)
        found = {}
        for name, shape in wanted.items():
            t = read("Scaling.load", name, values[name])
            if t.shape != shape or t.dtype is not dtypes.float32:
                allowed = f"float32 {shape}, of the same recipe and layer"
                raise ArgumentError("Scaling.load", f"{name} = {t!r}", allowed, "restore it from such a state")
            host = library_of(values[name]).runtime(t.device).numpy(t)
            good = (host > 0) & np.isfinite(host) if name.startswith("scale") else host >= 0
            if not good.all():
                allowed = "scales that are finite and above 0, and histories without NaN or anything below 0"
                first = host[~good].ravel()[0]
                raise ArgumentError("Scaling.load", f"{first} in {name}", allowed, "restore it from a sound checkpoint")
            found[name] = np.ascontiguousarray(host)
        for name, host in found.items():
            rt = self.runtime()
            rt.backend.copy_from_host(rt, host, self._tensors[name])

    def __repr__(self) -> str:
        rows = f", {self._tensors['amax_history_fwd'].shape[0]} rows" if self._tensors else ", without a history"
        return f"Scaling({self.layer.name}, {self.gemms} products{rows})"


def new_states(rt: Runtime, precision: Precision, gemms: int) -> tuple[ScalingState, ScalingState]:
    """What a recipe with a history begins with for so many products: forward's and backward's."""
    history = precision.history
    assert history is not None and precision.input is not None and precision.grad is not None
    if callable(history.amax_algo) or history.scale_algo is not None:
        do = 'choose amax_compute_algo="max" or "most_recent", without scaling_factor_compute_algo'
        raise UnsupportedError("Scaling", "a recipe with a function of the user's", "recipes without", do)
    parts = []
    for slots, rule in ((FORWARD_SLOTS, precision.input), (BACKWARD_SLOTS, precision.grad)):
        ones, zeros = np.ones(gemms * slots, np.float32), np.zeros((history.length, gemms * slots), np.float32)
        scale, used, amax = rt.tensor(ones), rt.tensor(ones), rt.tensor(zeros)
        parts.append(ScalingState(scale, amax, used, rule.dtype.max * 2.0**-history.margin))
    return parts[0], parts[1]


def views_of(states: Sequence[ScalingState]) -> Scales:
    """What a layer's calls read and raise of them."""
    rows = [row for state in states for row in (state.scale, state.history.rows(0, 1).reshape(state.scale.size))]
    return Scales(*rows)


def check_scaling(operation: str, scaling: Any, precision: Precision | None, rt: Runtime, gemms: int) -> Scales | None:
    """What the core reads of the state that a call was given, which has to be one of this layer and recipe."""
    history = None if precision is None else precision.history
    if scaling is None:
        if history is None:
            return None
        do = f"make scaling = te.Scaling(recipe, te.{operation}, like=x) once, and pass it to each call"
        raise ArgumentError(operation, "no scaling= for a recipe with a history", "the Scaling of this layer", do)
    if precision is None:
        got, do = "scaling= in a call without a recipe", "pass recipe=, or leave scaling out"
        raise ArgumentError(operation, got, "scaling= beside recipe=", do)
    wanted = f"a Scaling of {operation} with {gemms} products, of this call's recipe, on {rt.device}"
    if not isinstance(scaling, Scaling):
        raise ArgumentError(operation, f"scaling = {type(scaling).__name__}", wanted, "pass te.Scaling(...)")
    other = scaling.layer.name != operation or scaling.gemms != gemms
    if other or scaling.precision is not precision or (history is not None and scaling.device is not rt.device):
        what = "of another layer" if other else "of another recipe or device"
        raise ArgumentError(operation, f"{scaling!r}, {what}", wanted, "make a Scaling for this layer and recipe")
    return scaling.scales


def update(*scalings: Scaling, rt: Runtime | None = None) -> None:
    """The next scales of any number of states, from the maxima since the last update: one launch for each device and
    rule. A state whose layer was not called stays as it is.

    Raises:
        ArgumentError: Something else than a Scaling is among them.
    """
    groups: dict[Any, list[ScalingState]] = {}
    for scaling in scalings:
        if not isinstance(scaling, Scaling):
            do = "pass te.Scaling objects, one after the other"
            raise ArgumentError("update", type(scaling).__name__, "Scaling objects", do)
        if scaling.states:
            history = scaling.precision.history
            assert history is not None
            groups.setdefault((rt or scaling.runtime(), history.amax_algo), []).extend(scaling.states)
    for (where, algo), states in groups.items():
        ops.update_scales(where, states, algo)
