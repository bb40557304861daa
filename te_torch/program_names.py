"""Names in the text of compiled programs.

A compiler keeps its programs on disk and takes one of another process for this one's where text and inputs are equal.
The shapes of what our operators return follow from neither: they follow from a layer's spec, and from this library.
So a name says both, and means the same in every process.

What stands in a program of `torch.export`, which runs in other processes, is a spec written out in full. A spec is
data: frozen dataclasses and named tuples of this library, its element types, constants. A function is none, nor is an
object of a user's own: what holds one cannot be exported. A text that is read makes nothing but such data.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import te_core
from te_core.dtypes import DType, dtype
from te_core.errors import ArgumentError, UnsupportedError
from te_core.precision import Precision, the_one

_PACKAGES = (Path(te_core.__file__).parent, Path(__file__).parent)
_SECRET = secrets.token_hex(8)
_CONSTANTS = (bool, int, float, str, type(None))
_PREFIXES = ("te_core.", "te_torch.")


def name_of_program(kind: str, described: Any, shared: bool = True) -> str:
    """A short name for what `repr` describes in full. `shared` is False where it does not: another process then takes
    no program of this name, as where an object without a description of its own is part of it."""
    text = repr(described)
    owner = build() if shared and " at 0x" not in text else this_process()
    return f"{kind}/{hashlib.sha256(f'{owner} {text}'.encode()).hexdigest()[:16]}"


def this_process() -> str:
    """A name that no other process has: a forked one shares the secret, and numbers of processes come again."""
    return f"{_SECRET} {os.getpid()}"


def build() -> str:
    """A digest of this library's sources; where it comes without any, a name of this process."""
    return _sources() or this_process()


@cache
def _sources() -> str:
    digest, found = hashlib.sha256(), False
    for package in _PACKAGES:
        for path in sorted(package.rglob("*.py")):
            content, found = path.read_bytes(), True
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16] if found else ""


# --------------------------------------------------------------------------------------------------- specs in full


def written(value: Any) -> str:
    """The value as text, the same in every process."""
    return json.dumps(_as_json(value), separators=(",", ":"))


def read(text: str) -> Any:
    """The value of such a text."""
    return _from_json(json.loads(text))


def not_written(what: str) -> UnsupportedError:
    """The error for what belongs to this process."""
    return UnsupportedError(
        "torch.export",
        f"a module with {what}, which no other process has",
        "modules that their options and recipes describe in full",
        "leave it out for the export (module.inspector = None, a recipe of te_core.recipe without functions)",
    )


def _as_json(value: Any) -> Any:
    kind = type(value)
    if kind in _CONSTANTS:
        return value
    if kind is tuple:
        return ["()", *map(_as_json, value)]
    if kind is DType:
        return ["dtype", value.name]
    name = f"{kind.__module__}:{kind.__qualname__}"
    if name.startswith(_PREFIXES):
        if isinstance(value, Enum):
            return [name, value.name]
        if isinstance(value, tuple):  # a named one
            return [name, *map(_as_json, value)]
        if is_dataclass(value):
            return [name, {f.name: _as_json(getattr(value, f.name)) for f in fields(value) if f.init}]
    raise not_written(f"an object of {kind.__name__!r} ({getattr(value, '__name__', 'a value')})")


def _from_json(found: Any) -> Any:
    if not isinstance(found, list):
        return found
    name, *parts = found
    if name == "()":
        return tuple(map(_from_json, parts))
    if name == "dtype":
        return dtype(parts[0])
    kind = _class(name)
    if issubclass(kind, Enum):
        return kind[parts[0]]
    if issubclass(kind, tuple):
        return kind(*map(_from_json, parts))
    made = kind(**{name: _from_json(value) for name, value in parts[0].items()})
    return the_one(made) if isinstance(made, Precision) else made


def _class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found = getattr(import_module(module), qualname, None) if module.startswith(_PREFIXES) else None
    if not isinstance(found, type) or not (issubclass(found, (Enum, tuple)) or is_dataclass(found)):
        raise unknown(name)
    return found


def unknown(name: str) -> ArgumentError:
    """The error for a program of another version, or of somebody else."""
    return ArgumentError(
        "torch.export",
        f"a program that names {name!r}",
        "programs that this version of te-runtime wrote, whose parts it has",
        "export the model again with this version",
    )
