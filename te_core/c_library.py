"""The library in C (bindings/c), where there is one: nothing here needs it, and some things are quicker with it.

TE_CORE_LIBRARY names the file; else it is the one that this wheel holds, or the one that `make -C bindings/c` built in
the tree that this package lies in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from te_core import env
from te_core.errors import LibraryError

_HERE = Path(__file__).resolve().parent
#: Who may use it: a name, and what says whether it does.
USERS: dict[str, Callable[[], str]] = {}


def found() -> Path | None:
    """Where it is."""
    named = env.library()
    places = [named] if named else [_HERE / "lib/libte_core.so", _HERE.parent / "bindings/c/build/libte_core.so"]
    return next((place for place in places if place.is_file()), None)


def library(*functions: str) -> ctypes.CDLL:
    """It, loaded once for the process. These functions of it are needed."""
    path = found()
    if path is None:
        raise _unusable(str(env.library() or "none"))
    loaded = _loaded(path)
    for name in functions:
        if not hasattr(loaded, name):
            raise _unusable(f"{path} without {name}")
    return loaded


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # of another architecture, or no library at all
        raise _unusable(str(error)) from error


class _Said(ctypes.Structure):
    """What te_error gives, as far as it is read."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("status", ctypes.c_int),
        *((name, ctypes.c_char_p) for name in ("operation", "got", "allowed", "to_do")),
    ]


def check(loaded: ctypes.CDLL, status: int) -> None:
    """Raise what the library says of a call that failed in this thread."""
    if status:
        loaded.te_error.restype = ctypes.POINTER(_Said)
        said = loaded.te_error().contents
        raise LibraryError(*(part.decode() for part in (said.operation, said.got, said.allowed, said.to_do)))


def _unusable(got: str) -> LibraryError:
    return LibraryError(
        "load te_core's library in C",
        got,
        "libte_core.so of this version, in a wheel that has it, built by `make -C bindings/c`, or where "
        "TE_CORE_LIBRARY says",
        "install such a wheel, build the library, or unset what asks for it",
    )
