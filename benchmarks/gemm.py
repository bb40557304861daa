"""FP8 and bf16 GEMMs of te_core.ops against torch's own calls of the same library, in turns in one process.

Both read the same operands. `of_torch` is torch's time over ours: 1 is equal, more is faster than torch. The target
is 0.98 for FP8. Host times are those of one call at 128 x 256 x 256, where the GPU is never in the way.

Products with block scales (kernels/block_gemm.cu) stand beside cuBLASLt's and its product with one scale a tensor
(split accumulation): `of_cublaslt` and `of_tensor` are the times of these over ours. Each runs for 25 ms at a time, in
turns, at the clock that the power allows, as in a training step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks import harness
from te_core import dtypes, ops
from te_core.backends.cuda import gemm as cuda_gemm
from te_core.backends.cuda import gemm_block
from te_core.ops.gemm import GemmOperands, GemmSpec
from te_core.quantized import Cast, Format
from te_torch.runtime import runtime_for, to_core, to_torch
from tests import generators

SHAPES = ((8192, 8192, 8192), (8192, 4096, 4096), (8192, 28672, 4096), (8192, 4096, 14336))  # M, N, K
#: With block scales.
BLOCK_SHAPES = (*SHAPES[1:], (16384, 8192, 2048), (28672, 4096, 8192), (4096, 4096, 8192))
MINI = ((256, 128, 64),)
TINY = (128, 256, 256)
TARGET = 0.98
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Call = Callable[[], Any]


def operands(shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input [M, K], weight [N, K], output gradient [M, K]) in bf16; any of the three sits well in any GEMM."""
    m, n, k = shape
    return (
        harness.matrix(generators.activations, m, k),
        harness.matrix(generators.weights, n, k),
        harness.matrix(generators.gradients, m, k),
    )


def quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(data, dequantization scale) by the tensor's own maximum; by torch, as torch's call wants its operands."""
    limit = torch.finfo(dtype).max
    scale = (x.abs().amax().float() / limit).reshape(1)
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


def result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Where a call writes."""
    return torch.empty(x.shape[0], w.shape[0], dtype=torch.bfloat16, device=x.device)


def fp8_pair(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, split: bool) -> tuple[Call, Call]:
    """Our call and torch's, out [M, N] = x w^T in bf16; `split` is cuBLASLt's slower, more exact accumulation."""
    rt = runtime_for(x)
    left, right = quantized(x, dtype), quantized(w, E4M3)
    a, a_scale, b, b_scale = map(to_core, (*left, *right))
    y, out = to_core(result(x, w)), result(x, w)

    def ours() -> Any:
        return ops.gemm(rt, a, b, trans_b=True, a_scale=a_scale, b_scale=b_scale, out=y, split_accumulator=split)

    def theirs() -> Any:
        return torch._scaled_mm(
            left[0],
            right[0].t(),
            scale_a=left[1],
            scale_b=right[1],
            out_dtype=torch.bfloat16,
            use_fast_accum=not split,
            out=out,
        )

    return ours, theirs


def bf16_pair(x: torch.Tensor, w: torch.Tensor) -> tuple[Call, Call]:
    """The same in bf16."""
    rt, a, b = runtime_for(x), to_core(x), to_core(w)
    y, out = to_core(result(x, w)), result(x, w)
    return lambda: ops.gemm(rt, a, b, trans_b=True, out=y), lambda: torch.matmul(x, w.t(), out=out)


def cases(shape: tuple[int, int, int]) -> Iterator[tuple[str, str, tuple[Call, Call]]]:
    """(case, mode, calls) of one shape."""
    x, w, dy = operands(shape)
    yield "fp8 e4m3 x e4m3", "fast", fp8_pair(x, w, E4M3, split=False)
    yield "fp8 e4m3 x e4m3", "split", fp8_pair(x, w, E4M3, split=True)
    yield "fp8 e5m2 x e4m3", "split", fp8_pair(dy, w, E5M2, split=True)
    yield "bf16", "", bf16_pair(x, w)


def block_calls(shape: tuple[int, int, int], tiled: bool, weight_gradient: bool) -> tuple[Call, Call, Call]:
    """The product of our own, cuBLASLt's, and cuBLASLt's with one scale a tensor; a weight gradient adds to float32."""
    (m, n, k), (x, w, _) = shape, operands(shape)
    rt, forms = runtime_for(x), (Format(dtypes.float8_e4m3, "block"), Format(dtypes.float8_e4m3, "block", tiled))
    a, b = (
        ops.quantize(rt, to_core(t), Cast(f, rowwise=True, columnwise=False))
        for t, f in zip((x, w), forms, strict=True)
    )
    kind = dtypes.float32 if weight_gradient else dtypes.bfloat16
    out = rt.zeros((m, n), kind)
    types = dtypes.float8_e4m3, dtypes.float8_e4m3, kind
    spec = GemmSpec(m, n, k, False, True, *types, *[None] * 5, weight_gradient, True, False, 256, *forms)
    given = GemmOperands(a.rowwise, b.rowwise, out, a.rowwise_scale, b.rowwise_scale)  # type: ignore[arg-type]
    with mock.patch.object(gemm_block, "able", lambda rt, spec: False):
        theirs = cuda_gemm.plan_gemm(rt, spec)
    own = gemm_block.plan(rt, spec, "a benchmark")
    assert own is not None
    if not weight_gradient:
        own.run(rt, given)
        ours = to_torch(out).clone()
        theirs.run(rt, given)
        check(ours, to_torch(out))
    tensor = fp8_pair(x, w, E4M3, split=True)[0]
    return lambda: own.run(rt, given), lambda: theirs.run(rt, given), tensor


def block_rows() -> Iterator[harness.Row]:
    """A row for each shape and kind of scales."""
    for shape in BLOCK_SHAPES:
        flops = 2e-6 * shape[0] * shape[1] * shape[2]
        for case, tiled, adds in (("128x128", True, False), ("1x128", False, False), ("1x128 adds", False, True)):
            calls = block_calls(shape, tiled, adds)
            turns = [[harness.row_us(call, max(3, round(25e9 / flops / 1e3))) for call in calls] for _ in range(5)]
            us, theirs, tensor = map(statistics.median, zip(*turns, strict=True))
            row: harness.Row = {"case": f"fp8 1x128 x {case}", "mode": "block", "shape": list(shape), "us": us}
            yield row | {"TFLOP/s": flops / us, "of_cublaslt": theirs / us, "of_tensor": tensor / us}
        harness.free()


def measure() -> list[harness.Row]:
    """GPU times of all shapes, then host times."""
    rows = []
    for shape in SHAPES if harness.gpu() else MINI:
        m, n, k = shape
        for case, mode, (ours, theirs) in cases(shape):
            check(to_torch(ours()), theirs())
            us, torch_us = harness.gpu_us(ours, theirs)
            row: harness.Row = {"case": case, "mode": mode, "shape": list(shape), "us": us, "torch_us": torch_us}
            row |= {"TFLOP/s": 2e-6 * m * n * k / us, "of_torch": torch_us / us}
            if case.startswith("fp8") and harness.gpu():
                row |= {"target": TARGET, "ok": torch_us / us >= TARGET}
            rows.append(row)
        harness.free()
    if harness.gpu() and torch.cuda.get_device_capability() == (9, 0):
        rows += block_rows()
    for case, mode, (ours, theirs) in cases(TINY):
        us, torch_us = harness.host_us(ours, theirs)
        rows.append(
            {
                "case": f"host: {case}",
                "mode": mode,
                "shape": list(TINY),
                "us": us,
                "torch_us": torch_us,
                "of_torch": torch_us / us,
            }
        )
    return rows


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """A fast wrong result is none. Both round the same sums, so they differ by bf16's last bit and little else."""
    a, b = ours[:256].float(), theirs[:256].float()
    if not float((a - b).norm()) <= 1e-2 * float(b.norm()):
        raise RuntimeError("gemm: our result is not torch's")


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["gemm", *sys.argv[1:]]))
