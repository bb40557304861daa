"""The pictures of a report, by matplotlib. The same figures give the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from te_core.errors import MissingPackageError

ROWS = 40  # layers in the heat map, the worst
CURVES = 6  # tensors in the picture of curves, the worst
#: (attribute, what stands at the axis, whether the axis is logarithmic)
CHARTS = (
    ("amax", "amax", True),
    ("underflow", "underflow, %", False),
    ("overflow", "overflow, %", False),
    ("snr", "SNR, dB", False),
)


def draw(report: Any, folder: Path) -> list[Path]:
    """heat.png, a row for each layer, and curves.png, of the tensors in the most trouble."""
    try:
        import matplotlib
    except ImportError as missing:
        raise MissingPackageError(
            "to_png", str(missing), "matplotlib, or to_html, which needs nothing", "pip install matplotlib"
        ) from missing
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, fill in (("heat", _heat), ("curves", _curves)):
            figure = Figure(layout="constrained", dpi=96)
            FigureCanvasAgg(figure)
            fill(figure, report)
            figure.savefig(folder / f"{name}.png", metadata={"Software": None})
            made.append(folder / f"{name}.png")
    return made


def by_layer(report: Any) -> dict[str, Any]:
    """dB lost over the steps by the worst tensor of each layer, the worst layer first."""
    found: dict[str, Any] = {}
    for s in report.series:
        lost = s.lost()
        found[s.layer] = np.fmax(found[s.layer], lost) if s.layer in found else lost
    return found


def _heat(figure: Any, report: Any) -> None:
    rows = by_layer(report)
    shown = list(rows)[:ROWS]
    figure.set_size_inches(8, 1.4 + 0.24 * max(len(shown), 2))
    axes = figure.subplots()
    if not shown:
        return
    values = np.array([rows[layer] for layer in shown])
    image = axes.imshow(
        values, aspect="auto", interpolation="nearest", cmap="magma_r", vmin=0, vmax=30,
        extent=(-0.5, values.shape[1] - 0.5, len(shown) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    marks = np.unique(np.linspace(0, values.shape[1] - 1, min(8, values.shape[1])).astype(int))
    axes.set_xticks(marks, [str(report.steps[i]) for i in marks])
    axes.set_xlabel("step")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    left = len(rows) - len(shown)
    axes.set_title("dB lost by the worst tensor of each layer" + (f" ({left} better layers left out)" if left else ""))
    figure.colorbar(image, ax=axes, label="dB", extend="max", pad=0.01)


def _curves(figure: Any, report: Any) -> None:
    figure.set_size_inches(8.5, 5.6)
    worst: list[Any] = [s for s in report.series if s.kind is not None and not s.kind.whole][:CURVES]
    for axes, (name, label, logarithmic) in zip(figure.subplots(2, 2, sharex=True).flat, CHARTS, strict=True):
        for s in worst:
            marker = "o" if len(report.steps) < 3 else None
            axes.plot(report.steps, getattr(s, name), linewidth=1.4, marker=marker, markersize=4, label=s.name)
        axes.set_title(label, loc="left", fontsize=9)
        axes.grid(axis="y", linewidth=0.4, alpha=0.5)
        if logarithmic:
            axes.set_yscale("log", base=2)
        else:
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]), top=max(1, axes.get_ylim()[1]))
    for axes in figure.axes[2:]:
        axes.set_xlabel("step")
    if worst:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
