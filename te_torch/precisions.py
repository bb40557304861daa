"""Precisions by number, 0 being none: what a tracing compiler can hold as a constant and guard on.

A number stays that of its precision for good, and is not given twice. Precisions with a user's functions in them may be
new in every step (a recipe made with a fresh lambda): only the last `_KEPT` of these are remembered.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from threading import RLock
from typing import NamedTuple

from te_core.errors import UnsupportedError
from te_core.precision import Precision, the_one
from te_core.recipe import Recipe, by_token, resolve
from te_torch.runtime import constant_at_trace

#: How a region changes what its recipe says: nothing, `emulate`, `strict`, `check_finite`, several of these; or high
#: precision that only records maxima.
PLAIN, EMULATE, STRICT, CALIBRATE, CHECK = 0, 1, 2, 4, 8

_KEPT = 64  # precisions with a user's functions


class _Numbered(NamedTuple):
    precision: Precision | None
    recipe: Recipe | None  # what it was resolved from, as it was then
    parts: tuple[int, ...] = ()  # the numbers of a module's GEMMs, where they differ; the precision is the first one's
    users: bool = False  # a user's functions are in it


_by_number: dict[int, _Numbered] = {0: _Numbered(None, None)}
#: In what a precision keeps: its number, what it is in each mode, and the numbers of several of which it is the first.
_NUMBER = "number"
_counter = itertools.count(1)
_numbering = RLock()


def precision_of(number: int) -> Precision | None:
    """The precision of this number; None for 0."""
    found = _by_number.get(number)
    return (_known(number) if found is None else found).precision


def recipe_of(number: int) -> Recipe | None:
    """The recipe of this number, as it was when the number was given: what user-supplied rules are shown."""
    return _known(number).recipe


def _known(number: int) -> _Numbered:
    found = _by_number.get(number)
    if found is None:
        raise UnsupportedError(
            "autocast",
            f"a recipe with functions of yours, {_KEPT} such recipes after its region ended",
            "one recipe object that is kept, or recipes without functions",
            "make the recipe once, not in every step",
        )
    return found


def number_of(recipe: Recipe, mode: int = PLAIN) -> int:
    """The number of what this recipe says now, in a region of this mode."""
    precision = resolve(recipe)
    found: Precision | None = precision.kept.get(mode) if mode else precision
    if found is None:
        if mode & CALIBRATE:
            x, w = (o and replace(o, scaling="calibrate") for o in (precision.input, precision.weight))
            changed = replace(precision, input=x, weight=w, grad=None, output=None, grad_input=None, attention=None)
        else:
            changed = replace(
                precision, emulate=bool(mode & EMULATE), strict=bool(mode & STRICT), check_finite=bool(mode & CHECK)
            )
        one = the_one(changed)  # not inside: it may run a user's code, under a lock of its own
        with _numbering:
            found = precision.kept.setdefault(mode, one)
    return number_of_precision(found, recipe)


def number_of_precision(precision: Precision, recipe: Recipe | None) -> int:
    """The number of a precision (one that `te_core.precision.the_one` gave)."""
    number: int | None = precision.kept.get(_NUMBER)
    if number is not None:
        return number
    kept = copy.copy(recipe)  # by rules of its own, so not inside
    with _numbering:
        number = precision.kept.get(_NUMBER)
        if number is not None:  # of another thread's, meanwhile
            return number
        number, users = _next(precision), _has_functions(precision)
        _by_number[number] = _Numbered(precision, kept, users=users)
        precision.kept[_NUMBER] = number  # now all is there that goes with it
        if users:
            for old in [n for n, known in _by_number.items() if known.users][:-_KEPT]:
                _forget(old)
    return number


def number_of_several(numbers: tuple[int, ...]) -> int:
    """One number for the precisions of a module's GEMMs; that of all of them where they are the same."""
    if len(set(numbers)) == 1:
        return numbers[0]
    with _numbering:
        first = _known(numbers[0])
        assert first.precision is not None  # numbers of which some are 0 are no module's
        number: int | None = first.precision.kept.get(numbers)
        if number is None:
            number = first.precision.kept[numbers] = _next(first.precision)
            _by_number[number] = _Numbered(first.precision, first.recipe, numbers)
    return number


def part_of(number: int, gemm: int) -> int:
    """The number of the precision of one GEMM, of the number that its module has."""
    parts = _known(number).parts
    return parts[gemm] if parts else number


def _has_functions(precision: Precision) -> bool:
    history = precision.history
    rules = (precision.input, precision.weight, precision.grad, precision.output, precision.grad_input)
    return (
        precision.factory is not None
        or any(rule is not None and rule.custom is not None for rule in rules)
        or (history is not None and (callable(history.amax_algo) or history.scale_algo is not None))
    )


def _forget(number: int) -> None:
    old = _by_number.pop(number).precision
    assert old is not None
    old.kept.clear()
    for other, known in list(_by_number.items()):
        if number in known.parts:
            del _by_number[other]
            known.precision.kept.pop(known.parts, None)  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------- at trace time


@constant_at_trace
def number_at_trace(token: int, mode: int) -> int:
    """`number_of` at trace time, where the recipe is a constant of the program known by its token."""
    return number_of(by_token(token), mode)


def says_by_module(number: int) -> bool:
    """Whether this is of a custom recipe, which says something else for each module."""
    precision = precision_of(number)
    return precision is not None and precision.factory is not None


is_custom = constant_at_trace(says_by_module)


@constant_at_trace
def reads_quantized(number: int, gemm: int = 0) -> bool:
    """Whether no GEMM of this precision reads the weight itself, which then need not be in the activation dtype."""
    precision = precision_of(part_of(number, gemm))
    rule = None if precision is None else precision.weight
    if rule is None or precision.backward == "high_precision":  # type: ignore[union-attr]
        return False
    parts = (rule, rule.columnwise or rule)
    return all(part.scaling not in ("calibrate", "custom", "none") for part in parts)


def draws(number: int) -> bool:
    """Whether backward in this precision rounds stochastically, and so needs random numbers."""
    return number < 0


def _next(precision: Precision | None) -> int:
    """A number for a precision: less than 0 if its backward rounds stochastically. Each forward asks for that."""
    stochastic = precision is not None and precision.grad is not None and precision.grad.stochastic
    return -next(_counter) if stochastic else next(_counter)
