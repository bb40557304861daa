"""The backend that computes nothing: the ops floor checks arguments and makes outputs, and that is all.

A layer run on it tells the shapes and dtypes of its outputs, which is what a tracing compiler asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import local
from typing import Any

from te_core.backend import FILES, Backend
from te_core.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class MetaPlan:
    """Its own description."""

    spec: Any
    swizzled: bool = False

    def run(self, rt: Any, operands: Any) -> None:
        """Nothing."""


def _plan(rt: Any, spec: Any, *rest: Any) -> MetaPlan:
    return MetaPlan(spec)


def _run(rt: Any, *operands: Any) -> None:
    pass


def _copy_to_host(rt: Any, tensor: Any) -> Any:
    """There are no values."""
    raise UnsupportedError("copy_to_host", f"{tensor!r}", "tensors with memory", "run on a device, cpu or cuda")


class _Meta(Backend):
    """Every operation is declared, and does nothing."""

    def __init__(self) -> None:
        super().__init__("meta")
        self.executors, self.stream, self.copy_to_host = (lambda rt: local()), (lambda rt, name: 0), _copy_to_host

    def __getattr__(self, name: str) -> Any:
        if name not in FILES:
            raise AttributeError(f"no operation declares a function {name} of backends")
        return self.__dict__.setdefault(name, _plan if name.startswith("plan_") else _run)


backend: Backend = _Meta()
