"""Numbers by which objects are found: constants that a compiler, and a program that it made, can hold."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, TypeVar

_T = TypeVar("_T")

_tokens = itertools.count(1)
_by_token: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def enrolled(thing: Any) -> int:
    """The number of this object, which no other of this process has."""
    token = next(_tokens)
    _by_token[token] = thing
    return token


def of_token(token: int) -> Any:
    """The object of this number; None where it is gone."""
    return _by_token.get(token)


def living(kind: type[_T]) -> list[_T]:
    """All of a class that have a number, whichever threads make or drop some meanwhile."""
    return [thing for reference in _by_token.valuerefs() if isinstance(thing := reference(), kind)]
