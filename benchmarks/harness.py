"""What every benchmark shares: clocks, inputs, what is recorded beside the figures, JSON, tables.

Method. GPU time: before each run L2 is flushed and the GPU kept busy for some milliseconds, so that the host's
launches are hidden; the run stands between two events; the figure is the median of RUNS. What is compared is
measured in turns in the same process. Host time: the time to enqueue one call at a tiny size, where the GPU is never
the bottleneck. Peak memory: the allocator's peak above the resting state. On a machine without a GPU the same code
runs over the CPU's wall clock with reduced shapes: that shows that a benchmark works, its figures mean nothing.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_core import libraries
from te_core.tape import taped

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RUNS = 15
HOST_CALLS = 900  # of each work whose host time is taken
HOST_ROUNDS = 15  # in so many turns
BUSY_CYCLES = 14_000_000  # about 7 ms: longer than the host needs for any forward and backward
L2_FLUSH = 64 << 20  # bytes written before each run; an H200's L2 holds 60 MB

Work = Callable[[], Any]
Row = dict[str, Any]


def gpu() -> bool:
    """Whether there is a CUDA device to measure."""
    return torch.cuda.is_available()


def gpus() -> int:
    """How many of them a run can see."""
    return torch.cuda.device_count()


def device() -> torch.device:
    """Where benchmarks run."""
    return torch.device("cuda" if gpu() else "cpu")


# ------------------------------------------------------------------------------------------------ clocks


def gpu_us(*works: Work, runs: int = RUNS) -> list[float]:
    """Microseconds of each work on the GPU, all measured in turns."""
    if not gpu():
        return [_wall_us(work) for work in works]
    for _ in range(4):
        for work in works:
            work()
    torch.cuda.synchronize()
    flush = torch.empty(L2_FLUSH, dtype=torch.int8, device="cuda")
    times: list[list[float]] = [[] for _ in works]
    for _ in range(runs):
        for work, found in zip(works, times, strict=True):
            flush.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(BUSY_CYCLES)
            start.record()
            work()
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop) * 1e3)
    return [statistics.median(found) for found in times]


def _wall_us(work: Work) -> float:
    work()
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def row_us(work: Work, runs: int) -> float:
    """Microseconds of wall time for each of several in a row: where the host is slower than the GPU, its time."""
    for _ in range(3 if gpu() else 1):
        work()
    wait()
    start = time.perf_counter()
    for _ in range(runs if gpu() else 1):
        work()
    wait()
    return (time.perf_counter() - start) / (runs if gpu() else 1) * 1e6


def host_us(*works: Work, calls: int = HOST_CALLS, turn: Callable[[int], Any] | None = None) -> list[float]:
    """Microseconds to enqueue each work, all measured in turns: the median of all rounds. `turn` is told the number
    of the work whose turn begins."""
    calls = max(1, calls // HOST_ROUNDS) if gpu() else 1  # of a round
    begins = turn or (lambda number: None)
    for number, work in enumerate(works):
        begins(number)
        for _ in range(30 if gpu() else 1):
            work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(HOST_ROUNDS):
        for number, (work, found) in enumerate(zip(works, times, strict=True)):
            begins(number)
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                work()
            found.append((time.perf_counter() - start) / calls * 1e6)
    wait()
    return [statistics.median(found) for found in times]


def peak_mib(work: Work) -> float:
    """MiB at the peak of one run, above what is held between runs; nan on a CPU, which keeps no such account."""
    if not gpu():
        return float("nan")
    work()
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - resting) / 2**20


def trace(work: Work) -> list[Row]:
    """The events of torch's profiler on the device during one run."""
    wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[Row] = json.loads(path.read_text())["traceEvents"]
    return events


def wait() -> None:
    """Until the GPU is idle."""
    if gpu():
        torch.cuda.synchronize()


def free() -> None:
    """Give back what the last case held, so that it is not in the way of the next."""
    gc.collect()
    if gpu():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------ inputs


def matrix(make: Callable[..., Any], rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A bf16 matrix of one of the generators of tests/generators.py, on the device.

    At most 1024 rows are generated and then repeated: random numbers come slowly on the host, and neither a GEMM nor
    a cast can tell.
    """
    count = min(rows, 1024)
    tile = torch.from_numpy(np.ascontiguousarray(make(count, columns, seed))).to(device(), torch.bfloat16)
    return tile.repeat(-(-rows // count), 1)[:rows].contiguous()


# ----------------------------------------------------------------------------------------- what is recorded


def about(commit: str = "") -> dict[str, str]:
    """The device and the versions that figures depend on."""
    facts = {
        "device": device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tapes": taped.when(),
    }
    for name in ("te-runtime", "numpy", "cupy-cuda13x", "cupy-cuda12x", "nvmath-python"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if gpu():
        facts["cuda of torch"] = str(torch.version.cuda)
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        facts["cublasLt"] = _cublaslt()
        clock = _output("nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm", "--format=csv,noheader").split("\n")[0]
        facts["SM clock, now and highest"] = clock
    facts["commit"] = commit or _commit()
    return facts


def _cublaslt() -> str:
    try:
        return ".".join(map(str, libraries.version("cublasLt")))
    except (RuntimeError, OSError) as missing:  # figures that took minutes are not lost for want of a number
        return f"unknown ({missing})"


def _commit() -> str:
    git = ("git", "-C", str(ROOT))
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", "te_core", "te_torch")
    return (_output(*git, "rev-parse", "--short=12", "HEAD") or "unknown") + (" with changes" if changed else "")


def device_name() -> str:
    """As the driver calls it."""
    return torch.cuda.get_device_name() if gpu() else "CPU"


def _output(*command: str) -> str:
    """What a program prints; nothing where it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write(name: str, rows: Sequence[Row], folder: Path, seconds: float, commit: str = "") -> Path:
    """The figures of a benchmark as a record."""
    plain = [{k: _plain(v) for k, v in row.items()} for row in rows]
    return write_record(name, {"seconds": round(seconds, 1), "runs": RUNS, "rows": plain}, folder, commit)


def write_record(name: str, content: dict[str, Any], folder: Path, commit: str = "") -> Path:
    """What was found as <date>-<device>-<name>.json; what is there already is never overwritten."""
    now = datetime.datetime.now(datetime.timezone.utc)
    where = re.sub(r"[^a-z0-9]+", "-", device_name().lower().removeprefix("nvidia ")).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{now:%Y-%m-%d}-{where}-{name}"
    record = {"name": name, "time": f"{now:%Y-%m-%dT%H:%M:%SZ}", "about": about(commit), **content}
    text = json.dumps(record, indent=1) + "\n"
    for number in range(1, 1000):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            with path.open("x") as file:
                file.write(text)
            return path
        except FileExistsError:
            continue
    raise RuntimeError(f"{folder} holds a thousand results of {stem}: clear it up")


def read(path: Path) -> dict[str, Any]:
    """A record that was written."""
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _plain(value: Any) -> Any:
    """JSON knows no nan, and five digits are more than a measurement has."""
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    if isinstance(value, float):
        return None if value != value else float(f"{value:.5g}")
    return value


# ------------------------------------------------------------------------------------------------- tables


def columns_of(rows: Sequence[Row]) -> list[str]:
    """All keys of the rows, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None or value == "" or value != value:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1e4 else f"{value:.0f}"
    if isinstance(value, (list, tuple)):
        return " x ".join(map(str, value))
    return str(value)


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """Rows as aligned text; a column that no row fills is left out."""
    columns = [c for c in (columns or columns_of(rows)) if any(cell(row.get(c)) for row in rows)]
    grid = [list(columns), *[[cell(row.get(c)) for c in columns] for row in rows]]
    widths = [max(len(line[i]) for line in grid) for i in range(len(columns))]
    lines = []
    for line in grid:
        first = line[0].ljust(widths[0])
        lines.append("  ".join([first, *[text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True)]]))
    return "\n".join(line.rstrip() for line in lines)


def label(row: Row) -> str:
    """What a row is about, in one line."""
    parts = [cell(row.get(key)) for key in ("case", "shape", "recipe", "mode", "dtype")]
    parts.append(f"x {row['ranks']}" if "ranks" in row else "")
    return " ".join(part for part in parts if part)
