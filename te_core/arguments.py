"""What is wrong with the arguments of a call that failed, worked out after it did: a right call pays nothing.

Operations and layers read attributes of what they are given without asking what it is. Where that fails, `explained`
compares the arguments with the function's annotations, down to what stands in them, and says which one is not what it
has to be. A failure for another reason stays as it is.
"""

from __future__ import annotations

import numbers
import sys
import types
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ForwardRef, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

from te_core.dtypes import DType, dtype
from te_core.errors import ArgumentError, LibraryError, UnsupportedError
from te_core.precision import Precision
from te_core.quantized import Cast
from te_core.runtime import Runtime
from te_core.tensor import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """The function with an `ArgumentError` where it fails for the kind of an argument.

    Costs 0.2 us a call. Who has checked already calls what is inside, `__wrapped__`.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ArgumentError, LibraryError, UnsupportedError):
            raise
        except Exception as error:
            wrong = _explanation(function, args, kwargs, error)
            if wrong is None:
                raise
            raise wrong from error

    return call


def settle(spec: Any, *names: str) -> None:
    """Check these fields of a new spec. A dtype may be named in any way that `dtypes.dtype` understands."""
    for name in names:
        value, hint = getattr(spec, name), _hint(type(spec), name)
        kinds = get_args(hint) or (hint,)
        if DType in kinds and value is not None:
            object.__setattr__(spec, name, dtype(value))
        elif not isinstance(value, kinds):
            raise wrong_kind(type(spec).__name__, name, value, hint)


def wrong_kind(operation: str, name: str, value: Any, hint: Any) -> ArgumentError:
    """The error about an argument that is not of this kind."""
    return _error(operation, _Misfit(name, value, hint))


def _missing(where: str, value: Any) -> list[str]:
    """Where there is None in an argument."""
    if value is None:
        return [where]
    if not isinstance(value, tuple):
        return []
    names = getattr(value, "_fields", None)
    parts = zip(names, value, strict=True) if names else enumerate(value)
    return [w for name, part in parts for w in _missing(f"{where}.{name}" if names else f"{where}[{name}]", part)]


class _Misfit(NamedTuple):
    """Where something stands that is not what the annotation says."""

    where: str
    value: Any
    hint: Any


def _explanation(function: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> ArgumentError | None:
    parameters = signature(function)
    try:
        given = parameters.bind(*args, **kwargs).arguments
    except TypeError:  # too many, too few, an unknown name: Python says it well
        return None
    package, _, module = function.__module__.rpartition(".")
    operation = f"{module}.{function.__name__}" if package.endswith("layers") else function.__name__
    for name, value in given.items():
        several = parameters.parameters[name].kind is Parameter.VAR_POSITIONAL
        for where, part in [(f"{name}[{i}]", v) for i, v in enumerate(value)] if several else [(name, value)]:
            found = _misfit(where, part, _hint(function, name))
            if found is not None:
                return _error(operation, found)
    missing = [where for name, value in given.items() for where in _missing(name, value)]
    if missing and (isinstance(error, AssertionError) or "NoneType" in str(error)):
        allowed = "None where neither the spec nor its recipe asks for a value"
        do = "pass what is missing; to a backward, what its forward saved under the same spec"
        return ArgumentError(operation, f"None for {', '.join(missing)}", allowed, do)
    return None


def _hint(owner: Any, name: str) -> Any:
    """An annotation of a function or class, evaluated; Any where it names what only a type checker imports."""
    text: Any = owner.__annotations__.get(name, Any)
    text = text.__forward_arg__ if isinstance(text, ForwardRef) else text  # of a named tuple
    space = getattr(owner, "__globals__", None) or vars(sys.modules[owner.__module__])
    try:
        return eval(text, space) if isinstance(text, str) else text
    except NameError:
        return Any


def _misfit(where: str, value: Any, hint: Any) -> _Misfit | None:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        tried = [_misfit(where, value, part) for part in get_args(hint)]
        if None in tried:
            return None
        return next((t for t in tried if t is not None and t.where != where), _Misfit(where, value, hint))
    if origin in (tuple, list, Sequence):
        return _misfit_inside(where, value, hint)
    if hint is None:
        hint = type(None)
    if isinstance(origin, type):
        hint = origin  # which Python 3.10 takes for a type with its parameters, too, and refuses to look for
    if hint is Any or not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return None  # not a kind that a look can tell
    if hint in (int, float) and isinstance(value, numbers.Number):
        return None
    if not isinstance(value, hint):
        return _Misfit(where, value, hint)
    for name in _parts(hint):
        found = _misfit(f"{where}.{name}", getattr(value, name), _hint(hint, name))
        if found is not None:
            return found
    return None


def _misfit_inside(where: str, value: Any, hint: Any) -> _Misfit | None:
    if not isinstance(value, (list, tuple)):
        return _Misfit(where, value, hint)
    hints = [h for h in get_args(hint) if h is not ...]
    if get_origin(hint) is not tuple or ... in get_args(hint):
        hints = hints[:1] * len(value)
    found = (_misfit(f"{where}[{i}]", part, h) for i, (part, h) in enumerate(zip(value, hints, strict=False)))
    return next((f for f in found if f is not None), None)


def _parts(kind: type) -> tuple[str, ...]:
    """The attributes of plain data that have annotations of their own."""
    if kind is Cast:
        return "scale", "amax", "rng"
    return getattr(kind, "_fields", None) or tuple(getattr(kind, "__dataclass_fields__", ()))


def _error(operation: str, found: _Misfit) -> ArgumentError:
    kinds = [h for h in get_args(found.hint) or (found.hint,) if h is not ...]
    got = f"{found.where} of type {_name(type(found.value))}"
    return ArgumentError(operation, got, " or ".join(map(_name, kinds)), _remedy(found, kinds))


def _name(kind: Any) -> str:
    if kind in (None, type(None)):
        return "None"
    if not isinstance(kind, type):
        return str(kind).replace("te_core.tensor.", "")
    ours = kind.__module__.split(".")[0] in ("te_core", "builtins")
    return kind.__name__ if ours else f"{kind.__module__}.{kind.__name__}"


def _remedy(found: _Misfit, kinds: list[Any]) -> str:
    if Tensor in kinds and found.value is not None:
        return f"pass te_core.from_dlpack({found.where}), or te_core.from_numpy of an array"
    if Runtime in kinds:
        return "make one: Runtime.cpu(), or Runtime.cuda() on a GPU"
    if Precision in kinds and hasattr(found.value, "resolve"):
        return "pass te_core.recipe.resolve(recipe)"
    first = kinds[0]
    return f"pass a {first.__module__}.{first.__name__}" if isinstance(first, type) else f"correct {found.where}"
