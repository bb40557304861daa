"""The one way a kernel gets onto a device: `get` compiles, caches and loads it; calling it launches it.

    scale = get(rt, "scale", args="ppfq", TYPE="float")      # te_core/kernels/scale.cu, extern "C" function scale
    scale(rt, blocks, 256, x, out, 0.5, x.size)

CuPy's driver binding launches (a fifth of the cost of ctypes); its arrays, memory pool and compiler are not used.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from threading import RLock
from typing import Any

from te_core import libraries
from te_core.errors import ArgumentError, LibraryError
from te_core.kernels.compiler import Constant, architecture, cached, only_architecture
from te_core.runtime import Runtime
from te_core.symbols import STREAM, Patch, patches
from te_core.tensor import Device, Tensor

#: How each letter of `args` is packed. Every argument has eight bytes, so one array of addresses serves all kernels.
_LETTERS = {"p": "Q", "q": "q", "i": "i4x", "f": "f4x", "b": "Q"}
_ADDRESS = struct.Struct("=Q")
MAX_ARGUMENTS = 64
_SHARED_LIMIT = 48 * 1024  # static and dynamic bytes; above this a kernel must be told first
_STATIC_SHARED, _MAX_DYNAMIC_SHARED = 1, 8  # CUfunction_attribute

_lock = RLock()


class Arguments:
    """One executor's argument block: the values, and the array of their addresses that a launch takes."""

    __slots__ = ("_addresses", "pointers", "values")

    def __init__(self) -> None:
        self.values = (ctypes.c_uint64 * MAX_ARGUMENTS)()
        base = ctypes.addressof(self.values)
        self._addresses = (ctypes.c_void_p * MAX_ARGUMENTS)(*(base + 8 * i for i in range(MAX_ARGUMENTS)))
        self.pointers = ctypes.addressof(self._addresses)


class Kernel:
    """A compiled function on one device."""

    __slots__ = ("_driver", "_function", "_launch", "_pack", "_shared", "letters", "made_of", "name")

    def __init__(self, name: str, function: int, args: str, driver: Any, made_of: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.made_of = made_of  # the file's name, constants and architecture that it was compiled with
        self._function = function
        self.letters = args  # one for each argument: see `get`
        self._driver = driver
        self._launch = driver.launchKernel
        self._pack = struct.Struct("=" + "".join(_LETTERS[letter] for letter in args)).pack_into
        self._shared = _SHARED_LIMIT - int(driver.funcGetAttribute(_STATIC_SHARED, function))

    def __call__(
        self, rt: Runtime, grid: int | tuple[int, ...], block: int | tuple[int, ...], *args: Any, shared: int = 0
    ) -> None:
        """Launch on the runtime's stream. A pointer is a tensor, an address or None; `shared`: dynamic bytes."""
        values = [0 if a is None else a.ptr if isinstance(a, Tensor) else a for a in args]
        if rt.recorder is not None:
            rt.recorder.add(Launch(self, _three(grid) + _three(block) + (shared,), values, rt.recorder.bases))
            return
        executor = rt.executor()
        arguments = executor.arguments
        try:
            self._pack(arguments.values, 0, *values)
        except struct.error as error:
            allowed = f"{len(self.letters)} arguments: {self.letters} (p address or None, q int64, i int32, f float32)"
            do = "match the kernel's signature"
            raise ArgumentError(f"launch {self.name}", f"{args} ({error})", allowed, do) from error
        if shared > self._shared:
            self.allow(shared)
        sizes = _three(grid) + _three(block)
        entered = executor.driver.enter(executor.context) if executor.context else False
        try:
            self._launch(self._function, *sizes, shared, rt.stream, arguments.pointers, 0)
        finally:
            if entered:
                executor.driver.leave()

    def by_value(
        self,
        rt: Runtime,
        grid: int,
        block: int,
        table: ctypes.Array[ctypes.c_char],
        shared: int = 0,
        places: Sequence[int] | None = None,
    ) -> None:
        """Launch a kernel whose one argument (args="b") is a struct passed by value: these bytes.

        `places`: where addresses stand in it, which a recording has to know.
        """
        if rt.recorder is not None:
            if places is None:
                raise rt.recorder.refused(f"{self.name} takes a table of addresses")
            rt.recorder.add(TableLaunch(self, (grid, block, shared), table.raw, places, rt.recorder.bases))
            return
        executor = rt.executor()
        entered = executor.driver.enter(executor.context) if executor.context else False
        try:
            self._launch_with(rt, (grid, block, shared), table)
        finally:
            if entered:
                executor.driver.leave()

    def _launch_with(self, rt: Runtime, sizes: tuple[int, int, int], table: ctypes.Array[ctypes.c_char]) -> None:
        grid, block, shared = sizes
        pointer = ctypes.c_uint64(ctypes.addressof(table))  # the driver copies the struct before the call returns
        if shared > self._shared:
            self.allow(shared)
        self._launch(self._function, grid, 1, 1, block, 1, 1, shared, rt.stream, ctypes.addressof(pointer), 0)

    def packed(self, args: Sequence[Any]) -> bytes:
        """Arguments as a launch takes them, eight bytes each."""
        block = bytearray(8 * len(args))
        self._pack(block, 0, *args)
        return bytes(block)

    def image(self) -> bytes:
        """The module that it is a function of."""
        return cached(*self.made_of)

    def attribute(self, number: int) -> int:
        """A CUfunction_attribute of the kernel: 4 is registers a thread, 3 local bytes (spills), 1 shared bytes."""
        return int(self._driver.funcGetAttribute(number, self._function))

    def allow(self, shared: int) -> None:
        """Launches may ask for so many dynamic bytes."""
        with _lock:  # what the driver was told last is what is remembered
            if shared > self._shared:
                self._driver.funcSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared)
                self._shared = shared

    def __repr__(self) -> str:
        return f"Kernel({self.name}, args {self.letters!r})"


class Launch:
    """A recorded launch: all that it takes, with symbolic addresses in their places."""

    __slots__ = ("args", "kernel", "patches", "sizes")

    def __init__(self, kernel: Kernel, sizes: tuple[int, ...], args: Sequence[Any], bases: Sequence[int]) -> None:
        self.kernel, self.sizes, self.args = kernel, sizes, args  # grid and block, three each, and dynamic bytes
        pointers = [a if letter == "p" else None for a, letter in zip(args, kernel.letters, strict=True)]
        self.patches = patches(pointers, bases)

    def bind(self, bound: Any, rt: Runtime) -> None:
        """The arguments are packed where the executor keeps them, and the driver copies them from there."""
        kernel, sizes, arguments = self.kernel, self.sizes, rt.executor().arguments
        kernel.allow(sizes[6])
        behind = [patch._replace(number=patch.number + 2) for patch in self.patches]
        bound.call(self, kernel._pack, (arguments.values, 0, *self.args), behind)
        bound.call(self, kernel._launch, (kernel._function, *sizes, STREAM, arguments.pointers, 0), ())

    def __repr__(self) -> str:
        return f"{self.kernel.name} {self.sizes[:3]} x {self.sizes[3:6]}"


class TableLaunch:
    """A recorded launch of a kernel that takes a struct by value; `patches` name its bytes."""

    __slots__ = ("kernel", "patches", "places", "sizes", "table")

    def __init__(
        self, kernel: Kernel, sizes: tuple[int, int, int], table: bytes, places: Sequence[int], bases: Sequence[int]
    ) -> None:
        self.kernel, self.sizes, self.table, self.places = kernel, sizes, table, tuple(places)
        found = patches([_ADDRESS.unpack_from(table, place)[0] for place in places], bases)
        self.patches = tuple(patch._replace(number=places[patch.number]) for patch in found)

    def bind(self, bound: Any, rt: Runtime) -> None:
        """Its bytes are changed where they will be read."""
        kernel, (grid, block, shared) = self.kernel, self.sizes
        kernel.allow(shared)
        table = ctypes.create_string_buffer(self.table, len(self.table))
        pointer = ctypes.c_uint64(ctypes.addressof(table))  # the driver copies the struct before the call returns
        bound.keep(pointer)
        # From the first address to the last in one call, with what stands between them.
        first = end = min([patch.number for patch in self.patches], default=0)
        form, values, places = ["="], list[Any](), list[Patch]()
        for number, slot, offset in sorted(self.patches):
            if number > end:
                form.append(f"{number - end}s")
                values.append(self.table[end:number])
            form.append("Q")
            places.append(Patch(2 + len(values), slot, offset))
            values.append(0)
            end = number + 8
        if places:
            bound.call(self, struct.Struct("".join(form)).pack_into, (table, first, *values), places)
        sizes = grid, 1, 1, block, 1, 1, shared
        bound.call(self, kernel._launch, (kernel._function, *sizes, STREAM, ctypes.addressof(pointer), 0), ())

    def __repr__(self) -> str:
        return f"{self.kernel.name} ({self.sizes[0]}, 1, 1) x ({self.sizes[1]}, 1, 1)"


def _three(size: Any) -> tuple[int, int, int]:
    return (size, 1, 1) if size.__class__ is int else (*size, 1, 1)[:3]


def get(rt: Runtime, name: str, *, entry: str | None = None, args: str, **constants: Constant) -> Kernel:
    """The function `entry` (default: `name`) of te_core/kernels/<name>.cu, compiled with these constants.

    `args` has one letter for each argument: p tensor, address or None, q int64, i int32, f float32; or it is "b": the
    one argument is a struct passed by value (`Kernel.by_value`).
    """
    kernels, key = rt.device.of(Loaded).kernels, (name, entry, args, *sorted(constants.items()))
    found = kernels.get(key)
    if found is None:
        with _lock:
            found = kernels.get(key)
            if found is None:
                found = kernels[key] = _load(rt, name, entry or name, args, constants)
    return found


class Loaded:
    """What is on a device; one module serves all the functions of a file."""

    __slots__ = ("kernels", "modules")

    def __init__(self, device: Device) -> None:
        self.kernels: dict[tuple[Any, ...], Kernel] = {}
        self.modules: dict[tuple[Any, ...], int] = {}


def _load(rt: Runtime, name: str, entry: str, args: str, constants: dict[str, Constant]) -> Kernel:
    unknown = set(args) - set(_LETTERS)
    if unknown or len(args) > MAX_ARGUMENTS:
        allowed = f"up to {MAX_ARGUMENTS} letters of {'/'.join(_LETTERS)}"
        raise ArgumentError(f"load {name}", f"args={args!r}", allowed, "correct args")
    backend = _cupy_driver()
    driver = libraries.driver()
    index = rt.device.index
    arch = only_architecture(name) or architecture((driver.attribute(index, "major"), driver.attribute(index, "minor")))
    modules, key = rt.device.of(Loaded).modules, (name, *sorted(constants.items()))
    with driver.at_first_use(index):
        if key not in modules:
            modules[key] = backend.moduleLoadData(cached(name, constants, arch))
        try:
            function = backend.moduleGetFunction(modules[key], entry)
        except Exception as error:
            got, allowed = f"no function {entry!r} ({error})", f'an extern "C" function of {name}.cu'
            raise LibraryError(f"load {name}", got, allowed, "correct the entry's name") from error
    return Kernel(entry, function, args, backend, (name, constants, arch))


def _cupy_driver() -> Any:
    """CuPy's binding of the driver; this module alone loads neither CuPy's arrays nor any CUDA library."""
    try:
        from cupy_backends.cuda.api import driver
    except ImportError as error:
        raise LibraryError("load a kernel", str(error), "CuPy 13 or newer", libraries.pip_install("CuPy")) from error
    return driver
