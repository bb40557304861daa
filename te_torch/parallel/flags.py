"""Words in host memory that the ranks of a group have mapped: GPUs write them and wait for them, in stream order.

A channel is one word, 0 or 1, from one rank to another. Who says something writes a 1, who takes it waits for the 1 and
writes a 0. The numbers are always these, so a captured graph replays them. No multiprocessor waits, and the host can
look on: beside each channel stands whether a stream waits for it now. So it can also end a wait that would never end
(`te_torch/parallel/watchdog.py`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from te_core.driver import flag_operations

_SHARED = Path("/dev/shm")  # memory, where the system has it
_WIDTH = 4  # words of a channel: its own, whether somebody waits for it, and two that keep it apart from the next
_PAGE = 4096
_HEAD = 16  # words before the first: whether the group has failed


def new_file(channels: int) -> str:
    """The path of a file for so many channels, which nobody has said anything on."""
    handle, path = tempfile.mkstemp(prefix="te-runtime-", dir=_SHARED if _SHARED.is_dir() else None)
    os.write(handle, bytes(-(-4 * (_HEAD + _WIDTH * channels) // _PAGE) * _PAGE))
    os.close(handle)
    return path


class Flags:
    """The channels of a group, as one rank has them."""

    def __init__(self, path: str, driver: Any, device: int) -> None:
        with open(path, "r+b") as file:
            self._pages = mmap.mmap(file.fileno(), 0)
        self._words = np.frombuffer(self._pages, np.uint32)
        self._marks = self._words[_HEAD + 1 :: _WIDTH]
        self._driver, self._device, self._made = driver, device, dict[tuple[str, int], Any]()
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._address = driver.register(device, self._host, len(self._pages))

    def say(self, stream: int, *channels: int) -> None:
        """Who takes these sees all that is on the stream before."""
        self._do(stream, "say", channels)

    def take(self, stream: int, *channels: int) -> None:
        """Later work of the stream comes behind what was said on these."""
        self._do(stream, "take", channels)

    def _do(self, stream: int, what: str, channels: tuple[int, ...]) -> None:
        made = self._made.get((what, *channels))  # type: ignore[arg-type]
        if made is None:
            asked: list[tuple[str, int, int]] = []
            for channel in channels:
                at = self._address + 4 * (_HEAD + _WIDTH * channel)
                if what == "say":
                    asked.append(("write", at, 1))
                else:
                    asked += [("write", at + 4, 1), ("wait", at, 1), ("write", at, 0), ("write", at + 4, 0)]
            made = self._made[(what, *channels)] = flag_operations(*asked)  # type: ignore[index]
        self._driver.flags(stream, made)

    def set(self, *channels: int) -> None:
        """Say something on these at once, for who has not begun to wait."""
        for channel in channels:
            self._words[_HEAD + _WIDTH * channel] = 1

    @property
    def failed(self) -> bool:
        """Whether a rank has given up."""
        return bool(self._words[0])

    def fail(self) -> None:
        """Tell the other ranks that this one has."""
        self._words[0] = 1

    def waiting(self, channels: range) -> list[int]:
        """Those of these channels that a stream waits for now."""
        return [channel for channel in channels if self._marks[channel]]

    def release(self, channels: range) -> None:
        """End the waits that there are now."""
        self.set(*self.waiting(channels))

    def close(self) -> None:
        """Let go of the memory, which no stream may use any more."""
        self._driver.unregister(self._device, self._host)
