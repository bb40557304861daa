"""A layer of the table as a function of arrays: y, back = function(x, weight, ...), grads = back(dy)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from te_core import dtypes
from te_core.calls import Call, call, precision_of
from te_core.described import REQUIRED, Describer
from te_core.described.layers import TEXT
from te_core.errors import ArgumentError
from te_core.functional.arrays import Library, library_of, read
from te_core.functional.contract import check_offsets
from te_core.functional.named import Named
from te_core.functional.scaling import Scaling, check_scaling
from te_core.layers.grouped_linear import Groups
from te_core.layers.linear import Sink
from te_core.layers.table import LAYERS
from te_core.ops import _check
from te_core.ops.gemm_grouped import group_offsets
from te_core.quantized import QuantizedTensor
from te_core.recipe import Recipe
from te_core.runtime import Runtime
from te_core.tensor import CPU, Tensor

_SHARED = ("recipe", "scaling", "needs", "quantized", "seed", "rt")
_OF_PRODUCTS = ("recipe", "scaling", "quantized")
_SIZES = "m_splits"


class Where(NamedTuple):
    """Where a call runs, and of which library what it gives is."""

    rt: Runtime
    home: Library
    waits: bool  # whether the call ends when its work has ended: see `Library.waits`

    def give(self, *tensors: Tensor | None) -> list[Any]:
        """Results as the library's arrays."""
        if self.waits:
            self.rt.synchronize()
        return [None if t is None else self.home.give(t) for t in tensors]


_RETURNS = """
Returns:
    (y, back), or ((y, ...), back) where options ask for more outputs. `back(dy)` gives the gradients of what `needs`
    names by name.

Raises:
    ArgumentError: An array or an option does not fit.
"""


def _allowed(layer: str, name: str) -> str:
    """What an array or an option of a layer may be, in words."""
    entry = LAYERS.get(layer)
    option = None if entry is None else entry.options.get(name)
    if entry is None or (option is not None and option.kind is bool):
        return ""
    if option is not None:
        return option.said()
    argument = next((a for a in entry.arguments if a.name == name), None)
    if argument is None or argument.shape in ("", "*"):
        return ""
    words = ", ".join(argument.shape.split()).replace("LEAD'", "...").replace("LEAD", "...").replace("|", " or ")
    return f"an array [{words}]{_TYPES.get(argument.dtypes, ' of ' + argument.dtypes.replace('|', ' or '))}"


#: What a layer's table says of types, in words.
_TYPES = {"x": "", "weight": "", "any": " of any float type"}
_OPTIONS = {f"{layer.name}.{name}": o.about for layer in LAYERS.values() for name, o in layer.options.items()}
DESCRIBER = Describer(_OPTIONS, TEXT, allowed=_allowed)


def _each(given: Iterable[Any]) -> Iterator[Any]:
    """The arrays among what a call was given: those of lists, too, and nothing for what was left out."""
    for value in given:
        if isinstance(value, (list, tuple)):
            yield from _each(value)
        elif value is not None:
            yield value


class Function(Named):
    """A layer by its name in `te_core.layers.table.LAYERS`, as a function of arrays."""

    def __init__(self, name: str) -> None:
        super().__init__(LAYERS[name])
        self.__name__ = self.__qualname__ = name
        arguments = self.layer.offered()
        optional, empty = Parameter.KEYWORD_ONLY, Parameter.empty
        first = next((i for i, a in enumerate(arguments) if a.optional), len(arguments))
        kinds = [
            Parameter(a.name, place, default=None if a.optional else empty)
            for i, a in enumerate(arguments)
            for place in [Parameter.POSITIONAL_OR_KEYWORD if i <= first else optional]
        ]
        self._positional = tuple(p.name for p in kinds if p.kind is not optional)
        more = [Parameter(n, optional, default=o.default) for n, o in self.layer.options.items() if not o.implied]
        shared = [n for n in _SHARED if self.layer.products or n not in _OF_PRODUCTS]
        sizes = [Parameter(_SIZES, optional)] if self.several else []
        named = [Parameter(n, optional, default=None) for n in shared]
        self.__signature__ = Signature(sorted([*kinds, *sizes, *more, *named], key=lambda p: p.kind))
        of_all = self.__signature__.parameters.values()
        given = [(p.name, "", REQUIRED if p.default is empty else p.default) for p in of_all]
        self.__doc__ = DESCRIBER.document(f"{self.layer.about}.\n{_RETURNS}", given, name)

    def __repr__(self) -> str:
        return f"te_core.functional.{self.__name__}{self.__signature__}"

    def __call__(
        self,
        *given: Any,
        recipe: Recipe | None = None,
        scaling: Scaling | None = None,
        needs: Iterable[str] | None = None,
        quantized: Mapping[str, Any] | None = None,
        seed: Any = None,
        rt: Runtime | None = None,
        **named: Any,
    ) -> tuple[Any, Back]:
        """As the class says. Of the named arguments `recipe` says how products are quantized, `scaling` is its state,
        `needs` names the gradients that are wanted, `quantized` has weights quantized before by their names, `seed` is
        that of dropout and stochastic rounding, and `rt` says where the call runs, if not where x's library does."""
        op = self.__name__
        arrays, options = self._bound(given, named)
        sizes = options.pop(_SIZES, None)
        tensors = self._read(arrays)
        where = self._where(arrays, tensors, rt)
        for option, value in zip(_OF_PRODUCTS, (recipe, scaling, quantized), strict=True):
            if not self.layer.products and value is not None:
                allowed = "recipes for layers with weights that are multiplied"
                raise ArgumentError(op, f"{option}=", allowed, f"leave {option} out")
        precision = precision_of(op, recipe)
        settled = self.check(tensors, options, precision, where.rt)
        for name, most in self.offsets(tensors, settled):
            check_offsets(op, name, tensors[name], most)
        wanted = self.wanted(needs, tensors)
        options |= self.implied(tensors, options, where.rt)
        made = call(op, options, tensors[self.layer.arguments[0].name].dtype, wanted, recipe)
        keywords: dict[str, Any] = {}
        # The weight of each product, by the name that `quantized` and `into` have for it.
        weights = {name: tensors[name] for name in self.layer.products}
        if self.several:
            weights = {f"{self.several}{i}": w for i, w in enumerate(tensors[self.several])}
        scales = check_scaling(op, scaling, precision, where.rt, len(weights)) if self.layer.products else None
        if scales is not None:
            keywords["scales"] = scales
        if self.several:
            keywords["splits"] = self._groups(sizes, tensors["x"].shape[0], len(weights), where.rt)
        ready = None
        if quantized is not None or any(isinstance(w, QuantizedTensor) for w in weights.values()):
            ready = self._ready(quantized, weights, made, where.rt)
        more = dict(keywords) if ready is None else {**keywords, "ready": ready}
        outputs, saved = made.forward(where.rt, *self.placed(tensors, made, seed, where.rt), **more)
        if ready is not None and made.asked.options.get("checkpoint"):
            keywords["ready"] = ready
        kept = Kept(made, saved, keywords, tuple((t.shape, t.dtype) for t in outputs), weights)
        shown = where.give(*outputs)
        return shown[0] if len(shown) == 1 else tuple(shown), Back(self, where, kept if wanted else None)

    # ------------------------------------------------------------------------------------------- what came in

    def _bound(self, given: Sequence[Any], named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arrays by name in the table's order, options as they were given)."""
        op, layer = self.__name__, self.layer
        if len(given) > len(self._positional):
            do = "name the others"
            raise ArgumentError(op, f"{len(given)} arguments by place", ", ".join(self._positional), do)
        by_place = dict(zip(self._positional, given, strict=False))
        twice = by_place.keys() & named.keys()
        if twice:
            raise ArgumentError(op, f"{', '.join(twice)} twice", "each argument once", "leave one out")
        arrays = {**by_place, **{name: named.pop(name) for name in [*named] if name in self.arguments}}
        missing = [n for n, a in self.arguments.items() if not a.optional and arrays.get(n) is None]
        if missing:
            do = f"pass {' and '.join(missing)}"
            raise ArgumentError(op, f"no {', '.join(missing)}", f"{', '.join(self.arguments)}", do)
        unknown = [n for n in named if (n not in layer.options or layer.options[n].implied) and n != _SIZES]
        if unknown or (_SIZES in named and not self.several):
            options = ", ".join(p for p in self.__signature__.parameters)
            raise ArgumentError(op, f"an argument {unknown[0] if unknown else _SIZES!r}", options, "correct the name")
        return {name: arrays.get(name) for name in self.arguments}, named

    def _read(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays as tensors of the core; a quantized weight as itself."""
        op = self.__name__
        found: dict[str, Any] = {}
        for name, array in arrays.items():
            if array is None:
                found[name] = None
            elif self.arguments[name].several:
                if not isinstance(array, (list, tuple)) or not array:
                    do = f"pass {name}=[one, another, ...]"
                    raise ArgumentError(op, f"{name} of type {type(array).__name__}", "a list of arrays", do)
                found[name] = [self._one(name, part) for part in array]
            else:
                found[name] = self._one(name, array)
        return found

    def _one(self, name: str, array: Any) -> Any:
        if isinstance(array, QuantizedTensor) and name in self.layer.products:
            return array
        return read(self.__name__, name, array)

    def _where(self, arrays: Mapping[str, Any], tensors: Mapping[str, Any], rt: Runtime | None) -> Where:
        first = self.layer.arguments[0].name
        home, device = library_of(arrays[first]), tensors[first].device
        if rt is not None and (not isinstance(rt, Runtime) or rt.device is not device):
            allowed = f"a Runtime of {device}, where {first} lies"
            raise ArgumentError(self.__name__, f"rt={rt!r}", allowed, "leave rt out, or correct it")
        waits = device is not CPU and any(library_of(array).waits for array in _each(arrays.values()))
        return Where(home.runtime(device) if rt is None else rt, home, waits)

    def _groups(self, sizes: Any, rows: int, count: int, rt: Runtime) -> Groups:
        """The groups that a list or an array of sizes says. An array on a GPU is not copied to the host here."""
        if not isinstance(sizes, (list, tuple)):
            t, kinds = read(self.__name__, _SIZES, sizes), (dtypes.int32, dtypes.int64)
            if t.device is rt.device is not CPU:
                _check.vector(self.__name__, rt.device, _SIZES, t, count, kinds)
                return Groups(None, offsets=group_offsets(rt, t, rows, rt.empty((count + 1,), dtypes.int32)))
            if t.device is rt.device and t.dtype in kinds and t.ndim == 1:
                sizes = rt.numpy(t).tolist()
        right = isinstance(sizes, (list, tuple)) and len(sizes) == count
        if not right or not all(type(n) is int and n >= 0 for n in sizes) or sum(sizes) != rows:
            allowed = f"{count} integers from 0 on, which add up to {rows} rows"
            raise ArgumentError(self.__name__, f"{_SIZES}={sizes!r}", allowed, f"correct {_SIZES}")
        return Groups(sizes)

    def _ready(
        self, quantized: Mapping[str, Any] | None, weights: Mapping[str, Any], made: Call, rt: Runtime
    ) -> tuple[QuantizedTensor | None, ...]:
        """The weights that were quantized before, as this call reads them."""
        op, precision, beside = self.__name__, made.asked.precision, quantized or {}
        if not isinstance(beside, Mapping) or not beside.keys() <= weights.keys():
            got = f"quantized={type(beside).__name__} {[*beside] if isinstance(beside, Mapping) else ''}"
            names = ", ".join(map(repr, weights))
            raise ArgumentError(op, got, f"a dict with the keys {names}", "correct the names")
        rule = None if precision is None else precision.weight
        if precision is None:
            got, do = "a quantized weight in a call without a recipe", "pass recipe=, by which it was quantized"
            raise ArgumentError(op, got, "quantized weights beside recipe=", do)
        for name, q in {**{n: w for n, w in weights.items() if isinstance(w, QuantizedTensor)}, **beside}.items():
            right = isinstance(q, QuantizedTensor) and None not in (rule, q.rowwise, q.columnwise, q.block)
            if not right or q.format is not rule.format or q.block.device is not rt.device:  # type: ignore[union-attr]
                allowed = f"{rule and rule.format} in both copies, as te.quantize(weight, recipe) makes it"
                raise ArgumentError(op, f"{name} = {q!r}", allowed, "quantize it by this call's recipe")
            if tuple(q.shape) != tuple(weights[name].shape):
                allowed = f"the weight's shape {weights[name].shape}"
                raise ArgumentError(op, f"{name} = {q!r}", allowed, "quantize it anew")
            _check.stored(op, rt.device, name, q)
        return tuple(beside.get(name) for name in weights)


class Kept(NamedTuple):
    """What backward needs of its forward."""

    call: Call
    saved: Any
    keywords: dict[str, Any]
    outputs: tuple[tuple[tuple[int, ...], dtypes.DType], ...]
    weights: dict[str, Any]


class Back:
    """The backward of one call. It reads what forward read: call it before you write to x or to a weight."""

    __slots__ = ("_function", "_kept", "_where", "_why")

    def __init__(self, function: Function, where: Where, kept: Kept | None) -> None:
        self._function, self._where, self._kept = function, where, kept
        self._why = "was called with needs=(), and kept nothing"

    def __call__(
        self, dy: Any, *, into: Mapping[str, Any] | None = None, accumulate: bool = False, keep: bool = False
    ) -> dict[str, Any]:
        """The gradients by name, of what forward's `needs` named.

        `dy` is the gradient of y; of several outputs a tuple, None for one behind the first that was not used. `into`
        has arrays that weights' gradients are written into, or added to with `accumulate`. What was kept is let go of,
        so it works once, unless `keep`.
        """
        function, kept, op = self._function, self._kept, f"{self._function.__name__} backward"
        if kept is None:
            allowed, do = "one backward for each forward", "pass keep=True to all but the last, or call forward again"
            raise ArgumentError(op, f"a call of a layer that {self._why}", allowed, do)
        where, made = self._where, kept.call
        grads = self._gradients_of_outputs(op, dy, kept)
        keywords = dict(kept.keywords)
        if accumulate and into is None:
            do = "pass the arrays that are added to"
            raise ArgumentError(op, "accumulate=True without into", 'into={"weight": array}', do)
        mains = self._into(op, into, accumulate, kept)
        if mains:
            keywords["sinks"] = tuple(mains.get(name) for name in kept.weights)
        if made.layer.releases and not keep:
            keywords["release"] = True
        saved = kept.saved
        if not keep:
            self._kept, self._why = None, "has had its backward"
            del kept
        outputs = made.backward(where.rt, *grads, saved, **keywords)
        del saved
        given, wanted, into = where.give(*outputs), made.asked.needs, into or {}
        if function.several:
            count = made.asked.options["num_gemms"]
            weights = [into.get(f"weight{i}", g) for i, g in enumerate(given[1 : 1 + count])]
            found = {"x": given[0], "weight": weights, "bias": given[1 + count :]}
            return {n: found[n] for n in found if n in wanted}
        by_name = zip(function.gradients, given, strict=False)
        return {n: into[n] if g is None and n in into else g for n, g in by_name if n in wanted}

    def _gradients_of_outputs(self, op: str, dy: Any, kept: Kept) -> list[Tensor | None]:
        count, several = len(kept.outputs), len(kept.outputs) > 1
        parts = list(dy) if several and isinstance(dy, (tuple, list)) else [dy]
        if len(parts) > count or parts[0] is None:
            got = f"gradients of {len(parts)} outputs" if len(parts) > count else "None for the first output's gradient"
            allowed = f"gradients of {count} outputs, None for those behind the first that were not used"
            raise ArgumentError(op, got, allowed, "correct dy; zeros stand for a first output that was not used")
        found: list[Tensor | None] = []
        for i, part in enumerate(parts):
            shape, dtype = kept.outputs[i]
            t, rt = None if part is None else read(op, "dy", part), self._where.rt
            like = t is None or (t.shape == shape and t.dtype is dtype and t.is_contiguous)
            if t is not None and not (like and t.device is rt.device):
                allowed = f"a dense array {shape} of {dtype} on {rt.device}, as the output is"
                do = "convert dy (reshape, astype, ascontiguousarray)"
                raise ArgumentError(op, f"dy = {t!r}", allowed, do)
            found.append(t)
        return found + [None] * (self._function.results - len(found))

    def _into(self, op: str, into: Mapping[str, Any] | None, accumulate: bool, kept: Kept) -> dict[str, Sink]:
        wanted = kept.call.asked.needs
        names = [n for n in kept.weights if n in wanted or self._function.several in wanted]
        found: dict[str, Sink] = {}
        if into is None:
            return found
        if not isinstance(into, Mapping) or not into.keys() <= set(names):
            got = f"into={[*into] if isinstance(into, Mapping) else type(into).__name__}"
            keys = ", ".join(map(repr, names)) or "of weights, of which no gradient is wanted here"
            do = "name weights that are multiplied; add other gradients yourself"
            raise ArgumentError(op, got, f"a dict with the keys {keys}", do)
        for name, array in into.items():
            t, weight = read(op, f"into[{name!r}]", array), kept.weights[name]
            kinds = (dtypes.float32, kept.call.asked.dtype if isinstance(weight, QuantizedTensor) else weight.dtype)
            right = tuple(t.shape) == tuple(weight.shape) and t.dtype in kinds and t.is_contiguous and t.writable
            if not right or t.device is not self._where.rt.device:
                types = " or ".join(d.name for d in dict.fromkeys(kinds))
                allowed = f"a dense array {weight.shape} of {types} to write to"
                got = f"into[{name!r}] = {t!r}" + ("" if t.writable else " in read-only memory")
                raise ArgumentError(op, got, allowed, "correct it, or leave it out")
            found[name] = Sink(t, bool(accumulate))
        return found

    def __repr__(self) -> str:
        return f"<backward of {self._function.__name__}, {'ready' if self._kept else 'done'}>"
