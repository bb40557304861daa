"""Measure the attention backends on this machine and write the table that goes before the shipped one.

    python -m te_core.tools.tune                     # all shape classes, some minutes: most of it is cuDNN's planning
    python -m te_core.tools.tune --only train/dense  # those whose names begin so; others in the table stay
    python -m te_core.tools.tune --out FILE          # elsewhere; te_core/attention_speed.json takes "measured" from it

Each class of `choose.shape_class` is measured by one shape. Its eligible backends take turns in one process, each for a
few milliseconds of GPU time; the median of the rounds counts. Nothing is ever measured in a user's own run.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from te_core import cache
from te_core.errors import ArgumentError
from te_torch.attention import choose, env
from te_torch.attention.dot_product import RUN, DotProductAttention, ready
from te_torch.attention.inputs import Given, layer_inputs
from te_torch.attention.masks import get_full_cu_seqlens
from te_torch.attention.plan import Key, make_plan
from te_torch.runtime import default_device

HEADS, GROUPS = 16, 4
ROUNDS = 5
WINDOW_MS = 10.0  # of GPU time for a backend in a round
#: Widths (d_qk, d_v) and (batch, queries, keys) that stand for their classes.
WIDTHS = {"d64": (64, 64), "d128": (128, 128), "d192": (192, 128), "d256": (256, 256)}
LENGTHS = {"decode": (32, 1, 2048), "short": (16, 512, 512), "medium": (4, 2048, 2048), "long": (1, 8192, 8192)}


class Case(NamedTuple):
    """One shape class as an attention that can be run."""

    module: DotProductAttention
    key: Key
    given: Given
    training: bool


Timer = Callable[[dict[str, Callable[[], Any]]], dict[str, float]]


def classes() -> Iterator[str]:
    """The names of what is measured. One query at a time is inference."""
    parts = (("train", "infer"), ("dense", "packed"), WIDTHS, LENGTHS, ("banded", "full"))
    for use, form, width, length, band in itertools.product(*parts):
        if use == "infer" or length != "decode":
            yield "/".join((use, form, width, length, band))


def case_of(name: str, device: torch.device) -> Case:
    """The attention that stands for a class."""
    use, form, width, length, band = name.split("/")
    (d_qk, d_v), (batch, sq, skv) = WIDTHS[width], LENGTHS[length]
    training, packed = use == "train", form == "packed"

    def tensor(count: int, heads: int, d: int) -> torch.Tensor:
        shape = (batch * count, heads, d) if packed else (batch, count, heads, d)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=training)

    tensors = tensor(sq, HEADS, d_qk), tensor(skv, GROUPS, d_qk), tensor(skv, GROUPS, d_v)
    mask = "causal_bottom_right" if band == "banded" else "no_mask"
    lengths: dict[str, Any] = {}
    if packed:
        mask = {"no_mask": "padding"}.get(mask, f"padding_{mask}")
        cu_q = get_full_cu_seqlens(batch, sq, device)
        cu_kv = cu_q if sq == skv else get_full_cu_seqlens(batch, skv, device)
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "max_seqlen_q": sq, "max_seqlen_kv": skv}
    layout = "thd" if packed else "bshd"
    module = DotProductAttention(HEADS, (d_qk, d_v), GROUPS, qkv_format=layout, attn_mask_type=mask).train(training)
    given = Given(*tensors, qkv_format=layout, **lengths)
    return Case(module, module._key(given, ""), given, training)


def runs_of(case: Case) -> dict[str, Callable[[], Any]]:
    """What to time: for each eligible backend a function that runs it once."""
    reasons = case.module.explain_key(case.key).reasons
    return {backend: _run_of(case, backend) for backend, reason in reasons.items() if reason is None}


def _run_of(case: Case, backend: str) -> Callable[[], Any]:
    plan = ready(make_plan(case.module._static, case.key, env.now(), backend), case.module._fork)
    inputs = layer_inputs(case.module, case.given, plan.prepare)
    run = RUN[backend]
    if not case.training:
        return lambda: run(plan, inputs)
    dy = torch.randn_like(run(plan, inputs)[0])
    return lambda: torch.autograd.grad(run(plan, inputs)[0], inputs[:3], dy)


def gpu_times(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each run, the median over rounds in which they take turns."""
    counts, times = {}, {name: [] for name in runs}  # type: dict[str, int], dict[str, list[float]]
    for name, run in runs.items():
        for _ in range(3):
            run()
        counts[name] = max(1, int(WINDOW_MS * 1e3 / _elapsed(run, 3)))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(_elapsed(run, counts[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def _elapsed(run: Callable[[], Any], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def measure(
    names: Sequence[str], device: torch.device, timer: Timer = gpu_times, say: Callable[[str], None] = print
) -> dict[str, dict[str, float]]:
    """Microseconds by class and backend; a class that does not fit into memory is left out, and said."""
    found: dict[str, dict[str, float]] = {}
    for i, name in enumerate(names, 1):
        times = {}
        try:
            times = timer(runs_of(case_of(name, device)))
        except torch.OutOfMemoryError:
            say(f"[{i}/{len(names)}] {name}: not enough memory")
        if times:
            found[name] = {backend: round(t, 1) for backend, t in sorted(times.items(), key=lambda item: item[1])}
            shown = ", ".join(f"{backend} {t:g} us" for backend, t in found[name].items())
            say(f"[{i}/{len(names)}] {name}: {shown}")
    return found


def merged(table: dict[str, Any], capability: str, times: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """The table with these times; other classes and devices stay."""
    measured = dict(table.get("measured", {}))
    before = measured.get(capability, {}).get("microseconds", {})
    measured[capability] = {**about, "microseconds": {**before, **times}}
    return {**table, "measured": measured}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m te_core.tools.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PREFIX", help="measure the classes whose names begin so")
    parser.add_argument("--out", type=Path, default=None, help="file to write (default: in the cache folder)")
    options = parser.parse_args(arguments)
    names = [name for name in classes() if name.startswith(options.only)]
    if not names:
        first, *_, last = classes()
        parser.error(f"no class begins with {options.only!r}; they go from {first} to {last}")
    if not torch.cuda.is_available():
        print("no GPU: on the CPU te_core's own backend is always chosen, and there is nothing to measure")
        return 1
    device = default_device()
    path: Path = options.out or choose.local_table_path()
    before = _read(path, own=options.out is None)  # what cannot be read is said before all is measured
    times = measure(names, device, say=lambda line: print(line, file=sys.stderr, flush=True))
    major, minor = torch.cuda.get_device_capability(device)
    versions = {name: ".".join(map(str, version)) for name, version in choose.installed()._asdict().items() if version}
    about = {
        "device": torch.cuda.get_device_name(device),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
    }
    table = merged(before, f"{major}.{minor}", times, about)
    if not _written(path, (json.dumps(table, indent=1) + "\n").encode(), own=options.out is None):
        print(f"{path} cannot be written: name another file with --out", file=sys.stderr)
        return 1
    print(f"{len(times)} classes written to {path}")
    return 0


def _read(path: Path, own: bool) -> dict[str, Any]:
    """The table there is; of a user's own file nothing is lost because it is damaged."""
    if own:
        return cache.read_json(path, choose.is_table) or {}
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError("tune", f"--out {path}: {error}", "a table, or no file", "correct or move it") from error
    if not choose.is_table(table):
        raise ArgumentError("tune", f"--out {path}, which is no table", "a table, or no file", "name another file")
    found: dict[str, Any] = table
    return found


def _written(path: Path, content: bytes, own: bool) -> bool:
    if own:
        return cache.write(path, content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
