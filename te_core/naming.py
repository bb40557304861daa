"""A class that goes by a second name: what it says of itself, and what pickle writes of its objects all the same.

The second name is a class's `__module__`, by which programs decide. In a file it would tie the objects to the package
of that name, so pickles of objects keep the module that defines the class. (Of a class itself pickle writes what it
says; nothing can be done about that from here.)
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any, NamedTuple

from te_core.errors import ArgumentError


class _Renamed(NamedTuple):
    """What a class said of itself."""

    home: str  # the module that defines it
    pickles: bool = False  # it got a `__reduce_ex__` here
    before: Any = None  # in whose place; None: nothing stood there


_renamed: dict[type, _Renamed] = {}


def rename(cls: type, module: str) -> None:
    """From now on the class says that it is of this module."""
    if cls in _renamed:
        return
    of_base = any(base in _renamed and base.__reduce_ex__ is cls.__reduce_ex__ for base in cls.__mro__)
    before = vars(cls).get("__reduce_ex__")
    _renamed[cls] = _Renamed(cls.__module__, not of_base, before)
    if not of_base:
        cls.__reduce_ex__ = _reduce_from_home(cls, before)  # type: ignore[method-assign]
    _say(cls, module)


def restore() -> None:
    """Every class under its own name again."""
    for cls, was in _renamed.items():
        if was.pickles and was.before is None:
            del cls.__reduce_ex__
        elif was.pickles:
            cls.__reduce_ex__ = was.before  # type: ignore[method-assign]
        _say(cls, was.home)
    _renamed.clear()


def _say(cls: type, module: str) -> None:
    line = vars(cls).get("__firstlineno__")
    cls.__module__ = module
    if line is not None:  # by which Python 3.13 finds a class's source; it goes with the name
        cls.__firstlineno__ = line  # type: ignore[attr-defined]


def home_of(cls: type) -> str:
    """The module that defines the class, whatever the class says."""
    return _renamed[cls].home if cls in _renamed else cls.__module__


def _reduce_from_home(cls: type, before: Callable[..., Any] | None) -> Callable[..., Any]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        protocol = max(int(protocol), 2)  # older ones name the class in another way
        made = before(self, protocol) if before else super(cls, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
        if isinstance(made, str):
            return made
        make, arguments, *rest = made
        if make is copyreg.__newobj__ and arguments[0] in _renamed:  # type: ignore[attr-defined]
            make, *arguments = arguments
        elif make not in _renamed:
            return made  # of a subclass that is not ours, or made by a function
        return named, (_renamed[make].home, make.__qualname__, *arguments), *rest

    return __reduce_ex__


def named(module: str, qualname: str, *value: Any) -> Any:
    """What such a pickle calls: an object of the class, before its state, or the member of an enum."""
    ours = module.startswith(("te_core.", "te_torch.")) and not module.startswith("te_torch.compat")  # that installs
    found: Any = import_module(module) if ours else None
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or home_of(found) != module:
        raise ArgumentError(
            "unpickle", f"{module}.{qualname}", "a class of te_core or te_torch", "load it with the version it is of"
        )
    return found(*value) if issubclass(found, Enum) else found.__new__(found)
