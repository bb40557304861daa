"""The state of delayed scaling as a pytree, whose gradient is the next state."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state, take_current_trace

from te_core import dtypes
from te_core.calls import precision_of
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.ops.quantize import ScalingState
from te_core.precision import Precision, the_one
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS
from te_core.recipe import Recipe
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_jax.context import region
from te_jax.mesh import axes_of, bound, tracked, varying
from te_jax.record import Array, Work
from te_jax.rules import bind

NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


@jax.tree_util.register_pytree_with_keys_class
class Scaling:
    """Scales and histories of maxima of one layer: four float32 arrays with the names of te_torch's checkpoints.

    What `jax.grad` gives as the gradient of a state is the state of the next step. `axis_names`: mesh axes over which
    maxima are taken, so that all devices of a `jax.shard_map` keep one state.
    """

    def __init__(self, arrays: tuple[Any, ...], rule: Rule) -> None:
        self.arrays, self.rule = tuple(arrays), rule
        self._entered: Any = None  # the arrays as layers of one trace read them

    def __reduce__(self) -> Any:
        return Scaling, (self.arrays, self.rule)

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            return self.arrays[NAMES.index(name)]
        raise AttributeError(name)

    def tree_flatten_with_keys(self) -> Any:
        """See jax.tree_util."""
        keys = [jax.tree_util.GetAttrKey(name) for name in NAMES]
        return list(zip(keys, self.arrays, strict=True)), self.rule

    @classmethod
    def tree_unflatten(cls, rule: Rule, arrays: Any) -> Scaling:
        """See jax.tree_util."""
        return cls(tuple(arrays), rule)

    def entered(self, operation: str, given: Any) -> tuple[Any, ...]:
        """The arrays for a call of a layer on these. Layers of one trace share them: so the maxima of a layer that is
        used twice add up before the update."""
        axes = self.rule.axes or self._named(operation, given)
        self._check(operation, given, axes)
        trace = get_opaque_trace_state(), axes
        if self._entered is None or self._entered[0] != trace:
            self._entered = trace, _entered(self.rule, axes, self.arrays)
        found: tuple[Any, ...] = self._entered[1]
        return found

    def closed_over(self) -> str | None:
        """What JAX traces a function for, such as "jit", into which the state enters as a constant; None: into none.

        JAX hands a state that it traces, too, on into branches and into functions that it compiles or computes again.
        The body of a loop runs several times: any state from outside is a constant of it.
        """
        found = {_closed_over(array) for array in self.arrays} - {None}
        return min(found, key=lambda where: where not in LOOPS) if found else None

    def _named(self, operation: str, given: Any) -> tuple[str, ...]:
        """Of the axes of the region's mesh those along which devices share the state, but not the arrays."""
        named, here = region().mesh.axes, bound()
        if not named or not here:
            return ()
        if not set(named) <= set(here):
            got = f"mesh_resource of axes {named} inside of {here}"
            raise ArgumentError(operation, got, "axes of the jax.shard_map that the call is in", "correct its fields")
        apart = axes_of(tuple(given.values())) if tracked() else set(named)
        return tuple(axis for axis in named if axis in apart - axes_of(self.arrays))

    def _check(self, operation: str, given: Any, axes: tuple[str, ...]) -> None:
        rule = self.rule
        for name, array, shape in zip(NAMES, self.arrays, rule.shapes(), strict=True):
            if jnp.shape(array) != shape or jnp.result_type(array) != jnp.float32:
                got = f"{name} = {jnp.result_type(array)}{list(jnp.shape(array))}"
                do = "pass the state as te_jax.scaling or jax.grad made it; of stacked states, one layer's"
                raise ArgumentError(operation, got, f"float32{list(shape)}", do)
        if not set(axes) <= set(bound()):
            where = f"inside of {bound()}" if bound() else "outside of shard_map"
            got = f"a state with axis_names={rule.axes} {where}"
            raise ArgumentError(operation, got, "axes of the jax.shard_map that the call is in", "correct axis_names")
        apart = axes_of(tuple(given.values())) - axes_of(self.arrays) - set(axes)
        if apart:
            got = f"one state for all devices along {sorted(apart)}, without axis_names"
            do = f"make it with te_jax.scaling(recipe, function, axis_names={sorted(apart)})"
            raise ArgumentError(operation, got, "states whose maxima are taken over these axes", do)

    def __repr__(self) -> str:
        return f"Scaling({self.rule.layer}, {self.rule.gemms} products, {self.rule.length} rows)"


class Rule:
    """How a state is updated, and whose it is."""

    def __init__(self, layer: str, gemms: int, precision: Precision, axes: tuple[str, ...]) -> None:
        history = precision.history
        assert history is not None and precision.input is not None and precision.grad is not None
        self.layer, self.gemms, self.axes, self.precision = layer, gemms, axes, the_one(precision)
        self.algo, self.length = history.amax_algo, history.length
        self.limits = [rule.dtype.max * 2.0**-history.margin for rule in (precision.input, precision.grad)]

    def updates(self) -> list[Work]:
        """What makes the next scales of both ways."""
        slots = FORWARD_SLOTS, BACKWARD_SLOTS
        return [_update(self.gemms * n, self.length, self.algo, m) for n, m in zip(slots, self.limits, strict=True)]

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the arrays of a state."""
        widths = [self.gemms * slots for slots in (FORWARD_SLOTS, BACKWARD_SLOTS)]
        return [shape for n in widths for shape in ((n,), (self.length, n))]

    def _key(self) -> Any:
        return self.layer, self.gemms, self.axes, self.precision.serial

    def __reduce__(self) -> Any:
        return Rule, (self.layer, self.gemms, self.precision, self.axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def scaling(recipe: Recipe | None, function: Any, *, axis_names: Any = ()) -> Scaling | None:
    """A new state for one layer, which is called by this function; None of a recipe without a history.

    Raises:
        ArgumentError: The function takes no state.
        UnsupportedError: The recipe has a function of the user's.

    Example:
        import jax
        import jax.numpy as jnp
        import te_jax
        from te_core.recipe import DelayedScaling

        recipe, x, kernel = DelayedScaling(), jnp.ones((32, 64)), jnp.ones((64, 16))
        state = te_jax.scaling(recipe, te_jax.dense)
        loss = lambda kernel, state: te_jax.dense(x, kernel, recipe=recipe, scaling=state).mean()
        grad, state = jax.grad(loss, argnums=(0, 1))(kernel, state)  # the next state
    """
    layer = getattr(function, "te_layer", None)
    if layer is None:
        allowed = "te_jax.dense, layernorm_dense, layernorm_mlp, multihead_attention or transformer_layer"
        raise ArgumentError("scaling", f"function = {function!r}", allowed, "pass the function that takes this state")
    precision = precision_of("scaling", recipe)
    history = None if precision is None else precision.history
    if precision is None or history is None:
        return None
    if callable(history.amax_algo) or history.scale_algo is not None:
        do = 'choose amax_compute_algo="max" or "most_recent", without scaling_factor_compute_algo'
        raise UnsupportedError("scaling", "a recipe with a function of the user's", "recipes without", do)
    axes = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    rule = Rule(layer.name, len(layer.products), precision, axes)
    arrays = tuple((jnp.ones if len(s) == 1 else jnp.zeros)(s, jnp.float32) for s in rule.shapes())
    return Scaling(arrays, rule)


#: What the bodies of loops are traced for.
LOOPS = ("scan", "fori_loop", "while_body", "while_cond")


def _closed_over(array: Any) -> str | None:
    """What the function is traced for of which an array is a constant."""
    with take_current_trace() as trace:
        pass
    found = None
    while trace is not None:
        frame = getattr(trace, "frame", None)  # of a function that becomes a program
        if getattr(array, "_trace", None) is trace:
            if frame is not None:
                return None
            found = None  # JAX hands on what it differentiates
            array = getattr(array, "primal", getattr(array, "val", None))
        elif frame is not None:
            found = frame.debug_info.traced_for
            if found in LOOPS:
                return str(found)
        trace = getattr(trace, "parent_trace", None)
    return found


@cache
def _update(slots: int, rows: int, algo: Any, limit: float) -> Work:
    """The update of a scale and a history, which it writes into, by te_core."""

    def update(rt: Runtime, scale: Tensor, history: Tensor, used: Tensor) -> tuple[()]:
        ops.update_scales(rt, [ScalingState(scale, history, used, limit)], algo)
        return ()

    vector = Array((slots,), dtypes.float32)
    operands = [vector, Array((rows, slots), dtypes.float32), vector]
    return Work("update", update, operands, lambda rt, tensors: (tuple(tensors), {}), f"{algo} {limit}", (0, 1, 2))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _entered(rule: Rule, axes: tuple[str, ...], arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    scales = [jnp.where(scale > 0, scale, 1.0) for scale in arrays[::2]]  # a state that no step has made yet
    entered = scales[0], arrays[1], scales[1], arrays[3]
    return tuple(varying(a, axes) for a in entered)


def _enter(rule: Rule, axes: tuple[str, ...], arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    return _entered(rule, axes, arrays), arrays


def _leave(rule: Rule, axes: tuple[str, ...], arrays: tuple[Any, ...], seen: tuple[Any, ...]) -> tuple[tuple[Any, ...]]:
    """The next state."""
    found: list[Any] = []
    for update, scale, history, maxima in zip(rule.updates(), arrays[::2], arrays[1::2], seen[1::2], strict=True):
        last = maxima[0] if not axes else jax.lax.pmax(maxima[0], axes)
        now = jnp.where(scale > 0, scale, 1.0)
        (after, rolled, _), _ = bind(update, [now, history.at[0].set(last), jnp.zeros_like(scale)])
        found += [after, rolled]
    return (tuple(found),)


_entered.defvjp(_enter, _leave)
