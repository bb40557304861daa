"""A layer of the table as a function of arrays: y, back = function(x, weight, ...), grads = back(dy)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import numpy as np

from te_core import dtypes
from te_core.calls import Call, call, precision_of
from te_core.errors import ArgumentError
from te_core.functional.arrays import Library, library_of, read
from te_core.functional.contract import Contract, check_all, check_offsets, check_row_map
from te_core.functional.scaling import Scaling, check_scaling
from te_core.layers.grouped_linear import Groups
from te_core.layers.linear import Sink
from te_core.layers.table import LAYERS
from te_core.ops import _check
from te_core.precision import Precision
from te_core.quantized import QuantizedTensor
from te_core.recipe import Recipe
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_SHARED = ("recipe", "scaling", "needs", "quantized", "seed", "rt")
_OF_PRODUCTS = ("recipe", "scaling", "quantized")
_SIZES = "m_splits"


class Where(NamedTuple):
    """Where a call runs, and of which library what it gives is."""

    rt: Runtime
    home: Library

    def give(self, *tensors: Tensor | None) -> list[Any]:
        """Results as the library's arrays."""
        if self.home.waits:
            self.rt.synchronize()
        return [None if t is None else self.home.give(t) for t in tensors]


class Function:
    """A layer by its name in `te_core.layers.table.LAYERS`.

    Returns (y, back), or ((y, ...), back) where options ask for more outputs. `back(dy)` gives the gradients of what
    `needs` names (all that has one, if it is left out) by name.
    """

    def __init__(self, name: str) -> None:
        self.layer = LAYERS[name]
        self.__name__ = self.__qualname__ = name
        arguments = self.layer.offered()
        self._arguments = {a.name: a for a in arguments}
        self._gradients = tuple(a.name for a in self.layer.arguments)
        self._several = next((a.name for a in arguments if a.several), None)
        optional, empty = Parameter.KEYWORD_ONLY, Parameter.empty
        first = next((i for i, a in enumerate(arguments) if a.optional), len(arguments))
        kinds = [
            Parameter(
                a.name,
                Parameter.POSITIONAL_OR_KEYWORD if i <= first else optional,
                default=None if a.optional else empty,
            )
            for i, a in enumerate(arguments)
        ]
        self._positional = tuple(p.name for p in kinds if p.kind is not optional)
        more = [Parameter(n, optional, default=o.default) for n, o in self.layer.options.items() if not o.implied]
        shared = [n for n in _SHARED if self.layer.products or n not in _OF_PRODUCTS]
        sizes = [Parameter(_SIZES, optional)] if self._several else []
        named = [Parameter(n, optional, default=None) for n in shared]
        self.__signature__ = Signature(sorted([*kinds, *sizes, *more, *named], key=lambda p: p.kind))
        self.__doc__ = f"{self.layer.about}. Takes {', '.join(self._arguments)}; {Function.__doc__}"

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
        first = arrays[self.layer.arguments[0].name]
        where = self._where(first, tensors, rt)
        if not self.layer.products:
            self._refuse_recipe(recipe, scaling, quantized)
        precision = precision_of(op, recipe)
        settled = self._check(tensors, options, precision, where.rt)
        for name, most in self._offsets(tensors, settled):
            check_offsets(op, name, tensors[name], most)
        wanted = self._wanted(needs, tensors)
        options |= self._implied(tensors, options, where.rt)
        made = call(op, options, tensors[self.layer.arguments[0].name].dtype, wanted, recipe)
        keywords: dict[str, Any] = {}
        weights = self._weights(tensors)
        scales = check_scaling(op, scaling, precision, where.rt, len(weights)) if self.layer.products else None
        if scales is not None:
            keywords["scales"] = scales
        if self._several:
            keywords["splits"] = self._groups(sizes, tensors["x"].shape[0], len(weights))
        ready = None
        if quantized is not None or any(isinstance(w, QuantizedTensor) for w in weights.values()):
            ready = self._ready(quantized, weights, made, where.rt)
        more = dict(keywords) if ready is None else {**keywords, "ready": ready}
        outputs, saved = made.forward(where.rt, *self._placed(tensors, made, seed, where.rt), **more)
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
        arrays = {**by_place, **{name: named.pop(name) for name in [*named] if name in self._arguments}}
        missing = [n for n, a in self._arguments.items() if not a.optional and arrays.get(n) is None]
        if missing:
            do = f"pass {' and '.join(missing)}"
            raise ArgumentError(op, f"no {', '.join(missing)}", f"{', '.join(self._arguments)}", do)
        unknown = [n for n in named if (n not in layer.options or layer.options[n].implied) and n != _SIZES]
        if unknown or (_SIZES in named and not self._several):
            options = ", ".join(p for p in self.__signature__.parameters)
            raise ArgumentError(op, f"an argument {unknown[0] if unknown else _SIZES!r}", options, "correct the name")
        return {name: arrays.get(name) for name in self._arguments}, named

    def _read(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays as tensors of the core; a quantized weight as itself."""
        op = self.__name__
        found: dict[str, Any] = {}
        for name, array in arrays.items():
            if array is None:
                found[name] = None
            elif self._arguments[name].several:
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

    def _where(self, first: Any, tensors: Mapping[str, Any], rt: Runtime | None) -> Where:
        home, device = library_of(first), tensors[self.layer.arguments[0].name].device
        if rt is None:
            return Where(home.runtime(device), home)
        if not isinstance(rt, Runtime) or rt.device is not device:
            allowed = f"a Runtime of {device}, where {self.layer.arguments[0].name} lies"
            raise ArgumentError(self.__name__, f"rt={rt!r}", allowed, "leave rt out, or correct it")
        return Where(rt, home)

    def _refuse_recipe(self, *given: Any) -> None:
        for name, value in zip(_OF_PRODUCTS, given, strict=True):
            if value is not None:
                allowed = "recipes for layers with weights that are multiplied"
                raise ArgumentError(self.__name__, f"{name}=", allowed, f"leave {name} out")

    def _check(
        self, tensors: Mapping[str, Any], options: Mapping[str, Any], precision: Precision | None, rt: Runtime
    ) -> dict[str, Any]:
        """All options; what tensors are fits them. No value is read."""
        settled = self.layer.settled(self.__name__, options)
        contract = Contract(self.__name__, rt.device, settled, precision is not None)
        check_all(contract, [(a, tensors[a.name]) for a in self._arguments.values()])
        kind = settled.get("normalization")
        for name in [n for n in self._arguments if n.endswith("layer_norm_bias") and kind is not None]:
            without = tensors[name] is None
            if (kind == "LayerNorm") == without:
                got, do = f"{kind} with{'out' * without} {name}", "correct normalization or the bias"
                raise ArgumentError(self.__name__, got, "one for LayerNorm, none for RMSNorm", do)
        if "attn_mask_type" in settled:
            padded = "padding" in settled["attn_mask_type"] or settled["qkv_format"] == "thd"
            if padded != (tensors["cu_seqlens_q"] is not None):
                got = f"attn_mask_type={settled['attn_mask_type']!r} with{'out' * padded} cu_seqlens_q"
                allowed = "running sums of lengths for padded and for packed sequences, none for others"
                do = "pass cu_seqlens_q" if padded else "leave it out, or choose a padding mask"
                raise ArgumentError(self.__name__, got, allowed, do)
        if tensors.get("residual_bias") is not None and tensors.get("residual") is None:
            raise ArgumentError(self.__name__, "residual_bias alone", "it beside residual", "pass residual, too")
        return settled

    def _offsets(self, tensors: Mapping[str, Any], settled: Mapping[str, Any]) -> list[tuple[str, int]]:
        """Running sums of lengths, and what they may come to."""
        found = [n for n in self._arguments if n.startswith("cu_seqlens") and tensors[n] is not None]
        return [(name, self._tokens(name, tensors, settled)) for name in found]

    def _tokens(self, name: str, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> int:
        """How many tokens running sums may come to."""
        if self.layer.name == "softmax":
            b, _, q, kv = tensors["x"].shape
            return int(b * (kv if "kv" in name else q))
        first = self.layer.arguments[0].name
        shape = tensors["k" if "kv" in name else first].shape
        form = options.get("qkv_format") or options["tensor_format"]
        return int(shape[0]) if form == "thd" else int(np.prod(shape[:2]))

    def _wanted(self, needs: Iterable[str] | None, tensors: Mapping[str, Any]) -> frozenset[str]:
        possible = frozenset(n for n, a in self._arguments.items() if a.gradient and tensors[n] is not None)
        if needs is None:
            return possible
        listed: Any = needs if isinstance(needs, Iterable) and not isinstance(needs, str) else (needs,)
        wanted = frozenset(name if isinstance(name, str) else repr(name) for name in listed)
        if not wanted <= possible:
            allowed, do = ", ".join(n for n in self._arguments if n in possible), "name arguments that have a gradient"
            raise ArgumentError(self.__name__, f"needs={sorted(wanted - possible)}", allowed, do)
        return wanted

    def _implied(self, tensors: Mapping[str, Any], given: Mapping[str, Any], rt: Runtime) -> dict[str, Any]:
        """The options that follow from the arguments."""
        options = self.layer.options
        if "rows" in options:
            return dict(zip(("tokens", "rows"), self._moved(tensors, given, rt), strict=True))
        if "stream" in options:
            return {"stream": tensors["residual"] is not None}
        if "num_gemms" in options:
            return {"num_gemms": len(tensors["weight"])}
        if "kv_channels" in options:
            return {
                "kv_channels": self._head_width(tensors, given),
                "turned_by_angles": tensors["rotary_pos_emb"] is not None,
            }
        if "head_dim_qk" not in options:
            return {}
        q, k, v = (tensors[name].shape for name in "qkv")
        sizes = {"num_attention_heads": q[-2], "num_gqa_groups": k[-2], "head_dim_qk": q[-1], "head_dim_v": v[-1]}
        if min(sizes.values()) < 1:
            raise ArgumentError(self.__name__, f"{sizes}", "sizes from 1 on", "correct the shapes of q, k and v")
        return sizes

    def _head_width(self, tensors: Mapping[str, Any], given: Mapping[str, Any]) -> int:
        """How many channels the heads of a projection to queries, keys and values have."""
        op, name = self.__name__, self.layer.products[0]
        heads, rows, columns = given.get("num_attention_heads"), tensors[name].shape[0], tensors["proj_weight"].shape[1]
        if heads is None:
            raise ArgumentError(op, "no num_attention_heads", "how many heads there are", "pass num_attention_heads")
        groups = given.get("num_gqa_groups") or heads
        width = int(rows // (heads + 2 * groups))
        if heads % groups or not width or (width * (heads + 2 * groups), width * heads) != (rows, columns):
            got = f"{heads} heads in {groups} groups with {rows} rows of {name} and {columns} columns of proj_weight"
            allowed = "(heads + 2 groups) * channels rows, and heads * channels columns; groups that divide the heads"
            raise ArgumentError(op, got, allowed, "correct num_attention_heads, num_gqa_groups or the weights")
        return width

    def _moved(self, tensors: Mapping[str, Any], given: Mapping[str, Any], rt: Runtime) -> tuple[int, int]:
        """(tokens, rows) of what moves tokens to experts or back."""
        x, routing, masked = tensors["x"], tensors.get("routing_map"), given.get("map_type", "mask") == "mask"
        if routing is not None:
            rows = given.get("num_out_tokens", -1)
            if rows < 0 and masked and rt.device.kind != "cpu":
                got, do = "num_out_tokens=-1 with a mask on a device", "pass the number of rows"
                raise ArgumentError(self.__name__, got, "a number that the host need not wait for", do)
            if rows < 0:
                rows = np.count_nonzero(routing.numpy()) if masked else routing.size
            return x.shape[0], int(rows)
        row_map, probs, tokens = tensors["row_id_map"], tensors["merging_probs"], given.get("num_tokens")
        check_row_map(self.__name__, "row_id_map", row_map)
        if masked and row_map.ndim == 2:
            tokens = row_map.shape[0]
        elif probs is not None:
            tokens = probs.shape[0]
        if masked != (row_map.ndim == 2) or tokens is None:
            got = f"row_id_map = {row_map!r} with map_type={'mask' if masked else 'index'!r}, num_tokens={tokens}"
            allowed = "a mask's map [tokens, 2 experts + 1]; an index map [slots * tokens] with num_tokens"
            raise ArgumentError(self.__name__, got, allowed, "correct map_type, or pass num_tokens")
        return tokens, x.shape[0]

    def _weights(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The weight of each product, by the name that `quantized` and `into` have for it."""
        if self._several:
            return {f"{self._several}{i}": w for i, w in enumerate(tensors[self._several])}
        return {name: tensors[name] for name in self.layer.products}

    def _groups(self, sizes: Any, rows: int, count: int) -> Groups:
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
            raise ArgumentError(op, got, f"a dict by {', '.join(weights)}", "correct the names")
        rule = None if precision is None else precision.weight
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

    # ----------------------------------------------------------------------------------------------- the call

    def _placed(self, tensors: Mapping[str, Any], made: Call, seed: Any, rt: Runtime) -> list[Any]:
        """The tensors as the core's function takes them, by place."""
        found: list[Any] = []
        drawn = 0
        for argument in self.layer.arguments:
            if argument.dtypes == "draws":
                found.append(self._draws(seed, rt, drawn) if made.draws else None)
                drawn += 1
            elif not argument.several:
                found.append(tensors.get(argument.name))
            else:
                count, given = len(tensors["weight"]), tensors[argument.name]
                if given is not None and len(given) != count:
                    got, do = f"{len(given)} in {argument.name} beside {count} weights", "pass as many of each"
                    raise ArgumentError(self.__name__, got, f"{count}", do)
                found.extend([None] * count if given is None else given)
        return found

    def _draws(self, seed: Any, rt: Runtime, number: int) -> Tensor:
        """Seed and offset of random numbers, on the device. Of numbers each part that draws gets a pair of its own."""
        pair = (seed, 0) if type(seed) is int else seed
        listed = isinstance(pair, (tuple, list)) and len(pair) == 2
        if listed and all(type(n) is int and -(1 << 63) <= n < 1 << 63 for n in pair):
            apart = (number & 1) << 62 | (number & 2) << 60 | (number & 4) << 58
            return rt.tensor(np.array((pair[0] ^ apart, pair[1]), np.int64))
        count = sum(a.dtypes == "draws" for a in self.layer.arguments)
        shape = (2,) if count <= 2 else (count, 2)
        allowed = f"an integer below 2^63, two of them, or an int64 array {list(shape)} on the device"
        if seed is None or isinstance(pair, (tuple, list, int)):
            do = "pass seed=: another one in each step"
            raise ArgumentError(self.__name__, f"seed={seed!r} where numbers are drawn", allowed, do)
        t = read(self.__name__, "seed", seed)
        if t.shape != shape or t.dtype is not dtypes.int64 or not t.is_contiguous or t.device is not rt.device:
            raise ArgumentError(self.__name__, f"seed = {t!r}", allowed, "correct seed")
        return t if len(shape) == 1 else t.rows(number, number + 1).reshape(2)


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
        given = self._gradients_of_outputs(op, dy, kept)
        keywords = dict(kept.keywords)
        mains = self._into(op, into, accumulate, kept)
        if mains:
            keywords["sinks"] = tuple(mains.get(name) for name in kept.weights)
        if made.layer.releases and not keep:
            keywords["release"] = True
        saved = kept.saved
        if not keep:
            self._kept, self._why = None, "has had its backward"
            del kept
        outputs = made.backward(where.rt, *given, saved, **keywords)
        del saved
        return self._named(function, made, outputs, into or {})

    def _gradients_of_outputs(self, op: str, dy: Any, kept: Kept) -> list[Tensor | None]:
        count, several = len(kept.outputs), len(kept.outputs) > 1
        parts = list(dy) if several and isinstance(dy, (tuple, list)) else [dy]
        if len(parts) > count or parts[0] is None:
            raise ArgumentError(
                op, f"gradients of {len(parts)} outputs", f"{count}, the first one always", "correct dy"
            )
        found: list[Tensor | None] = []
        for i, part in enumerate(parts):
            shape, dtype = kept.outputs[i]
            t, rt = None if part is None else read(op, "dy", part), self._where.rt
            if t is not None and (
                t.shape != shape or t.dtype is not dtype or not t.is_contiguous or t.device is not rt.device
            ):
                allowed = f"a dense array {shape} of {dtype} on {rt.device}, as the output is"
                raise ArgumentError(op, f"dy = {t!r}", allowed, "convert dy (astype, ascontiguousarray)")
            found.append(t)
        layer = kept.call.layer
        places = len(layer.outputs) + (layer.name == "attention")  # whose second output is not offered
        return found + [None] * (places - len(found))

    def _into(self, op: str, into: Mapping[str, Any] | None, accumulate: bool, kept: Kept) -> dict[str, Sink]:
        wanted = kept.call.asked.needs
        names = [n for n in kept.weights if n in wanted or self._function._several in wanted]
        found: dict[str, Sink] = {}
        if into is None:
            return found
        if not isinstance(into, Mapping) or not into.keys() <= set(names):
            got = f"into={[*into] if isinstance(into, Mapping) else type(into).__name__}"
            allowed = f"a dict by {', '.join(names) or 'the weights, of which no gradient is wanted'}"
            raise ArgumentError(op, got, allowed, "correct the names")
        for name, array in into.items():
            t, weight = read(op, f"into[{name!r}]", array), kept.weights[name]
            kinds = (dtypes.float32, kept.call.asked.dtype if isinstance(weight, QuantizedTensor) else weight.dtype)
            right = tuple(t.shape) == tuple(weight.shape) and t.dtype in kinds and t.is_contiguous and t.writable
            if not right or t.device is not self._where.rt.device:
                allowed = (
                    f"a dense array {weight.shape} of {' or '.join(d.name for d in dict.fromkeys(kinds))} to write to"
                )
                got = f"into[{name!r}] = {t!r}" + ("" if t.writable else " in read-only memory")
                raise ArgumentError(op, got, allowed, "correct it, or leave it out")
            found[name] = Sink(t, bool(accumulate))
        return found

    def _named(self, function: Function, made: Call, outputs: Any, into: Mapping[str, Any]) -> dict[str, Any]:
        """What the core gave, by the names of arguments, as arrays."""
        given, wanted = self._where.give(*outputs), made.asked.needs
        if function._several:
            count = made.asked.options["num_gemms"]
            weights = [into.get(f"weight{i}", g) for i, g in enumerate(given[1 : 1 + count])]
            found = {"x": given[0], "weight": weights, "bias": given[1 + count :]}
            return {n: found[n] for n in found if n in wanted}
        named = zip(function._gradients, given, strict=False)
        return {n: into[n] if g is None and n in into else g for n, g in named if n in wanted}

    def __repr__(self) -> str:
        return f"<backward of {self._function.__name__}, {'ready' if self._kept else 'done'}>"
