"""What `inspect` saw, as figures over steps: the table, and what the HTML page, the pictures and the JSON show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from te_torch.debug.ledger import Kind
from te_torch.debug.page import page
from te_torch.debug.pictures import draw
from te_torch.listing import table

#: The SNR in dB that a format leaves to values which fit in it, by its element type: what is missing is trouble.
#: (m bits of mantissa: an error of 2^-m / sqrt(12) on values between 1 and 2; what random signs and sizes add is 1 dB.)
EXPECTED = {"float8_e4m3": 30.5, "float8_e5m2": 24.5, "float4_e2m1": 18.0}
#: More dB are no worse: nothing of the tensor arrived.
WORST = 60.0
SHOWN = 20  # rows of a printed table

Array = Any  # np.ndarray of float64, one element for each step; NaN where nothing was seen


class Series(NamedTuple):
    """One tensor of a layer as its GEMMs read or made it, over the steps of a report."""

    layer: str
    gemms: tuple[str, ...]  # two where both read the same
    tensor: str
    kind: Kind | None  # None: it is not quantized
    count: Array  # elements
    amax: Array
    underflow: Array  # % of its elements that became zero
    overflow: Array  # % beyond the largest that its scale can hold
    snr: Array  # dB
    scale: Array  # what values are multiplied by; of several the smallest
    nonfinite: Array  # NaNs and infinities
    order: int  # in which the layers ran

    @property
    def gemm(self) -> str:
        """The GEMMs, in words."""
        return ", ".join(self.gemms)

    @property
    def name(self) -> str:
        """Layer, tensor, and of which GEMMs."""
        return f"{self.layer} {self.tensor} ({self.gemm})"

    def lost(self) -> Array:
        """dB lost in each step: below what the format can do, and by elements that became zero."""
        if self.kind is None or self.kind.whole:
            lost = np.where(np.isnan(self.amax), np.nan, 0.0)
        else:
            expected = EXPECTED.get(self.kind.element, 24.0) - 3.0 * self.kind.stochastic
            below = np.clip(expected - self.snr, 0.0, WORST)
            gone = -10 * np.log10(np.maximum(1 - self.underflow / 100, 1e-6))
            lost = np.clip(below + gone, 0.0, WORST)
        return np.where(self.nonfinite > 0, WORST, lost)

    def trouble(self) -> float:
        """The mean of what was lost, in dB."""
        return _known(self.lost(), np.mean)

    def why(self) -> str:
        """What the trouble is, in words; "" where there is none worth a word."""
        bad = self.nonfinite > 0
        if bad.any():
            return f"NaN or infinite values, first in its look {int(np.argmax(bad)) + 1}"
        if self.kind is not None and self.kind.whole:
            return "not shown: a rank's rows are no whole blocks"
        if self.kind is None or self.trouble() < 0.5:
            return ""
        said = []
        scale, amax = (a[np.isfinite(a) & (a > 0)] for a in (self.scale, self.amax))
        if len(scale) >= 3 and len(amax) >= 3 and scale.min() == scale.max() and amax.max() / amax.min() >= 4:
            said.append(f"scale {scale[0]:.3g} stood still while amax moved by {amax.max() / amax.min():.3g}")
        over, under = _known(self.overflow, np.mean), _known(self.underflow, np.mean)
        used = np.maximum(self.amax * self.scale, 1e-30) / self.kind.largest
        most = _known(used, np.max)
        if over > 0 and most > 1.01:  # a current scale is rounded
            said.append(f"{over:.3g} % beyond what its scale can hold, the largest {most:.3g} times")
        if under >= 1:
            unused = -_known(np.log2(used), np.mean)
            room = f"its scale is 2^{unused:.0f} too small" if unused > 3 else "its values spread too wide for it"
            said.append(f"{under:.3g} % became zero: {room}")
        return "; ".join(said) or "its values spread too wide for the format"


class Report:
    """What was seen. Printable, worst first; `to_html`, `to_png` and `to_json` write it, `as_dict` is for programs."""

    def __init__(self, steps: list[int], series: list[Series], unseen: list[str], blind: int = 0) -> None:
        self.steps = steps  # those that were looked at
        nonfinite = [s for s in series if (s.nonfinite > 0).any()]
        # What is no number spreads: the first step counts, and there the first layer that ran.
        nonfinite.sort(key=lambda s: (int(np.argmax(s.nonfinite > 0)), s.order))
        others = sorted((s for s in series if not (s.nonfinite > 0).any()), key=lambda s: (-s.trouble(), s.order))
        self.series = nonfinite + others  # the worst first
        self.blind = blind  # how many steps were looked at in vain: no layer ran eagerly
        self.unseen = unseen  # layers that were asked for and did not run where they can be looked at

    @property
    def worst(self) -> Series | None:
        """The tensor in the most trouble; None where nothing lost half a dB."""
        first = self.series[0] if self.series else None
        return first if first is not None and first.trouble() >= 0.5 else None

    def layers(self) -> list[str]:
        """The layers, each where the first of its tensors stands."""
        return list(dict.fromkeys(s.layer for s in self.series))

    def as_dict(self) -> dict[str, Any]:
        """{"steps": [...], "series": [{"layer": ..., "gemms": [...], "snr": [...], ...}], "unseen": [layer, ...]}."""
        return {
            "steps": self.steps,
            "series": [
                {
                    "layer": s.layer,
                    "gemms": list(s.gemms),
                    "tensor": s.tensor,
                    "format": None if s.kind is None else s.kind.words,
                    "trouble": s.trouble(),
                    "why": s.why(),
                    **{name: _plain(getattr(s, name)) for name in FIGURES},
                }
                for s in self.series
            ],
            "unseen": self.unseen,
        }

    def to_json(self, path: str | Path) -> Path:
        """Write `as_dict` to a file."""
        return _write(path, json.dumps(self.as_dict()))

    def to_html(self, path: str | Path, title: str = "Precision") -> Path:
        """Write a page that needs nothing but a browser: no network, no second file."""
        return _write(path, page(self, title))

    def to_png(self, folder: str | Path) -> list[Path]:
        """Draw a heat map of layers and steps, and the curves of the worst layers. Needs matplotlib."""
        return draw(self, Path(folder))

    def __str__(self) -> str:
        lines = [self.verdict(), *[f"not seen: {', '.join(self.unseen)}"] * bool(self.unseen)]
        if not self.series:
            return "\n".join(lines)
        cells = [
            (
                s.layer, s.tensor, s.gemm, "-" if s.kind is None else s.kind.words, f"{s.trouble():.1f}",
                _figure(s.snr, np.mean, ".1f"), _figure(s.underflow, np.mean), _figure(s.overflow, np.mean),
                _figure(s.amax, np.max), _figure(s.scale, lambda known: known[-1]), s.why(),
            )
            for s in self.series[:SHOWN]
        ]  # fmt: skip
        headings = ("layer", "tensor", "gemms", "format", "dB lost", "SNR dB", "underflow %", "overflow %", "amax",
                    "scale", "why")  # fmt: skip
        left = len(self.series) - len(cells)
        if left:
            more = f"and {left} tensors with less trouble: .series has all of them, .to_html(path) shows them"
            lines = [more, *lines]
        return "\n".join([table(headings, cells), "", *lines])

    def verdict(self) -> str:
        """The report in one sentence."""
        if not self.series:
            return f"nothing was seen: no layer of te_torch ran eagerly in a step that was looked at ({REPLAYED})"
        looked = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)} of {len(self.layers())} layers"
        if self.blind:
            looked += f" (in {self.blind} more no layer ran eagerly: {REPLAYED})"
        if self.worst is None:
            return f"{looked}: every tensor keeps what its format can hold"
        bad = sum(s.trouble() >= 0.5 for s in self.series)
        return f"{looked}: {bad} of {len(self.series)} tensors lose precision, most of all {self.worst.name}"


#: Why nobody may have seen a step.
REPLAYED = "what a replayed CUDA graph or a compiled program computes is not seen: let the steps run eagerly"
FIGURES = ("count", "amax", "underflow", "overflow", "snr", "scale", "nonfinite")


def _known(values: Array, pick: Callable[[Array], Any]) -> float:
    """A figure of those values that are numbers; NaN where none is."""
    found = values[np.isfinite(values)]
    return float(pick(found)) if len(found) else math.nan


def _figure(values: Array, pick: Callable[[Array], Any], form: str = ".3g") -> str:
    value = _known(values, pick)
    return "-" if math.isnan(value) else format(value, form)


def _plain(values: Array) -> list[float | str | None]:
    """For JSON, which has neither NaN nor infinity."""
    return [None if math.isnan(v) else v if math.isfinite(v) else str(v) for v in values.tolist()]


def _write(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
