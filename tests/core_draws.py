"""Calls of te_core's operations and layers with one array wrong, drawn from a seed, each array between guard bands.

    python -m tests.core_draws 100000 [SEED]             # on the CPU; --device cuda
    python -m tests.core_draws 1 1234 --verbose          # one draw

An array is an element short or long, of another dtype, read-only, off its alignment, strided, on another device, of
another rank, or missing. A call either gives a result or is refused by an error of ours. All else is a fault: a write
outside of what was handed in (guard bands lie around arguments and around what the allocator gave), a write to
read-only memory, a result that depends on what lies outside, an error from inside NumPy, a crash.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import ArgumentError, LibraryError, UnsupportedError
from te_core.layers.grouped_linear import GroupedSaved, Groups
from te_core.layers.linear import Sink
from te_core.ops.quantize import ScalingState
from te_core.quantize.state import VIEWS, Scales
from te_core.quantized import Cast, Copy, QuantizedTensor
from te_core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_core.runtime import Runtime
from te_core.tape.taped import Taped, set_when
from te_core.tensor import CPU, Device, ReadOnly, Tensor
from tests.core import face
from tests.core_calls import more_layers, more_operations

OURS = (ArgumentError, UnsupportedError, LibraryError)
KINDS = ("short", "long", "dtype", "read-only", "misaligned", "strided", "elsewhere", "rank", "missing", "right")
DTYPES = (
    dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.float64, dtypes.int32, dtypes.int64, dtypes.uint8,
    dtypes.bool_, dtypes.float8_e4m3, dtypes.float8_e5m2,
)  # fmt: skip
RECIPES = (
    None,
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
)
BAND = 4096  # bytes of a guard band, more than any of our arrays has
ELSEWHERE = Device("cuda", 9)
_PIECES = ("rowwise", "rowwise_scale", "rowwise_amax", "columnwise", "columnwise_scale", "columnwise_amax")


class FaultError(Exception):
    """What a call must not come to, in words."""


# ---------------------------------------------------------------------------------------------------- memory


class Block(NamedTuple):
    """Memory between two guard bands; `mask` tells the bytes that nobody may write to."""

    what: str
    base: Tensor  # uint8
    before: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any]


class Guarded:
    """Memory for arguments, and the allocator of the runtime under test: all that a draw has, until `check`."""

    def __init__(self, plain: Runtime) -> None:
        self.plain = plain
        self.alignment = getattr(plain.allocator, "alignment", 16)
        self.fill = 0x5A
        self.blocks: list[Block] = []

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        """What the runtime asks for: bytes that are the same in every call."""
        count = dtype.nbytes(int(np.prod(shape, dtype=np.int64)))
        base, at = self._block("memory of the allocator", np.full(count, 0x11, np.uint8), np.ones(count, bool), 0)
        return Tensor(at, tuple(shape), dtype, base.device, base)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Blocks live until the draw ends."""

    def beside(self, stream: int) -> Guarded:
        """Itself."""
        return self

    def place(
        self, what: str, data: np.ndarray[Any, Any], writable: np.ndarray[Any, Any], shift: int
    ) -> tuple[Tensor, int]:
        """(owner, address) of these bytes, `shift` off the boundary; the others of the block may not be written."""
        return self._block(what, data, writable, shift)

    def _block(
        self, what: str, data: np.ndarray[Any, Any], writable: np.ndarray[Any, Any], shift: int
    ) -> tuple[Tensor, int]:
        whole = np.full(2 * BAND + 256 + shift + data.size, self.fill, np.uint8)
        host = self.plain.device is CPU
        begin = BAND + (-(whole.ctypes.data + BAND) % 256 if host else 0) + shift
        mask = np.ones(whole.size, bool)
        mask[begin : begin + data.size] = ~writable
        whole[begin : begin + data.size] = data
        base = Tensor(whole.ctypes.data, whole.shape, dtypes.uint8, CPU, whole) if host else self.plain.tensor(whole)
        self.blocks.append(Block(what, base, whole.copy(), mask))
        return base, base.ptr + begin

    def check(self) -> None:
        """Raise a `FaultError` if anything was written that may not be; forget all blocks."""
        blocks, self.blocks = self.blocks, []
        for block in blocks:
            now = block.base.owner if self.plain.device is CPU else self.plain.numpy(block.base)
            changed = np.flatnonzero((now != block.before) & block.mask)
            if changed.size:
                first = np.flatnonzero(~block.mask)
                where = f"bytes {changed[0]} to {changed[-1]}, of which {first[:1]} to {first[-1:]} may be written"
                raise FaultError(f"wrote outside of {block.what}: {where}")


# ------------------------------------------------------------------------------------------- arguments as data


class Leaf(NamedTuple):
    """A tensor of a right call: its bytes, and what it is."""

    data: np.ndarray[Any, Any]
    shape: tuple[int, ...]
    dtype: DType


class Quantized(NamedTuple):
    """A quantized tensor of a right call; the pieces by name."""

    form: Any
    shape: tuple[int, int]
    pieces: Mapping[str, Leaf]


class Call(NamedTuple):
    """A right call whose tensors are leaves."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    leaves: tuple[str, ...]  # what they are called


def template(rt: Runtime, value: Any) -> Any:
    """The value with leaves in the place of tensors."""
    if isinstance(value, Tensor):
        return Leaf(np.ascontiguousarray(rt.numpy(value)).reshape(-1).view(np.uint8), value.shape, value.dtype)
    if isinstance(value, QuantizedTensor):
        pieces = {name: getattr(value, name) for name in _PIECES}
        found = {name: template(rt, t) for name, t in pieces.items() if t is not None}
        return Quantized(value.format, value.shape, found)
    if isinstance(value, dict):
        return {name: template(rt, part) for name, part in value.items()}
    if isinstance(value, Made):
        return Made(value.make, tuple(template(rt, part) for part in value.parts), value.options)
    parts = _parts(value)
    if parts is not None:
        return Made(_maker(value), tuple(template(rt, part) for part in parts[0]), parts[1])
    if isinstance(value, (tuple, list)):
        return Made(type(value), tuple(template(rt, part) for part in value), {})
    return value


class Made(NamedTuple):
    """An object that is made of its parts: so a wrong part is met by its constructor, too."""

    make: Any
    parts: tuple[Any, ...]
    options: Mapping[str, Any]

    def of(self, parts: list[Any]) -> Any:
        """It, of other parts."""
        if self.make in (tuple, list):
            return self.make(parts)
        return self.make(*parts, **self.options)


def _maker(value: Any) -> Any:
    return _cast if isinstance(value, Cast) else type(value)


def _cast(form: Any, scale: Any, amax: Any, rng: Any, nonfinite: Any, maxima: Any, **options: Any) -> Cast:
    return Cast(form, scale=scale, amax=amax, rng=rng, nonfinite=nonfinite, maxima=maxima, **options)


def _parts(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if isinstance(value, Cast):
        names = "rowwise", "columnwise", "epsilon", "power_of_two", "transform", "stochastic", "site", "four_over_six"
        tensors = value.scale, value.amax, value.rng, value.nonfinite, value.maxima
        return (value.format, *tensors), {name: getattr(value, name) for name in names}
    if isinstance(value, Scales):
        return tuple(getattr(value, name) for name in VIEWS), {}
    if isinstance(value, ScalingState):
        return (value.scale, value.history, value.used, value.limit), {}
    if isinstance(value, Sink):
        return (value.main, value.accumulate, None), {}
    if isinstance(value, Groups):
        return (list(value.sizes), value.out, value.dx), {}
    if isinstance(value, GroupedSaved) or hasattr(value, "_fields"):
        return tuple(value), {}
    return None


def names_of(value: Any, name: str) -> Iterator[str]:
    """What the leaves of a template are called, in the order of `filled`."""
    if isinstance(value, Leaf):
        yield name
    elif isinstance(value, Quantized):
        yield from (f"{name}.{piece}" for piece in value.pieces)
    elif isinstance(value, Made):
        for i, part in enumerate(value.parts):
            yield from names_of(part, f"{name}[{i}]")


def filled(value: Any, leaf: Callable[[Leaf], Tensor | None]) -> Any:
    """A template with tensors in the place of its leaves."""
    if isinstance(value, Leaf):
        return leaf(value)
    if isinstance(value, Quantized):
        made = {name: leaf(part) for name, part in value.pieces.items()}
        copies = [Copy(*[made.get(name) for name in _PIECES[i : i + 3]]) for i in (0, 3)]  # type: ignore[arg-type]
        row, column = (None if copy.data is None and copy.scale is None else copy for copy in copies)
        return QuantizedTensor(value.form, value.shape, row, column)
    if isinstance(value, Made):
        return value.of([filled(part, leaf) for part in value.parts])
    return value


def calls(rt: Runtime) -> dict[str, Call]:
    """All right calls, by name: those of `face` and those with more of their options."""
    found: dict[str, face.Right] = {**face.operations(rt), **more_operations(rt)}
    for recipe in RECIPES:
        called = "plain" if recipe is None else type(recipe).__name__
        of_recipe = {**face.layers(rt, recipe), **more_layers(rt, recipe)}
        found |= {f"{name} ({called})": right for name, right in of_recipe.items()}
    return {name: _call(rt, name, right) for name, right in found.items()}


def _call(rt: Runtime, name: str, right: face.Right) -> Call:
    args = tuple(template(rt, part) for part in right.args[1:])
    options = {key: template(rt, part) for key, part in right.options.items()}
    named = {**{str(i): part for i, part in enumerate(args)}, **options}
    leaves = tuple(leaf for key, part in named.items() for leaf in names_of(part, key))
    return Call(name, right.function, args, options, leaves)


# ------------------------------------------------------------------------------------------------------- draws


class Draw(NamedTuple):
    """One call, and what is wrong with it."""

    seed: int
    call: str
    kind: str
    leaf: int
    taped: bool
    choice: int  # of a dimension, of a dtype


def draw(seed: int, found: Mapping[str, Call]) -> Draw:
    """The draw of this seed."""
    r = random.Random(seed)
    call = found[r.choice(tuple(found))]
    taped = call.name.endswith(")") and r.random() < 0.5  # a layer
    leaf = r.randrange(len(call.leaves)) if call.leaves else -1
    return Draw(seed, call.name, r.choice(KINDS) if call.leaves else "right", leaf, taped, r.randrange(1 << 16))


class _Lent(ReadOnly):
    """Memory of a GPU that nobody may write to."""

    def __init__(self, base: Any) -> None:
        self.base = base


def _wrong(memory: Guarded, leaf: Leaf, d: Draw, what: str) -> Tensor | None:
    """The tensor that the draw has in the place of this leaf."""
    data, shape, dtype, kind = leaf.data, leaf.shape, leaf.dtype, d.kind
    device = memory.plain.device
    strides, shift, spaces = None, 0, 1
    if kind == "missing":
        return None
    if kind in ("short", "long") and shape:
        at = d.choice % len(shape)
        n = max(0, shape[at] + (1 if kind == "long" else -1))
        shape = (*shape[:at], n, *shape[at + 1 :])
    elif kind == "dtype":
        others = [other for other in DTYPES if other is not dtype]
        dtype = others[d.choice % len(others)]
    elif kind == "misaligned":
        shift = 1 if device is CPU else dtype.itemsize
    elif kind == "strided":
        spaces = 2
        strides = tuple(2 * n for n in Tensor(0, shape, dtype, CPU, None).row_major_strides())
    elif kind == "rank":
        shape = (1, *shape) if d.choice % 2 or len(shape) < 2 else (shape[0] * shape[1], *shape[2:])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    values = np.resize(data, size) if data.size else np.zeros(size, np.uint8)
    writable = np.ones(size * spaces, bool)
    if spaces > 1:
        of_element = np.arange(size * spaces) // dtype.itemsize
        writable = of_element % spaces == 0
        spread = np.full(size * spaces, memory.fill, np.uint8)
        spread[writable] = values
        values = spread
    if kind == "read-only":
        writable[:] = False
    base, at = memory.place(what, values, writable, shift)
    owner: Any = base
    if kind == "read-only":
        owner = base.owner.view() if device is CPU else _Lent(base)
        if device is CPU:
            owner.flags.writeable = False
    if kind == "elsewhere":
        device = ELSEWHERE if device is CPU else CPU
    return Tensor(at, shape, dtype, device, owner, strides)


class Bench:
    """The calls, a runtime whose memory is guarded, and the layers that are recorded."""

    def __init__(self, device: str = "cpu") -> None:
        plain = Runtime.cpu() if device == "cpu" else Runtime.cuda()
        self.calls = calls(Runtime.cpu())
        self.memory = Guarded(plain)
        self.rt = Runtime(plain.device, plain.stream, self.memory, plain.backend)
        self._taped: dict[str, Taped] = {}
        set_when("first")

    def run(self, seed: int) -> tuple[Draw, str]:
        """(a draw, "result" or "refused: why"); raises a `FaultError`."""
        d = draw(seed, self.calls)
        try:
            first = self._once(d, 0x5A)
            if isinstance(first, str):
                return d, first
            second = self._once(d, 0x3B)
            if isinstance(second, str) or (first != second and self._repeats(d, first)):
                raise FaultError("the result depends on memory that was not handed in")
        finally:
            self.memory.blocks.clear()
        return d, "result"

    def _repeats(self, d: Draw, first: Any) -> bool:
        """Whether the same memory gives the same bytes: cuDNN adds gradients of sinks up in any order."""
        return all(first == self._once(d, 0x5A) for _ in range(8))

    def _once(self, d: Draw, fill: int) -> str | list[bytes]:
        """The bytes of the result, or why there is none; the memory around the arguments holds `fill`."""
        call, self.memory.fill, count = self.calls[d.call], fill, iter(range(len(self.calls[d.call].leaves)))

        def leaf(part: Leaf) -> Tensor | None:
            number = next(count)
            what = f"{call.leaves[number]} {part.dtype} {part.shape}"
            kind = d if number == d.leaf else d._replace(kind="right")
            return _wrong(self.memory, part, kind, what)

        refused = result = None
        try:
            args = [filled(part, leaf) for part in call.args]
            options = {name: filled(part, leaf) for name, part in call.options.items()}
            function = call.function
            if d.taped:
                spec = options.pop("spec")
                function = self._taped.setdefault(d.call, Taped(d.call, function, spec))
            result = function(self.rt, *args, **options)
        except OURS as error:
            refused = f"refused: {error}"
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise FaultError(f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})") from error
        found = refused or [*self._bytes(result)]
        self.memory.check()
        return found

    def _bytes(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, Tensor) and value.device is not self.rt.device:
            yield b"handed on"
        elif isinstance(value, Tensor):
            yield np.ascontiguousarray(self.memory.plain.numpy(value)).tobytes()
        elif isinstance(value, QuantizedTensor):
            for name in _PIECES:
                yield from self._bytes(getattr(value, name))
        elif isinstance(value, (tuple, list)):
            for part in value:
                yield from self._bytes(part)


class DeviceLostError(Exception):
    """A kernel read or wrote where it may not: nothing runs on the device any more."""


class Tally:
    """What came of many draws."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.faults: dict[str, str] = {}  # the first of each kind

    def run(self, bench: Bench, seed: int) -> str:
        """Note what came of one."""
        try:
            d, outcome = bench.run(seed)
        except LibraryError as error:  # a kernel's fault: with it the device is lost to this process
            raise DeviceLostError(f"{draw(seed, bench.calls)}\n    {error}") from error
        except FaultError as fault:
            d, outcome = draw(seed, bench.calls), "fault"
            leaf = bench.calls[d.call].leaves[d.leaf] if d.leaf >= 0 else ""
            self.faults.setdefault(f"{d.call} {d.kind} {leaf}", f"{d}\n    {str(fault)[:600]}")
        if outcome == "result" and d.kind != "right":
            self.accepted[f"{d.kind} {d.call} {bench.calls[d.call].leaves[d.leaf]}"] += 1
        self.counts[outcome.partition(":")[0]] += 1
        return f"{d}: {outcome}"


def run(count: int, seed: int = 0, device: str = "cpu", say: Callable[[str], None] = lambda line: None) -> Tally:
    """So many draws, from this seed on."""
    bench, tally, began = Bench(device), Tally(), time.perf_counter()
    try:
        for i in range(count):
            said = tally.run(bench, seed + i)
            if i % 10000 == 9999:
                said = f"{i + 1} in {time.perf_counter() - began:.0f} s: {dict(tally.counts)}"
                say(said)
    finally:
        set_when(None)
    return tally


def main() -> int:
    """Draw, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--verbose", action="store_true", help="also which wrong calls gave a result")
    options = parser.parse_args()
    faulthandler.enable()
    try:
        tally = run(options.count, options.seed, options.device, lambda line: print(line, flush=True))
    except DeviceLostError as lost:
        sys.exit(f"the device is lost: {lost}")
    if options.verbose:
        print(*(f"{n:5} {what}" for what, n in sorted(tally.accepted.items())), sep="\n")
    print(*(f"{name}: {fault}" for name, fault in tally.faults.items()), dict(tally.counts), sep="\n")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
