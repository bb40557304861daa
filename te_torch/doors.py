"""The one question whether a compiler traces what runs, and the doors at which it is asked.

A door is a function that users call, a forward, or a hook. It has a form for eager code and one for traced code, and
what lies below belongs to one of them, or to both: nothing there asks again. (Exporters are tracers, too; what is
exported is a question of its own: `te_torch/export`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from te_torch.runtime import constant_at_trace, untraced

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def either(eager: T, traced: T) -> T:
    """What eager code is given at a door, or what traced code is."""
    return traced if torch.compiler.is_compiling() else eager


def door(eager: F, traced: Callable[..., Any]) -> F:
    """The function, which traced code calls in its other form."""

    @wraps(eager)
    def entered(*args: Any, **options: Any) -> Any:
        return traced(*args, **options) if torch.compiler.is_compiling() else eager(*args, **options)

    return cast("F", entered)


def never_traced(reason: str) -> Callable[[F], F]:
    """A decorator: a compiler breaks its graph at the function, which runs eagerly with all that it calls."""

    def decorate(function: F) -> F:
        made: list[Any] = []

        @constant_at_trace
        def prepare() -> None:
            made[:] = made or [untraced(function, reason)]

        def traced(*args: Any, **options: Any) -> Any:
            prepare()
            return made[0](*args, **options)

        return door(function, traced)

    return decorate


@contextmanager
def as_traced(enabled: bool) -> Iterator[None]:
    """Inside, all doors open for traced code, or for eager code: torch.export says so by the same flag."""
    compiler: Any = torch.compiler
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, enabled
    try:
        yield
    finally:
        compiler._is_compiling_flag = before
