"""What the fields of a recipe may be, and what becomes of names that are none of them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import Enum
from math import isfinite
from typing import Any, TypeVar

from te_core.errors import ArgumentError
from te_core.naming import home_of
from te_core.spelling import FieldNameError, choice_error, meant, name_error, nearest

#: Keywords of older releases of the documented API.
_OLDER = frozenset({"interval", "override_linear_precision"})
#: The fields of all recipes: a program may hand one set of options to whichever recipe it uses.
_fields: set[str] = set()

#: E4M3 holds 18 powers of two: under a larger margin every value becomes zero, under a smaller one the largest code.
MARGINS = range(-18, 19)

_R = TypeVar("_R")


def require(recipe: str, name: str, value: object, ok: bool, allowed: str) -> None:
    """An error unless it is `ok`."""
    if not ok:
        raise ArgumentError(recipe, f"{name}={value!r}", allowed, f"correct {name}")


def is_whole(value: object) -> bool:
    """Whether it is an integer, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_choice(recipe: Any, name: str, allowed: Sequence[Any]) -> None:
    """This field has one of these values."""
    if getattr(recipe, name) not in allowed:
        raise choice_error(type(recipe).__name__, name, getattr(recipe, name), allowed)


def require_flags(recipe: Any, *names: str) -> None:
    """These fields are True or False."""
    for name in names:
        value = getattr(recipe, name)
        require(type(recipe).__name__, name, value, isinstance(value, bool), "True or False")


def require_parameters(recipe: Any, kind: type, *names: str) -> None:
    """These attributes are parameters of a quantizer, or None where the class has None."""
    for name in names:
        value, optional = getattr(recipe, name), getattr(type(recipe), name) is None
        ok = isinstance(value, kind) or (value is None and optional)
        require(type(recipe).__name__, name, value, ok, f"{kind.__name__}(...){', or None' * optional}")


def check_parameters(parameters: Any) -> None:
    """The fields of MMParams or QParams: flags, and a number where the default is one."""
    for one in fields(parameters):
        value, name = getattr(parameters, one.name), type(parameters).__name__
        if isinstance(one.default, bool):
            require(name, one.name, value, isinstance(value, bool), "True or False")
        else:
            number = isinstance(value, int | float) and isfinite(value) and value >= 0
            require(name, one.name, value, number, "a number >= 0")


def require_format(recipe: Any, formats: Sequence[Enum]) -> None:
    """The format is one of these."""
    form = recipe.fp8_format
    require(type(recipe).__name__, "fp8_format", form, form in formats, " or ".join(map(str, formats)))


def require_delayed(recipe: Any) -> None:
    """The fields of delayed scaling."""
    name = type(recipe).__name__
    margin, length = recipe.margin, recipe.amax_history_len
    algo, scale = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    allowed = f"an integer from {MARGINS[0]} to {MARGINS[-1]}: beyond, every value becomes zero or the largest one"
    require(name, "margin", margin, is_whole(margin) and margin in MARGINS, allowed)
    require_flags(recipe, "reduce_amax")
    require(name, "amax_history_len", length, is_whole(length) and length >= 1, "an integer >= 1")
    algorithms = ("max", "most_recent")
    if algo not in algorithms and not callable(algo):
        raise choice_error(name, "amax_compute_algo", algo, algorithms, also="a callable(history) -> amax")
    allowed = "None or a callable(amax, old_scale, fp8_max, recipe) -> new scale"
    require(name, "scaling_factor_compute_algo", scale, scale is None or callable(scale), allowed)


def check_common(recipe: Any, formats: Sequence[Enum], overrides: Sequence[str | None]) -> None:
    """What every recipe has: one of these formats and overrides, and the flags of attention."""
    require_format(recipe, formats)
    require_flags(recipe, "fp8_dpa", "fp8_mha")
    require_choice(recipe, "backward_override", overrides)


def documented(recipe: Any) -> Any:
    """The recipe in the documented class below its own: a file that names a program's class loads only beside that."""
    above = (cls for cls in type(recipe).__mro__ if home_of(cls) == "te_core.recipe")
    kind: Any = next((cls for cls in above if "__dataclass_fields__" in vars(cls)), type(recipe))
    if type(recipe) is kind:
        return recipe
    found = kind.__new__(kind)
    vars(found).update({name: getattr(recipe, name) for name in kind.__dataclass_fields__})
    return found


def named_by_its_fields(cls: type[_R]) -> type[_R]:
    """Keywords that the recipe does not have are dropped with a warning, as documented: programs hand over options of
    layers, older releases and other recipes (Megatron-core params_dtype and device). A misspelt field is an error."""
    init: Callable[..., None] = cls.__init__
    known = [one.name for one in fields(cls)]  # type: ignore[arg-type]
    _fields.update(known)

    @functools.wraps(init)
    def __init__(self: _R, *args: Any, **given: Any) -> None:  # noqa: N807
        without = [name for name in given if name not in known]
        if without:
            strange = [name for name in without if name not in _fields | _OLDER]
            misspelt = {name: given[name] for name in strange if nearest(name, known)}
            if misspelt:
                raise name_error(cls.__name__, misspelt, known)
            dropped = ", ".join(f"{name}={given.pop(name)!r}" for name in without)
            text = f"{cls.__name__}: got {dropped}, which it does not have: dropped, it computes as without"
            warnings.warn(text, stacklevel=2)
        init(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[method-assign,assignment]
    return cls


def check_attribute(recipe: Any, name: str) -> None:
    """Refuse an assignment to what looks like a field and is none. Anything else may be kept on a recipe."""
    known = [*(one.name for one in fields(recipe)), *(n for n in dir(type(recipe)) if "_quant_" in n)]
    if name not in known and (meaning := meant([name], known, 0.8)):
        raise FieldNameError(
            type(recipe).__name__, f"an assignment to {name}{meaning}", ", ".join(known), "correct the name"
        )
