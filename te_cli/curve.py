"""The picture of a training."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from te_cli.arguments import replacing


def write_curve(
    path: Path, runs: Mapping[str, Sequence[float]], what: str = "training loss", level: tuple[str, float] | None = None
) -> Path | None:
    """Draw the losses of all runs, and a level (its name, its value) beside them; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("\nNo picture: matplotlib is not installed (pip install matplotlib).", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, losses), style in zip(runs.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, style, linewidth=1.2, label=name)
    if level is not None:
        axes.axhline(level[1], color="grey", linewidth=0.8, linestyle=":", label=level[0])
    axes.set(xlabel="step", ylabel=what)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format="png")
    plt.close(figure)
    return path
