"""What te_core does for a call, recorded for a platform: work on operands and results that XLA brings.

Work is known by its content. It is recorded on the CPU while JAX traces, for the shapes of its results; on the platform
of a program when that program is lowered, or run on another device.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import te_core
from te_core import dtypes
from te_core.dtypes import DType
from te_core.errors import LibraryError, UnsupportedError
from te_core.runtime import Runtime
from te_core.tape.hosted import At, Brought, NoMemory, at_place, brought, place_of
from te_core.tape.walk import NotRecordedError
from te_core.tensor import CPU, Device, Tensor, cuda_device

_ALIGNMENT = 16  # of what enters and leaves an XLA program; inside it is more


class Array(NamedTuple):
    """An operand or a result."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.dtype.nbytes(prod(self.shape))


_NOTHING: Any = NoMemory(_ALIGNMENT)
_runtimes: dict[tuple[Device, int], Runtime] = {}


def runtime(device: Device, stream: int = 0) -> Runtime:
    """Where work on XLA's buffers runs."""
    found = _runtimes.get((device, stream))
    if found is None:
        # (The CPU backend computes with workspaces of its threads, which are no part of a tape.)
        made = Runtime.cpu() if device is CPU else Runtime.cuda(device.index, stream, _NOTHING)
        found = _runtimes.setdefault((device, stream), made.apart())
    return found


class Part(NamedTuple):
    """An array inside of an operand or a result."""

    number: int
    offset: int
    array: Array


class Work:
    """A function of te_core on operands: `build` makes of their tensors its arguments and options.

    `written`: the operands that it writes into, which are results, too.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        operands: Sequence[Array],
        build: Callable[[Runtime, list[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]],
        content: str,
        written: Sequence[int] = (),
    ) -> None:
        self.name, self.function, self.build = name, function, build
        #: The same in JAX's own operations, of the operands that are used: for devices where te_core refuses it.
        self.plain: Callable[..., list[Any]] | None = None
        self.operands, self.written = tuple(operands), tuple(written)
        whole = f"{te_core.__version__} {name} {content} {self.operands} {self.written}"
        self.digest = int.from_bytes(hashlib.sha256(whole.encode()).digest()[:8], "big") >> 1
        self._programs: dict[Device, Brought] = {}
        self._placed: dict[Device, tuple[At, ...]] = {}
        self._lowered: int | None = None  # the fewest bytes of temporaries that a program gives a call on a GPU
        self.calls: Callable[[], int] | None = None  # how often XLA has called it in C, if it does
        self._lock = threading.RLock()  # destructors may run inside of it
        self.used: tuple[int, ...] = tuple(range(len(self.operands)))
        self.results: tuple[Array, ...] = ()
        self.used = tuple(sorted({at.number for at in self.on(CPU).places} | set(self.written)))
        self._order = {number: i for i, number in enumerate(self.used)}

    def on(self, device: Device) -> Brought:
        """Its program on this device."""
        found = self._programs.get(device)
        if found is None:
            with self._lock:
                found = self._programs.get(device) or self._recorded(device)
                self._programs[device] = found
        return found

    def _recorded(self, device: Device) -> Brought:
        rt = runtime(device)
        tensors = [Tensor(place_of(i), *a, device, object()) for i, a in enumerate(self.operands)]
        try:
            call = brought(rt, self.name, self.function, self.build(rt, tensors), len(tensors), _ALIGNMENT)
        except NotRecordedError as error:
            do = "leave this option out, or call te_core.functional outside of jax.jit"
            raise UnsupportedError(self.name, str(error), "calls that te_core can record", do) from error
        results = tuple(_stored(slot.shape, slot.dtype, slot.nbytes) for slot in call.made.results())
        if device is CPU:
            self.results = results
        elif results != self.results:
            got = f"results {results} on {device}, {self.results} on the CPU"
            raise UnsupportedError(self.name, got, "layers whose results have one shape everywhere", "report this")
        if device is not CPU and self._lowered is not None and call.made.block > self._lowered:
            got = f"{call.made.block} bytes of temporaries on {device}, {self._lowered} where it was lowered"
            do = "lower a program for all GPUs on which it runs, as jax.shard_map does"
            raise UnsupportedError(self.name, got, "GPUs of one kind", do)
        return call

    def temporaries(self, devices: Sequence[Device]) -> int:
        """The bytes of temporaries that a program which is lowered now gives a call on any of these devices."""
        found = max(self.on(device).made.block for device in devices)
        if devices[0] is not CPU:  # a program may also run on a GPU for which it was not lowered
            self._lowered = found if self._lowered is None else min(found, self._lowered)
        return found

    def of(self, device: Device) -> str:
        """What it is there, in words."""
        operands = ", ".join(f"{self.operands[i].dtype}{list(self.operands[i].shape)}" for i in self.used)
        return f"{self.name} on {device}: {operands}"

    def standing(self) -> Any:
        """What the function returns, over addresses that stand for operands and results."""
        return self.on(CPU).structure([place_of(i) for i in range(len(self.operands) + len(self.results))])

    def where(self, tensor: Tensor | None) -> Part | None:
        """Which part of an operand or a result a tensor of `standing` is."""
        if tensor is None:
            return None
        at, array = at_place(tensor.ptr), Array(tuple(tensor.shape), tensor.dtype)
        stored = (*self.operands, *self.results)[at.number]
        whole = not at.offset and array.nbytes == stored.nbytes
        if not tensor.is_contiguous or not (whole or stored.dtype is dtypes.uint8):
            raise UnsupportedError(self.name, f"{tensor!r} inside of {stored}", "results of their own", "report this")
        return Part(*at, array)

    def places(self, device: Device) -> tuple[At, ...]:
        """Where the tape's slots lie in a call's buffers: the operands that are used, the written ones again, the
        results, the block."""
        found = self._placed.get(device)
        if found is None:
            given = [At(self._order[number], offset) for number, offset in self.on(device).places]
            first = len(self.used) + len(self.written)
            found = self._placed[device] = (*given, *(At(first + i, 0) for i in range(len(self.results) + 1)))
        return found

    def run(self, device: Device, stream: int, addresses: list[int]) -> None:
        """Carry it out on the addresses of a call's buffers."""
        program = self.on(device)
        at = [addresses[number] + offset for number, offset in self.places(device)]
        if device is not CPU and any(address % _ALIGNMENT for address in at):
            raise LibraryError(self.name, "a buffer that is not aligned", f"{_ALIGNMENT} bytes", "report this")
        program.made.tape.replay(runtime(device, stream), at, [None] * len(at), ())


def _stored(shape: tuple[int, ...], dtype: DType, nbytes: int) -> Array:
    """A result as JAX keeps it: bytes, where JAX has no such type."""
    if dtype in (dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.int32, dtypes.uint8):
        return Array(shape, dtype)
    return Array((nbytes,), dtypes.uint8)


@jax.tree_util.register_static
class _Kept(NamedTuple):
    value: Any


@partial(jax.jit, static_argnums=0)
def _kept(value: Any) -> _Kept:
    value.settle()
    return _Kept(value)


def the_one(value: Any) -> Any:
    """The first of all that are equal to this. JAX keeps it, as it keeps programs: `jax.clear_caches` lets it go."""
    return _kept.eval_shape(value).value


_works: dict[int, Work] = {}  # of all programs that were lowered: one may outlive all that made it


def known(work: Work) -> int:
    """Its digest, by which a program finds it."""
    return _works.setdefault(work.digest, work).digest


def run(on_gpu: bool, device: int, stream: int, digest: int, addresses: list[int]) -> None:
    """What the handler of XLA's calls does."""
    work = _works.get(digest)
    if work is None:
        raise LibraryError(
            "te_jax",
            f"a program with work {digest:#x} that this process does not know",
            "programs that this process has lowered",
            "trace the function again here: jax.jit(f).lower(...) of the same f",
        )
    work.run(cuda_device(device) if on_gpu else CPU, stream, addresses)


@atexit.register
def _let_go() -> None:
    """Free what cuDNN's frontend has made before the interpreter ends: it prints what is left of its objects."""
    works = list(_works.values())
    if all(device is CPU for work in works for device in work._programs):
        return
    # What XLA was asked to run comes first.
    jax.block_until_ready([jnp.ones((), device=device) + 1 for device in jax.local_devices()])
    _works.clear()
    for work in works:
        work._programs.clear()


_notes: dict[str, None] = {}  # in the order in which they came


def note(text: str) -> None:
    """Something that a user may want to know of a call; once."""
    _notes[text] = None


def explain() -> str:
    """What the programs of this process run of te_core: a line for each call of XLA's, and what was decided for it."""
    lines = []
    for work in list(_works.values()):
        for device, program in list(work._programs.items()):
            if device is CPU and len(work._programs) > 1:
                continue  # that one was made for its shapes alone
            steps, block = len(program.made.tape.steps), program.made.block
            way = "" if device is CPU else f", in C ({work.calls()} calls)" if work.calls else ", in Python"
            lines.append(f"{work.of(device)}; {steps} steps, {block} bytes of temporaries{way}")
    return "\n".join([*lines, *_notes]) or "no program with layers of te_core was lowered yet"
