"""Which modules are alike: the registry of those that traced code knows by constants alone."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

_tokens = itertools.count(1)
_by_token: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def enrolled(module: Any) -> int:
    """The number of this module, which no other of this process has."""
    token = next(_tokens)
    _by_token[token] = module
    return token


def living() -> list[Any]:
    """All of them, whichever threads make or drop some meanwhile."""
    return [module for reference in _by_token.valuerefs() if (module := reference()) is not None]


def of_token(token: int) -> Any:
    """The module of this number; None where it is gone."""
    return _by_token.get(token)


def alike(kind: int, facts: tuple[Any, ...]) -> list[Any]:
    """The living modules of this class that are like this: what is compiled for one of them serves all."""
    return [module for module in living() if _is_like(module, kind, facts)]


def _is_like(module: Any, kind: int, facts: tuple[Any, ...]) -> bool:
    try:
        return bool(module._kind == kind and module._facts() == facts)
    except AttributeError:  # another thread is about to make it: it has no forward that could be run yet
        return False
