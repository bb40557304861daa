"""Doors for precision debugging: inspectors that are chosen anew in each iteration, and who is told of new modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from te_torch.base import feature_folders


class Choice:
    """Stands in the place of a module's inspectors where a forward chooses them."""

    current: tuple[Any, ...] | None  # what was chosen for the forward that runs
    generation = ""  # another one when a compiled program has to ask again

    def touches(self, module: Any) -> bool:
        """Whether anybody may look at this module in some iteration."""
        return False

    @property
    def high(self) -> tuple[bool, bool]:
        """Of attention: whether its forward stays in high precision, and its backward."""
        return False, False

    def choose(self, module: Any, precision: int) -> None:
        """Set `current` for a forward in this precision (0: high precision), or `module.inspector` to None."""
        raise NotImplementedError

    def refuse_traced(self, module: Any, precision: int) -> None:
        """At trace time: an error, unless nobody looks at a forward in this precision."""
        raise NotImplementedError


class Watching:
    """Who is told of every new module that has inspectors: nobody, or precision debugging."""

    new: Callable[[Any], None] | None = None


watching = Watching()
feature_folders.watch()
