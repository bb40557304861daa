"""Statistics of tensors, kept on their devices until somebody reads them: a row of a buffer for each, merged in place.

    records = Records()
    records.feed(rt, ("fc1", "activation"), x, q)        # at an inspector's point; launches, waits for nothing
    records.read()                                       # {("fc1", "activation"): Statistics}; one copy a device

What a row holds: `te_core.statistics`. Rows of several ranks merge as those of several microbatches do (`merge`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from te_core.ops import raw as ops
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.statistics import Statistics, empty, merge
from te_core.tensor import Tensor
from te_torch.runtime import to_core

_FIRST = 256  # rows of a device's first buffer


class _Rows:
    """The rows of one device, in buffers that are never moved: what was launched writes into them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[torch.Tensor] = []
        self.rows: list[torch.Tensor] = []
        self.unused: torch.Tensor | None = None

    def add(self) -> int:
        """A further row, empty."""
        if len(self.rows) == sum(len(b) for b in self.buffers):
            count = _FIRST if not self.buffers else len(self.buffers[-1]) * 2
            with torch.inference_mode(False), torch.no_grad():
                buffer = torch.from_numpy(empty(count)).to(self.device)
            self.buffers.append(buffer)
        start = sum(len(b) for b in self.buffers[:-1])
        self.rows.append(self.buffers[-1][len(self.rows) - start])
        return len(self.rows) - 1

    def clear(self) -> None:
        """All rows empty again."""
        with torch.inference_mode(False), torch.no_grad():
            for buffer in self.buffers:
                if self.unused is None:
                    self.unused = torch.from_numpy(empty()).to(self.device)
                buffer.copy_(self.unused.expand_as(buffer))


def merged(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """One record of several."""
    return parts[0] if len(parts) == 1 else merge(np.stack(parts))


class Records:
    """A row for each key and device."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, _Rows] = {}
        self._places: dict[tuple[torch.device, Hashable], int] = {}

    def row(self, key: Hashable, device: torch.device) -> torch.Tensor:
        """The row of this key, float64 [SLOTS] on the device; empty at the first call."""
        rows = self._devices.get(device)
        if rows is None:
            rows = self._devices[device] = _Rows(device)
        place = self._places.get((device, key))
        if place is None:
            place = self._places[device, key] = rows.add()
        return rows.rows[place]

    def feed(
        self, rt: Runtime, key: Hashable, x: Tensor, q: QuantizedTensor | None = None, *, columnwise: bool = False
    ) -> None:
        """Merge a tensor, and what a cast made of it, into the row of this key: the arguments of `ops.statistics`."""
        device = torch.device(rt.device.kind, rt.device.index) if rt.device.kind == "cuda" else torch.device("cpu")
        ops.statistics(rt, x, to_core(self.row(key, device)), q, columnwise=columnwise)

    def numbers(self) -> dict[Hashable, np.ndarray[Any, Any]]:
        """The record of each key that was fed, [SLOTS]; those of several devices merged. Waits for the devices."""
        found: dict[Hashable, list[np.ndarray[Any, Any]]] = {}
        for device, rows in self._devices.items():
            if not rows.buffers:
                continue
            whole = torch.cat(rows.buffers)[: len(rows.rows)].cpu().numpy()
            fed = set(whole[:, 0].nonzero()[0].tolist())  # a count is the first number
            for (place_device, key), place in self._places.items():
                if place in fed and place_device == device:
                    found.setdefault(key, []).append(whole[place])
        return {key: merged(parts) for key, parts in found.items()}

    def read(self, reset: bool = True) -> dict[Hashable, Statistics]:
        """What was fed since the last reading, by key (keys that were not fed are left out)."""
        found = {key: Statistics(numbers) for key, numbers in self.numbers().items()}
        if reset:
            self.reset()
        return found

    def reset(self) -> None:
        """Begin anew, with the same rows."""
        for rows in self._devices.values():
            rows.clear()
