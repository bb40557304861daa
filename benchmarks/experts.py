"""Experts: the grouped products beside torch's and a dense one, and a block of a mixture of experts as it is trained.

Sizes of groups are drawn with skew, and are others in each step: four inputs come in turns. A block is a router, the
permutation of tokens, two grouped linears with a gated activation between them, and the way back; `wall us` is what its
step takes where steps follow one another, `gpu us` what the GPU computes. torch's is `torch._grouped_mm` compiled.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

import te_torch as te
from benchmarks import harness
from te_core import dtypes
from te_core.ops import raw as ops
from te_core.quantized import Cast, Format
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_torch.runtime import runtime_for, to_core

BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
#: Rows, out features, in features, groups.
PRODUCTS = [
    (98304, 2816, 2048, 64),
    (98304, 2048, 1408, 64),
    (65536, 1536, 2048, 128),
    (65536, 2048, 768, 128),
    (16384, 28672, 4096, 8),
    (16384, 4096, 14336, 8),
]
#: Tokens, hidden, inside of the MLP, experts, how many a token goes to.
BLOCKS = [(16384, 2048, 1408, 64, 6), (8192, 2048, 768, 128, 8), (8192, 4096, 14336, 8, 2)]
RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
TURNS = 5
#: Scaling and product: the share of torch's speed in bf16 that is asked for.
OF_TORCH = {"bf16": (0.97, 0.97, 0.97), "one scale": (1.8, 1.8, 1.5), "block": (1.5, 1.5, 1.1)}


def products(rows: int, n: int, k: int, groups: int) -> Iterator[dict[str, Any]]:
    """TFLOP/s of the three products, in turns with torch's in bf16; `of_dense`: beside one product of all rows.

    With one scale fprop leaves sums to the tensor cores, as recipes do; the others are promoted.
    """
    torch.manual_seed(0)
    shares = torch.distributions.Dirichlet(torch.full((groups,), 2.0)).sample()
    sizes = torch.distributions.Multinomial(rows, shares).sample().long().tolist()
    ends = torch.tensor([*accumulate(sizes)], dtype=torch.int32, device="cuda")
    offsets = torch.cat([ends.new_zeros(1), ends])
    x, dy, w = (torch.randn(shape, **BF16) for shape in ((rows, k), (rows, n), (groups, n, k)))
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
    rt, of = runtime_for(x), to_core
    parts, grads, where = [of(part) for part in w], [of(part) for part in dw], of(offsets)
    theirs: dict[str, Callable[[], Any]] = {
        "fprop": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
        "dgrad": lambda: torch._grouped_mm(dy, w, offs=ends),
        "wgrad": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
    }
    for scaling, targets in OF_TORCH.items():
        a, g, b = of(x), of(dy), parts
        whole, dense_b = of(x), parts[0]
        if scaling != "bf16":
            kind, tiled = ("block", True) if scaling == "block" else ("tensor", False)
            cast = Cast(Format(dtypes.float8_e4m3, kind), rowwise=True, columnwise=True)
            a, g = (ops.quantize_rows(rt, of(t), where, [cast] * groups) for t in (x, dy))
            form = Format(dtypes.float8_e4m3, kind, tiled)
            b = ops.quantize_many(rt, parts, [Cast(form, rowwise=True, columnwise=True)] * groups)
            whole, dense_b = ops.quantize(rt, of(x), cast), b[0]
            bytes_moved = 2 * rows * k * 2
            us = _each(lambda c=[cast] * groups: ops.quantize_rows(rt, of(x), where, c))
            one = _each(lambda c=cast: ops.quantize(rt, of(x), c))
            found = {"case": "cast", "scaling": scaling, "shape": (rows, n, k, groups), "us": us, "of_dense": one / us}
            yield found | {"TB/s": 1e-6 * bytes_moved / us}
        ours: dict[str, Callable[[], Any]] = {
            "fprop": lambda a=a, b=b: ops.gemm_grouped(rt, a, b, of(y), where, trans_b=True, split_accumulator=False),
            "dgrad": lambda g=g, b=b: ops.gemm_grouped(rt, g, b, of(dx), where),
            "wgrad": lambda g=g, a=a: ops.gemm_grouped(rt, g, a, grads, where, trans_a=True),
        }
        if scaling == "bf16":
            dense = _each(lambda: torch.mm(x, w[0].t()))
        else:
            dense = _each(lambda p=whole, q=dense_b: ops.gemm_quantized(rt, p, q, of(y), split_accumulator=False))
        for (name, work), target in zip(ours.items(), targets, strict=True):
            times = [(_each(work), _each(theirs[name])) for _ in range(TURNS)]
            us, other = (statistics.median(side) for side in zip(*times, strict=True))
            found = {"case": name, "scaling": scaling, "shape": (rows, n, k, groups), "us": us}
            found |= {"TFLOP/s": 2e-6 * rows * n * k / us, "torch_us": other, "of_torch": other / us}
            yield found | {"of_dense": dense / us, "target": f"{target} of torch", "ok": other / us >= target}


def _each(work: Callable[[], Any], times: int = 8) -> float:
    """Microseconds of a call where calls follow one another."""
    for _ in range(2):
        work()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4_000_000)  # about 2 ms, in which all of it is queued
    start.record()
    for _ in range(times):
        work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / times * 1e3


class Block(nn.Module):
    """A mixture of experts by parts of te_torch; its sizes stay on the GPU."""

    def __init__(self, hidden: int, inside: int, experts: int, top: int) -> None:
        super().__init__()
        self.experts, self.top = experts, top
        self.router = nn.Linear(hidden, experts, bias=False, **BF16)
        options: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
        self.fc1 = te.GroupedLinear(experts, hidden, 2 * inside, **options)
        self.fc2 = te.GroupedLinear(experts, inside, hidden, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]."""
        scores = self.router(x).float().softmax(-1)
        ids = scores.topk(self.top, -1).indices
        mask = torch.zeros(*scores.shape, dtype=torch.int32, device="cuda").scatter_(1, ids, 1)
        rows, gates, row_map = te.moe_permute_with_probs(x, scores * mask, mask, len(x) * self.top)
        sizes = mask.sum(0)
        a, b = self.fc1(rows, sizes).chunk(2, -1)
        y: torch.Tensor = self.fc2(silu(a) * b * gates.to(x.dtype)[:, None], sizes)
        made: torch.Tensor = te.moe_unpermute(y, row_map, restore_shape=x.shape)
        return made


class TorchBlock(nn.Module):
    """The same by torch alone."""

    def __init__(self, hidden: int, inside: int, experts: int, top: int) -> None:
        super().__init__()
        self.experts, self.top = experts, top
        self.router = nn.Linear(hidden, experts, bias=False, **BF16)
        self.fc1 = nn.Parameter(torch.randn(experts, hidden, 2 * inside, **BF16) * hidden**-0.5)
        self.fc2 = nn.Parameter(torch.randn(experts, inside, hidden, **BF16) * inside**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]."""
        gates, ids = self.router(x).float().softmax(-1).topk(self.top, -1)
        order = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=self.experts).cumsum(0).to(torch.int32)
        a, b = torch._grouped_mm(x[order // self.top], self.fc1, offs=ends).chunk(2, -1)
        gated = silu(a) * b * gates.flatten()[order].to(x.dtype)[:, None]
        y = torch._grouped_mm(gated, self.fc2, offs=ends)
        return torch.zeros_like(x).index_add_(0, order // self.top, y)


def blocks() -> Iterator[dict[str, Any]]:
    """A step of each block: torch's, that of the parts and `te.MoELayer` in all recipes."""
    for tokens, hidden, inside, experts, top in BLOCKS:
        shape = tokens, hidden, inside, experts, top
        rows = 18e-6 * tokens * top * hidden * inside
        ways = [
            ("torch, compiled", "bf16"),
            *[(name, r) for r in RECIPES for name in ("parts", "MoELayer", "MoELayer, graphed")],
        ]
        for name, recipe in ways:
            torch.manual_seed(0)
            block: nn.Module
            if name == "torch, compiled":
                block = TorchBlock(hidden, inside, experts, top)
                call: Any = torch.compile(block)
            elif name == "parts":
                call = block = Block(hidden, inside, experts, top)
            else:
                options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda"}
                call = block = te.MoELayer(hidden, inside, experts, top, bias=False, **options)
                if name == "MoELayer, graphed":
                    rule = RECIPES[recipe] and RECIPES[recipe]()
                    sample = (torch.randn(tokens, hidden, **BF16).requires_grad_(),)
                    call = te.make_graphed_callables(block, sample, enabled=rule is not None, recipe=rule)
            wall, busy = _stepped(call, block, RECIPES[recipe], tokens, hidden)
            found = {"case": name, "recipe": recipe, "shape": shape, "wall us": wall, "gpu us": busy}
            yield found | {"TFLOP/s": rows / wall}
            del block, call
            harness.free()


def _stepped(call: Any, block: nn.Module, recipe: Any, tokens: int, hidden: int) -> tuple[float, float]:
    """(wall time, GPU time) of a step in microseconds."""
    inputs = [torch.randn(tokens, hidden, **BF16).requires_grad_() for _ in range(4)]
    rule = recipe and recipe()

    def steps(count: int) -> None:
        for i in range(count):
            with te.autocast(enabled=rule is not None, recipe=rule):
                y = call(inputs[i % 4])
            y.float().square().mean().backward()
            inputs[i % 4].grad = None
            block.zero_grad(set_to_none=True)

    steps(8)
    walls = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        steps(8)
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - begin) / 8 * 1e6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps(4)
        torch.cuda.synchronize()
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 4
    return statistics.median(walls), busy


def measure() -> list[dict[str, Any]]:
    """Products, then blocks."""
    found = []
    for shape in PRODUCTS:
        found += products(*shape)
        harness.free()
    return [*found, *blocks()]


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["experts", *sys.argv[1:]]))
