"""The XLA FFI target `te_tape`: runs what te_core recorded on the buffers and the stream of an XLA program.

The handler is a Python function that ctypes makes callable: no compiler is needed. Its structures are those of the FFI
API of XLA, version 0.x (xla/ffi/api/c_api.h), as far as they are read. An exception that left the handler would end the
process, so each one becomes an error of XLA's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from typing import Any

import jax

TARGET = "te_tape"
_INTERNAL, _EXECUTE, _METADATA = 13, 3, 1

#: Carries a call out: (on a GPU, the device's number, its stream, the digest, addresses of operands and results).
Runner = Callable[[bool, int, int, int, list[int]], None]


def _struct(name: str, *fields: tuple[str, Any], extended: bool = True) -> Any:
    """A structure of the API; nearly all begin with their size and a list of extensions."""
    begin = [("struct_size", c_size_t), ("extension", c_void_p)] if extended else []
    return type(name, (ctypes.Structure,), {"_fields_": [*begin, *fields]})


_Buffer = _struct("Buffer", ("dtype", c_int), ("data", c_void_p))
_Buffers = _struct("Buffers", ("count", c_int64), ("types", c_void_p), ("items", c_void_p))
_Scalar = _struct("Scalar", ("dtype", c_int), ("value", POINTER(c_int64)), extended=False)
_Attrs = _struct(
    "Attrs", ("count", c_int64), ("types", c_void_p), ("names", c_void_p), ("items", POINTER(POINTER(_Scalar)))
)
_Frame = _struct(
    "Frame",
    ("api", c_void_p),
    ("ctx", c_void_p),
    ("stage", c_int),
    ("args", _Buffers),
    ("rets", _Buffers),
    ("attrs", _Attrs),
)
_Version = _struct("Version", ("major", c_int), ("minor", c_int))
_Metadata = _struct("Metadata", ("size", c_size_t), ("version", _Version), ("traits", c_uint32), extended=False)
_Extension = _struct(
    "Extension", ("size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(_Metadata)),
    extended=False,
)  # fmt: skip
_CREATE_ERROR, _GET_STREAM, _GET_DEVICE = 0, 4, 17  # places in the API's table of functions
_Api = _struct("Api", ("version", _Version), ("internal", c_void_p), ("functions", c_void_p * (_GET_DEVICE + 1)))
_Wrong = _struct("Wrong", ("message", c_char_p), ("code", c_int))
_Stream = _struct("Stream", ("ctx", c_void_p), ("value", c_void_p))
_Device = _struct("Device", ("ctx", c_void_p), ("value", c_int32))
_Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_DATA, _POINTER = _Buffer.data.offset, ctypes.sizeof(c_void_p)


@cache
def _function(address: int) -> Any:
    return _Function(address)


def _asked(frame: Any, place: int, kind: Any) -> int:
    """What a function of the API says of the running call."""
    asked = kind(ctypes.sizeof(kind), None, frame.ctx, 0)
    error = _function(_Api.from_address(frame.api).functions[place])(ctypes.addressof(asked))
    if error:
        raise RuntimeError(f"XLA does not tell its {kind.__name__.lower()}")
    return asked.value or 0


def _addresses(buffers: Any) -> list[int]:
    items = (c_int64 * buffers.count).from_address(buffers.items) if buffers.count else ()
    return [c_int64.from_address(item + _DATA).value for item in items]


def _is_question(frame: Any) -> bool:
    """Whether XLA asks for the version that the handler speaks; it is answered then."""
    if not frame.extension:
        return False
    extension = _Extension.from_address(frame.extension)
    if extension.type != _METADATA:
        return False
    version = extension.metadata.contents.version
    version.major, version.minor = 0, _Api.from_address(frame.api).version.minor if frame.api else 0
    extension.metadata.contents.traits = 0
    return True


def _made(on_gpu: bool, run: Runner) -> Any:
    def handler(address: int) -> int | None:
        frame = _Frame.from_address(address)
        try:
            if _is_question(frame) or frame.stage != _EXECUTE:
                return None
            device = _asked(frame, _GET_DEVICE, _Device) if on_gpu else 0
            stream = _asked(frame, _GET_STREAM, _Stream) if on_gpu else 0
            digest = frame.attrs.items[0].contents.value[0]
            run(on_gpu, device, stream, digest, _addresses(frame.args) + _addresses(frame.rets))
            return None
        except BaseException as error:
            wrong = _Wrong(ctypes.sizeof(_Wrong), None, f"te_jax: {error}".encode(), _INTERNAL)
            made: int = _function(_Api.from_address(frame.api).functions[_CREATE_ERROR])(ctypes.addressof(wrong))
            return made

    return _Function(handler)


_handlers: list[Any] = []  # XLA keeps their addresses


def register(run: Runner) -> None:
    """Tell XLA of the target, on the CPU and on NVIDIA GPUs."""
    for on_gpu, platform in ((False, "cpu"), (True, "CUDA")):
        _handlers.append(_made(on_gpu, run))
        capsule = jax.ffi.pycapsule(_handlers[-1])
        jax.ffi.register_ffi_target(TARGET, capsule, platform=platform, api_version=1)
