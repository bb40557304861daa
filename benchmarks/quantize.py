"""Quantize, activations and elementwise kernels against the speed of a device-to-device copy.

    python -m benchmarks.quantize [--json FILE]

Times are medians of event-timed runs with L2 flushed before each and the host hidden behind a busy GPU. A flush that
only writes leaves L2 full of dirty lines, whose write-back the kernel then pays for (about 4 us, a copy too); `clean`
reads another buffer after it. `bytes` is what an operation has to move (each operand once), `of_copy` its rate against
that of a copy of 1 GiB in the same process.
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
from te_core.ops.quantize import ScalingState
from te_core.quantized import Cast, Format
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from te_torch.runtime import runtime_for
from te_torch.runtime import to_core as core

RUNS = 21
SHAPES = ((8192, 4096), (8192, 14336), (1024, 4096))


class Clock:
    """Times device work: L2 flushed, host hidden, median of RUNS."""

    def __init__(self) -> None:
        self._written = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self._read = torch.zeros(64 << 20, device="cuda")

    def __call__(self, work: Callable[[], Any], *, clean: bool = False) -> float:
        """Microseconds."""
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
        torch.cuda._sleep(20_000_000)  # about 10 ms: everything below is queued before the first run starts
        for start, stop in events:
            self._written.zero_()
            if clean:
                self._read.sum()
            start.record()
            work()
            stop.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in events) * 1e3


def cases(rows: int, cols: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(name, bytes it must move, work) of every operation on a bf16 matrix [rows, cols]."""
    n = rows * cols
    x, dy = torch.randn(rows, 2 * cols, device="cuda").bfloat16(), torch.randn(rows, cols, device="cuda").bfloat16()
    rt = runtime_for(x)
    wide, one, other = core(x), core(dy), core(torch.randn(rows, cols, device="cuda").bfloat16())
    scale, amax, sums = (core(torch.ones(k, device="cuda")) for k in (1, 1, 2 * cols))
    narrow_sums = core(torch.ones(cols, device="cuda"))

    def cast(columnwise: bool, delayed: bool = True) -> Cast:
        return Cast(
            dtypes.float8_e4m3,
            rowwise=True,
            columnwise=columnwise,
            scale=scale if delayed else None,
            amax=amax if delayed else None,
        )

    yield "quantize", 3 * n, lambda: ops.quantize(rt, one, cast(False))
    yield "quantize+T", 4 * n, lambda: ops.quantize(rt, one, cast(True))
    yield "quantize+T+sums", 4 * n, lambda: ops.quantize(rt, one, cast(True), column_sum=narrow_sums)
    yield "quantize+T current", 6 * n, lambda: ops.quantize(rt, one, cast(True, False))
    yield from block_cases(rt, one, narrow_sums)
    yield from block_producers(rt, one, wide)
    yield "amax", 2 * n, lambda: ops.amax(rt, one)
    yield "transpose", 4 * n, lambda: ops.transpose(rt, one)
    for kind in ("gelu", "silu", "srelu"):
        yield kind, 4 * n, lambda kind=kind: ops.activation_forward(rt, one, kind)
        yield f"{kind}+quantize+T", 4 * n, lambda kind=kind: ops.activation_forward(rt, one, kind, cast=cast(True))
        yield (
            f"d{kind}+sums+quantize+T",
            6 * n,
            lambda kind=kind: ops.activation_backward(rt, one, other, kind, cast=cast(True), column_sum=narrow_sums),
        )
    for kind in ("swiglu", "geglu"):
        yield kind, 6 * n, lambda kind=kind: ops.activation_forward(rt, wide, kind)
        yield f"{kind}+quantize+T", 6 * n, lambda kind=kind: ops.activation_forward(rt, wide, kind, cast=cast(True))
        yield (
            f"{kind}+quantize+T current",
            12 * n,
            lambda kind=kind: ops.activation_forward(rt, wide, kind, cast=cast(True, False)),
        )
        yield (
            f"d{kind}+quantize+T",
            10 * n,
            lambda kind=kind: ops.activation_backward(rt, one, wide, kind, cast=cast(True)),
        )
        yield (
            f"d{kind}+sums+quantize+T",
            10 * n,
            lambda kind=kind: ops.activation_backward(rt, one, wide, kind, cast=cast(True), column_sum=sums),
        )
    rng = core(torch.tensor([1, 2], device="cuda"))
    bias = core(torch.randn(cols, device="cuda").bfloat16())
    yield "add", 6 * n, lambda: ops.add(rt, one, other)
    yield "bias+dropout+add", 6 * n, lambda: ops.bias_dropout_add(rt, one, bias, other, p=0.1, rng=rng)
    yield "ddropout+sums", 4 * n, lambda: ops.bias_dropout_add_backward(rt, one, p=0.1, rng=rng, column_sum=narrow_sums)


def block_cases(rt: Runtime, x: Tensor, sums: Tensor) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """FP8 with a scale for each 1x128 piece or 128x128 tile."""
    n = x.size
    for tiled, grain in ((False, "1x128"), (True, "128x128")):
        form = Format(dtypes.float8_e4m3, "block", tiled=tiled)
        scales = 0 if tiled else n // 32  # bytes of a copy; those of tiles are too few to count
        both, row, column = (
            Cast(form, rowwise=r, columnwise=c, power_of_two=True)
            for r, c in ((True, True), (True, False), (False, True))
        )
        yield f"block {grain}", 3 * n + scales, lambda row=row: ops.quantize(rt, x, row)
        yield f"block {grain} T alone", 3 * n + scales, lambda column=column: ops.quantize(rt, x, column)
        yield f"block {grain}+T", 4 * n + 2 * scales, lambda both=both: ops.quantize(rt, x, both)
        yield (
            f"block {grain}+T+sums",
            4 * n + 2 * scales,
            lambda both=both: ops.quantize(rt, x, both, column_sum=sums),
        )
        held = ops.quantize(rt, x, both)
        for columnwise in (False, True):
            yield (
                f"block {grain}{'T' if columnwise else ''} back",
                3 * n + scales,
                lambda c=columnwise, held=held: ops.dequantize(rt, held, x.dtype, columnwise=c),
            )


def block_producers(rt: Runtime, one: Tensor, wide: Tensor) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Activations that deliver 1x128 pieces in their own pass, and the same in two."""
    cast = Cast(Format(dtypes.float8_e4m3, "block"), rowwise=True, columnwise=True, power_of_two=True)

    def apart(values: Tensor | None) -> None:
        assert values is not None
        ops.quantize(rt, values, cast)

    for kind, x in (("gelu", one), ("swiglu", wide)):
        n, made, read = one.size, x.size, 2 * x.size
        back = read + 2 * n
        yield f"{kind}+block+T", read + 2 * n, lambda k=kind, x=x: ops.activation_forward(rt, x, k, cast=cast)
        yield (f"{kind}, block+T apart", read + 6 * n, lambda k=kind, x=x: apart(ops.activation_forward(rt, x, k)[0]))
        yield f"d{kind}+block+T", back + 2 * made, lambda k=kind, x=x: ops.activation_backward(rt, one, x, k, cast=cast)
        yield (
            f"d{kind}, block+T apart",
            back + 6 * made,
            lambda k=kind, x=x: apart(ops.activation_backward(rt, one, x, k)[0]),
        )


def copy_rate(clock: Clock) -> float:
    """Bytes a microsecond, read and written, of a copy of 1 GiB."""
    source = torch.randn(256 << 20, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock(lambda: target.copy_(source))


def measure_device() -> list[dict[str, Any]]:
    """Times and rates of all cases."""
    clock, results = Clock(), []
    copy = copy_rate(clock)
    for rows, cols in SHAPES:
        for name, moved, work in cases(rows, cols):
            dirty, clean = clock(work), clock(work, clean=True)
            results.append(
                {
                    "case": name,
                    "shape": [rows, cols],
                    "us": dirty,
                    "of_copy": moved / dirty / copy,
                    "bytes": moved,
                    "clean_us": clean,
                    "clean_of_copy": moved / clean / copy,
                    "copy_TBps": copy / 1e6,
                }
            )
        plain = torch.randn(rows, cols, device="cuda").bfloat16()
        other = torch.empty_like(plain)
        dirty, clean = (clock(lambda: other.copy_(plain), clean=c) for c in (False, True))  # noqa: B023
        results.append(
            {
                "case": "copy (torch)",
                "shape": [rows, cols],
                "us": dirty,
                "of_copy": 2 * plain.nbytes / dirty / copy,
                "bytes": 2 * plain.nbytes,
                "clean_us": clean,
                "clean_of_copy": 2 * plain.nbytes / clean / copy,
            }
        )
    return results


def scaling_states(rt: Runtime, count: int) -> list[ScalingState]:
    """The states of `count` modules: three quantizers, a history of 1024."""

    def ones(*shape: int) -> Tensor:
        return core(torch.ones(*shape, device="cuda"))

    return [ScalingState(ones(3), ones(1024, 3), ones(3), 448.0) for _ in range(count)]


def measure_host() -> list[dict[str, Any]]:
    """Enqueue times at a tiny size, and the scale update of many modules."""
    rt = runtime_for(torch.empty(0, device="cuda"))
    states = scaling_states(rt, 200)
    results = [
        {"case": "host update_scales of 200", "us": harness.host_us(lambda: ops.update_scales(rt, states, "max"))[0]}
    ]
    return results + [{"case": f"host {name}", "us": harness.host_us(work)[0]} for name, _, work in cases(128, 256)]


def main() -> None:
    """Print a table and, with --json, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    options = parser.parse_args()
    results = measure_device() + measure_host()
    for r in results:
        rate = ""
        if "of_copy" in r:
            rate = f"{r['of_copy']:6.1%}   clean {r['clean_us']:8.1f} us {r['clean_of_copy']:6.1%}"
        print(f"{r['case']:28s} {r.get('shape', '')!s:14s} {r['us']:8.1f} us {rate}")
    if options.json:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        with open(options.json, "w") as out:
            json.dump(record, out, indent=1)


if __name__ == "__main__":
    main()
