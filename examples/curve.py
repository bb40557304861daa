"""Draw losses. As a program it reads lines `step 3 loss 0.25`, as programs in C print them, shows them and draws them.

TE_CORE_PYTHON=.venv bindings/c/build/train cpu 50 | python examples/curve.py build/examples/c.png
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_LINE = re.compile(r"step (\d+) loss (\S+)")


def write_curve(
    path: Path, runs: Mapping[str, Sequence[float]], what: str = "training loss", level: tuple[str, float] | None = None
) -> Path | None:
    """One picture of all runs, and of a level (its name, its value) to compare them with; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("\nNo picture: matplotlib is not installed (pip install matplotlib).", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, values), style in zip(runs.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(values) + 1), values, style, linewidth=1.2, label=name)
    if level is not None:
        axes.axhline(level[1], color="grey", linewidth=0.8, linestyle=":", label=level[0])
    axes.set(xlabel="step", ylabel=what)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Draw what the standard input says."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        sys.stderr.write(f"{__doc__}")
        return 2
    losses = []
    for line in sys.stdin:
        sys.stdout.write(line)
        sys.stdout.flush()
        losses += [float(match[2]) for match in _LINE.finditer(line)]
    if not losses:
        sys.stderr.write("curve.py: error: no line says `step 0 loss 1.5`: nothing is drawn\n")
        return 1
    written = write_curve(Path(given[0]), {Path(given[0]).stem: losses})
    print(f"{len(losses)} losses, {losses[0]:.4f} to {losses[-1]:.4f}" + (f", drawn in {written}" if written else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
