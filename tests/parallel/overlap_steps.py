"""Modules whose GEMMs overlap with their communication, beside the same modules without: what ranks do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from te_torch.parallel import overlap
from tests.parallel.ranks import Rank
from tests.recipes import region
from tests.tolerances import snr_db

NONE, FP8 = te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8
H, F = 64, 128
TOKENS = 128  # of a rank: the most that overlaps
FLAGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
#: Which of them are set: the bulk ones, or a ring for the sum of dgrad.
SETS = {
    "bulk": dict(zip(FLAGS, (True, True, False, True, True), strict=True)),
    "rings": dict(zip(FLAGS, (True, True, True, False, False), strict=True)),
}
RINGS = {f"{name}_fprop": {"method": "ring_exchange"} for name in ("proj", "fc2")}


def each_said(flags: dict[str, bool], cfg: dict[str, Any] | None) -> dict[str, Any]:
    """The methods of all GEMMs, by name: where nobody says one, a GPU takes the fastest, which is plain for these."""
    bulk = flags["ub_bulk_dgrad"]
    found = {f"{name}_fprop": "ring_exchange" for name in ("qkv", "fc1")}
    found |= {f"{name}_dgrad": "bulk" if bulk else "ring_exchange" for name in ("qkv", "fc1")}
    found |= {f"{name}_wgrad": "bulk" for name in ("qkv", "fc1") if bulk}
    found |= {f"{name}_fprop": "pipeline" for name in ("proj", "fc2")}
    found |= {f"{name}_dgrad": "ring_exchange" for name in ("proj", "fc2")}
    return {name: {"method": method} for name, method in found.items()} | (cfg or {})


def make(kind: str, rank: Rank, group: Any, **flags: bool) -> Any:
    """A layer over the ranks of a group, with these flags."""
    torch.manual_seed(1 + dist.get_rank(group))
    options: dict[str, Any] = {
        "params_dtype": torch.bfloat16,
        "device": rank.device,
        "tp_group": group,
        "tp_size": dist.get_world_size(group),
        "sequence_parallel": True,
        **flags,
    }
    if kind == "column":
        return te.Linear(H, F, parallel_mode="column", ub_name="qkv", **options)
    if kind.startswith("row"):
        options["delay_wgrad_compute"] = kind == "row, wgrad later"
        return te.Linear(F, H, parallel_mode="row", ub_name="proj", **options)
    if kind == "norm column":
        return te.LayerNormLinear(H, F, parallel_mode="column", ub_name="fc1", **options)
    options["set_parallel_mode"] = True
    if kind.startswith("mlp"):
        return te.LayerNormMLP(H, F, checkpoint=kind == "mlp again", **options)
    if kind == "attention":
        return te.MultiheadAttention(H, 4, attention_dropout=0.0, input_layernorm=True, fuse_qkv_params=True, **options)
    if flags:
        options["ub_tp_comm_overlap"] = True
    return te.TransformerLayer(H, F, 4, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, **options)


@contextmanager
def initialised(ranks: int, **options: Any) -> Iterator[None]:
    """Between `initialize_ub` and `destroy_ub`."""
    modes = {"quantization_modes": [NONE, FP8], "dtype": torch.bfloat16, **options}
    te.initialize_ub([TOKENS * ranks, H], ranks, **modes)
    try:
        yield
    finally:
        te.destroy_ub()


def steps(
    module: Any, rank: Rank, recipe: str | None, counts: tuple[int, ...], group: Any, checkpointed: bool = False
) -> list[torch.Tensor]:
    """All outputs and gradients of some steps, of each so many tokens a rank."""
    found: list[torch.Tensor] = []
    trained = [p for p in module.parameters() if p.requires_grad]
    size, own = dist.get_world_size(group), dist.get_rank(group)
    whole = isinstance(module, te.Linear) and module.parallel_mode == "row"  # it takes all tokens, and columns of them
    width = module.in_features if isinstance(module, te.Linear) else H
    for step, tokens in enumerate(counts):
        rows = tokens * size if whole else tokens
        generator = torch.Generator().manual_seed(10 * step + own)
        x = torch.randn(rows, 1, width, generator=generator).bfloat16().to(rank.device).requires_grad_()
        with region(recipe):
            y = te.checkpoint(module, x) if checkpointed else module(x)
        y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(rank.device))
        if isinstance(module, te.Linear) and module.need_backward_dw():
            module.backward_dw()
        found += [t.detach().cpu() for t in (y, x.grad, *[p.grad for p in trained])]  # type: ignore[union-attr]
        with torch.no_grad():
            for p in trained:
                p.sub_(p.grad, alpha=0.001)
                p.grad = None
    return found


def reasons(module: Any) -> dict[str, str]:
    """By GEMM, as ub_cfgs calls it, what the report says of its overlap."""
    said: dict[str, str] = {}
    for row in te.precision_report(module).rows:
        for part in row.facts.reason.split("; "):
            name, _, how = part.partition(" ")
            if name.partition("_")[0] in overlap.NAMES:
                said[name] = how
    return said


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The least agreement of any pair, in dB; infinite where all bits are equal."""
    pairs = list(zip(found, wanted, strict=True))
    return min(math.inf if torch.equal(a, b) else snr_db(a, b) for a, b in pairs)


def compared(
    rank: Rank,
    kind: str,
    recipe: str | None,
    flags: dict[str, bool],
    cfg: dict[str, Any] | None,
    counts: tuple[int, ...],
    group: Any = None,
) -> tuple[float, dict[str, str]]:
    """(how far overlap changes results, how GEMMs overlapped in the last step)."""
    group = group or dist.group.WORLD
    plain = steps(make(kind, rank, group), rank, recipe, counts, group)
    with initialised(dist.get_world_size(group), ub_cfgs=cfg if rank.device == "cpu" else each_said(flags, cfg)):
        module = make(kind, rank, group, **flags)
        found = steps(module, rank, recipe, counts, group)
        said = reasons(module)
    return worst(found, plain), said
