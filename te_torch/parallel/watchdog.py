"""An end for waits that nobody would end: a rank that waits too long for another one goes on, and says so.

Waits between GPUs take no part of the host, so no call of a program notices a rank that died. One thread of the process
looks at what its groups wait for (`GroupPeers` in te_torch/parallel/peers.py). What waits for one announcement for
UB_TIMEOUT seconds has failed: its memory is filled with NaNs, so that no result of the meantime passes for one, all
waits are released, and the group's next call raises. The other ranks, whose memory shows it, do the same.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import Any

from te_core import env

_LOOKS = 50  # in the time of a timeout,
_LONGEST = 1.0  # but one in so many seconds
_RELEASES = 0.002  # seconds between the releases of a group that has failed: its streams may have more waits to come
_SPOILING = 5.0  # seconds


class Watchdog:
    """The thread, and what it looks at."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._over: weakref.WeakSet[Any] = weakref.WeakSet()  # those that have failed
        self._thread: threading.Thread | None = None

    def watch(self, group: Any) -> None:
        """Look at a group as long as it lives."""
        with self._lock:
            self._watched.add(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="te_torch.parallel.watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        since: dict[tuple[int, int], float] = {}  # by group and wait
        while True:
            timeout = float(env.number("UB_TIMEOUT"))
            pause = self._look(since, timeout)
            if pause is None:
                return
            time.sleep(pause)

    def _look(self, since: dict[tuple[int, int], float], timeout: float) -> float | None:
        """Look once: the seconds until the next time. (What sleeps keeps no group alive.)"""
        with self._lock:
            groups, now = list(self._watched), time.monotonic()
            if not groups:  # nothing is left, and the thread ends
                self._thread = None
                return None
        waits = {(id(group), wait) for group in groups if group not in self._over for wait in group.waiting()}
        for known in [*since]:
            if known not in waits:
                del since[known]
        for group in groups:
            if group in self._over:
                group.release()
                continue
            late = [
                wait for of, wait in waits if of == id(group) and now - since.setdefault((of, wait), now) >= timeout
            ]
            if late or group.failed:
                self._end(group, late[0] if late else None)
        return _RELEASES if len(self._over) else min(_LONGEST, timeout / _LOOKS)

    def _end(self, group: Any, wait: int | None) -> None:
        """Spoil what there is, and let go. Where even that has to wait, nobody can be told but by the process's end."""
        group.fail(wait)
        spoiling = threading.Thread(target=group.spoil, daemon=True)
        spoiling.start()
        spoiling.join(_SPOILING)
        if spoiling.is_alive():
            sys.stderr.write("te_torch: a rank has waited in vain for another one, and its GPU takes no more work\n")
            sys.stderr.flush()
            os.abort()
        self._over.add(group)
        group.release()


watchdog = Watchdog()
