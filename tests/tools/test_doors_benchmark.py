"""The benchmark of doors on a door that is not there: memory that is only let go of when somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import doors


def test_peaks_of_waited_steps_and_of_a_host_that_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most, threads = [0], [0], set()

    def make(*shape: int) -> tuple[Callable[[], Any], Callable[[], None], Callable[[], int]]:
        def step() -> None:
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            threads.add(len(set(threading.enumerate()) - before))

        return step, lambda: alive.__setitem__(0, 0), lambda: most[0] << 20

    monkeypatch.setitem(doors.MAKERS, "cupy", make)
    before = set(threading.enumerate())
    tiny, large = doors.measured("cupy")
    assert (tiny["peak MiB"], tiny["peak ahead MiB"]) == (1, 20)
    assert {"host us", "us", "busy host us", "busy us"} <= large.keys()
    assert threads == {0, 1} and not set(threading.enumerate()) - before


@pytest.mark.parametrize("wrong", [True, False])
def test_a_busy_thread_ends(wrong: bool) -> None:
    before = set(threading.enumerate())
    try:
        with doors.busy():
            assert len(set(threading.enumerate()) - before) == 1
            if wrong:
                raise RuntimeError
    except RuntimeError:
        assert wrong
    assert not set(threading.enumerate()) - before
