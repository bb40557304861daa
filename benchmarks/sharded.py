"""FSDP2 on two ranks: what a step takes and what travels, with weights in bf16 and held quantized.

Two GPUs over NCCL; without them two processes on the CPU over gloo, whose times mean nothing. Eight layers of a Llama's
shape (hidden 4096, ffn 14336, 32 heads, 8 groups, RMSNorm, swiglu, 8192 tokens a rank), and four small ones (hidden
4096, ffn 4096, 1024 tokens a rank), where the host's time shows. A step is forward, backward, AdamW and zero_grad. Each
form is measured in turns with bf16 weights that train in bf16, in the same processes; its step may take no longer.
`gathered MiB` is what a rank sends in a step's all-gathers.

What matters most comes first (the rows with a target, and those that `benchmarks.predict` reads), and what does not fit
into `SECONDS` is left out and said to be.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from benchmarks import harness, parallel
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from te_torch.exchange import ALL_GATHER

RANKS = 2
SECONDS = 50  # from the start of the processes; after that no further case begins, of which the longest takes six
ROUNDS = 5  # whose median counts
WARM = 3  # steps: a call of a layer is met, recorded, replayed
ALLOWED = 1.0  # of bf16's step


@dataclass(frozen=True)
class Case:
    """What trains, and how."""

    model: str
    recipe: str
    held: bool = False  # weights quantized
    fused: bool = False  # torch.optim.AdamW(fused=True)

    @property
    def shown(self) -> str:
        """Of the recipe."""
        return f"{self.recipe}{', weights too' if self.held else ''}{', fused AdamW' if self.fused else ''}"


RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
LARGE, SMALL = "8 Llama-shape layers", "4 small layers"
STEPS = {LARGE: 2, SMALL: 3}  # of a round
FP8 = ("delayed", "current", "block")
CASES = (
    Case(LARGE, "delayed"),
    *[Case(LARGE, name, True) for name in FP8],
    *[Case(SMALL, name, True, fused) for fused in (False, True) for name in FP8],
    *[Case(LARGE, name) for name in FP8[1:]],
    *[Case(SMALL, name) for name in FP8],
)
#: By device: layers, then hidden, ffn, heads, groups and tokens a rank.
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {LARGE: (8, 4096, 14336, 32, 8, 8192), SMALL: (4, 4096, 4096, 32, 32, 1024)},
    "cpu": {LARGE: (2, 512, 512, 4, 4, 32), SMALL: (1, 256, 256, 4, 4, 16)},
}


@dataclass(frozen=True)
class Built:
    """A step of a model that has been warmed up, and what its all-gathers send."""

    work: Callable[[], None]
    sent: int


def build(case: Case, device: torch.device) -> Built:
    """The model of a case."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layers, hidden, ffn, heads, groups, tokens = SIZES[device.type][case.model]
    recipe = RECIPES[case.recipe]
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe) if case.held else nullcontext():
        model = torch.nn.Sequential(
            *[
                te.TransformerLayer(
                    hidden, ffn, heads, num_gqa_groups=groups, normalization="RMSNorm", activation="swiglu",
                    bias=False, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, device=device,
                    fuse_qkv_params=True,
                )
                for _ in range(layers)
            ]
        )  # fmt: skip
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **({"fused": True} if case.fused else {}))
    x = torch.randn(tokens, 1, hidden, device=device, dtype=torch.bfloat16)

    def work() -> None:
        with te.autocast(enabled=recipe is not None, recipe=recipe, emulate=device.type == "cpu"):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        with counted() as nbytes:
            work()
    return Built(work, nbytes[0])


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank sends in all-gathers."""
    gather, sent = getattr(dist, ALL_GATHER), [0]

    def noting(*args: Any, **kwargs: Any) -> Any:
        inp = args[1] if len(args) > 1 else kwargs["input_tensor"]
        sent[0] += inp.numel() * inp.element_size()
        return gather(*args, **kwargs)

    setattr(dist, ALL_GATHER, noting)
    try:
        yield sent
    finally:
        setattr(dist, ALL_GATHER, gather)


def times(device: torch.device, steps: int, *works: Callable[[], None]) -> list[float]:
    """Milliseconds of a step of each, in turns: medians of rounds, from barrier to barrier."""
    found: list[list[float]] = [[] for _ in works]
    rounds, steps = (ROUNDS, steps) if device.type == "cuda" else (1, 1)
    for _ in range(rounds):
        for work, one in zip(works, found, strict=True):
            _settle(device)
            begin = time.perf_counter()
            for _ in range(steps):
                work()
            _settle(device)
            one.append((time.perf_counter() - begin) / steps * 1e3)
    return [median(one) for one in found]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measured(case: Case, plain: Built, device: torch.device) -> harness.Row:
    """One row, on every rank; `plain`: the same model in bf16."""
    other = build(case, device)
    plain_ms, ms = times(device, STEPS[case.model], plain.work, other.work)
    row: harness.Row = {
        "case": case.model,
        "recipe": case.shown,
        "bf16 ms": plain_ms,
        "ms": ms,
        "of_bf16": ms / plain_ms,
        "bf16 gathered MiB": plain.sent / 2**20,
        "gathered MiB": other.sent / 2**20,
        "of_bytes": other.sent / plain.sent,
    }
    if case.held:
        row |= {"target": ALLOWED, "ok": row["of_bf16"] <= ALLOWED}
    return row


def over(begin: float, seconds: float, device: torch.device) -> bool:
    """Whether the time is over, on the rank that is latest: all of them leave out the same."""
    passed = torch.tensor([time.time() - begin], dtype=torch.float64, device=device)
    dist.all_reduce(passed, dist.ReduceOp.MAX)
    return float(passed.item()) > seconds


def all_rows(kind: str, cases: tuple[Case, ...], begin: float, seconds: float) -> Iterator[harness.Row]:
    """A row a case, on every rank. The bf16 models are made once each, and stay."""
    device = torch.device(kind)
    plain: dict[Case, Built] = {}
    for case in cases:
        if over(begin, seconds, device):
            yield {"case": f"{case.model}, {case.shown}: left out, {seconds} s are over"}
            continue
        base = Case(case.model, "bf16", fused=case.fused)
        if base not in plain:
            plain[base] = build(base, device)
        row = measured(case, plain[base], device)
        if dist.get_rank() == 0:
            print(f"{time.time() - begin:6.1f} s  {harness.label(row)}", flush=True)
        yield row
        harness.free()


def measure(cases: tuple[Case, ...] = CASES) -> list[harness.Row]:
    """All cases, in two processes."""
    kind = "cuda" if harness.gpus() >= RANKS else "cpu"
    if harness.gpu() and kind == "cpu":
        return [{"case": f"needs {RANKS} GPUs"}]
    rows = partial(all_rows, cases=cases, begin=time.time(), seconds=SECONDS)
    return list(parallel.spawned(kind, rows, RANKS))


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["sharded", *sys.argv[1:]]))
