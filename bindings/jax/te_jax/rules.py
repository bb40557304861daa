"""A layer of te_core's table as a function of JAX's: differentiable, and a single call of XLA's each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from te_core import dtypes
from te_core.calls import call, precision_of
from te_core.errors import ArgumentError, UnsupportedError
from te_core.functional.named import Named
from te_core.layers.table import LAYERS
from te_core.quantize.state import Scales
from te_core.recipe import Recipe
from te_core.runtime import Runtime
from te_core.tensor import CPU, Tensor, cuda_device
from te_jax import c_handler, handler, plain, record
from te_jax.mesh import alike
from te_jax.record import Array, Part, Work

# ------------------------------------------------------------------------------------------------ the call of XLA's

_work_p = Primitive("te_core")
_work_p.multiple_results = True


def _abstract(*operands: Any, work: Work) -> list[Any]:
    kinds = [work.operands[i] for i in work.written] + list(work.results)
    return [_aval(kind, operands[0]) for kind in kinds]


def _aval(kind: Array, like: Any) -> Any:
    """A result's, which differs along the mesh axes along which operands do."""
    place = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec(*[None] * len(kind.shape)))
    return like.update(shape=kind.shape, dtype=np.dtype(kind.dtype.numpy), weak_type=False, sharding=place)


def _lower(ctx: Any, *operands: Any, work: Work, on_gpu: bool) -> Any:
    _refuse_partition(ctx, work)
    # Recorded on all of them now: while programs run, their collectives wait for one another.
    numbers = range(jax.local_device_count() if _over_mesh(ctx) else 1)
    devices = [cuda_device(number) for number in numbers] if on_gpu else [CPU]
    try:
        work.on(devices[0])
        in_c = on_gpu and c_handler.takes(work, devices)
        block = work.temporaries(devices[:1] if in_c else devices)  # the library in C plays the first one's program
    except UnsupportedError as refusal:
        if work.plain is None:
            raise
        record.note(f"{work.of(devices[0])}; plain JAX, for te_core refuses: {refusal.got}")
        shapes = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
        return mlir.lower_fun(work.plain, multiple_results=True)(ctx.replace(avals_in=shapes), *operands)
    ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((max(block, 1),), np.uint8)])
    target = c_handler.TARGET if in_c else handler.TARGET
    aliases = {work.used.index(operand): i for i, operand in enumerate(work.written)}
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    return rule(ctx, *operands, digest=np.int64(record.known(work)))[:-1]


def _over_mesh(ctx: Any) -> bool:
    """Whether a program runs on several devices."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return mesh is not None and mesh.size > 1


def _refuse_partition(ctx: Any, work: Work) -> None:
    """XLA would gather all operands onto each device, without a word."""
    where = ctx.module_context.axis_context
    devices = getattr(where, "num_devices", None) or 1  # outside of shard_map
    manual, mesh = getattr(where, "manual_axes", None), getattr(where, "mesh", None)
    some = manual is not None and mesh is not None and set(manual) != set(mesh.axis_names)
    if devices > 1 or some:
        over = f"{devices} devices under jax.jit alone" if not some else f"shard_map over {sorted(manual or ())} alone"
        allowed = "jax.shard_map over all axes of the mesh, where each device calls with its part"
        raise UnsupportedError(work.name, over, allowed, "wrap the call in jax.shard_map")


def _impl(*operands: Any, work: Work) -> Any:
    with jax.disable_jit(False):  # XLA runs it, also where JAX compiles nothing else
        return work_jitted(work)(*operands)


def _unbatched(arguments: Any, dimensions: Any, *, work: Work) -> Any:
    do = "give x a leading dimension more, or use jax.lax.map (instead of jax.jacrev: jax.vjp)"
    raise UnsupportedError(work.name, "jax.vmap over it", "calls without vmap", do)


def _without_jvp(primals: Any, tangents: Any, *, work: Work) -> Any:
    do = "use jax.grad, once"
    if work.name in ("quantize", "dequantize"):
        do = "pass jax.lax.stop_gradient(x)"
        raise UnsupportedError(work.name, "a derivative of it", "calls without derivatives", do)
    raise UnsupportedError(work.name, "a second derivative, or forward mode", "first derivatives by jax.vjp", do)


_work_p.def_abstract_eval(_abstract)
_work_p.def_impl(_impl)
mlir.register_lowering(_work_p, partial(_lower, on_gpu=False), platform="cpu")
mlir.register_lowering(_work_p, partial(_lower, on_gpu=True), platform="cuda")
batching.primitive_batchers[_work_p] = _unbatched
ad.primitive_jvps[_work_p] = _without_jvp
handler.register(record.run)


def work_jitted(work: Work) -> Any:
    """The call by itself, compiled once."""
    found = work.__dict__.get("jitted")
    if found is None:
        found = work.__dict__["jitted"] = jax.jit(lambda *operands: _work_p.bind(*operands, work=work))
    return found


def bind(work: Work, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(the written operands as they are afterwards, the results) of work on all of its operands."""
    found = _work_p.bind(*alike([operands[i] for i in work.used]), work=work)
    count = len(work.written)
    return found[:count], found[count:]


# ------------------------------------------------------------------------------------------------------- layers


#: The functions of te_jax whose layers have another name in the core.
CALLED = {"linear": "dense", "layernorm_linear": "layernorm_dense", "attention": "fused_attn", "rmsnorm": "layernorm"}
CALLED |= {"router_topk": "fused_topk_with_score_function", "router_scores": "fused_topk_with_score_function"}
CALLED |= {"router_aux_loss": "fused_moe_aux_loss"}
#: By which policies of jax.checkpoint know what forward of a layer made: outputs, and what backward reads.
checkpoint_names = tuple(
    f"te_jax.{name}"
    for name in ("activation", "dense", "fused_attn", "layernorm", "layernorm_dense", "layernorm_mlp")
    + ("fused_moe_aux_loss", "fused_topk_with_score_function", "multihead_attention", "transformer_layer")
)


class Layered:
    """A layer of the table with its options, on arrays of these shapes."""

    def __init__(
        self, name: str, options: Mapping[str, Any], recipe: Recipe | None, strict: bool, given: Mapping[str, Any]
    ) -> None:
        """`strict`: what te_core refuses is an error, also where plain JAX could do it."""
        self.name, self.recipe, self.strict, self.precision = name, recipe, strict, precision_of(name, recipe)
        self.given = tuple((n, Array(tuple(a.shape), dtypes.dtype(np.dtype(a.dtype)))) for n, a in given.items())
        serial = None if self.precision is None else self.precision.serial
        self._key = name, tuple(options.items()), serial, strict, self.given
        self.named = Named(LAYERS[name])
        self.layer, self.options = self.named.layer, dict(options)
        self.sides: dict[Any, Sides] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layered) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def settle(self) -> None:
        """Check arrays and options, and complete these."""
        rt = record.runtime(CPU)
        tensors = self._tensors([Tensor(1 << 20, *array, CPU, object()) for _, array in self.given])
        self.named.check(tensors, self.options, self.precision, rt)
        self.options |= self.named.implied(tensors, self.options, rt)

    @property
    def history(self) -> bool:
        """Whether a scaling state belongs to it."""
        return self.precision is not None and self.precision.history is not None

    def _tensors(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = dict.fromkeys(self.named.arguments)
        return found | dict(zip((name for name, _ in self.given), tensors, strict=False))

    def wanting(self, needs: frozenset[str], seen: bool) -> Sides:
        """It with these gradients; `seen`: maxima are taken for the state."""
        key = needs, seen
        found = self.sides.get(key)
        return found if found is not None else self.sides.setdefault(key, Sides(self, needs, seen))


class Sides:
    """Forward and backward of a layer: work over its arrays, its random numbers, and its state."""

    def __init__(self, whole: Layered, needs: frozenset[str], seen: bool) -> None:
        self.whole, self.needs, self._seen = whole, needs, seen and whole.history
        first = whole.given[0][1].dtype
        self.call = call(whole.name, whole.options, first, needs, whole.recipe)
        operands = [array for _, array in whole.given]
        self._random = len(operands) if self.call.draws else None
        if self.call.draws:
            operands.append(Array(whole.named.pairs, dtypes.int64))
        self._state = len(operands)
        written: tuple[int, ...] = ()
        if whole.history:
            gemms = len(whole.layer.products)
            operands += [Array((slots * gemms,), dtypes.float32) for slots in (3, 3, 2, 2)]
            written = (self._state + 1,) if self._seen else ()
        content = f"{whole.options} {sorted(needs)} {whole.recipe}"
        function = partial(self.call.forward.function, spec=self.call.spec)
        name = f"{whole.name} forward"
        self.forward = Work(name, function, operands, self._forward_call, content, written)
        outputs, saved = self.forward.standing()
        self.outputs: list[Any] = [self.forward.where(t) for t in outputs]
        self._content = content
        self._replaceable = whole.name == "attention" and not whole.strict
        if self._replaceable:
            self._sums = self.forward.where(saved.stats)
            self.forward.plain = self._plain_forward

    @property
    def draws(self) -> bool:
        """Whether it needs random numbers."""
        return self._random is not None

    def _scales(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        if not self.whole.history:
            return {}
        fs, fa, bs, ba = tensors[self._state : self._state + 4]
        return {"scales": Scales(fs, fa if self._seen else None, bs, ba if self._seen else None)}

    def _forward_call(self, rt: Runtime, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        seed = None if self._random is None else tensors[self._random]
        given = self.whole._tensors(tensors)
        return tuple(self.whole.named.placed(given, self.call, seed, rt)), self._scales(tensors)

    def _backward_call(self, rt: Runtime, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count = len(self.outputs)
        addresses = [t.ptr for t in tensors[count:]]
        _, saved = self.forward.on(rt.device).structure(addresses)
        grads: list[Tensor | None] = [*tensors[:count]]
        layer = self.whole.layer
        grads += [None] * (len(layer.outputs) + (layer.name == "attention") - count)
        return (*grads, saved), self._scales(tensors[count:])

    @cached_property
    def backward(self) -> Work:
        """Of the gradients of the outputs, then the operands of forward, then its results."""
        count = len(self.outputs)
        operands = [part.array for part in self.outputs] + [*self.forward.operands, *self.forward.results]
        written = (count + self._state + 3,) if self._seen else ()
        function = partial(self.call.backward.function, spec=self.call.spec)
        name = f"{self.whole.name} backward"
        work = Work(name, function, operands, self._backward_call, self._content, written)
        work.plain = self._plain_backward if self._replaceable else None
        return work

    def _plain_forward(self, *operands: Any) -> list[Any]:
        work = self.forward
        out, sums = plain.forward(self.call.spec, self._by_name(dict(zip(work.used, operands, strict=True))))
        return _placed(work, [(self.outputs[0], out), (self._sums, sums)])

    def _plain_backward(self, *operands: Any) -> list[Any]:
        work = self.backward
        dy, *given = (dict(zip(work.used, operands, strict=True)).get(i) for i in range(len(work.operands)))
        grads = plain.backward(self.call.spec, self.needs, dy, self._by_name(dict(enumerate(given))))
        return _placed(work, [(self.gradients[name], grads[name]) for name in self.gradients])

    def _by_name(self, operands: Mapping[int, Any]) -> dict[str, Any]:
        names = [*(name for name, _ in self.whole.given), "seed"]
        return {name: operands[i] for i, name in enumerate(names) if operands.get(i) is not None}

    @cached_property
    def gradients(self) -> dict[str, Part]:
        """The parts of backward's results that are gradients, by name of what."""
        found: Any = self.backward.standing()
        named = zip(self.whole.named.gradients, found, strict=False)
        placed = {name: self.backward.where(t) for name, t in named if name in self.needs}
        return {name: at for name, at in placed.items() if at is not None}


def shown(part: Part, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """The array that is a part of an operand or a result."""
    found, array = (*operands, *results)[part.number], part.array
    if part.offset or found.nbytes != array.nbytes or found.dtype != array.dtype.numpy:
        flat = found.reshape(-1)[part.offset : part.offset + array.nbytes]
        wide = flat.reshape(-1, array.dtype.itemsize) if array.dtype.itemsize > 1 else flat
        boolean = array.dtype is dtypes.bool_  # which JAX makes of no bits
        found = wide != 0 if boolean else jax.lax.bitcast_convert_type(wide, array.dtype.numpy)
    return found.reshape(array.shape)


def _placed(work: Work, made: Sequence[tuple[Part | None, Any]]) -> list[Any]:
    """Arrays as the results of work whose parts they are."""
    found = {part.number - len(work.operands): array for part, array in made if part is not None}
    return [found[i].reshape(kind.shape) for i, kind in enumerate(work.results)]


# ------------------------------------------------------------------------------------------------ differentiation


def _operands(sides: Sides, given: Mapping[str, Any]) -> list[Any]:
    found = [given[name] for name, _ in sides.whole.given]
    if sides.draws:
        if "seed" not in given:
            do = "pass seed=: another key in each step"
            raise ArgumentError(sides.whole.name, "no seed where numbers are drawn", "a key of jax.random", do)
        found.append(given["seed"])
    if sides.whole.history:
        fs, fh, bs, bh = given["scaling"]
        found += [fs, jnp.zeros_like(fs), bs, jnp.zeros_like(bs)]
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def layered(whole: Layered, constant: str | None, given: dict[str, Any]) -> tuple[Any, ...]:
    """The outputs of a layer. `constant`: what a function is traced for of which the scaling state is a constant."""
    sides = whole.wanting(frozenset(), False)
    operands = _operands(sides, given)
    _, results = bind(sides.forward, operands)
    return tuple(shown(at, operands, results) for at in sides.outputs)


def _forward(whole: Layered, constant: str | None, given: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    needs = frozenset(
        a.name for a in whole.layer.arguments if a.gradient and a.name in given and given[a.name].perturbed
    )
    values = jax.tree_util.tree_map(lambda leaf: leaf.value, given, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
    seen = any(leaf.perturbed for leaf in given.get("scaling", ()))
    if constant is not None and (seen or needs & set(whole.layer.products)):
        got = f"a scaling state that is a constant of a function which JAX traces for {constant}"
        do = "pass the state to this function as an argument: each step has another one"
        raise ArgumentError(CALLED.get(whole.name, whole.name), got, "constants where no weight is trained", do)
    if not needs and not seen:
        return layered(whole, constant, values), (_Static(None, tuple(values)), {}, (), None)
    sides = whole.wanting(needs, seen)
    operands = _operands(sides, values)
    maxima, results = bind(sides.forward, operands)
    maxima, results = checkpoint_name((maxima, results), f"te_jax.{CALLED.get(whole.name, whole.name)}")
    kept = {}
    if needs:
        both = enumerate([*operands, *results], len(sides.outputs))
        kept = {str(i): a for i, a in both if i in sides.backward.used}
    outputs = tuple(shown(part, operands, results) for part in sides.outputs)
    return outputs, (_Static(sides, tuple(values)), kept, maxima, values.get("scaling"))


@jax.tree_util.register_static
class _Static:
    """What backward knows besides arrays."""

    def __init__(self, sides: Sides | None, names: tuple[str, ...]) -> None:
        self.sides, self.names = sides, names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and other.sides is self.sides and other.names == self.names

    def __hash__(self) -> int:
        return hash((id(self.sides), self.names))


def _backward(
    whole: Layered, constant: str | None, residual: Any, cotangents: tuple[Any, ...]
) -> tuple[dict[str, Any]]:
    static, kept, maxima, state = residual
    sides, found = static.sides, dict.fromkeys(static.names)
    if sides is None:
        return (found,)
    if sides.needs:
        work = sides.backward
        operands: list[Any] = [None] * len(work.operands)
        for i, (ct, part) in enumerate(zip(cotangents, sides.outputs, strict=True)):
            symbolic = isinstance(ct, jax.custom_derivatives.SymbolicZero)
            operands[i] = jnp.zeros(part.array.shape, part.array.dtype.numpy) if symbolic else ct
        for number, value in kept.items():
            operands[int(number)] = value
        more, results = bind(work, operands)
        maxima = [*maxima, *more]
        for name, part in sides.gradients.items():
            found[name] = shown(part, operands, results)
    if maxima:
        fs, fh, bs, bh = state
        rows = [jnp.zeros_like(h).at[0].set(m) for h, m in zip((fh, bh), maxima, strict=False)]
        rows += [jnp.zeros_like(bh)] * (2 - len(rows))
        found["scaling"] = (jnp.zeros_like(fs), rows[0], jnp.zeros_like(bs), rows[1])
    return (found,)


layered.defvjp(_forward, _backward, symbolic_zeros=True)
