"""The sums behind the figures of a report: on the device, one row for each tensor, closed at the end of each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from te_core import dtypes
from te_core.ops.quantize import dense_columns
from te_core.quantized import QuantizedTensor
from te_torch.debug.report import Kind
from te_torch.runtime import to_torch

#: Added up over microbatches and ranks: elements, NaNs and infinities; of quantized ones elements, those that are not
#: zero before and after, those beyond the largest, squares, squares of errors.
SUMS = ("count", "nonfinite", "cast", "nonzero", "left", "over", "squares", "errors")
#: The largest counts: amax, and of the scales by which values come back the largest and the smallest (negated).
MAXIMA = ("amax", "widest", "narrowest")
_COLUMNS = frozenset((("dgrad", "weight"), ("wgrad", "activation"), ("wgrad", "gradient")))


class Ledger:
    """Rows of sums, closed step by step; nothing waits for the device before `read`."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._open: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._closed: list[tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        self._entered: set[int] = set()  # in this step
        self._order: dict[int, int] = {}  # when a row was first seen
        self._kinds: dict[int, Kind] = {}

    def has(self, row: int) -> bool:
        """Whether this row has been seen in this step."""
        return row in self._entered

    def _buffers(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._open.get(device)
        if found is None:
            with torch.inference_mode(False):
                sums = torch.zeros(self._rows, len(SUMS), dtype=torch.float64, device=device)
                maxima = torch.full((self._rows, len(MAXIMA)), -torch.inf, device=device)
            found = self._open[device] = sums, maxima
        return found

    def enter(self, rt: Any, row: int, point: tuple[str, str], value: Any, cast: Any, out: Any) -> None:
        """Add a tensor to its row."""
        self._entered.add(row)
        self._order.setdefault(row, len(self._order))
        if isinstance(out, QuantizedTensor):
            stochastic = cast is not None and cast.stochastic
            self._kinds[row] = Kind(out.dtype.name, repr(out.format), out.dtype.max, stochastic)
        with torch.no_grad():
            x = to_torch(value)
            sums, maxima = self._buffers(x.device)
            new_sums, new_maxima = measured(rt, x, out, point in _COLUMNS)
            sums[row] += new_sums
            maxima[row] = torch.maximum(maxima[row], new_maxima)

    def close(self, step: int, group: Any) -> None:
        """The end of a step: its rows are put aside, reduced over the ranks of the group if there is one."""
        if group is not None:
            sums, maxima = self._buffers(self._device)  # also of a rank that has seen nothing
            torch.distributed.all_reduce(sums, torch.distributed.ReduceOp.SUM, group)
            torch.distributed.all_reduce(maxima, torch.distributed.ReduceOp.MAX, group)
        if self._open:
            self._closed.append((step, list(self._open.values())))
        self._open = {}
        self._entered = set()

    def read(self) -> tuple[list[int], dict[int, tuple[int, Kind | None, dict[str, Any]]]]:
        """(steps, for each row that was seen: its order, its kind, its figures over the steps)."""
        n = len(self._closed)
        sums = np.zeros((n, self._rows, len(SUMS)))
        maxima = np.full((n, self._rows, len(MAXIMA)), -np.inf)
        for i, (_, parts) in enumerate(self._closed):
            for part_sums, part_maxima in parts:
                sums[i] += part_sums.cpu().numpy()
                maxima[i] = np.maximum(maxima[i], part_maxima.cpu().numpy())
        found = {}
        for row in sorted(self._order, key=self._order.__getitem__):
            if sums[:, row, 0].any():
                of_row = dict(zip(SUMS, sums[:, row].T, strict=True)) | dict(zip(MAXIMA, maxima[:, row].T, strict=True))
                found[row] = self._order[row], self._kinds.get(row), figures(of_row)
        return [step for step, _ in self._closed], found


def measured(rt: Any, x: torch.Tensor, out: Any, columns: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums, maxima) of one tensor, as SUMS and MAXIMA name them."""
    x = x.reshape(-1, x.shape[-1]).float()
    finite = torch.isfinite(x)
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    count = torch.full_like(zero, x.numel())
    amax = torch.where(finite, x, 0).abs().amax() if x.numel() else zero.float()
    bad = (~finite).sum()
    low = torch.full_like(amax, -torch.inf)
    if not isinstance(out, QuantizedTensor):
        return torch.stack([count, bad.double(), *[zero] * 6]), torch.stack([amax, low, low])
    q = to_torch(dense_columns(rt, out, dtypes.float32, columns)).float()
    scale = to_torch(out.scale_inv)
    over = (x.abs() > out.dtype.max * scale.max()).sum()
    error = (x - q).double()
    parts = [count, bad, count, (x != 0).sum(), (q != 0).sum(), over, x.double().square().sum(), error.square().sum()]
    return torch.stack([p.double() for p in parts]), torch.stack([amax, scale.max(), -scale.min()])


def figures(of_row: dict[str, Any]) -> dict[str, Any]:
    """What a report shows of the sums and maxima of a tensor, over steps."""
    s = of_row
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 100 / np.where(s["cast"] > 0, s["cast"], np.nan)
        return {
            "amax": np.where(s["count"] > 0, s["amax"], np.nan),
            "underflow": (s["nonzero"] - s["left"]) * share,
            "overflow": s["over"] * share,
            "snr": np.where(s["cast"] > 0, 10 * np.log10(s["squares"] / s["errors"]), np.nan),
            "scale": np.where(s["cast"] > 0, 1 / s["widest"], np.nan),
            "nonfinite": np.where(s["count"] > 0, s["nonfinite"], 0.0),
        }
