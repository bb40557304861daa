"""Names that annotations and imports of programs need, of parts that are not built: a class refuses when it is made, a
function when it is called. Which they are, and what to use in their place: te_torch/not_built.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from te_torch import not_built


def refusing(place: str) -> dict[str, Any]:
    """The documented names of this place, which refuse."""
    names, _ = not_built.REFUSING[place]
    return {name: _class(place, name) if name[0].isupper() else _function(place, name) for name in names}


class _Named(type):
    """Of a class that cannot be made: documented class methods are not there, either."""

    _place: tuple[str, str]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise not_built.refusal(*cls._place, not_built.NotBuiltError)


def _class(place: str, name: str) -> type:
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        raise not_built.refusal(place, name)

    doc = f"Can be named, not made: {not_built.REFUSING[place][1]}."
    return _Named(
        name,
        (torch.nn.Module,),
        {"__init__": __init__, "__doc__": doc, "__module__": __name__, "_place": (place, name)},
    )


def _function(place: str, name: str) -> Callable[..., NoReturn]:
    def function(*args: Any, **options: Any) -> NoReturn:
        raise not_built.refusal(place, name)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Can be named, not called: {not_built.REFUSING[place][1]}."
    return function


def has_no_grouped_path(recipe: Any, dtype: torch.dtype) -> bool:
    """Whether groups of a GroupedLinear are multiplied as one tensor: no, one after another."""
    return False
