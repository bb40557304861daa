"""The backend that computes nothing: the ops floor checks arguments and makes outputs, and that is all.

A layer run on it tells the shapes and dtypes of its outputs, which is what a tracing compiler asks for.
"""

from __future__ import annotations

from threading import local
from typing import Any


class _Plan:
    __slots__ = ("spec",)

    def __init__(self, spec: Any) -> None:
        self.spec = spec


class MetaBackend:
    """Answers every operation by doing nothing, and every plan with its own description."""

    name = "meta"

    def executors(self, rt: Any) -> local:
        """A place for nothing."""
        return local()

    def executor(self, rt: Any) -> None:
        """Nothing to write into."""

    def __getattr__(self, operation: str) -> Any:
        if operation.startswith("__"):
            raise AttributeError(operation)
        if operation.startswith("plan_"):
            return lambda rt, spec, *rest: _Plan(spec)
        return lambda *args: None


BACKEND = MetaBackend()
