"""FSDP2 on two ranks: what a step takes and what travels, with weights in bf16 and held quantized.

Two GPUs over NCCL; without them two processes on the CPU over gloo, whose times mean nothing. Eight layers of a Llama's
shape (hidden 4096, ffn 14336, 32 heads, 8 groups, RMSNorm, swiglu, 8192 tokens a rank), and four small ones (hidden
4096, ffn 4096, 1024 tokens a rank), where the host's time shows. A step is forward, backward, AdamW and zero_grad. Each
form is measured in turns with bf16 weights that train in bf16, in the same processes; its step may take no longer.
`gathered MiB` is what a rank sends in a step's all-gathers.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from benchmarks import harness
from examples.ranks import leave
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

RANKS = 2
ROUNDS, STEPS = 5, 3
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
FORMS = [(name, held) for name in ("delayed", "current", "block") for held in (False, True)]
CASES = (
    *[Case("8 Llama-shape layers", *form) for form in FORMS],
    *[Case("4 small layers", *form) for form in FORMS],
    *[Case("4 small layers", name, True, True) for name in ("delayed", "current", "block")],
)
#: By device: layers, then hidden, ffn, heads, groups and tokens a rank.
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"8 Llama-shape layers": (8, 4096, 14336, 32, 8, 8192), "4 small layers": (4, 4096, 4096, 32, 32, 1024)},
    "cpu": {"8 Llama-shape layers": (2, 256, 512, 4, 2, 32), "4 small layers": (1, 256, 256, 4, 4, 16)},
}


def build(case: Case, device: torch.device) -> tuple[Callable[[], None], torch.nn.Module]:
    """A step as a work, and its model."""
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

    return work, model


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank sends in all-gathers."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather, sent = getattr(dist, name), [0]

    def noting(*args: Any, **kwargs: Any) -> Any:
        inp = args[1] if len(args) > 1 else kwargs["input_tensor"]
        sent[0] += inp.numel() * inp.element_size()
        return gather(*args, **kwargs)

    setattr(dist, name, noting)
    try:
        yield sent
    finally:
        setattr(dist, name, gather)


def times(device: torch.device, *works: Callable[[], None]) -> list[float]:
    """Milliseconds of a step of each, in turns: medians of rounds, from barrier to barrier."""
    found: list[list[float]] = [[] for _ in works]
    for round_ in range(ROUNDS + 1):
        for work, one in zip(works, found, strict=True):
            _settle(device)
            begin = time.perf_counter()
            for _ in range(STEPS):
                work()
            _settle(device)
            if round_:
                one.append((time.perf_counter() - begin) / STEPS * 1e3)
    return [median(one) for one in found]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measured(case: Case, device: torch.device) -> harness.Row:
    """One row, on every rank."""
    (plain, _), (other, model) = build(Case(case.model, "bf16", fused=case.fused), device), build(case, device)
    sent = []
    for work in (plain, other):
        for _ in range(2):
            with counted() as nbytes:
                work()
        sent.append(nbytes[0])
    plain_ms, ms = times(device, plain, other)
    del model
    row: harness.Row = {
        "case": case.model,
        "recipe": case.shown,
        "bf16 ms": plain_ms,
        "ms": ms,
        "of_bf16": ms / plain_ms,
        "bf16 gathered MiB": sent[0] / 2**20,
        "gathered MiB": sent[1] / 2**20,
        "of_bytes": sent[1] / sent[0],
    }
    if case.held:
        row |= {"target": ALLOWED, "ok": row["of_bf16"] <= ALLOWED}
    return row


def on_a_rank(rank: int, folder: str, kind: str, cases: list[Case]) -> None:
    """All cases on one rank; the first writes the rows."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=RANKS)
    rows = []
    for case in cases:
        rows.append(measured(case, device))
        gc.collect()
        if kind == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()
    leave()


def measure(cases: tuple[Case, ...] = CASES) -> list[harness.Row]:
    """All cases, in two processes."""
    kind = "cuda" if harness.gpus() >= RANKS else "cpu"
    if harness.gpu() and kind == "cpu":
        return [{"case": f"needs {RANKS} GPUs"}]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(on_a_rank, (folder, kind, list(cases)), nprocs=RANKS)
        rows: list[harness.Row] = json.loads(Path(folder, "rows.json").read_text())
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["sharded", *sys.argv[1:]]))
