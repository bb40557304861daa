"""The XLA FFI target `te_tape_c`: te_core's library in C plays what was recorded, without the interpreter and its lock.

It takes work that a program can hold, on GPUs, where TE_JAX_HANDLER allows it; a program that was lowered names its
target. Other work is that of `te_jax.handler`.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p

import jax

from te_core import c_library, env, libraries
from te_core.errors import LibraryError, UnsupportedError
from te_core.tape.program import add_entry
from te_core.tape.program_file import Program, pack
from te_core.tensor import Device
from te_jax.record import Work, note

TARGET = "te_tape_c"
_FUNCTIONS = ("te_xla_tape", "te_xla_add", "te_xla_load", "te_xla_calls", "te_error")

_lock = threading.RLock()
_registered: list[ctypes.CDLL | LibraryError] = []  # the library, or why XLA does not call it


def _known() -> ctypes.CDLL | LibraryError:
    with _lock:
        if not _registered:
            _registered.append(_register())
        return _registered[0]


def library() -> ctypes.CDLL | None:
    """The library that XLA calls; None where it calls Python."""
    asked = env.chosen("TE_JAX_HANDLER")
    found = None if asked == "python" else _known()
    note(said())
    if isinstance(found, LibraryError) and asked == "c":
        raise found
    return found if isinstance(found, ctypes.CDLL) else None


def said() -> str:
    """What XLA calls on a GPU, and why."""
    if env.chosen("TE_JAX_HANDLER") == "python":
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
        found.te_xla_calls.restype, found.te_xla_calls.argtypes = c_int64, [c_int64]
        found.te_xla_load.argtypes = [c_int64, c_int32]
        found.te_xla_add.argtypes = [c_int64, c_char_p, c_size_t, *2 * [c_int32], *2 * [c_void_p], *2 * [c_char_p]]
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


def takes(work: Work, devices: list[Device]) -> bool:
    """Whether XLA is to call this work in C: the program is then loaded on these devices."""
    found = library()
    if found is None:
        return False
    try:
        if found.te_xla_calls(work.digest) < 0:
            _add(found, work, devices[0])
        for device in devices:
            c_library.check(found, found.te_xla_load(work.digest, device.index))
    except (LibraryError, UnsupportedError) as error:
        note(f"{work.of(devices[0])}; XLA calls it in Python: {error.got}")
        return False
    work.calls = lambda: int(found.te_xla_calls(work.digest))
    return True


def _add(found: ctypes.CDLL, work: Work, device: Device) -> None:
    """Give the library its program, and where the slots of that lie in the buffers of a call: the block in the last."""
    program = Program()
    add_entry(program, "call", work.on(device).made.tape, index=device.index)
    paths = [str(libraries.file(n)).encode() if n in program.facts else None for n in ("cublasLt", "cudnn")]
    content, places = pack(program), work.places(device)
    count, buffers = len(places), places[-1].number + 1
    at = (c_int32 * count)(*(p.number for p in places)), (c_uint64 * count)(*(p.offset for p in places))
    c_library.check(found, found.te_xla_add(work.digest, content, len(content), buffers, count, *at, *paths))
