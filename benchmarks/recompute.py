"""What each way of computing again costs and saves: a TransformerLayer, its bytes kept for backward, its step's time.

python -m benchmarks.recompute          the bytes alone, as docs/guides/13-memory.md shows them: exact on any machine
python -m benchmarks.run recompute      with times (on a GPU)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import te_torch as te
from benchmarks import harness
from te_core.recipe import DelayedScaling


@dataclass(frozen=True)
class Size:
    """One size of a layer and its input."""

    hidden: int
    inside: int
    heads: int
    tokens: int
    batch: int


SIZES = {"cuda": Size(4096, 14336, 32, 4096, 1), "cpu": Size(128, 448, 2, 1024, 2)}
RECIPES: dict[str, Any] = {"bf16": None, "delayed": DelayedScaling(amax_history_len=16)}
KEEPING = "everything kept"


@dataclass(frozen=True)
class Way:
    """What a layer computes again."""

    norms: bool = False
    attention: bool = False
    mlp: bool = False
    whole: bool = False


WAYS = {
    KEEPING: Way(),
    "norm outputs": Way(norms=True),
    "core attention": Way(attention=True),
    "the MLP": Way(mlp=True),
    "norm outputs, core attention, the MLP": Way(True, True, True),
    "the layer (te.checkpoint)": Way(whole=True),
}


def layer_of(way: Way, size: Size, device: torch.device) -> Any:
    """A layer as Llama has them, that computes again what the way says."""
    layer = te.TransformerLayer(
        size.hidden,
        size.inside,
        size.heads,
        hidden_dropout=0.0,
        attention_dropout=0.1,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        params_dtype=torch.bfloat16,
        device=device,
    )
    for module in layer.modules():
        if hasattr(module, "recompute_norm_output"):
            module.recompute_norm_output = way.norms
    layer.layernorm_mlp.checkpoint = way.mlp
    return layer


def forward_of(way: Way, layer: Any, x: torch.Tensor, recipe: Any) -> torch.Tensor:
    """A forward in this way."""
    with nullcontext() if recipe is None else te.autocast(recipe=recipe):
        if way.whole:
            return te.checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]
        return layer(x, checkpoint_core_attention=way.attention)  # type: ignore[no-any-return]


def kept_bytes(way: Way, size: Size, recipe: Any, device: torch.device) -> int:
    """What one forward keeps for its backward, the parameters not counted."""
    layer = layer_of(way, size, device)
    x = torch.randn(size.tokens, size.batch, size.hidden, dtype=torch.bfloat16, device=device).requires_grad_()
    with te.measure_saved(layer) as saved:
        y = forward_of(way, layer, x, recipe)
    found = te.memory_report(layer, saved).totals["saved"]
    del y
    return found


def rows(size: Size, device: torch.device, timed: bool) -> list[harness.Row]:
    """A row for each way in each recipe; times of all ways of a recipe are taken in turns."""
    found: list[harness.Row] = []
    elements = size.tokens * size.batch * size.hidden
    for name, recipe in RECIPES.items():
        times: Sequence[float] = [float("nan")] * len(WAYS)
        if timed:
            times = harness.gpu_us(*[work_of(way, size, recipe, device) for way in WAYS.values()])
        for (case, way), us in zip(WAYS.items(), times, strict=True):
            kept = kept_bytes(way, size, recipe, device)
            row = {"case": case, "recipe": name, "kept MiB": kept / 2**20, "bytes an element": kept / elements}
            found.append(row | {"fwd+bwd us": us, "of_keeping": times[0] / us})
            harness.free()
    return found


def work_of(way: Way, size: Size, recipe: Any, device: torch.device) -> Callable[[], None]:
    """A step in this way."""
    layer = layer_of(way, size, device)
    x = torch.randn(size.tokens, size.batch, size.hidden, dtype=torch.bfloat16, device=device).requires_grad_()
    dy = torch.randn_like(x)

    def step() -> None:
        forward_of(way, layer, x, recipe).backward(dy)
        x.grad = None
        for p in layer.parameters():
            p.grad = None

    return step


def measure() -> list[harness.Row]:
    """All ways, with times."""
    device = harness.device()
    return rows(SIZES[device.type], device, True)


def bytes_table() -> str:
    """Bytes for each element of the layer's input, a line a way and a column a recipe."""
    found = rows(SIZES["cpu"], torch.device("cpu"), False)
    lines = [f"| Computed again | {' | '.join(RECIPES)} |", "|---|" + "---|" * len(RECIPES)]
    for case in WAYS:
        cells = [f"{row['bytes an element']:.1f}" for row in found if row["case"] == case]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(bytes_table())
