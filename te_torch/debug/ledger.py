"""The records behind the figures of a report: on the device, a row for each tensor, put aside at each step's end."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from te_core.ops import raw as ops
from te_core.quantized import Format, QuantizedTensor
from te_core.runtime import Runtime
from te_core.statistics import ADDED, LOWERED, RAISED, merge
from te_core.tensor import Tensor
from te_torch.debug.records import empty_on, place_of
from te_torch.exchange import all_reduce
from te_torch.runtime import to_core

NAMES = (*ADDED, *RAISED, *LOWERED)
_ADDED, _RAISED = len(ADDED), len(ADDED) + len(RAISED)
_REDUCTIONS = (slice(0, _ADDED), "sum"), (slice(_ADDED, _RAISED), "max"), (slice(_RAISED, None), "min")


class Kind(NamedTuple):
    """How an operand was quantized."""

    element: str  # "float8_e4m3"
    words: str  # "float8_e4m3 per tensor"
    largest: float  # that the element type holds
    stochastic: bool = False
    whole: bool = False  # not here: a part of it was seen, which is quantized once it is gathered


class Ledger:
    """Rows of statistics, put aside step by step; nothing waits for the device before `read`."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._open: dict[torch.device, torch.Tensor] = {}
        self._empty: dict[torch.device, torch.Tensor] = {}
        self._closed: list[tuple[int, list[torch.Tensor]]] = []
        self._order: dict[int, int] = {}
        self._kinds: dict[int, Kind] = {}

    def _records(self, device: torch.device) -> torch.Tensor:
        if device not in self._open:
            with torch.inference_mode(False), torch.no_grad():
                if device not in self._empty:
                    self._empty[device] = empty_on(device, self._rows)
                self._open[device] = self._empty[device].clone()
        return self._open[device]

    def enter(self, rt: Runtime, row: int, x: Tensor, cast: Any, out: Any, columns: bool) -> None:
        """Merge a tensor into its row; `columns`: its GEMM reads the columnwise copy of `out`."""
        self._order.setdefault(row, len(self._order))
        q = out if isinstance(out, QuantizedTensor) else None
        if q is not None:
            stochastic = cast is not None and cast.stochastic
            self._kinds[row] = Kind(q.dtype.name, repr(q.format), q.dtype.max, stochastic)
            if q.format.scaling == "nvfp4" and columns:
                q = None  # it may be transformed: there is nothing to compare it with
            elif q.format.scaling == "tensor":  # one scale, and equal codes: the copy that costs less
                columns = q.rowwise is None
            elif (q.columnwise if columns else q.rowwise) is None:  # tiles: a part has one copy that serves for both
                columns = not columns
        ops.statistics(rt, x, to_core(self._records(place_of(rt))[row]), q, columnwise=columns)

    def quantized_whole(self, row: int, form: Format) -> None:
        """What was entered in this row was a part of a tensor that was quantized now."""
        if row in self._order:
            self._kinds[row] = Kind(form.dtype.name, f"{form!r} once gathered", form.dtype.max, whole=True)

    def close(self, step: int, group: Any) -> None:
        """The end of a step: its rows are put aside, merged over the ranks of the group if there is one."""
        if group is not None:
            records = self._records(self._device)  # also on a rank that has seen nothing
            for part, reduction in _REDUCTIONS:
                numbers = records[:, part].contiguous()
                all_reduce("inspect", numbers, group, reduction)
                records[:, part] = numbers
        if self._open:
            self._closed.append((step, list(self._open.values())))
        self._open = {}

    def read(self) -> tuple[list[int], dict[int, tuple[int, Kind | None, dict[str, Any]]]]:
        """(steps, of the rows that were entered when they first were, how they were quantized, and what they held over
        these steps). Waits for the device."""
        steps = [step for step, _ in self._closed]
        if not steps:
            return steps, {}
        records = np.stack([merge(np.stack([part.cpu().numpy() for part in parts])) for _, parts in self._closed])
        found = {}
        for row in np.flatnonzero(records[:, :, 0].any(0)).tolist():
            numbers = dict(zip(NAMES, records[:, row].T, strict=True))
            # Of a row that only other ranks have entered this one does not know when, nor of what kind it is.
            found[row] = self._order.get(row, len(self._order)), self._kinds.get(row), figures(numbers)
        return steps, found


def figures(numbers: dict[str, Any]) -> dict[str, Any]:
    """What a report shows of a tensor's records over steps; NaN where there was none, or nothing quantized."""
    seen, compared = numbers["count"] > 0, numbers["compared"] > 0
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 100 / np.where(compared, numbers["compared"], np.nan)
        scale = 1 / numbers["scale_inv_max"]
        return {
            "count": numbers["count"],
            "amax": np.where(seen & np.isfinite(numbers["amax"]), numbers["amax"], np.nan),
            "underflow": numbers["underflows"] * share,
            "overflow": numbers["overflows"] * share,
            "snr": np.where(compared, 10 * np.log10(numbers["signal"] / numbers["noise"]), np.nan),
            "scale": np.where(compared & np.isfinite(scale) & (scale > 0), scale, np.nan),
            "nonfinite": numbers["nans"] + numbers["infinities"],
        }
