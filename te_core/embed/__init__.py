"""What the library in C asks of te_core: `ask`, by bindings/c/src/python.c (te_layer_open and what follows).

Words are numbers of 64 bits, addresses among them. An answer is bytes: the status, how many words and texts there are,
the words, the texts with a zero behind each, and a program's bytes.
"""

from __future__ import annotations

import struct
import sysconfig
from collections.abc import Sequence

from te_core.embed.doors import DOORS
from te_core.errors import ArgumentError, LibraryError, UnsupportedError

_VERSION = 1  # of what is asked and answered
_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_ARGUMENT, _UNSUPPORTED, _LIBRARY, _MEMORY = 1, 2, 3, 6  # te_status
_STATUS = {ArgumentError: _ARGUMENT, UnsupportedError: _UNSUPPORTED, LibraryError: _LIBRARY}


def _packed(status: int, words: Sequence[int], texts: Sequence[str], content: bytes = b"") -> bytes:
    said = b"".join(text.replace("\0", " ").encode() + b"\0" for text in texts)
    return struct.pack(f"<{3 + len(words)}q", status, len(words), len(texts), *words) + said + content


def ask(version: int, door: str, *words: int) -> bytes:
    """The answer, or an error in its four parts: no exception leaves."""
    try:
        if version != _VERSION:
            got, do = f"a library that speaks version {version}", "take both from one release"
            raise LibraryError("te_core.embed", got, f"version {_VERSION}", do)
        if _FREE_THREADED:
            allowed, do = "a Python that has the interpreter's lock", "install one without a t behind its version"
            raise UnsupportedError("te_core.embed", "a free-threaded Python", allowed, do)
        return _packed(0, *DOORS[door](*words))
    except tuple(_STATUS) as error:
        status = next(number for kind, number in _STATUS.items() if isinstance(error, kind))
        return _packed(status, (), (error.operation, error.got, error.allowed, error.do))
    except MemoryError as error:
        return _packed(_MEMORY, (), (door, str(error) or "too little memory", "enough memory", "free some"))
    except BaseException as error:  # an interrupt, too: C has no other way to hear of it
        return _packed(_LIBRARY, (), (door, f"{type(error).__name__}: {error}", "no such error", "report it"))
