"""A device that is not there, for offloading: CPU tensors count as a device's, and what is done is noted in order.

Copies are late: a copy's bytes move when somebody waits for it, or when the next copy begins, as a slow bus would do.
Memory that is to be filled holds ones until then, so whoever reads before waiting computes nonsense, and what is let go
of before its copy was made is noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from te_torch.training.offload import device
from te_torch.training.offload.device import Pair


class RecordedSide:
    """As `Side`, with the CPU as the device."""

    def __init__(self) -> None:
        self.copied: list[tuple[str, int]] = []  # ("out" or "back", bytes) of each tensor
        self.forgotten = 0
        self.in_capture = False
        self.buffers = 0  # of the host that were made
        self._hosts: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id
        self._waiting: list[tuple[object, list[tuple[torch.Tensor, Callable[[], torch.Tensor | None]]]]] = []

    def host(self, nbytes: int) -> torch.Tensor:
        """Memory that counts as pinned."""
        made = torch.full((nbytes,), 255, dtype=torch.uint8)
        self.buffers += 1
        self._hosts[id(made)] = made
        return made

    @property
    def held(self) -> int:
        """Bytes of the host that are held now."""
        return sum(t.numel() for t in self._hosts.values())

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory that counts as a device's."""
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def copy(self, pairs: Sequence[Pair]) -> Any:
        """Note the copies; they are made when somebody waits."""
        self._settle(None)
        ticket = object()
        late: list[tuple[torch.Tensor, Callable[[], torch.Tensor | None]]] = []
        for to, source in pairs:
            out = id(to) in self._hosts
            self.copied.append(("out" if out else "back", source.numel()))
            late.append((to, weakref.ref(source) if out else partial(_itself, source)))
        self._waiting.append((ticket, late))
        return ticket

    def wait(self, ticket: Any) -> None:
        """The copies up to this one are made now."""
        self._settle(ticket)

    def _settle(self, ticket: Any) -> None:
        if ticket is None or any(t is ticket for t, _ in self._waiting):
            while self._waiting:
                done, pairs = self._waiting.pop(0)
                for to, find in pairs:
                    source = find()
                    assert source is not None, "memory was let go of before the copy of it was made"
                    to.copy_(source)
                if done is ticket:
                    break

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note how many copies nobody will wait for; they are made."""
        self.forgotten += len(list(tensors))
        self._settle(None)

    def capturing(self) -> bool:
        """Whether a test says that a capture runs."""
        return self.in_capture

    def moved(self, way: str) -> int:
        """Bytes that went this way."""
        return sum(n for direction, n in self.copied if direction == way)


def _itself(t: torch.Tensor) -> torch.Tensor:
    return t


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> RecordedSide:
    """CPU tensors travel."""
    made = RecordedSide()
    monkeypatch.setattr(device, "side_of", lambda where, stream=None: made if where.type == "cpu" else None)
    return made
