"""LayerNorm and RMSNorm against the speed of a device-to-device copy, with torch beside them.

    python -m benchmarks.norms [--json FILE]

Times are medians of event-timed runs with L2 flushed before each and the host hidden behind a busy GPU. `bytes` is
what an operation has to move (each operand once); `of_copy` is its rate against that of a copy in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import harness
from te_core import dtypes, ops
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from te_torch.runtime import runtime_for
from te_torch.runtime import to_core as core

RUNS = 21
SHAPES = ((8192, 4096), (8192, 1024), (8192, 2048), (8192, 5120), (8192, 8192), (4096, 16384), (32768, 128))


class Clock:
    """Times device work: L2 flushed, host hidden, median of RUNS.

    Flushing by reading leaves L2 clean; after a fill it is full of lines that the work has to write back first, which
    costs a 30 us kernel a quarter of its time. `dirty=True` measures that.
    """

    def __init__(self, *, dirty: bool = False) -> None:
        self._buffer = torch.zeros(128 << 20, dtype=torch.float16, device="cuda")
        self._flush = self._buffer.zero_ if dirty else self._buffer.max

    def __call__(self, work: Callable[[], Any]) -> float:
        """Microseconds."""
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
        torch.cuda._sleep(20_000_000)  # about 10 ms: everything below is queued before the first run starts
        for start, stop in events:
            self._flush()
            start.record()
            work()
            stop.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in events) * 1e3


def copy_rate(clock: Clock) -> float:
    """Bytes a microsecond, read and written, of a 256 MiB copy."""
    source = torch.randn(64 << 20, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock(lambda: target.copy_(source))


def cases(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(name, bytes it must move, work) of every operation on one shape."""
    rows, cols = shape
    x = torch.randn(shape, device="cuda").to(dtype)
    dy = torch.randn(shape, device="cuda").to(dtype)
    gamma, beta = (torch.randn(cols, device="cuda").to(dtype) for _ in range(2))
    rt = runtime_for(x)
    cx, cdy, cgamma, cbeta = map(core, (x, dy, gamma, beta))
    n = x.nbytes
    for kind, shift in (("LayerNorm", cbeta), ("RMSNorm", None)):
        options: dict[str, Any] = {"kind": kind, "eps": 1e-5}
        yield f"{kind} forward", 2 * n, lambda o=options, s=shift: ops.norm_forward(rt, cx, cgamma, s, **o)
        _, _, mean, rstd = ops.norm_forward(rt, cx, cgamma, shift, **options)
        yield (
            f"{kind} backward",
            3 * n,
            lambda k=kind, m=mean, r=rstd: ops.norm_backward(rt, cdy, cx, cgamma, m, r, kind=k),
        )
    blocks = Cast(Format(dtypes.float8_e4m3, "block"), rowwise=True, columnwise=True, power_of_two=True)
    norm: dict[str, Any] = {"kind": "RMSNorm", "eps": 1e-5}

    def apart() -> None:
        y, _, _, _ = ops.norm_forward(rt, cx, cgamma, None, **norm)
        assert y is not None
        ops.quantize(rt, y, blocks)

    cast_bytes = 2 * rows * cols  # the moments come first, by a reading of their own
    yield (
        "RMSNorm forward, block",
        2 * n + cast_bytes,
        lambda: ops.norm_forward(rt, cx, cgamma, None, cast=blocks, **norm),
    )
    yield "RMSNorm forward, block apart", 3 * n + cast_bytes, apart
    for name, scaled, both in (("delayed rowwise", 1, 0), ("delayed both", 1, 1), ("current both", 0, 1)):
        scale = core(torch.ones(1, device="cuda")) if scaled else None
        cast = Cast(
            dtypes.float8_e4m3,
            rowwise=True,
            columnwise=bool(both),
            scale=scale,
            amax=core(torch.zeros(1, device="cuda")),
        )
        # Current scaling cannot avoid writing and reading the values in between.
        moved = n + rows * cols * (1 + both) + (0 if scaled else 2 * n)
        yield (
            f"LayerNorm forward, {name}",
            moved,
            lambda c=cast: ops.norm_forward(rt, cx, cgamma, cbeta, kind="LayerNorm", eps=1e-5, cast=c),
        )
    yield "torch layer_norm", 2 * n, lambda: torch.nn.functional.layer_norm(x, (cols,), gamma, beta)
    yield "torch rms_norm", 2 * n, lambda: torch.nn.functional.rms_norm(x, (cols,), gamma)


def device_times(shapes: tuple[tuple[int, int], ...] = SHAPES, only: str = "") -> list[dict[str, Any]]:
    """One row for each shape, dtype and operation."""
    clock = Clock()
    rate = copy_rate(clock)
    found = [{"case": "copy 256 MiB", "TB/s": rate / 1e6}]
    for shape in shapes:
        for dtype in (torch.bfloat16, torch.float32) if shape == shapes[0] else (torch.bfloat16,):
            for name, moved, work in cases(shape, dtype):
                if only in name:
                    us = clock(work)
                    found.append(
                        {
                            "case": name,
                            "shape": shape,
                            "dtype": str(dtype)[6:],
                            "us": us,
                            "bytes": moved,
                            "of_copy": moved / us / rate,
                        }
                    )
    return found


def host_times() -> list[dict[str, Any]]:
    """Enqueue times of tiny operations, beside torch's Linear."""
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    linear = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    gamma, beta = (torch.ones(256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rt: Runtime = runtime_for(x)
    cx, cg, cb = map(core, (x, gamma, beta))
    _, _, mean, rstd = ops.norm_forward(rt, cx, cg, cb, kind="LayerNorm", eps=1e-5)
    with torch.no_grad():
        (base,) = harness.host_us(lambda: linear(x))
    (forward,) = harness.host_us(lambda: ops.norm_forward(rt, cx, cg, cb, kind="LayerNorm", eps=1e-5))
    (backward,) = harness.host_us(lambda: ops.norm_backward(rt, cx, cx, cg, mean, rstd, kind="LayerNorm"))
    return [
        {"case": "host: torch Linear forward", "us": base},
        {"case": "host: ops.norm_forward", "us": forward, "of_linear": forward / base},
        {"case": "host: ops.norm_backward", "us": backward, "of_linear": backward / base},
    ]


def main() -> None:
    """Measure everything; print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    options = parser.parse_args()
    rows = [*device_times(), *host_times()]
    for row in rows:
        where = f"{'x'.join(map(str, row['shape']))} {row['dtype']}" if "shape" in row else ""
        rate = f"{row['of_copy']:7.1%} of copy" if "of_copy" in row else ""
        value = f"{row['us']:9.1f} us" if "us" in row else f"{row['TB/s']:7.2f} TB/s"
        print(f"{row['case']:34s} {where:22s} {value} {rate}")
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": RUNS}
        with open(options.json, "w") as out:
            json.dump({**about, "rows": rows}, out, indent=1)


if __name__ == "__main__":
    main()
