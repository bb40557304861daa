"""CUDA that is not there, at the lowest level: under the real classes of the backend, what each launch, library call,
fill, allocation and free is given. Nothing is compiled and nothing is computed.

`FakeCuda` is a libcuda made of Python functions. `Machine` puts one under the whole backend, with bindings of kernels,
cuBLASLt and cuDNN (`fake_cudnn.py`) that note `Event`s: what would run, and of each address in which block of memory
it lies, and where. Addresses are never given twice, so one that is out of date, or was let go of, is a `fault`.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import threading
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

from te_core import device, dtypes, libraries
from te_core.backends.cuda import attention, gemm_tune
from te_core.backends.cuda import cublaslt as lt_
from te_core.device import DeviceInfo
from te_core.driver import _SIGNATURES, Driver
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.runtime import Allocator, Runtime
from te_core.tape import native
from te_core.tensor import Device, Tensor, cuda_device
from tests.core import fake_cudnn
from tests.core.fake_cudnn import H200
from tests.core.fake_doors import Doors
from tests.core.fake_tables import table

B200 = DeviceInfo("NVIDIA B200", (10, 0), 148, 126 << 20, 180 << 30, (13, 0))
#: What both have that decisions about kernels ask for.
ATTRIBUTES = {
    "shared_per_block_optin": 232448,
    "shared_per_multiprocessor": 233472,
    "threads_per_multiprocessor": 2048,
    "memory_pools": 1,
}
_NUMBERS = {"multiprocessors": 16, "l2_bytes": 38, "shared_per_block_optin": 97, "shared_per_multiprocessor": 81} | {
    "threads_per_multiprocessor": 39,
    "memory_pools": 115,
    "major": 75,
    "minor": 76,
}
#: Where memory begins: above all that is a size, below all that is a symbol.
BASES = (0x7F10_0000_0000, 0x7E80_0000_0000, 0x7D20_0000_0000)
_NO_SIZE = 1 << 44
#: What torch's allocator rounds up to, and the tape's layout with it.
ROUND = 512


class Call:
    """One function of the library: takes the argument types that ctypes would, and notes its calls."""

    def __init__(self, name, lib):
        self.name, self.lib = name, lib

    def __call__(self, *args):
        self.lib.log.append(self.name)
        return getattr(self.lib, "_" + self.name, lambda *a: 0)(*args)


class FakeCuda:
    """A libcuda of `devices` devices, whose contexts are 1000, 1001, …; each thread has a context of its own."""

    def __init__(self, devices=1):
        self.devices, self.log, self.thread, self.fails = devices, [], threading.local(), {}
        self.order = []  # (what, event, stream)
        self.allocated, self.freed = [], []  # (stream, mode), (address, stream, mode)
        self.captured = set()  # streams
        self.mode, self.copied = 0, []  # of captures; what was copied to the device: (bytes, stream, mode)
        for name in [*_SIGNATURES, "cuGetErrorName", "cuGetErrorString"]:
            setattr(self, name, Call(name, self))

    @property
    def stack(self):
        return self.thread.__dict__.setdefault("stack", [0])

    def _cuDeviceGetCount(self, out):  # noqa: N802  the driver's names
        out._obj.value = self.devices
        return 0

    def _cuDevicePrimaryCtxRetain(self, out, index):  # noqa: N802
        out._obj.value = 1000 + index
        return 0

    def _cuCtxGetCurrent(self, out):  # noqa: N802
        out._obj.value = self.stack[-1] or None
        return 0

    def _cuCtxSetCurrent(self, context):  # noqa: N802
        self.stack[-1] = context
        return 0

    def _cuCtxPushCurrent_v2(self, context):  # noqa: N802
        self.stack.append(context)
        return 0

    def _cuCtxPopCurrent_v2(self, out):  # noqa: N802
        self.stack.pop()
        return 0

    def _cuDeviceGetAttribute(self, out, number, index):  # noqa: N802
        out._obj.value = 1
        return 0

    def _cuMemPoolCreate(self, out, properties):  # noqa: N802
        out._obj.value = 9
        return 0

    def _cuMemAllocFromPoolAsync(self, out, nbytes, pool, stream):  # noqa: N802
        out._obj.value = 4096
        self.allocated.append((stream, self.mode))
        return self.fails.get("alloc", 0)

    def _cuMemFreeAsync(self, address, stream):  # noqa: N802
        if "free" not in self.fails:
            self.freed.append((address, stream, self.mode))
        return self.fails.get("free", 0)

    def _cuStreamIsCapturing(self, stream, out):  # noqa: N802
        out._obj.value = stream in self.captured
        return 0

    def _cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def _cuStreamCreate(self, out, flags):  # noqa: N802
        out._obj.value = 555
        return 0

    def _cuMemcpyHtoDAsync_v2(self, to, host, nbytes, stream):  # noqa: N802
        self.copied.append((ctypes.string_at(host, nbytes), stream, self.mode))
        return 0

    def _cuEventCreate(self, out, flags):  # noqa: N802
        out._obj.value = 77
        return 0

    def _cuTensorMapEncodeTiled(self, room, kind, rank, address, *rest):  # noqa: N802
        ctypes.c_uint64.from_address(room).value = address
        return 0

    def _cuEventRecord(self, event, stream):  # noqa: N802
        self.order.append(("record", event, stream))
        return 0

    def _cuStreamWaitEvent(self, stream, event, flags):  # noqa: N802
        self.order.append(("wait", event, stream))
        return 0


# -------------------------------------------------------------------------------------------------- what is noted


class Block(NamedTuple):
    """Memory that was given out."""

    serial: int
    start: int
    nbytes: int
    stream: int


class Place(NamedTuple):
    """Where an address lies. `scratch`: in the runtime's own memory of this name."""

    serial: int
    offset: int
    scratch: str = ""


class Event(NamedTuple):
    """What would run."""

    kind: str  # "launch", "gemm", "cudnn", "fill", "copy", "synchronize", "record", "wait"
    what: Any  # all that it is given besides addresses
    places: tuple[tuple[str, Place | None], ...]  # of each address; None: it is 0
    stream: int
    thread: int
    context: int


class Arena:
    """Memory: who was given which addresses, and how much is alive."""

    def __init__(self, base: int) -> None:
        self.top, self.grain, self.gap = base, 256, 1024
        self.alive: dict[int, Block] = {}  # by address
        self.blocks: dict[int, Block] = {}  # all there ever were, by address
        self.sizes: dict[int, int] = {}  # and their bytes, by serial
        self.starts: dict[int, int] = {}  # and their addresses
        self._sorted: list[int] = []
        self.bytes = self.peak = 0
        self._serials = itertools.count(1)
        self._lock = threading.Lock()

    def take(self, nbytes: int, stream: int) -> int:
        """An address that is a multiple of `grain` and of nothing larger."""
        with self._lock:
            start = -(-self.top // (2 * self.grain)) * 2 * self.grain + self.grain
            self.top = start + nbytes + self.gap
            block = self.alive[start] = self.blocks[start] = Block(next(self._serials), start, nbytes, stream)
            insort(self._sorted, start)
            self.sizes[block.serial], self.starts[block.serial] = nbytes, start
            self.bytes += counted(nbytes)
            self.peak = max(self.peak, self.bytes)
        return start

    def give(self, address: int) -> Block:
        """Memory comes back."""
        with self._lock:
            block = self.alive.pop(address)
            self.bytes -= counted(block.nbytes)
        return block

    def find(self, address: int) -> tuple[Block, bool] | None:
        """The block that an address lies in, and whether it is alive."""
        i = bisect_right(self._sorted, address)
        if not i:
            return None
        block = self.blocks[self._sorted[i - 1]]
        if address - block.start > block.nbytes:  # an empty tensor may begin right behind
            return None
        return block, block.start in self.alive


def counted(nbytes: int) -> int:
    """The bytes that an allocation counts for."""
    return -(-max(1, nbytes) // ROUND) * ROUND


class Libcuda(FakeCuda):
    """The same with memory, and notes of what would run."""

    def __init__(self, machine: Machine, devices: int) -> None:
        super().__init__(devices)
        self.machine, self._handles = machine, itertools.count(501)

    def _cuDeviceGetAttribute(self, out: Any, number: int, index: int) -> int:  # noqa: N802
        info = self.machine.info
        known = ATTRIBUTES | {"multiprocessors": info.multiprocessors, "l2_bytes": info.l2_bytes}
        known |= dict(zip(("major", "minor"), info.capability, strict=True))
        out._obj.value = next(known[name] for name, n in _NUMBERS.items() if n == number)
        return 0

    def _cuMemAllocFromPoolAsync(self, out: Any, nbytes: int, pool: int, stream: int) -> int:  # noqa: N802
        if self.fails.get("alloc"):
            return int(self.fails["alloc"])
        out._obj.value = self.machine.arena.take(nbytes, stream)
        return 0

    def _cuMemFreeAsync(self, address: int, stream: int) -> int:  # noqa: N802
        block = self.machine.arena.give(address)
        if block.stream != stream:
            self.machine.faults.append(f"block {block.serial} of stream {block.stream} is freed on {stream}")
        return 0

    def _cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> int:  # noqa: N802
        self.machine.note("fill", (value, nbytes), {"out": address, "end": address + nbytes - 1}, stream)
        return 0

    def _cuMemcpyHtoDAsync_v2(self, to: int, host: int, nbytes: int, stream: int) -> int:  # noqa: N802
        self.machine.note("copy", ("to device", nbytes), {"out": to}, stream)
        return 0

    def _cuMemcpyDtoHAsync_v2(self, host: int, address: int, nbytes: int, stream: int) -> int:  # noqa: N802
        self.machine.note("copy", ("to host", nbytes), {"in": address}, stream)
        return 0

    def _cuStreamSynchronize(self, stream: int) -> int:  # noqa: N802
        self.machine.note("synchronize", None, {}, stream)
        return 0

    def _cuStreamCreate(self, out: Any, flags: int) -> int:  # noqa: N802
        out._obj.value = next(self._handles)
        return 0

    def _cuEventRecord(self, event: int, stream: int) -> int:  # noqa: N802
        self.machine.note("record", None, {}, stream)
        return 0

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:  # noqa: N802
        self.machine.note("wait", None, {}, stream)
        return 0


# -------------------------------------------------------------------------------------------------- libraries


class Binding:
    """CuPy's binding of the driver: modules are the text that they would be compiled from."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.numbers = machine, itertools.count(1)
        self.modules: dict[int, str] = {}
        self.functions: dict[int, tuple[str, str]] = {}  # (module's text, entry)
        self.contexts: dict[int, int] = {}  # of modules and functions
        self.letters: dict[int, str] = {}

    def moduleLoadData(self, image: bytes) -> int:  # noqa: N802
        number = next(self.numbers)
        self.modules[number], self.contexts[number] = image.decode(), self.machine.lib.stack[-1]
        return number

    def moduleGetFunction(self, module: int, entry: str) -> int:  # noqa: N802
        number = next(self.numbers)
        self.functions[number], self.contexts[number] = (self.modules[module], entry), self.contexts[module]
        return number

    def funcGetAttribute(self, number: int, function: int) -> int:  # noqa: N802
        return {4: 64}.get(number, 0)  # registers of a thread; no static shared memory, no spills

    def funcSetAttribute(self, function: int, number: int, value: int) -> None:  # noqa: N802
        if self.contexts[function] != self.machine.lib.stack[-1]:
            self.machine.faults.append(f"{self.functions[function][1]} is set up on another device")

    def launchKernel(self, function: int, *rest: int) -> None:  # noqa: N802
        *sizes, shared, stream, pointers, _ = rest
        letters = self.letters.get(function)
        if letters is None:
            (letters,) = {k.letters for k in self.machine.kernels() if k._function == function}
            self.letters[function] = letters
        kinds = {"p": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
        values: list[Any] = []
        addresses = {}
        for i, letter in enumerate(letters):
            at = ctypes.c_uint64.from_address(pointers + 8 * i).value
            if letter == "b":
                addresses, values = table(*self.functions[function], at)
                continue
            value = kinds[letter].from_address(at).value
            if letter == "p":
                addresses[f"{i}"] = value
            else:
                values.append(value)
        if any(type(v) is int and abs(v) >= _NO_SIZE for v in values):
            self.machine.faults.append(f"{self.functions[function]}: an address that is no pointer, in {values}")
        text, entry = self.functions[function]
        self.machine.note("launch", (entry, text, tuple(sizes), shared, *values), addresses, stream)


class Lt:
    """cuBLASLt: descriptors are dictionaries, and an algorithm is a digest of what it was asked for."""

    _POINTERS = {
        lt_.BIAS_POINTER: "bias",
        lt_.AUX_POINTER: "aux",
        lt_.A_SCALE_POINTER: "a_scale",
        lt_.B_SCALE_POINTER: "b_scale",
    }

    def __init__(self, machine: Machine) -> None:
        self.machine, self._numbers = machine, itertools.count(1)
        self.handles: dict[int, int] = {}  # by number: the context it was made in
        self.users: dict[int, set[int]] = {}  # the threads that used a handle, or a descriptor
        self.made: dict[int, Any] = {}  # descriptors: {attribute: value}; layouts: (dtype, rows, columns, ld)
        self.counts: Counter[str] = Counter()

    def get_version(self) -> int:
        return 130100

    def create(self) -> int:
        self.handles[number := next(self._numbers)] = self.machine.lib.stack[-1]
        return number

    def _make(self, what: str, content: Any) -> int:
        self.counts[what] += 1
        self.made[number := next(self._numbers)] = content
        return number

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        return self._make("descriptor", {"compute": compute, "scale": scale})

    def matrix_layout_create(self, dtype: int, rows: int, columns: int, ld: int) -> int:
        return self._make("layout", (dtype, rows, columns, ld))

    def matmul_preference_create(self) -> int:
        return self._make("preference", {})

    def matmul_desc_destroy(self, number: int) -> None:
        del self.made[number]

    matrix_layout_destroy = matmul_preference_destroy = matmul_desc_destroy

    def matmul_desc_set_attribute(self, desc: int, attribute: int, value: int, nbytes: int) -> None:
        self.made[desc][attribute] = int.from_bytes(ctypes.string_at(value, nbytes), "little")

    matmul_preference_set_attribute = matmul_desc_set_attribute

    def _facts(self, desc: int, *layouts: int) -> tuple[Any, ...]:
        """All but where pointers lead: that, the heuristic may only know by whether they are set and aligned."""
        known = self.made[desc]
        options = tuple(sorted((str(k), v) for k, v in known.items() if k not in self._POINTERS))
        return options, tuple(sorted(k for k in self._POINTERS if known.get(k))), *(self.made[n] for n in layouts)

    def matmul_algo_get_heuristic(self, handle: int, desc: int, *rest: int) -> None:
        *layouts, preference, wanted, results, count = rest
        self.counts["heuristic"] += 1
        for i in range(wanted):
            content = repr((self._facts(desc, *layouts), sorted(self.made[preference].items()), i)).encode()
            algorithm = hashlib.sha512(content).digest()
            needs = self._needs(algorithm)
            result = algorithm + needs.to_bytes(8, "little") + bytes(lt_.RESULT_BYTES - lt_.ALGO_BYTES - 8)
            ctypes.memmove(results + i * lt_.RESULT_BYTES, result, lt_.RESULT_BYTES)
        ctypes.c_int.from_address(count).value = wanted

    @staticmethod
    def _needs(algorithm: bytes) -> int:
        return algorithm[0] % 3 * (1 << 20)

    def matmul_algo_check(self, handle: int, desc: int, *rest: int) -> None:
        *_, algo, result = rest
        needs = self._needs(ctypes.string_at(algo, lt_.ALGO_BYTES))
        ctypes.c_uint64.from_address(result + lt_.ALGO_BYTES).value = needs

    def matmul_algo_config_get_attribute(self, *arguments: int) -> None:
        raise lt_.CublasLtError("cublasLtMatmulAlgoConfigGetAttribute", 7)  # no property of any kernel

    def matmul(self, handle: int, desc: int, alpha: int, a: int, a_layout: int, *rest: int) -> None:
        b, b_layout, beta, c, c_layout, d, d_layout, algo, workspace, nbytes, stream = rest
        known, machine = self.made[desc], self.machine
        for number in (handle, desc):
            self.users.setdefault(number, set()).add(threading.get_ident())
        if self.handles[handle] not in (machine.lib.stack[-1], 0):
            machine.faults.append(f"a handle of context {self.handles[handle]} in {machine.lib.stack[-1]}")
        addresses = {"a": a, "b": b, "c": c, "d": d, "workspace": workspace}
        addresses |= {name: known[k] for k, name in self._POINTERS.items() if k in known}
        factors: Any = "on the device"
        if known.get(lt_.POINTER_MODE) == lt_.POINTERS_ON_DEVICE:
            addresses |= {"alpha": alpha, "beta": beta}
        else:
            factors = tuple(ctypes.c_float.from_address(at).value for at in (alpha, beta))
        facts = self._facts(desc, a_layout, b_layout, c_layout, d_layout)
        machine.note("gemm", (facts, factors, ctypes.string_at(algo, lt_.ALGO_BYTES), nbytes), addresses, stream)


class Graphs(fake_cudnn.Calls):
    """What cuDNN is asked for: its runs are noted beside all else."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def ran(self, run: fake_cudnn.Run) -> None:
        """Note a run."""
        super().ran(run)
        addresses = {**run.at, "workspace": run.workspace}
        self.machine.note("cudnn", (self.graphs.index(run.graph), run.graph.needs), addresses, run.stream)


# -------------------------------------------------------------------------------------------------- the machine


class Machine:
    """GPUs that are not there, under the real backend, as long as `patch` holds."""

    def __init__(self, patch: Any, folder: Any, info: DeviceInfo = H200, devices: int = 1) -> None:
        self.info, self.arena = info, Arena(BASES[0])
        self._base, self._tops = 0, list(BASES)
        self.allocator: Callable[[Device], Allocator] | None = None
        self.log: list[Event] = []
        self.faults: list[str] = []
        self.asked: dict[tuple[int, str], int] = {}  # of scratch memory: the most bytes, by thread and name
        self._scratch: dict[int, str] = {}  # the name of a block's, by address
        self._zeroed: set[str] = set()  # names of such as begins as zeros
        self._filled: set[int] = set()  # blocks that were filled
        self.lib, self.binding, self.lt, self.graphs = Libcuda(self, devices), Binding(self), Lt(self), Graphs(self)
        self.driver = Driver(self.lib)
        fake_cudnn.install(patch, folder, self.graphs)
        patch.setattr(libraries, "driver", lambda: self.driver)
        patch.setattr(libraries, "driver_version", lambda: (13, 0))
        patch.setattr(device, "info", lambda index=0: info)
        patch.setattr(lt_, "_bindings", self.lt)
        patch.setattr(loader, "_cupy_driver", lambda: self.binding)
        patch.setattr(loader, "cached", lambda name, constants, arch: repr((name, sorted(constants.items()))).encode())
        self.devices = [cuda_device(index) for index in range(devices)]
        for known in self.devices:
            patch.setattr(known, "_kept", {})
        patch.setattr(gemm_tune, "_store", None)
        patch.setattr(Runtime, "workspace", self._noting(Runtime.workspace))
        self.doors = Doors(self)
        patch.setattr(native, "doors", self.doors)

    def kernels(self) -> list[loader.Kernel]:
        """What was loaded, on all devices."""
        return [kernel for known in self.devices for kernel in list(known.of(loader.Loaded).kernels.values())]

    def _noting(self, workspace: Any) -> Any:
        """Runtime.workspace, and a note of what was asked for."""

        def asked(rt: Runtime, name: str, nbytes: int, zeroed: bool = False) -> int:
            begin = len(self.log)
            if zeroed:
                self._zeroed.add(name)
            address = workspace(rt, name, nbytes, zeroed)
            key = threading.get_ident(), name
            self.asked[key] = max(self.asked.get(key, 0), nbytes)
            self._scratch[address] = name
            for i, event in enumerate(self.log[begin:], begin):  # new memory was filled before it had a name
                if event.thread != key[0]:
                    continue  # another thread names its own; what was read of it here may be out of date
                places = tuple((n, p and p._replace(scratch=self._name_of(p))) for n, p in event.places)
                self.log[i] = event._replace(places=places)
            return address  # type: ignore[no-any-return]

        return asked

    def _name_of(self, place: Place) -> str:
        return self._scratch.get(self.arena.starts[place.serial], "")

    def place(self, address: int) -> Place | None:
        """Where an address lies; a fault if it is nobody's, or was let go of."""
        if not address:
            return None
        found = self.arena.find(address)
        if found is None:
            self.faults.append(f"{address:#x} lies in no block")
            return Place(-1, address)
        block, alive = found
        if not alive:
            self.faults.append(f"{address:#x} lies in block {block.serial}, which is free")
        scratch = self._scratch.get(block.start, "")
        offset = address - block.start
        if scratch and offset > self.asked.get((threading.get_ident(), scratch), -1):
            self.faults.append(f"{offset} bytes into {scratch!r}, of which fewer were asked for")
        return Place(block.serial, offset, scratch)

    def note(self, kind: str, what: Any, addresses: dict[str, int], stream: int) -> None:
        """Add an event."""
        places = tuple((name, self.place(address)) for name, address in addresses.items())
        blocks = {place.serial for _, place in places if place is not None and place.scratch in self._zeroed}
        if kind == "fill":
            self._filled |= {place.serial for _, place in places if place is not None}
        elif blocks - self._filled:
            self.faults.append(f"{kind} {what}: scratch memory that should have begun as zeros")
        event = Event(kind, what, places, stream, threading.get_ident(), self.lib.stack[-1])
        self.log.append(event)

    @contextmanager
    def noting(self) -> Iterator[list[Event]]:
        """The events of what this thread does inside."""
        begin, found, thread = len(self.log), [], threading.get_ident()  # type: ignore[var-annotated]
        for key in [key for key in list(self.asked) if key[0] == thread]:
            del self.asked[key]
        yield found
        found += [event for event in self.log[begin:] if event.thread == thread]

    def kept(self) -> set[int]:
        """The blocks that are held: without scratch memory, and numbers that plans keep on the device."""
        constants = {at for known in self.devices for at in known.of(attention._constants_held).values()}
        alive = self.arena.alive.values()
        return {block.serial for block in alive if block.start not in self._scratch and block.start not in constants}

    def runtime(self, stream: int = 5, index: int = 0) -> Runtime:
        """A runtime of its own, with the driver's pool or another allocator."""
        return Runtime.cuda(index, stream, self.allocator and self.allocator(cuda_device(index)))

    def elsewhere(self) -> None:
        """Give out quite other addresses from now on."""
        self._tops[self._base] = self.arena.top
        self._base = (self._base + 1) % len(BASES)
        self.arena.top = self._tops[self._base]


Make = Callable[..., Machine]


def tensor(
    rt: Runtime, shape: tuple[int, ...], dtype: DType, *, shift: int = 0, strides: tuple[int, ...] | None = None
) -> Tensor:
    """A tensor in memory of its own, `shift` bytes behind its beginning."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides or (), strict=False))
    nbytes = dtype.nbytes(extent if strides else prod(shape))
    block = rt.empty((nbytes + shift,), dtypes.uint8)
    return Tensor(block.ptr + shift, shape, dtype, rt.device, block.owner, strides)
