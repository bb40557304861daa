"""cuDNN through its frontend: the library, a handle for each executor, and graphs that are built once and kept on disk.

The frontend looks for libcudnn by itself, in LD_LIBRARY_PATH first: the copy that `te_core.libraries` chose is mapped
before, and its folder is shown to the frontend while it is imported, so that no second one gets in.

A graph is made with the frontend's C++ class. The Python class around it may choose among engines of the frontend's
own, which want CUTLASS and do not read the offsets of packed sequences. A finished graph is run with one array of
addresses, in the order of its tensors' numbers; a frontend without that entry gets a dictionary (10 us more).

Graphs are immutable and shared by threads; a handle, its stream and the array belong to an executor.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import struct
import sys
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from te_core import cache as disk
from te_core import device, dtypes, libraries
from te_core.errors import LibraryError, UnsupportedError
from te_core.kernels.compiler import read_cache, write_cache
from te_core.runtime import Runtime
from te_core.symbols import STREAM, patches
from te_core.tensor import Device

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_OPERANDS = 64
#: Scratch memory up to this size is kept by the runtime; more goes back to the allocator after each call.
KEPT_WORKSPACE = 8 << 20

#: Puts the operations into an empty graph, and returns what to call when it is built.
Describe = Callable[[Any], Callable[[], None]]

_lock = RLock()


@dataclass(frozen=True, slots=True)
class Frontend:
    """The frontend's modules, and the versions that decide what a stored plan is worth."""

    module: Any  # cudnn
    native: Any  # its extension: the C++ graph class, handles
    version: tuple[int, ...]  # of cuDNN
    frontend: str

    @property
    def types(self) -> Any:
        """The names of data types."""
        return self.module.data_type


_frontend: Frontend | None = None


def frontend() -> Frontend:
    """The frontend over this process's cuDNN; `LibraryError` where either is missing."""
    global _frontend
    if _frontend is None:
        with _lock:
            if _frontend is None:
                _frontend = _import()
    return _frontend


def _import() -> Frontend:
    version = libraries.version("cudnn")
    # The frontend opens a CUDA runtime of its own choice otherwise, of CUDA 12 where there are two.
    os.environ.setdefault("CUDNN_FRONTEND_CUDART_LIB_NAME", libraries.file("cudart"))
    try:
        with _shown_folder(Path(libraries.file("cudnn")).parent):
            module = sys.modules.get("cudnn") or import_module("cudnn")
        native = module._pybind_module
        native.backend_graph, native.create_handle, native._raw_set_stream  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise LibraryError(
            "load the cuDNN frontend",
            str(error),
            "nvidia-cudnn-frontend 1.28 or newer",
            libraries.pip_install("cuDNN's frontend"),
        ) from error
    number = int(module.backend_version())
    found = number // 10000, number // 100 % 100, number % 100
    if found != version:
        raise LibraryError(
            "load the cuDNN frontend",
            f"a frontend over cuDNN {found}, while the process uses {version}",
            "one cuDNN",
            "import te_core (or torch) before cudnn, or set LD_LIBRARY_PATH to the folder of the cuDNN to use",
        )
    return Frontend(module, native, version, str(getattr(module, "__version__", "?")))


@contextmanager
def _shown_folder(folder: Path) -> Iterator[None]:
    """LD_LIBRARY_PATH as the frontend reads it. (The system's loader read its own at the start of the process.)"""
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LD_LIBRARY_PATH"]
        else:
            os.environ["LD_LIBRARY_PATH"] = before


# ---------------------------------------------------------------------------------------------- what executes


class Handle:
    """What an executor keeps for cuDNN: a handle, the stream that it is set to, and the addresses of a run."""

    __slots__ = ("_address", "_native", "_values", "raw", "stream")

    def __init__(self, rt: Runtime) -> None:
        self._native = frontend().native
        self.raw = int(self._native.create_handle())  # for the current device
        self.stream = 0
        self._values = (ctypes.c_uint64 * MAX_OPERANDS)()
        self._address = ctypes.addressof(self._values)

    def execute(self, graph: Graph, pointers: Sequence[int], workspace: int, stream: int) -> None:
        """Launch on a stream; the addresses in the order of `graph.operands`."""
        self.follow(stream)
        if graph.run is None:
            self.execute_by_name(graph, workspace, *pointers)
            return
        graph.pack(self._values, 0, *pointers)
        graph.run(self._address, graph.count, workspace, self.raw, -1)

    def execute_by_name(self, graph: Graph, workspace: int, *pointers: int) -> None:
        """The same where the frontend takes no list."""
        graph.built._execute(dict(zip(graph.uids, pointers, strict=True)), workspace, self.raw)

    def follow(self, stream: int) -> None:
        """Later runs are on this stream."""
        if stream != self.stream:
            self._native._raw_set_stream(self.raw, stream)
            self.stream = stream

    def bind(self, step: Attended, bound: Any) -> None:
        """What a replay calls for it."""
        graph, (*pointers, scratch) = step.graph, step.addresses
        bound.call(step, Handle.follow, (self, STREAM), ())
        operands = [p._replace(number=p.number + 2) for p in step.patches if p.number < graph.count]
        behind = [p for p in step.patches if p.number == graph.count]  # the scratch memory's, if it has any
        if graph.run is None:
            operands += [p._replace(number=1) for p in behind]
            bound.call(step, self.execute_by_name, (graph, scratch, *pointers), operands)
            return
        bound.call(step, graph.pack, (self._values, 0, *pointers), operands)
        arguments = self._address, graph.count, scratch, self.raw, -1
        bound.call(step, graph.run, arguments, [p._replace(number=2) for p in behind])


def handle(rt: Runtime) -> Handle:
    """The executor's handle, made at its first use."""
    executor = rt.executor()
    if executor.attention is None:
        with executor.driver.at_first_use(rt.device.index):
            executor.attention = Handle(rt)
    found: Handle = executor.attention
    return found


def execute(rt: Runtime, graph: Graph, pointers: tuple[int, ...]) -> None:
    """Run a graph on the runtime's stream."""
    executor = rt.executor()
    needs = graph.workspace
    if needs <= KEPT_WORKSPACE:
        block, scratch = None, rt.workspace("cudnn", needs) if needs else 0
    else:
        block = rt.empty((needs,), dtypes.uint8)
        scratch = block.ptr
    if rt.recorder is not None:
        rt.recorder.add(Attended(graph, (*pointers, scratch), rt.recorder.bases))
        return
    entered = executor.driver.enter(executor.context) if executor.context else False
    try:
        _run(rt, executor, graph, pointers, scratch)
    finally:
        if entered:
            executor.driver.leave()
        del block  # back to the allocator, which hands it out again in stream order


def _run(rt: Runtime, executor: Any, graph: Graph, pointers: Sequence[int], scratch: int) -> None:
    try:
        (executor.attention or handle(rt)).execute(graph, pointers, scratch, rt.stream)
    except RuntimeError as error:
        raise _refused(error) from error


def _refused(error: RuntimeError) -> LibraryError:
    return LibraryError(
        "attention",
        f"cuDNN: {error}",
        "success",
        "check that every tensor is alive, starts at 16 bytes and is on the runtime's device",
    )


class Attended:
    """A recorded run of a graph; the last address is its scratch memory's."""

    __slots__ = ("addresses", "graph", "patches")

    def __init__(self, graph: Graph, addresses: Sequence[int], bases: Sequence[int]) -> None:
        self.graph, self.addresses, self.patches = graph, addresses, patches(addresses, bases)

    def bind(self, bound: Any, rt: Runtime) -> None:
        """With the handle of the thread that replays."""
        handle(rt).bind(self, bound)

    def explain(self, error: Exception) -> Exception | None:
        """An error of its calls in words."""
        return _refused(error) if isinstance(error, RuntimeError) else None

    def __repr__(self) -> str:
        return f"cuDNN graph of {self.graph.count} tensors"


class Graph:
    """A finished graph: what it needs, and how to run it."""

    __slots__ = ("built", "count", "operands", "pack", "run", "source", "uids", "workspace")

    def __init__(self, built: Any, names: tuple[str, ...], source: str) -> None:
        self.built = built
        built._prepare_variant_pack_template()
        self.uids = tuple(built._get_variant_pack_uids_sorted())
        self.operands = tuple(names[uid - 1] for uid in self.uids)  # tensor i of `names` has the number i + 1
        self.count = len(self.uids)
        self.pack = struct.Struct(f"={self.count}Q").pack_into
        self.run: Callable[..., None] | None = getattr(built, "_execute_with_raw_ptrs", None)
        self.workspace = int(built.get_workspace_size())
        self.source = source  # "built" or "read from disk"


# ---------------------------------------------------------------------------------------------- building


@dataclass(frozen=True, slots=True)
class Target:
    """What a graph is built for: a handle on a device, or (to check graphs without one) a description of it."""

    name: str
    multiprocessors: int
    handle: int | None = None
    properties: Any = None
    capability: tuple[int, int] = (9, 0)

    def arguments(self) -> dict[str, Any]:
        """Of the graph's constructor."""
        if self.properties is None:
            return {"handle": self.handle}
        major, minor = self.capability
        return {"device_property": self.properties, "sm_version": major * 10 + minor, "sm_count": self.multiprocessors}


@dataclass
class Counts:
    """How many graphs this process built, and how many it read from disk."""

    built: int = 0
    loaded: int = 0


COUNTS = Counts()


class Graphs:
    """Those of a device."""

    __slots__ = ("known", "passing")

    def __init__(self, device: Device) -> None:
        #: By spec, for good: a captured CUDA graph may hold a graph's kernels.
        self.known: dict[Hashable, Graph] = {}
        #: The last that only their callers keep: the GPU may still run one that its caller has dropped.
        self.passing: deque[Graph] = deque(maxlen=64)
        atexit.register(self._let_go)

    def _let_go(self) -> None:
        """Free them before the interpreter ends: the frontend's extension prints what is left of its objects."""
        for known in (*self.known.values(), *self.passing):
            known.built = known.run = None
        self.known.clear()
        self.passing.clear()


def graph(rt: Runtime, spec: Hashable, names: tuple[str, ...], describe: Describe, *, keep: str = "disk") -> Graph:
    """The graph of a spec: from memory, from disk, or built.

    Building takes a second, reading from disk 2 ms. `keep` says for how long: on "disk", in this "process", or for the
    "caller" alone, where nothing tells two specs apart.
    """
    graphs = rt.device.of(Graphs)
    if keep == "caller":
        graphs.passing.append(made := _new_graph(rt, spec, names, describe, keep))
        return made
    found = graphs.known.get(spec)
    if found is None:
        with _lock:  # threads that want the same graph shall not build it twice
            found = graphs.known.get(spec)
            if found is None:
                found = graphs.known[spec] = _new_graph(rt, spec, names, describe, keep)
    return found


def _new_graph(rt: Runtime, spec: Hashable, names: tuple[str, ...], describe: Describe, keep: str) -> Graph:
    known = device.info(rt.device.index)
    with rt.executor().driver.at_first_use(rt.device.index):
        target = Target(known.name, known.multiprocessors, handle(rt).raw, capability=known.capability)
        if keep == "disk":
            return load_or_build(target, spec, names, describe)
        COUNTS.built += 1
        return Graph(build(target, describe), names, "built")


def load_or_build(target: Target, spec: Hashable, names: tuple[str, ...], describe: Describe) -> Graph:
    """The graph from disk, or built and written there."""
    place = disk.place("attention", f"{disk_key(target, spec)}.plan")
    stored = read_cache(place)
    if stored is not None:
        found = _deserialized(target, names, stored)
        if found is not None:
            COUNTS.loaded += 1
            return found
    built = build(target, describe)
    COUNTS.built += 1
    try:
        image = serialized(built)
    except (RuntimeError, frontend().module.cudnnGraphNotSupportedError):  # an engine whose plans are not for keeping
        return Graph(built, names, "built")
    write_cache(place, image)
    return Graph(built, names, "built")


def serialized(built: Any) -> bytes:
    """What the frontend stores of a finished graph."""
    return bytes(built.serialize(as_bytes=True) if _knows_bytes(built) else built.serialize())


def _knows_bytes(built: Any) -> bool:
    """Whether a graph is stored as bytes: frontend 1.28, which CUDA 12 has, gives and takes lists of numbers only."""
    return "as_bytes" in (built.serialize.__doc__ or "as_bytes")


def disk_key(target: Target, spec: Hashable) -> str:
    """A digest of all that decides a plan: the file that makes the graph of a spec and this one, too."""
    fe = frontend()
    text = repr((fe.version, fe.frontend, target.name, target.multiprocessors, spec))
    return hashlib.sha256(text.encode() + _source(type(spec).__module__) + _source(__name__)).hexdigest()[:32]


def _source(module: str) -> bytes:
    path = getattr(sys.modules[module], "__file__", None)
    return Path(path).read_bytes() if path and Path(path).exists() else b""


def _deserialized(target: Target, names: tuple[str, ...], stored: bytes) -> Graph | None:
    """The graph of a stored plan; None where this cuDNN does not take it."""
    made = frontend().native.backend_graph(**target.arguments())
    image = stored if _knows_bytes(made) else list(stored)
    try:
        if target.properties is None:
            made.deserialize(target.handle, image)
        else:
            made.deserialize(image)
        return Graph(made, names, "read from disk")
    except (RuntimeError, ValueError, IndexError, frontend().module.cudnnGraphNotSupportedError):
        return None  # another version's, cut short, or not for this driver


def build(target: Target, describe: Describe) -> Any:
    """A graph with a plan; `UnsupportedError` with cuDNN's reason where there is none."""
    fe = frontend()
    types, modes = fe.types, fe.module.heur_mode
    made = fe.native.backend_graph(
        intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, **target.arguments()
    )
    release = None
    try:
        release = describe(made)
        made.validate()
        made.build_operation_graph()
        made.create_execution_plans([modes.A, modes.FALLBACK])
        made.check_support()
        made.build_plans()
    except (RuntimeError, fe.module.cudnnGraphNotSupportedError) as error:
        raise UnsupportedError(
            "attention",
            "a graph that cuDNN " + ".".join(map(str, fe.version)) + f" refuses: {_short(error)}",
            "what te_core.attention_rules lists",
            "change the options named, or use the unfused attention",
        ) from error
    finally:
        if release is not None:
            release()
    return made


def _short(error: Exception) -> str:
    """The first line that says something, without the frontend's prefix."""
    text = str(error).replace("[cudnn_frontend] Error: ", "").strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
