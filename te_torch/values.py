"""What arguments may be: the kinds of values that constructors and functions take, and the errors for all others."""

from __future__ import annotations

import inspect
import math
from numbers import Real
from operator import index
from typing import Any

import numpy as np
import torch

from te_core.errors import ArgumentError
from te_core.spelling import name_error

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OptionError(ArgumentError, AssertionError):
    """An argument that a constructor does not take. Also the AssertionError that is documented for some of them."""


def is_size(value: Any) -> bool:
    """Whether a value is a positive integer, of Python's or of a kind that stands for one."""
    if isinstance(value, bool | torch.Tensor):
        return False
    try:
        return index(value) >= 1
    except TypeError:
        return False


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_flag(value: Any) -> bool:
    """Whether a value says yes or no: nothing whose truth is an accident of its type. (torch's older exporter makes
    tensors of flags.)"""
    if isinstance(value, torch.Tensor):
        return bool(torch.jit.is_tracing()) and value.dtype is torch.bool  # type: ignore[attr-defined]
    return isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1))


def check_flags(operation: str, **given: Any) -> None:
    """Refuse what does not say yes or no. None, which means "as usual", is for the function to understand."""
    for name, value in given.items():
        if value is not None and not is_flag(value):
            raise ArgumentError(operation, f"{name}={value!r}", "True or False", f"correct {name}")


def check_numbers(operation: str, **given: Any) -> None:
    """Refuse what is no number of at least 0."""
    for name, value in given.items():
        if not is_number(value) or value < 0:
            raise ArgumentError(operation, f"{name}={value!r}", "a number >= 0", f"correct {name}")


def check_model(operation: str, model: Any) -> None:
    """Refuse what is no module."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(operation, f"a model of type {type(model).__name__}", "a torch.nn.Module", "pass the model")


def integer(operation: str, name: str, value: Any) -> int:
    """An integer: Python's, NumPy's, or one in a tensor, for which the host waits if it is on a GPU."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise ArgumentError(operation, f"{name}={value!r}", "an integer", f"correct {name}")


def splits_of(operation: str, m_splits: Any) -> list[int]:
    """The rows of each group, on the host."""
    if isinstance(m_splits, torch.Tensor):
        if m_splits.dtype in _INTEGERS and m_splits.ndim == 1:
            return m_splits.tolist()
        got = f"a tensor of {m_splits.dtype}, of shape {tuple(m_splits.shape)}"
        do = "m_splits.flatten().to(torch.int64)"
    else:
        try:
            return [index(m) for m in m_splits]
        except TypeError:
            got, do = repr(m_splits), "a number of rows for each group, as [8, 8]"
    raise ArgumentError(
        operation, f"m_splits: {got}", "a list of integers, or an integer tensor of one dimension", f"pass {do}"
    )


class NamedOptions:
    """A class whose constructor says which option a misspelt one was meant to be."""

    #: A class, the names of its options (None: it takes any), and whether it is made as every object is. Constants of a
    #: class, which a compiler follows; not those of one below it that does not call `__init_subclass__`.
    _made: tuple[type | None, tuple[str, ...] | None, bool] = None, None, True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        found = list(inspect.signature(cls.__init__).parameters.values())
        takes_any = any(p.kind is p.VAR_KEYWORD for p in found)
        known = None if takes_any else tuple(p.name for p in found if p.name != "self")
        cls._made = cls, known, super(NamedOptions, cls).__new__ is object.__new__

    def __new__(cls, *args: Any, **given: Any) -> Any:
        """A new object, before it is initialised."""
        of, known, plainly = cls._made
        if of is cls and known is not None and (unknown := {name: given[name] for name in given if name not in known}):
            raise name_error(cls.__name__, unknown, known)
        return super().__new__(cls) if plainly else super().__new__(cls, *args, **given)
