"""Context parallelism against one GPU: attention, and a layer of Llama's shape, forward and backward.

    torchrun --nproc-per-node 2 -m benchmarks.context [--layer] [--fp8] [--longest] [--streams]

Causal, 32 query heads on 8 groups of 128 channels, bfloat16, one sequence. Each rank measures the whole sequence on its
own GPU, then its part of it. Times are of the slower rank. Peaks are of rank 0, above inputs and weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from te_core.layers.context import ring
from te_core.recipe import DelayedScaling
from te_core.tape.taped import forget

HEADS, GROUPS, WIDTH = 32, 8, 128
LENGTHS = (8192, 32768, 131072)
MODES = ("p2p", "all_gather", "a2a")
ROUNDS = {8192: 15, 32768: 7, 131072: 3}


def milliseconds(function: Callable[[], Any], rounds: int) -> float:
    """Device time of a call on the slower rank."""
    found = []
    for _ in range(2):
        function()
    for _ in range(rounds):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    slower = torch.tensor(statistics.median(found), device="cuda")
    dist.all_reduce(slower, dist.ReduceOp.MAX)
    return round(slower.item(), 3)


def peak(function: Callable[[], Any]) -> float:
    """MiB above what is there before."""
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def measured(step: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Time and peak of a step."""
    return {"ms": milliseconds(step, rounds), "peak_mib": peak(step)}


def attention(tokens: int, mode: str | None, recipe: DelayedScaling | None = None) -> Callable[[], Any]:
    """A step of the attention over this many tokens of this rank."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(tokens, 1, n, WIDTH, **options).requires_grad_() for n in (HEADS, GROUPS, GROUPS))
    dy = torch.randn(tokens, 1, HEADS * WIDTH, **options)
    module = te.DotProductAttention(HEADS, WIDTH, GROUPS, attn_mask_type="causal")
    if mode is not None:
        module.set_context_parallel_group(dist.group.WORLD, cp_comm_type=mode)

    def step() -> None:
        q.grad = k.grad = v.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=dist.group.WORLD):
            y = module(q, k, v)
        y.backward(dy)

    return step


def layer(tokens: int, mode: str | None) -> Callable[[], Any]:
    """A step of a layer of Llama 8B."""
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    options |= {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "params_dtype": torch.bfloat16}
    module = te.TransformerLayer(4096, 14336, 32, num_gqa_groups=8, fuse_qkv_params=True, device="cuda", **options)
    if mode is not None:
        module.set_context_parallel_group(dist.group.WORLD, cp_comm_type=mode)
    angles = te.RotaryPositionEmbedding(WIDTH)(tokens * (1 if mode is None else dist.get_world_size())).cuda()
    x = torch.randn(tokens, 1, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        module.zero_grad()
        module(x, rotary_pos_emb=angles).backward(dy)

    return step


def table() -> str:
    """The newest record, as Markdown."""
    records = (Path(__file__).parent / "results").glob("*-x2-context*.json")  # of one day the last has a number
    newest = max((p for p in records if "calls" not in p.name), key=lambda p: (p.name[:10], len(p.name), p.name))
    lines = ["| | tokens | one GPU | " + " | ".join(MODES) + " |", "|---" * (3 + len(MODES)) + "|"]
    for row in json.loads(newest.read_text())["rows"]:
        one = row["one"]
        if row["what"] == "longest":
            continue
        cells = [f"{row[m]['times']:.2f} x, {row[m]['peak_mib']:,.0f} MiB, {row[m]['exposed']:.1%}" for m in MODES]
        cells = [f"{one['ms']:,.1f} ms, {one['peak_mib']:,.0f} MiB", *cells]
        lines.append(f"| {row['what']} | {row['tokens']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def longest(mode: str | None) -> int:
    """The longest sequence, to 8,192 tokens a rank, of which forward and backward of the layer fit."""
    world = 1 if mode is None else dist.get_world_size()

    def fits(tokens: int) -> tuple[bool, float]:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            layer(tokens, mode)()
            torch.cuda.synchronize()
            right = 1
        except torch.OutOfMemoryError:
            right = 0
        all_right = torch.tensor(right, device="cuda")
        dist.all_reduce(all_right, dist.ReduceOp.MIN)
        return bool(all_right.item()), torch.cuda.max_memory_allocated()

    short, long = (fits(tokens)[1] for tokens in (32768, 65536))
    each = (long - short) / 32768  # bytes a token
    room = torch.cuda.get_device_properties(dist.get_rank()).total_memory - 1.5 * 2**30 - (short - each * 32768)
    tokens = int(room / each) // 8192 * 8192
    while not fits(tokens)[0]:
        tokens -= 8192
    return tokens * world


def exposed(step: Callable[[], Any]) -> float:
    """Of a step's time on this GPU, the share in which a transfer runs and nothing else."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    transfers, others = ([], [])  # type: tuple[list[tuple[float, float]], list[tuple[float, float]]]
    for e in kernels:
        (transfers if "nccl" in e.name else others).append((e.time_range.start, e.time_range.end))
    marks = [(a, 1, 0) for a, _ in transfers] + [(b, -1, 0) for _, b in transfers]
    marks = sorted(marks + [(a, 0, 1) for a, _ in others] + [(b, 0, -1) for _, b in others])
    alone, moving, computing, before = 0.0, 0, 0, marks[0][0]
    for at, transfer, other in marks:
        if moving and not computing:
            alone += at - before
        moving, computing, before = moving + transfer, computing + other, at
    return round(alone / (marks[-1][0] - marks[0][0]), 4)


def streams(tokens: int) -> dict[str, dict[str, float]]:
    """A ring's steps on one stream and on two, in turns."""
    found: dict[str, list[dict[str, float]]] = {"one stream": [], "two streams": []}
    chosen = ring.two_streams
    for _ in range(3):
        for rows, two in zip(found.values(), (False, True), strict=True):
            ring.two_streams = lambda *_, two=two: two
            forget()  # tapes of the other way
            rows.append(measured(attention(tokens // dist.get_world_size(), "p2p"), 9))
    ring.two_streams = chosen
    forget()
    return {name: min(rows, key=lambda row: row["ms"]) for name, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="store_true", help="also a layer of Llama 8B at 32,768 tokens")
    parser.add_argument("--fp8", action="store_true", help="also attention in FP8 (delayed scaling) at 32,768 tokens")
    parser.add_argument("--longest", action="store_true", help="the longest sequence of which a step of the layer fits")
    parser.add_argument("--streams", action="store_true", help="p2p on one stream and on two, and nothing else")
    chosen = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    world, rows = dist.get_world_size(), []
    low = partial(attention, recipe=DelayedScaling(fp8_dpa=True))
    cases = [("attention", attention, LENGTHS), ("layer", layer, (32768,) * chosen.layer)]
    cases.append(("attention, FP8", low, (32768,) * chosen.fp8))
    for tokens in [world << n for n in (12, 13, 14, 15)] if chosen.streams else ():
        rows.append({"what": "streams", "tokens": tokens, **streams(tokens)})
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    for name, make, lengths in () if chosen.streams else cases:
        for tokens in lengths:
            row: dict[str, Any] = {"what": name, "tokens": tokens, "one": measured(make(tokens, None), ROUNDS[tokens])}
            for mode in MODES:
                found = measured(make(tokens // world, mode), ROUNDS[tokens])
                row[mode] = {**found, "times": round(row["one"]["ms"] / found["ms"], 3)}
                row[mode]["exposed"] = exposed(make(tokens // world, mode))
            rows.append(row)
            if dist.get_rank() == 0:
                print(row, flush=True)
    if chosen.longest:
        rows.append({"what": "longest", "one": longest(None), "p2p": longest("p2p")})
    if dist.get_rank() == 0 and "OUT" in os.environ:
        found = {"device": torch.cuda.get_device_name(), "world": world, "torch": torch.__version__, "rows": rows}
        with open(f"{os.environ['OUT']}/context.json", "w") as file:
            json.dump(found, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
