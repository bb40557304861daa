"""The XLA FFI target `te_tape_c`: te_core's library in C plays what was recorded, without the interpreter and its lock.

It takes work that a program can hold, on GPUs, where TE_JAX_HANDLER allows it; a program that was lowered names its
target. Other work is that of `te_jax.handler`.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import jax

from te_core import c_library, env, libraries
from te_core.errors import LibraryError, UnsupportedError
from te_core.tape.program import add_entry
from te_core.tape.program_file import Program, pack
from te_core.tensor import Device, cuda_device
from te_jax.record import Work, note

TARGET = "te_tape_c"
_FUNCTIONS = ("te_xla_tape", "te_xla_add", "te_xla_load", "te_xla_calls", "te_error")


class _Work(ctypes.Structure):
    """See te_xla_work in bindings/c/src/xla.h."""

    _fields_ = [
        ("size", c_size_t),
        ("digest", c_int64),
        ("content", c_char_p),
        ("bytes", c_size_t),
        ("buffers", c_int32),
        ("slots", c_int32),
        ("buffer", ctypes.POINTER(c_int32)),
        ("offset", ctypes.POINTER(c_uint64)),
        ("libcublaslt", c_char_p),
    ]


_PARTS = ("operation", "got", "allowed", "to_do")


class _Error(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("status", ctypes.c_int), *((name, c_char_p) for name in _PARTS)]


_lock = threading.RLock()
_registered: list[ctypes.CDLL | LibraryError] = []  # the library, or why XLA does not call it


def _known() -> ctypes.CDLL | LibraryError:
    with _lock:
        if not _registered:
            _registered.append(_register())
        return _registered[0]


def library() -> ctypes.CDLL | None:
    """The library that XLA calls; None where it calls Python."""
    asked = env.jax_handler()
    found = None if asked == "python" else _known()
    note(said())
    if isinstance(found, LibraryError):
        if asked == "c":
            raise found
        return None
    return found


def said() -> str:
    """What XLA calls on a GPU, and why."""
    if env.jax_handler() == "python":
        return "on a GPU XLA calls te_core in Python (TE_JAX_HANDLER=python)"
    found = _known()
    if isinstance(found, LibraryError):
        return f"on a GPU XLA calls te_core in Python ({found.got})"
    return f"on a GPU XLA calls te_core's library in C ({found._name})"


c_library.USERS["te_jax"] = said


def _register() -> ctypes.CDLL | LibraryError:
    """Tell XLA of the target. That of the CPU is never called: there XLA says at once whether it knows our version."""
    try:
        found = c_library.library(*_FUNCTIONS)
        found.te_xla_calls.restype = c_int64
        found.te_xla_calls.argtypes, found.te_xla_load.argtypes = [c_int64], [c_int64, c_int32]
        found.te_error.restype = ctypes.POINTER(_Error)
        capsule = jax.ffi.pycapsule(ctypes.cast(found.te_xla_tape, c_void_p).value)
        for platform in ("cpu", "CUDA"):
            stages = {"initialize": capsule, "execute": capsule}
            jax.ffi.register_ffi_target(TARGET, stages, platform=platform, api_version=1)
        return found
    except LibraryError as error:
        return error
    except Exception as error:
        allowed, do = "an FFI that the library speaks, 0.3 or 0.4", "install JAX 0.10 or 0.11, or leave it to Python"
        return LibraryError("te_jax", f"XLA refuses the library in C: {error}", allowed, do)


def takes(work: Work, devices: list[int]) -> bool:
    """Whether XLA is to call this work in C: the program is then loaded on these devices."""
    found = library()
    if found is None:
        return False
    try:
        if found.te_xla_calls(work.digest) < 0:
            _check(found, found.te_xla_add(ctypes.byref(_given(work, cuda_device(devices[0])))))
        for index in devices:
            _check(found, found.te_xla_load(work.digest, index))
    except (LibraryError, UnsupportedError) as error:
        note(f"{work.of(cuda_device(devices[0]))}; XLA calls it in Python: {error.got}")
        return False
    work.calls = lambda: int(found.te_xla_calls(work.digest))
    return True


def _given(work: Work, device: Device) -> _Work:
    """Its program, and where the slots of that lie in the buffers of a call."""
    program = Program()
    add_entry(program, "call", work.on(device).made.tape, index=device.index)
    content = pack(program)
    places = work.places(device)
    buffers, offsets = zip(*places, strict=True)
    blas = str(libraries.file("cublasLt")).encode() if "cublasLt" in program.facts else None
    count = len(places)
    return _Work(
        ctypes.sizeof(_Work),
        work.digest,
        content,
        len(content),
        max(buffers) + 1,
        count,
        (c_int32 * count)(*buffers),
        (c_uint64 * count)(*offsets),
        blas,
    )


def _check(found: Any, status: int) -> None:
    if status:
        said = found.te_error().contents
        raise LibraryError(*(getattr(said, name).decode() for name in _PARTS))
