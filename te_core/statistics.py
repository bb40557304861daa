"""What is known of a tensor's values, and of what a cast made of them: a record of float64 numbers that merges.

A record is SLOTS numbers. Each either adds up, or is a maximum, or a minimum, so records of microbatches and of ranks
merge slot by slot (`merge`), in any order. `te_core.ops.statistics` merges a tensor into a record on the device;
`Statistics` reads one on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

#: The numbers of a record: those that add up, those that are maxima, those that are minima. Kernels count on the order.
ADDED = (
    "count", "sum", "squares", "magnitudes", "nonzero", "nans", "infinities",
    "compared", "underflows", "overflows", "saturated", "noise", "signal",
)  # fmt: skip
RAISED = ("max", "amax", "scale_inv_max")
LOWERED = ("min", "amin", "scale_inv_min")

SLOTS = len(ADDED) + len(RAISED) + len(LOWERED)
_RAISED = slice(len(ADDED), len(ADDED) + len(RAISED))
_LOWERED = slice(len(ADDED) + len(RAISED), SLOTS)


def empty(*shape: int) -> F64:
    """Records into which nothing was merged."""
    records = np.zeros((*shape, SLOTS))
    records[..., _RAISED], records[..., _LOWERED] = -np.inf, np.inf
    return records


def merge(records: F64) -> F64:
    """The record of all [n, .., SLOTS] together: [.., SLOTS]."""
    merged = records.sum(0)
    merged[..., _RAISED] = records[..., _RAISED].max(0, initial=-np.inf)
    merged[..., _LOWERED] = records[..., _LOWERED].min(0, initial=np.inf)
    return np.asarray(merged)


class Statistics:
    """A record, read: the numbers by their names, and what follows from them.

    Of the values: count, sum, squares (their sum), magnitudes (the sum of |x|), nonzero, nans, infinities; max, min,
    amax (max |x|), amin (the smallest |x| that is not 0). NaN is left out of these four, which are +-inf if nothing is
    left. Of those that were compared with what a cast made of them: compared (how many), underflows (nonzero values
    that became 0), overflows (|x| above the largest value of the format at the scale there was), saturated (codes
    that are the largest), noise and signal (sums of (x - q)^2 and x^2), scale_inv_max and scale_inv_min.
    """

    __slots__ = ("record",)

    def __init__(self, record: Iterable[float]) -> None:
        self.record = tuple(float(number) for number in record)

    def __getattr__(self, name: str) -> float:
        place = _PLACES.get(name)
        if place is None:
            raise AttributeError(f"Statistics has no {name!r}; it has {', '.join(_PLACES)}")
        return self.record[place]

    @property
    def mean(self) -> float:
        """Of all values."""
        return self.sum / self.count if self.count else math.nan

    @property
    def std(self) -> float:
        """The unbiased standard deviation of all values together."""
        if self.count < 2:
            return math.nan
        return math.sqrt(max(self.squares - self.sum * self.mean, 0.0) / (self.count - 1))

    @property
    def l1_norm(self) -> float:
        """The sum of |x|."""
        return self.magnitudes

    @property
    def l2_norm(self) -> float:
        """The root of the sum of squares."""
        return math.sqrt(self.squares) if self.squares >= 0 else math.nan

    @property
    def dynamic_range(self) -> float:
        """log2 of the largest over the smallest magnitude that is not 0; infinite if there is none."""
        return math.log2(self.amax) - math.log2(self.amin) if self.nonzero and self.amax > 0 else math.inf

    @property
    def underflow_percent(self) -> float:
        """Of the compared values, those that were not 0 and became 0."""
        return self._share(self.underflows)

    @property
    def overflow_percent(self) -> float:
        """Of the compared values, those beyond the format's range at the scale there was."""
        return self._share(self.overflows)

    @property
    def saturated_percent(self) -> float:
        """Of the compared values, those that became the format's largest."""
        return self._share(self.saturated)

    @property
    def mse(self) -> float:
        """Mean square error of what the cast made."""
        return self.noise / self.compared if self.compared else math.nan

    @property
    def snr_db(self) -> float:
        """Signal over noise in decibels; infinite if nothing was lost."""
        if not self.compared or math.isnan(self.noise) or math.isnan(self.signal):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 else -math.inf

    def _share(self, part: float) -> float:
        return 100 * part / self.compared if self.compared else math.nan

    def as_dict(self) -> dict[str, float]:
        """Every number of the record by its name."""
        return dict(zip(_PLACES, self.record, strict=True))

    def __repr__(self) -> str:
        return f"Statistics({', '.join(f'{name}={value:.6g}' for name, value in self.as_dict().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Statistics, (self.record,)


_PLACES = {name: place for place, name in enumerate((*ADDED, *RAISED, *LOWERED))}
