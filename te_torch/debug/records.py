"""Statistics of tensors, kept on their devices until somebody reads them: a row of a buffer for each, merged in place.

    records = Records()
    records.feed(rt, ("fc1", "activation"), x, q)        # at an inspector's point; launches, waits for nothing
    records.numbers()                                    # {("fc1", "activation"): its record}; one copy a device

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
from te_core.statistics import empty, merge
from te_core.tensor import Tensor
from te_torch.runtime import to_core

_FIRST = 256  # rows of a device's first buffer


def place_of(rt: Runtime) -> torch.device:
    """Where the records of this runtime's tensors lie."""
    return torch.device("cuda", rt.device.index) if rt.device.kind == "cuda" else torch.device("cpu")


def empty_on(device: torch.device, *shape: int) -> torch.Tensor:
    """Records on a device into which nothing was merged."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.from_numpy(empty(*shape)).to(device)


def merged(parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """One record of several."""
    return parts[0] if len(parts) == 1 else merge(np.stack(parts))


class Records:
    """A row for each key and device, in buffers that are never moved: what was launched writes into them."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, list[torch.Tensor]] = {}
        self._rows: dict[torch.device, dict[Hashable, torch.Tensor]] = {}
        self._unused: dict[torch.device, torch.Tensor] = {}

    def row(self, key: Hashable, device: torch.device) -> torch.Tensor:
        """The row of this key, float64 [SLOTS] on the device; empty at the first call."""
        rows, buffers = self._rows.setdefault(device, {}), self._buffers.setdefault(device, [])
        if key not in rows:
            if len(rows) == sum(map(len, buffers)):
                buffers.append(empty_on(device, len(buffers[-1]) * 2 if buffers else _FIRST))
            rows[key] = buffers[-1][len(rows) - sum(map(len, buffers[:-1]))]
        return rows[key]

    def feed(
        self, rt: Runtime, key: Hashable, x: Tensor, q: QuantizedTensor | None = None, *, columnwise: bool = False
    ) -> None:
        """Merge a tensor, and what a cast made of it, into the row of this key: the arguments of `ops.statistics`."""
        ops.statistics(rt, x, to_core(self.row(key, place_of(rt))), q, columnwise=columnwise)

    def numbers(self) -> dict[Hashable, np.ndarray[Any, Any]]:
        """The record of each key that was fed, [SLOTS]; those of several devices merged. Waits for the devices."""
        found: dict[Hashable, list[np.ndarray[Any, Any]]] = {}
        for device, rows in self._rows.items():
            whole = torch.cat(self._buffers[device])[: len(rows)].cpu().numpy()
            for key, record in zip(rows, whole, strict=True):
                if record[0]:  # a count is the first number
                    found.setdefault(key, []).append(record)
        return {key: merged(parts) for key, parts in found.items()}

    def reset(self) -> None:
        """Begin anew, with the same rows."""
        with torch.inference_mode(False), torch.no_grad():
            for device, buffers in self._buffers.items():
                if device not in self._unused:
                    self._unused[device] = empty_on(device)
                for buffer in buffers:
                    buffer.copy_(self._unused[device].expand_as(buffer))
