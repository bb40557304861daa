"""The picture of a result. The same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.catalogue import BENCHMARKS
from benchmarks.kernel_groups import GROUPS


def draw_record(record: dict[str, Any], path: Path) -> bool:
    """The picture of a result; trainings have curves."""
    if record["name"] == "training":
        return _curves(record, path)
    if record["name"] == "endurance":
        return _memory(record, path)
    if record["name"] == "end_to_end" and any(GROUPS[0] in row for row in record["rows"]):
        return _stacks(record, path)
    spec = BENCHMARKS[record["name"]]
    return _bars(record, path, spec.ratio, spec.reference)


def _bars(record: dict[str, Any], path: Path, ratio: str, reference: str) -> bool:
    """A bar for every row that has this ratio, with a line at 1; False without matplotlib or without such rows."""
    rows = [row for row in record["rows"] if isinstance(row.get(ratio), (int, float))]
    try:
        import matplotlib
    except ImportError:
        return False
    if not rows:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # The same bytes from the same figures: `make docs` must not change what has not changed.
    with matplotlib.rc_context({"svg.hashsalt": record["name"], "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(9, 0.8 + 0.26 * len(rows)), layout="constrained")
        labels = [harness.label(row) for row in rows]
        axes.barh(range(len(rows)), [row[ratio] for row in rows], height=0.7)
        axes.set_yticks(range(len(rows)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(reference)
        axes.set_title(f"{record['name']}, {record['about']['device']}, {record['time'][:10]}", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
        figure.savefig(path, **options)
        plt.close(figure)
    return True


def _stacks(record: dict[str, Any], path: Path) -> bool:
    """A bar for every step, of its kernels by group; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in record["rows"] if GROUPS[0] in row]
    with matplotlib.rc_context({"svg.hashsalt": record["name"], "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(9, 1.6 + 0.3 * len(rows)), layout="constrained")
        ends = [0.0] * len(rows)
        for color, group in zip(plt.get_cmap("tab10").colors, GROUPS, strict=True):
            widths = [row[group] for row in rows]
            axes.barh(range(len(rows)), widths, left=ends, height=0.7, label=group, color=color)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [f"{row['recipe']}: {row['parts']}" for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(BENCHMARKS[record["name"]].reference)
        axes.set_title(f"{record['name']}, {record['about']['device']}, {record['time'][:10]}", fontsize=10)
        figure.legend(fontsize=8, loc="outside lower center", ncols=5)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))
        plt.close(figure)
    return True


def _curves(record: dict[str, Any], path: Path) -> bool:
    """The losses of the first seed; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows: Sequence[harness.Row] = [row for row in record["rows"] if row.get("seed") == record["rows"][0]["seed"]]
    with matplotlib.rc_context({"svg.hashsalt": record["name"], "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for row in rows:
            style = ":" if "frozen" in row["recipe"] else "-"
            axes.plot(range(1, len(row["losses"]) + 1), row["losses"], style, linewidth=1, label=row["recipe"])
        axes.set(xlabel="step", ylabel="training loss (nats a byte)")
        axes.set_title(f"training, {record['about']['device']}, {record['time'][:10]}", fontsize=10)
        axes.legend(fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))
        plt.close(figure)
    return True


def _memory(record: dict[str, Any], path: Path) -> bool:
    """What was held, over the minutes; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    samples = record["rows"][-1]["samples"]
    held = {key: values for key, values in samples.items() if key.endswith(" MiB") and values[0] is not None}
    with matplotlib.rc_context({"svg.hashsalt": record["name"], "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
        for key, values in held.items():
            axes.plot(samples["minutes"], values, linewidth=1, label=key.removesuffix(" MiB"))
        most = max(max(values) for values in held.values())
        for third in (1, 2):
            axes.axvline(samples["minutes"][-1] * third / 3, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="minutes", ylabel="MiB", ylim=(0, 1.1 * most))
        axes.set_title(f"endurance, {record['about']['device']}, {record['time'][:10]}", fontsize=10)
        axes.legend(fontsize=8, loc="lower right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))
        plt.close(figure)
    return True
