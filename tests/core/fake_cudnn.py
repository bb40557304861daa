"""A cuDNN that plans everything and computes nothing: what graphs are asked of it, and which address goes where.

`runtime(monkeypatch, folder)` gives a runtime of a device that is not there, whose launches and graph runs are noted
in `Calls`; graphs, plans, the disk cache and the order of operands are the real ones.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

from te_core import device, libraries
from te_core.backends.cuda import attention_graph, backend, cudnn, cudnn_stored
from te_core.device import DeviceInfo
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.plan_cache import PlanCache
from te_core.runtime import Runtime
from te_core.tensor import Tensor, cuda_device

VERSION = (9, 19, 0)
INDEX = 7  # of a device whose plans no other test makes
H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 50 << 20, 141 << 30, (13, 0))


#: Bytes of the workspace that are the frontend's.
IN_FRONT = 128
SLOPES = ["3F000000", "3E800000", "3E000000"]


def ubjson(value: Any) -> bytes:
    """A value as the frontend writes it."""
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        for mark, form in ((b"i", ">b"), (b"U", ">B"), (b"I", ">h"), (b"l", ">i"), (b"L", ">q")):
            with suppress(struct.error):
                return mark + struct.pack(form, value)
    if isinstance(value, float):
        return b"D" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"S" + ubjson(len(value)) + value.encode()
    if isinstance(value, list):
        return b"[" + b"".join(map(ubjson, value)) + b"]"
    return b"{" + b"".join(ubjson(key)[1:] + ubjson(part) for key, part in value.items()) + b"}"


class Calls:
    """What was launched, in order."""

    def __init__(self) -> None:
        self.graphs: list[Built] = []  # made, whether built or read
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        self.runs: list[Run] = []
        self.streams: list[int] = []  # that handles were set to, in order
        self.stream_of: dict[int, int] = {}  # a handle's
        self.handles = itertools.count(77)
        self.zeroed: list[Tensor] = []
        self.constants: list[bytes] = []
        self.relaxed = False  # inside of what is done at a first use
        self.made_in_relaxed: list[tuple[str, bool]] = []  # handles and graphs, and whether they were
        self.refuse_stored: Exception | None = None

    def new_handle(self) -> int:
        """A library's handle."""
        self.made_in_relaxed.append(("handle", self.relaxed))
        return next(self.handles)

    def set_stream(self, handle: int, stream: int) -> None:
        """Of later runs of a handle."""
        self.streams.append(stream)
        self.stream_of[handle] = stream

    def ran(self, run: Run) -> None:
        """A graph was run."""
        self.runs.append(run)

    def args(self, kernel: str) -> list[tuple[Any, ...]]:
        """The arguments of each launch of this kernel."""
        return [args for name, args in self.launches if name == kernel]


class Run:
    """One run of a graph: the address of each of its tensors by name."""

    def __init__(self, graph: Built, pointers: dict[int, int], workspace: int, handle: int) -> None:
        self.graph, self.workspace, self.handle = graph, workspace, handle
        self.stream = graph.calls.stream_of.get(handle, 0)
        ours = attention_graph.OPERANDS
        self.at = {
            ours[uid - 1] if uid <= len(ours) else graph.parts[uid].known["name"]: p for uid, p in pointers.items()
        }


class Part:
    """A tensor of a graph."""

    def __init__(self, graph: Built, **known: Any) -> None:
        self.graph, self.known = graph, known

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def remember(value: Any) -> Part:
            self.known[name[4:]] = value
            if name == "set_uid":
                self.graph.parts[value] = self
            return self

        return remember


class Built:
    """A graph: its tensors by number, and the operation it was given."""

    needs = 256

    def __init__(self, calls: Calls, **arguments: Any) -> None:
        self.calls, self.parts, self.operation, self.options = calls, {}, "", {}
        calls.graphs.append(self)
        calls.made_in_relaxed.append(("graph", calls.relaxed))

    def _make_tensor(self, **known: Any) -> Part:
        made = self.parts[known["uid"]] = Part(self, **known)
        return made

    def _operation(self, name: str, results: int, options: dict[str, Any]) -> list[Part]:
        self.operation, self.options = name, options
        for mod in ("score_mod", "score_mod_bprop"):
            if mod in options:
                options[mod](self, Part(self))
        return [Part(self) for _ in range(results)]

    def sdpa(self, **options: Any) -> list[Part]:
        return self._operation("sdpa", 2, options)

    def sdpa_backward(self, **options: Any) -> list[Part]:
        return self._operation("sdpa_backward", 3, options)

    def sdpa_fp8(self, **options: Any) -> list[Part]:
        return self._operation("sdpa_fp8", 4, options)

    def sdpa_fp8_backward(self, **options: Any) -> list[Part]:
        return self._operation("sdpa_fp8_backward", 7, options)

    def __getattr__(self, name: str) -> Any:  # pointwise operations, and the steps of building
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: Part(self)

    def get_workspace_size(self) -> int:
        return self.needs

    @property
    def zeroed(self) -> bool:
        """Whether the frontend zeroes a part of the workspace before a run."""
        return bool(self.needs) and self.operation.endswith("backward")

    @property
    def slopes(self) -> bool:
        """Whether it copies numbers there."""
        return bool(self.needs) and "use_alibi_mask" in self.options

    @property
    def plan(self) -> str:
        """cuDNN's own."""
        known = {"operation": self.operation, "parts": sorted(self.parts), "slopes": self.slopes}
        return json.dumps({**known, "workspace": max(0, self.needs - IN_FRONT)})

    def stored(self) -> dict[str, Any]:
        """What the frontend stores, as far as it matters."""
        changes: dict[str, Any] = {"9100": [2, 0, []]} if self.needs else {}
        changes |= {"9101": [1, 64, ["42000000"]]} if self.zeroed else {}
        changes |= {"9102": [0, 96, SLOPES]} if self.slopes else {}
        scalars = {"9000": {"index": 3, "value": "3E000000"}, "9001": {"index": 0, "value": -(1 << 40)}}
        return {
            "json_version": "2.0",
            "cudnn_backend_data": self.plan,
            "variant_pack_uids": [*self.parts, 9000, 9001, *map(int, changes)],
            "pass_by_values": scalars,
            "workspace_modifications": changes,
            "variant_pack_replacements": [],
            "fe_workspace_size": IN_FRONT if self.needs else 0,
        }

    def serialize(self, as_bytes: bool) -> bytes:
        return ubjson(self.stored())

    def deserialize(self, *arguments: Any) -> None:
        if self.calls.refuse_stored:
            raise self.calls.refuse_stored
        known = json.loads(cudnn_stored._Reader(arguments[-1]).value()["cudnn_backend_data"])
        self.operation, self.options = known["operation"], {"use_alibi_mask": True} if known["slopes"] else {}
        self.parts = {number: Part(self) for number in known["parts"]}

    def _prepare_variant_pack_template(self) -> None:
        pass

    def _get_variant_pack_uids_sorted(self) -> list[int]:
        return sorted(self.parts)

    def _execute_with_raw_ptrs(self, address: int, count: int, workspace: int, handle: int, plan: int) -> None:
        values = (ctypes.c_uint64 * count).from_address(address)
        pointers = dict(zip(sorted(self.parts), values, strict=True))
        self.calls.ran(Run(self, pointers, workspace, handle))

    def _execute(self, pointers: dict[int, int], workspace: int, handle: int) -> None:
        self.calls.ran(Run(self, pointers, workspace, handle))


def frontend(calls: Calls) -> cudnn.Frontend:
    """The fake's modules."""
    names = SimpleNamespace
    types = {t: t for t in ("FLOAT", "BFLOAT16", "HALF", "INT32", "INT64", "FP8_E4M3", "FP8_E5M2", "BOOLEAN")}
    native = names(
        backend_graph=lambda **arguments: Built(calls, **arguments),
        create_handle=calls.new_handle,
        _raw_set_stream=calls.set_stream,
    )
    module = names(
        data_type=names(**types),
        heur_mode=names(A="A", FALLBACK="FALLBACK"),
        tensor_reordering=names(NONE=0),
        diagonal_alignment=names(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right"),
        cudnnGraphNotSupportedError=KeyError,
        scalar_type=names(RUNTIME_PARAM=1, COMPILE_TIME_CONST=2),
        _pybind_module=native,
    )
    return cudnn.Frontend(module, native, VERSION, "1.32.0")


class Memory:
    """Addresses that no one reads."""

    def __init__(self) -> None:
        self.top, self.asked = 1 << 40, []

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        count = 1
        for n in shape:
            count *= n
        made = Tensor(self.top, tuple(shape), dtype, cuda_device(INDEX), self)
        self.asked.append(dtype.nbytes(count))
        self.top += (dtype.nbytes(count) + 511) // 256 * 256
        return made


def install(monkeypatch: Any, folder: Any, calls: Calls) -> None:
    """Put the fake in cuDNN's place, on a device of its own, with no graphs and an empty disk cache."""
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(folder))
    monkeypatch.setattr(cudnn, "_frontend", frontend(calls))
    monkeypatch.setattr(cuda_device(INDEX), "_kept", {})
    monkeypatch.setattr(cudnn, "COUNTS", cudnn.Counts())
    monkeypatch.setattr(device, "info", lambda index=0: H200)
    monkeypatch.setattr(libraries, "version", lambda name: VERSION)


def runtime(monkeypatch: Any, folder: Any, stream: int = 5) -> tuple[Runtime, Calls]:
    """A runtime over the fake, with its own memory, plans and disk cache."""
    calls = Calls()
    install(monkeypatch, folder, calls)
    monkeypatch.setattr(backend, "zero", lambda rt, t: calls.zeroed.append(t))
    monkeypatch.setattr(backend, "copy_from_host", lambda rt, array, out: None)
    monkeypatch.setattr(backend, "copy_to_host", lambda rt, t: None)

    def kernel(rt: Runtime, name: str, *, entry: str | None = None, args: str, **constants: Any) -> Any:
        def launch(rt: Runtime, grid: Any, block: Any, *given: Any, shared: int = 0) -> None:
            assert len(given) == len(args), f"{name} takes {len(args)} arguments"
            values = [0 if a is None else a.ptr if isinstance(a, Tensor) else a for a in given]
            calls.launches.append((name, tuple(values)))

        return launch

    monkeypatch.setattr(loader, "get", kernel)
    rt = Runtime(cuda_device(INDEX), stream, Memory(), backend)
    rt.plans = PlanCache()
    found = driver(calls)
    monkeypatch.setattr(libraries, "driver", lambda: found)
    rt._threads = backend.executors(rt)
    return rt, calls


def driver(calls: Calls) -> Any:
    """The few calls that runs and first uses make."""

    @contextmanager
    def at_first_use(index: int) -> Iterator[None]:
        before, calls.relaxed = calls.relaxed, True
        try:
            yield
        finally:
            calls.relaxed = before

    def constant(index: int, content: bytes) -> int:
        calls.constants.append(content)
        return (1 << 20) + 512 * len(calls.constants)

    return SimpleNamespace(
        at_first_use=at_first_use,
        constant=constant,
        on=lambda index: nullcontext(),
        attach=lambda index: 0,
        enter=lambda context: False,
        leave=lambda: None,
    )


def tensor(rt: Runtime, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None = None) -> Tensor:
    """A tensor of that memory."""
    made = rt.empty(shape, dtype)
    return Tensor(made.ptr, made.shape, dtype, made.device, made.owner, strides)
