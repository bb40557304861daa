"""`Backend`: a kind of device, and the functions that compute on it.

A backend is a folder, te_core/backends/<name>. An operation of te_core/ops declares which of its functions it calls and
in which file they stand (`operation` in te_core/ops/declare.py); a function is imported at its first use, and from then
on it is an attribute like any other. tests/core/test_backends.py compares what is declared with what is there.

The ops floor says what specs and operands are, and what is computed. Where it takes long to decide how (products,
attention), a `plan_` function does; the plan is immutable and shared by threads (`PlanCache.find`), and what runs it
fills in addresses and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np

from te_core.tensor import Device, Tensor

if TYPE_CHECKING:
    from te_core.runtime import Allocator, Runtime

#: Where a backend has a function: {its name: the file}. Operations add theirs as they are declared.
FILES = {
    **dict.fromkeys(("executor", "executors"), "executor"),
    **dict.fromkeys(("copy_from_host", "copy_to_host", "default_allocator", "order", "stream", "zero"), "memory"),
}


class Backend:
    """The functions of one kind of device. Each takes the runtime first."""

    #: Where threads keep their executors, as `executor`: one place for all runtimes that may share them.
    executors: Callable[[Runtime], local]
    #: An executor for the calling thread, which has none.
    executor: Callable[[Runtime], Any]
    #: Where memory comes from if nobody says so.
    default_allocator: Callable[[Device], Allocator]
    #: A stream beside the runtime's own, always the same for a name.
    stream: Callable[[Runtime, str], int]
    #: Later work of one stream (the last) waits for the work that is on another one now.
    order: Callable[[Runtime, int, int], None]
    #: The values as a NumPy array; waits for the runtime's stream.
    copy_to_host: Callable[[Runtime, Tensor], np.ndarray[Any, Any]]
    #: Fill a tensor from a NumPy array.
    copy_from_host: Callable[[Runtime, np.ndarray[Any, Any], Tensor], None]
    #: Fill a dense tensor with zero bytes.
    zero: Callable[[Runtime, Tensor], None]

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        """A function at its first use."""
        if name not in FILES:
            raise AttributeError(f"no operation declares a function {name} of backends")
        found = getattr(import_module(f"te_core.backends.{self.name}.{FILES[name]}"), name)
        return self.__dict__.setdefault(name, found)
