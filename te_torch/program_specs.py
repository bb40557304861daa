"""Specs written out in full: what stands in a program of `torch.export`, which runs in other processes.

A spec is data: frozen dataclasses and named tuples of this library, its element types, constants. A function is none,
nor is an object of a user's own: what holds one cannot be exported. A text that is read makes nothing but such data.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

from te_core.dtypes import DType, dtype
from te_core.errors import ArgumentError, UnsupportedError
from te_core.precision import Precision, the_one

_CONSTANTS = (bool, int, float, str, type(None))
_PACKAGES = ("te_core.", "te_torch.")


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
    if name.startswith(_PACKAGES):
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
    found = getattr(import_module(module), qualname, None) if module.startswith(_PACKAGES) else None
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
