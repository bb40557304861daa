"""A replay whose launches, products and fills are done by te_core's library in C (TE_CORE_PLAYER=c).

What lies between takes and drops, or steps of another kind, is a stretch: one call of C. Memory, streams, descriptors
and handles stay Python's; of each stretch C has words, and the numbers in them that become addresses.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_int, c_uint32, c_uint64, c_void_p, sizeof
from operator import itemgetter
from typing import Any

from te_core import c_library, libraries
from te_core.backends.cuda.cublaslt import CublasLtError
from te_core.backends.cuda.gemm_run import Multiplied, Prepared, alpha_on_device, cache_of
from te_core.errors import LibraryError
from te_core.runtime import Runtime
from te_core.tape.bound import Bound, Step
from te_core.tape.program_file import FILL, PRODUCT, SIZES
from te_core.tape.words import Packed, packed

_POINTERS = 8  # the most that a product has
_DEVICE_ALPHA, _ADDS = 1, 2


def _fields(kind: Any, *names: str) -> list[Any]:
    return [(name, kind) for name in names]


# As bindings/c/src/internal.h lays them out: the library compares the sizes.
class _Patch(Structure):
    _fields_ = [*_fields(c_uint32, "number", "where"), *_fields(c_uint64, "offset")]


class _Product(Structure):
    _fields_ = [
        *_fields(c_void_p, "handle", "desc", "first", "second", "out", "algorithm", "workspace"),
        *_fields(c_uint32, "flags", "count"),
        *_fields(c_int * _POINTERS, "attributes"),
        *_fields(c_uint64 * _POINTERS, "last"),
        *_fields(c_uint64, "set"),
    ]


class _Op(Structure):
    _fields_ = [
        *_fields(c_uint32, "kind", "target", "stream", "other", "count"),
        *_fields(c_uint32 * SIZES, "sizes"),
        *_fields(POINTER(_Patch), "patches"),
        *_fields(c_void_p, "words", "pointers", "what"),
    ]


class _Stretch(Structure):
    _fields_ = [
        *_fields(c_uint64, "sizes"),
        *_fields(c_void_p * 4, "calls"),
        *_fields(POINTER(_Op), "ops"),
        *_fields(c_uint64, "count", "failed"),
    ]


_LAYOUT = sizeof(_Stretch) << 32 | sizeof(_Op) << 16 | sizeof(_Product)


def doors(products: bool) -> tuple[int, ...]:
    """The addresses of what C calls."""
    found = [libraries.driver().address(name) for name in ("cuLaunchKernel", "cuMemsetD8Async")]
    if products:
        lt = libraries.load("cublasLt")
        names = "cublasLtMatmul", "cublasLtMatmulDescSetAttribute"
        found += [ctypes.cast(lt[name], c_void_p).value or 0 for name in names]
    return tuple(found)


class _CallError(Exception):
    """A call that failed in C, with its status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def _checked(status: Any, function: Any, arguments: Any) -> Any:
    if status:
        raise _CallError(status)


def player() -> Any:
    """The function that plays a stretch. Other threads of Python's run meanwhile."""
    found = c_library.library("te_stretch_play")["te_stretch_play"]
    found.argtypes, found.restype, found.errcheck = [c_void_p, c_void_p], c_int, _checked
    return found


class Stretch:
    """Steps that C does in one call, and its memory."""

    __slots__ = ("_kept", "_ops", "_places", "_stretch", "_values", "_words", "steps")

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._ops: list[tuple[_Op, Packed]] = []
        self._places: dict[int, int] = {}  # in a replay's `at`: the number among this stretch's addresses
        self._stretch = _Stretch(_LAYOUT)
        self._kept: list[Any] = []

    def add(self, step: Any, words: Packed, stream: int, rt: Runtime) -> None:
        """Another one; the stream by its place."""
        what = 0
        if words.kind == PRODUCT:
            cache, plan = cache_of(rt), step.plan
            # Descriptors of its own: nobody else sets their pointers.
            made = Prepared(cache, plan.spec, plan.route).finished(plan)
            flags = _DEVICE_ALPHA * alpha_on_device(plan.spec) | _ADDS * plan.route.accumulate
            layouts = made.a_layout, made.b_layout, made.out_layout
            product = _Product(cache.handle, made.desc, *layouts, made.algo, made.needs, flags, len(made.attributes))
            product.attributes[: len(made.attributes)] = made.attributes
            self._kept += (made, product)
            what = addressof(product)
        elif words.kind != FILL:
            step.kernel.allow(step.sizes[-1])
            what = step.kernel._function
        self._ops.append((_Op(words.kind, 0, self._number(stream), words.nbytes, len(words.patches), what=what), words))
        self.steps.append(step)

    def _number(self, place: int) -> int:
        return self._places.setdefault(place, len(self._places))

    def closed(self) -> tuple[Any, Sequence[Any], Sequence[int]]:
        """(the function that is given its addresses, what it is given before these, their places)."""
        count = sum(len(words.words) for _, words in self._ops)
        self._words, pointers = (c_uint64 * (count + 1))(), (c_uint64 * (count + 1))()
        ops, at = (_Op * len(self._ops))(), 0
        for i, (op, words) in enumerate(self._ops):
            op.words, op.pointers = addressof(self._words) + 8 * at, addressof(pointers) + 8 * at
            for k, word in enumerate(words.words):
                self._words[at + k] = word
            if words.kind not in (PRODUCT, FILL):
                op.sizes = words.words[:SIZES]
                for k in range(len(words.words) - SIZES):
                    pointers[at + k] = op.words + 8 * (SIZES + k)
            moved = [_Patch(p.number, self._number(p.slot), p.offset) for p in words.patches]
            op.patches = patches = (_Patch * (len(moved) + 1))(*moved)
            self._kept.append(patches)
            ops[i] = op
            at += len(words.words)
        self._stretch.calls = doors(any(words.kind == PRODUCT for _, words in self._ops))
        self._stretch.ops, self._stretch.count = ops, len(ops)
        self._kept += (ops, pointers)
        self._values = (c_uint64 * len(self._places))()
        return struct.Struct(f"={len(self._places)}Q").pack_into, (self._values, 0), tuple(self._places)

    @property
    def arguments(self) -> tuple[int, int]:
        """Of `player`."""
        return addressof(self._stretch), addressof(self._values)

    def explain(self, error: Exception) -> Exception | None:
        """What is raised for a call that failed: as the step's own in Python."""
        if not isinstance(error, _CallError):
            return None
        if error.status < 0:
            got, do = "a library in C of another version", "build or install it anew"
            return LibraryError("replay", got, "this version's", do)
        step: Any = self.steps[self._stretch.failed]
        if isinstance(step, Multiplied):
            return step.explain(CublasLtError("cublasLtMatmul", error.status))
        return libraries.driver().failed(error.status, f"replay {step!r}")


class Played(Bound):
    """What a replay does, most of it in C."""

    __slots__ = ()

    def enter(self, step: Any, rt: Runtime) -> None:
        """A step joins the stretch that is open, begins one, or is done in Python."""
        words = packed(step)
        if words is None:
            step.bind(self, rt)
            return
        calls: list[Any] = self._group(1).calls
        if not calls or not isinstance(calls[-1], Stretch):
            calls.append(Stretch())
        calls[-1].add(step, words, self._stream(), rt)

    def close(self) -> None:
        """Each stretch becomes two calls: its addresses are put where C reads them, and C is called."""
        play = player()
        for group in self._groups:
            calls: list[Any] = group.calls
            group.calls = []
            for call in calls:
                if not isinstance(call, Stretch):
                    group.calls.append(call)
                    continue
                pack, before, places = call.closed()
                group.calls.append((pack, itemgetter(*map(self._add, before), *places)))
                chosen = itemgetter(*map(self._add, call.arguments))
                self._steps[id(chosen)] = call  # type: ignore[assignment]
                group.calls.append((play, chosen))
