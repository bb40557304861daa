"""Threads that run at once, for tests of what they share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE = 60.0


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Their results, each in a thread of its own, all begun at once; the first error is raised."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def work(i: int) -> None:
        start.wait()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for good"
    if errors:
        raise errors[0]
    return results


def ends(function: Callable[[], Any]) -> Any:
    """Its result; an error if it waits for itself."""
    return together(function)[0]


@contextmanager
def switching() -> Iterator[None]:
    """Threads give way to one another all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
