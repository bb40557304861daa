"""The player in C (bindings/c), built for tests, on stubs of the driver, cuBLASLt and cuDNN; its calls by ctypes."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_uint64, c_void_p
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from te_core.tape.program_file import Slot

FOLDER = Path(__file__).resolve().parents[2] / "bindings" / "c"

_ALLOC = ctypes.CFUNCTYPE(c_void_p, c_size_t, c_size_t, c_void_p, c_void_p)
_FREE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", POINTER(ctypes.c_int64)),
        ("strides", POINTER(ctypes.c_int64)),
        ("byte_offset", c_uint64),
    ]


class Options(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("stream", c_void_p),
        ("alloc", _ALLOC),
        ("free", _FREE),
        ("user", c_void_p),
        ("libcuda", c_char_p),
        ("libcublaslt", c_char_p),
        ("libcudnn", c_char_p),
    ]


class ErrorInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("status", ctypes.c_int),
        *[(name, c_char_p) for name in ("operation", "got", "allowed", "to_do", "message")],
        ("step", c_int32),
    ]


class SlotInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("role", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("ndim", c_int32),
        ("shape", POINTER(ctypes.c_int64)),
        ("strides", POINTER(ctypes.c_int64)),
        ("bytes", c_size_t),
        ("alignment", c_size_t),
        ("written", c_int32),
    ]


class Run(ctypes.Structure):
    kept: Any
    _fields_ = [
        ("size", c_size_t),
        ("entry", c_int32),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("input", POINTER(POINTER(DLTensor))),
        ("output", POINTER(POINTER(DLTensor))),
        ("stream", c_void_p),
        ("block", c_void_p),
        ("block_bytes", c_size_t),
    ]


class PlayerError(Exception):
    """A call of the library that failed, with its status."""

    def __init__(self, status: int, message: str, step: int) -> None:
        super().__init__(message)
        self.status, self.step = status, step


@cache
def built() -> Path:
    """The folder of the library and what it is tested with: that of TE_C_BUILD, or one built once for the process."""
    folder = Path(os.environ.get("TE_C_BUILD") or mkdtemp(prefix="te-c-"))
    if "TE_C_BUILD" in os.environ:
        return folder
    targets = [str(folder / name) for name in ("libte_core.so", "libstub.so", "libtimer.so")]
    made = subprocess.run(
        ["make", "-s", "-C", str(FOLDER), f"BUILD={folder}", "CFLAGS=-O1 -g", *targets], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@cache
def library() -> ctypes.CDLL:
    """The player."""
    lib = ctypes.CDLL(str(built() / "libte_core.so"))
    lib.te_error.restype = POINTER(ErrorInfo)
    lib.te_program_fact.restype = c_char_p
    pointer, place = c_void_p, POINTER(c_void_p)
    lib.te_runtime_create.argtypes = [POINTER(Options), place]
    lib.te_runtime_destroy.argtypes = lib.te_program_free.argtypes = [pointer]
    lib.te_runtime_destroy.restype = lib.te_program_free.restype = None
    lib.te_synchronize.argtypes = [pointer, pointer]
    lib.te_program_load.argtypes = [pointer, c_char_p, place]
    lib.te_program_load_memory.argtypes = [pointer, c_char_p, c_size_t, place]
    lib.te_program_find.argtypes = [pointer, c_char_p, POINTER(c_int32)]
    lib.te_program_fact.argtypes = [pointer, c_char_p]
    slots = POINTER(POINTER(POINTER(SlotInfo)))
    lib.te_program_slots.argtypes = [pointer, c_int32, slots, POINTER(c_int32), POINTER(c_int32)]
    lib.te_program_block_bytes.argtypes = [pointer, c_int32, POINTER(c_size_t)]
    lib.te_program_run.argtypes = [pointer, POINTER(Run)]
    lib.te_program_prepare.argtypes = [pointer, c_int32, pointer]
    lib.te_layer_open.argtypes = [pointer, c_char_p, c_char_p, place]
    lib.te_layer_slots.argtypes = [pointer, POINTER(POINTER(LayerSlot)), POINTER(c_int32), POINTER(c_int32)]
    tensors = POINTER(POINTER(DLTensor))
    lib.te_forward.argtypes = [pointer, pointer, tensors, c_int32, tensors, c_int32, place]
    lib.te_backward.argtypes = [pointer, pointer, pointer, tensors, c_int32, tensors, c_int32]
    lib.te_scaling_create.argtypes = [pointer, place]
    lib.te_scaling_update.argtypes = [pointer, place, c_int32]
    lib.te_layer_save.argtypes = [pointer, c_char_p]
    for free in (lib.te_layer_free, lib.te_scaling_free, lib.te_saved_free, lib.te_close):
        free.argtypes, free.restype = [] if free is lib.te_close else [pointer], None
    return lib


@cache
def stub() -> ctypes.CDLL:
    """The driver, the cuBLASLt and the cuDNN that are not there."""
    lib = ctypes.CDLL(str(built() / "libstub.so"))
    lib.stub_log.restype = c_char_p
    lib.stub_note.argtypes = [c_char_p]
    lib.stub_arguments.argtypes = [c_char_p, c_uint64, c_char_p]
    lib.stub_lt_version.argtypes = [c_size_t, ctypes.c_int]
    lib.stub_fail.argtypes = [c_char_p, ctypes.c_int, ctypes.c_int]
    lib.stub_mute(0)
    return lib


def check(status: int) -> None:
    """Raise what the library says."""
    if status:
        said = library().te_error().contents
        assert said.status == status and all((said.operation, said.got, said.allowed, said.to_do))
        raise PlayerError(status, said.message.decode(), said.step)


def time_call() -> Any:
    """(te_program_run, a program, a run, how many calls): nanoseconds a call."""
    lib = ctypes.CDLL(str(built() / "libtimer.so"))
    lib.te_time.argtypes, lib.te_time.restype = [c_void_p, c_void_p, POINTER(Run), ctypes.c_int], ctypes.c_double
    play = ctypes.cast(library().te_program_run, c_void_p)
    return partial(lib.te_time, play)


class CRuntime:
    """A te_runtime on libraries, or on the stub; `alloc(nbytes, alignment, stream)` and `free(address, stream)`, or
    functions in C, give its memory."""

    def __init__(
        self,
        alloc: Any = None,
        free: Any = None,
        libcuda: str = "",
        libcublaslt: str = "",
        libcudnn: str = "",
        stream: int = 5,
        device_type: int = 2,
    ) -> None:
        stubbed = str(built() / "libstub.so")
        names = [(path or stubbed).encode() for path in (libcuda, libcublaslt, libcudnn)]
        self._alloc = _ALLOC() if alloc is None else alloc
        self._free = _FREE() if free is None else free
        if not isinstance(self._alloc, _ALLOC):
            self._alloc = _ALLOC(lambda nbytes, alignment, stream, _: alloc(nbytes, alignment, stream or 0))
            self._free = _FREE(lambda address, stream, _: free(address, stream or 0))
        options = Options(ctypes.sizeof(Options), device_type, 0, stream, self._alloc, self._free, 4096, *names)
        self.handle = c_void_p()
        check(library().te_runtime_create(byref(options), byref(self.handle)))

    def destroy(self) -> None:
        """It is gone."""
        library().te_runtime_destroy(self.handle)

    def load(self, content: bytes) -> CProgram:
        """A program in memory."""
        made = c_void_p()
        check(library().te_program_load_memory(self.handle, content, len(content), byref(made)))
        return CProgram(made)

    def open(self, path: Path) -> CProgram:
        """A program in a file."""
        made = c_void_p()
        check(library().te_program_load(self.handle, str(path).encode(), byref(made)))
        return CProgram(made)


class CProgram:
    """A te_program."""

    def __init__(self, handle: c_void_p) -> None:
        self.handle = handle

    def free(self) -> None:
        """It is gone."""
        library().te_program_free(self.handle)

    def find(self, name: str) -> int:
        """An entry's number."""
        found = c_int32(-1)
        check(library().te_program_find(self.handle, name.encode(), byref(found)))
        return found.value

    def slots(self, entry: int = 0) -> tuple[list[SlotInfo], list[SlotInfo]]:
        """(inputs, outputs)."""
        found, inputs, outputs = POINTER(POINTER(SlotInfo))(), c_int32(), c_int32()
        check(library().te_program_slots(self.handle, entry, byref(found), byref(inputs), byref(outputs)))
        every = [found[i].contents for i in range(inputs.value + outputs.value)]
        return every[: inputs.value], every[inputs.value :]

    def block_bytes(self, entry: int = 0) -> int:
        """Of an entry."""
        found = c_size_t()
        check(library().te_program_block_bytes(self.handle, entry, byref(found)))
        return found.value

    def asked(
        self, inputs: Sequence[Any], outputs: Sequence[Any], stream: int = 5, block: int = 0, entry: int = 0
    ) -> Run:
        """A run of an entry on tensors (`tensor`), which live as long as it."""
        kinds = [(POINTER(DLTensor) * max(1, len(some)))(*map(ctypes.pointer, some)) for some in (inputs, outputs)]
        more = len(inputs), len(outputs), *kinds, stream, block, self.block_bytes(entry)
        made = Run(ctypes.sizeof(Run), entry, *more)
        made.kept = inputs, outputs, kinds
        return made

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any], **more: int) -> None:
        """Play an entry."""
        check(library().te_program_run(self.handle, byref(self.asked(inputs, outputs, **more))))


def tensor(slot: Slot, address: int) -> DLTensor:
    """A tensor for a slot; at address 0 there is none yet."""
    shape = (ctypes.c_int64 * max(1, len(slot.shape)))(*slot.shape)
    strides = None if slot.strides is None else (ctypes.c_int64 * max(1, len(slot.strides)))(*slot.strides)
    return DLTensor(address, 2, 0, len(slot.shape), slot.code, slot.bits, 1, shape, strides, 0)


# ------------------------------------------------------------------------------------------------------------ layers


class LayerSlot(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("shape", c_char_p),
        ("dtypes", c_char_p),
        ("role", ctypes.c_int),
        ("optional", c_int32),
        ("gradient", c_int32),
    ]


def host_tensor(t: Any) -> DLTensor | None:
    """The DLTensor of a te_core Tensor, which has to outlive it."""
    if t is None:
        return None
    shape = (ctypes.c_int64 * max(1, len(t.shape)))(*t.shape)
    strides = None if t.strides is None else (ctypes.c_int64 * max(1, len(t.strides)))(*t.strides)
    kind, index = (1, 0) if t.device.kind == "cpu" else (2, t.device.index)
    return DLTensor(t.ptr, kind, index, len(t.shape), t.dtype.dlpack_code, t.dtype.bits, 1, shape, strides, 0)


def _pointers(tensors: Sequence[Any]) -> Any:
    made = (POINTER(DLTensor) * max(1, len(tensors)))()
    for i, t in enumerate(tensors):
        if t is not None:
            made[i] = ctypes.pointer(t)
    return made


class CLayer:
    """A te_layer, with its state."""

    def __init__(self, runtime: c_void_p, name: str, options: str | None = None, scaled: bool = False) -> None:
        self.runtime, self.handle, self.scaling = runtime, c_void_p(), c_void_p()
        text = None if options is None else options.encode()
        check(library().te_layer_open(runtime, name.encode(), text, byref(self.handle)))
        if scaled:
            check(library().te_scaling_create(self.handle, byref(self.scaling)))

    def slots(self) -> tuple[list[LayerSlot], list[LayerSlot]]:
        """(inputs, outputs)."""
        found, inputs, outputs = POINTER(LayerSlot)(), c_int32(), c_int32()
        check(library().te_layer_slots(self.handle, byref(found), byref(inputs), byref(outputs)))
        every = [found[i] for i in range(inputs.value + outputs.value)]
        return every[: inputs.value], every[inputs.value :]

    def forward(self, inputs: Sequence[Any], outputs: Sequence[Any], keep: bool = True) -> c_void_p:
        """What was kept."""
        saved = c_void_p()
        given = _pointers(inputs), len(inputs), _pointers(outputs), len(outputs)
        check(library().te_forward(self.handle, self.scaling, *given, byref(saved) if keep else None))
        return saved

    def backward(self, saved: c_void_p, dy: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Releases what was kept."""
        given = _pointers(dy), len(dy), _pointers(gradients), len(gradients)
        check(library().te_backward(self.handle, self.scaling, saved, *given))

    def update(self) -> None:
        """The next scales."""
        check(library().te_scaling_update(self.runtime, byref(self.scaling), 1))

    def save(self, path: Path) -> None:
        """What was recorded, as a file."""
        check(library().te_layer_save(self.handle, str(path).encode()))

    def free(self) -> None:
        """It is gone."""
        library().te_layer_free(self.handle)
