"""Layers that C has opened: their options, their tensors by address, and what a call of them is."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from threading import RLock
from typing import Any

from te_core import dtypes
from te_core import recipe as recipes
from te_core.calls import Call, call, precision_of
from te_core.dlpack import _DLTensor
from te_core.errors import ArgumentError, UnsupportedError
from te_core.functional.contract import check_offsets
from te_core.functional.named import Named
from te_core.functional.scaling import new_states, views_of
from te_core.layers.entries import Asked
from te_core.layers.table import LAYERS
from te_core.recipe import Recipe
from te_core.runtime import ByteAllocator, Runtime
from te_core.spelling import choice_error
from te_core.tape.program_file import Program
from te_core.tensor import CPU, Tensor, cuda_device

_TAKE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_GIVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_CPU = 1
_OPEN = "te_layer_open"
_DEEPEST = 8  # levels of lists and objects in options


class Host:
    """A te_runtime: where its calls run, and the memory that it gives."""

    def __init__(self, kind: int, index: int, stream: int, address: int, take: int, give: int) -> None:
        taking, giving = _TAKE(take), _GIVE(give)

        def taken(nbytes: int, stream: int) -> int:
            found: int | None = taking(address, nbytes, stream)
            if not found:
                raise MemoryError(f"{nbytes} bytes of the runtime's memory")
            return found

        def given(at: int, stream: int) -> None:
            if self.there:
                giving(address, at, stream)

        self.take, self.give, self.there = taken, given, True
        self.device, self.stream = CPU if kind == _CPU else cuda_device(index), stream
        self._runtimes: dict[int, Runtime] = {}

    def runtime(self, alignment: int = 256) -> Runtime:
        """Where work runs whose results are aligned so."""
        if self.device is CPU:
            return Runtime.cpu()
        found = self._runtimes.get(alignment)
        if found is None:
            allocator: Any = ByteAllocator(self.device, self.take, self.give)
            allocator.alignment = alignment
            found = Runtime.cuda(self.device.index, self.stream, allocator)
            self._runtimes[alignment] = found
        return found


class Opened:
    """A layer with its options."""

    def __init__(self, host: Host, name: str, text: str | None) -> None:
        if name not in LAYERS:
            raise choice_error(_OPEN, "name", name, LAYERS)
        self.host, self.named, self.name = host, Named(LAYERS[name]), name
        if self.named.several:
            do = "call te_core.functional in Python"
            raise UnsupportedError(_OPEN, f"{name}, which takes sizes with each call", "layers without", do)
        options = _options(text)
        self.recipe = _recipe(options.pop("recipe", None))
        self.precision = precision_of(_OPEN, self.recipe)
        if self.recipe is not None and not self.named.layer.products:
            do = "leave recipe out"
            raise ArgumentError(_OPEN, f"a recipe for {name}", "recipes for layers with weights", do)
        gradients = [n for n, a in self.named.arguments.items() if a.gradient]
        self.needs = options.pop("needs", gradients)
        if not isinstance(self.needs, list) or not set(map(str, self.needs)) <= set(gradients):
            raise ArgumentError(_OPEN, f"needs={self.needs!r}", f"a list of {', '.join(gradients)}", "correct needs")
        self.options = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
        known = self.named.layer.options
        for option in [n for n in self.options if n in known and known[n].implied]:
            raise ArgumentError(_OPEN, f"an option {option!r}", "options that no shape says", "leave it out")
        settled = self.named.layer.settled(_OPEN, self.options)
        settled |= {"stream": True} if "stream" in settled else {}  # a residual may come with a call
        asked = Asked(settled, dtypes.float32, frozenset(self.needs), self.precision)
        self.names = [*self.named.arguments, *["seed"] * self.named.layer.draws(asked)]
        self.program = Program()  # what was recorded: te_layer_save writes it
        self.lock = RLock()
        self.state: State | None = None  # the last one that was made for it

    @property
    def history(self) -> bool:
        """Whether a scaling state belongs to it."""
        return self.precision is not None and self.precision.history is not None

    def slots(self) -> tuple[list[int], list[str]]:
        """(flags, and texts) of what it takes and gives: 1 optional, 2 it has a gradient."""
        flags, texts = [], []
        for name in self.names:
            argument = self.named.arguments.get(name)
            said = ("2" if len(self.named.pairs) == 1 else f"{self.named.pairs[0]} 2"), "int64"
            shape, kind = said if argument is None else (" ".join(argument.letters(self.options)), argument.dtypes)
            flags.append(1 if argument is None else argument.optional + 2 * (name in self.needs))
            texts += [name, shape, kind]
        for i, name in enumerate(self.named.layer.outputs):
            flags.append(int(i > 0) + 2)
            texts += [name, "", "x"]
        return flags, texts

    def call(self, given: Sequence[Tensor | None], keep: bool, rt: Runtime) -> tuple[Call, list[Any]]:
        """(the call of these tensors, its arguments by place)."""
        tensors: dict[str, Any] = dict.fromkeys(self.names) | dict(zip(self.names, given, strict=False))
        seed = tensors.pop("seed", None)
        missing = [n for n, a in self.named.arguments.items() if tensors[n] is None and not a.optional]
        if missing:
            allowed = ", ".join(self.named.arguments)
            raise ArgumentError(self.name, f"no {', '.join(missing)}", allowed, f"pass {' and '.join(missing)}")
        settled = self.named.check(tensors, self.options, self.precision, rt)
        for name, most in self.named.offsets(tensors, settled):
            check_offsets(self.name, name, tensors[name], most)
        wanted = [n for n in self.needs if tensors[n] is not None] if keep else ()
        made = self.asked(tensors, frozenset(wanted), rt)
        return made, self.named.placed(tensors, made, seed, rt)

    def asked(self, tensors: Mapping[str, Any], wanted: frozenset[str], rt: Runtime) -> Call:
        """The call with these gradients."""
        options = self.options | self.named.implied(tensors, self.options, rt)
        return call(self.name, options, tensors[next(iter(self.named.arguments))].dtype, wanted, self.recipe)

    def scales(self, state: State | None) -> dict[str, Any]:
        """Keywords of a call that say how its products are scaled."""
        if self.history and state is None:
            got, do = "no scaling for a recipe with a history", "make one by te_scaling_create"
            raise ArgumentError(self.name, got, "the state of this layer", do)
        return {} if state is None or not self.history else {"scales": state.scales}


class State:
    """Scales and maxima of an opened layer."""

    def __init__(self, layer: Opened) -> None:
        self.layer = layer
        self.states: tuple[Any, ...] = ()
        self.scales: Any = None
        if layer.precision is not None and layer.history:
            self.states = new_states(layer.host.runtime(), layer.precision, len(layer.named.layer.products))
            self.scales = views_of(self.states)
        layer.state = self

    def tensors(self) -> list[Tensor]:
        """In the order in which C knows them."""
        return [t for state in self.states for t in (state.scale, state.history)] + [s.used for s in self.states]


def _options(text: str | None) -> dict[str, Any]:
    allowed, do = '{"option": value, ...}', "correct them"
    try:
        found = json.loads(text or "{}")
        deep = _deeper(found, _DEEPEST)
    except ValueError as error:
        raise ArgumentError(_OPEN, f"options that are no JSON: {error}", allowed, do) from None
    except RecursionError:
        deep = True
    if deep:
        raise ArgumentError(_OPEN, f"options nested more than {_DEEPEST} deep", allowed, do)
    if not isinstance(found, dict):
        raise ArgumentError(_OPEN, f"options = {text}", allowed, do)
    return found


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects stand in one another on more levels."""
    if not isinstance(value, (dict, list)):
        return False
    return not levels or any(_deeper(v, levels - 1) for v in (value.values() if isinstance(value, dict) else value))


def _recipe(said: Any) -> Recipe | None:
    """A recipe by its name, or {its name: its fields}; an enumeration's values by their names."""
    if said is None:
        return None
    name, fields = next(iter(said.items())) if isinstance(said, dict) and len(said) == 1 else (said, {})
    known = {n: k for n, k in vars(recipes).items() if isinstance(k, type) and issubclass(k, Recipe)}
    del known["Recipe"], known["CustomRecipe"]
    if not isinstance(name, str) or name not in known or not isinstance(fields, dict):
        raise ArgumentError(_OPEN, f"recipe = {said!r}", ", ".join(known), "name one, or {name: {field: value}}")
    formats = recipes.Format.__members__
    named = {n: formats[v] if n == "fp8_format" and v in formats else v for n, v in fields.items()}
    made: Recipe = known[name](**named)
    return made


def read(pointers: int, count: int, device: Any) -> tuple[list[Any], list[Tensor | None]]:
    """(DLTensors, and tensors over their memory) by the addresses of DLTensors; None where there is none."""
    addresses = (ctypes.c_void_p * count).from_address(pointers) if count else ()
    found = [_DLTensor.from_address(at) if at else None for at in addresses]
    return found, [None if t is None else _tensor(t, device) for t in found]


def alike(like: Tensor, t: Tensor) -> bool:
    """Whether a tensor of the caller's can hold what is like this one."""
    return t.shape == like.shape and t.dtype is like.dtype and t.is_contiguous


def _tensor(t: Any, device: Any) -> Tensor:
    shape = tuple(t.shape[: t.ndim]) if t.ndim else ()
    strides = tuple(t.strides[: t.ndim]) if t.ndim and t.strides else None
    dtype = dtypes.from_dlpack(t.code, t.bits, t.lanes)
    made = Tensor((t.data or 0) + t.byte_offset, shape, dtype, device, None, strides)
    if made.is_contiguous:
        made.strides = None
    made.owner = made.shape  # something that lives: the memory is the caller's
    return made
