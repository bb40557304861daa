"""Layers whose weights are spread over ranks, and the whole layers that they are parts of."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from tests.parallel.ranks import Rank
from tests.parallel.steps import on_cpu
from tests.recipes import region

H, F, BATCH, HEADS, GROUPS = 64, 96, 2, 8, 4
WIDE = 4 * 128  # hidden size with heads of 128, of which cuDNN has FP8 attention
STEPS = 3
#: How parameters are cut, by the end of their names: dimension, and into how many equal pieces before (gated: 2).
CUTS = {
    "column": {"weight": (0, 1), "bias": (0, 1)},
    "row": {"weight": (1, 1)},
    "mlp": {"fc1_weight": (0, 1), "fc1_bias": (0, 1), "fc2_weight": (1, 1)},
    "gated": {"fc1_weight": (0, 2), "fc1_bias": (0, 2), "fc2_weight": (1, 1)},
    "attention": {
        **{f"{which}_{kind}": (0, 1) for which in ("query", "key", "value") for kind in ("weight", "bias")},
        "qkv.weight": (0, 1),
        "qkv.bias": (0, 1),
        "proj.weight": (1, 1),
    },
}
CUTS["layer"] = CUTS["attention"] | CUTS["mlp"]
CUTS["wide heads"] = CUTS["layer"]
CUTS["gated layer"] = CUTS["attention"] | CUTS["gated"]


class Turned(torch.nn.Module):
    """Attention with rotary embeddings."""

    def __init__(self, attention: Any, device: str) -> None:
        super().__init__()
        self.attention = attention
        self.angles = te.RotaryPositionEmbedding(H // HEADS)(512).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The attention's output."""
        out: torch.Tensor = self.attention(x, rotary_pos_emb=self.angles)
        return out


def make(kind: str, device: str, **parallel: Any) -> Any:
    """A layer by name: whole, or with its group and mode this rank's part."""
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device, **parallel}
    mode = bool(parallel)
    torch.manual_seed(0)
    if kind in ("column", "row"):
        return te.Linear(H, F, parallel_mode=kind if mode else None, **options)
    if kind == "norm column":
        return te.LayerNormLinear(H, F, parallel_mode="column" if mode else None, **options)
    options["set_parallel_mode"] = mode
    if kind in ("mlp", "gated"):
        activation = "gelu" if kind == "mlp" else "swiglu"
        return te.LayerNormMLP(H, F, activation=activation, normalization="RMSNorm", **options)
    if kind == "mlp again":
        return te.LayerNormMLP(H, F, checkpoint=True, **options)
    if kind == "attention":
        return te.MultiheadAttention(
            H,
            HEADS,
            num_gqa_groups=GROUPS,
            attention_dropout=0.0,
            input_layernorm=True,
            fuse_qkv_params=False,
            **options,
        )
    if kind == "turned attention":
        options |= {"qk_norm_type": "RMSNorm", "fuse_qkv_params": False, "bias": False}
        return Turned(te.MultiheadAttention(H, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, **options), device)
    if kind == "wide heads":
        return te.TransformerLayer(WIDE, F, 4, hidden_dropout=0.0, attention_dropout=0.0, **options)
    if kind in ("layer", "gated layer"):
        return te.TransformerLayer(
            H,
            F,
            HEADS,
            num_gqa_groups=GROUPS,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation="gelu" if kind == "layer" else "swiglu",
            **options,
        )
    raise ValueError(kind)


def cuts_of(kind: str) -> dict[str, tuple[int, int]]:
    return CUTS[{"norm column": "column", "mlp again": "mlp", "turned attention": "attention"}.get(kind, kind)]


def cut_of(kind: str, name: str) -> tuple[int, int] | None:
    """How a parameter is cut; None if it is whole on every rank."""
    last = name.rpartition(".")[2]
    if last.startswith("layer_norm"):
        return None
    return next((cut for end, cut in cuts_of(kind).items() if f".{name}".endswith(f".{end}")), None)


def part(t: torch.Tensor, cut: tuple[int, int] | None, rank: int, world: int) -> torch.Tensor:
    """A rank's part of a whole parameter."""
    if cut is None:
        return t
    dim, pieces = cut
    return torch.cat([piece.chunk(world, dim)[rank] for piece in t.chunk(pieces, dim)], dim)


def joined(parts: list[torch.Tensor], cut: tuple[int, int] | None) -> torch.Tensor:
    """And back."""
    if cut is None:
        return parts[0]
    dim, pieces = cut
    each = [p.chunk(pieces, dim) for p in parts]
    return torch.cat([each[rank][i] for i in range(pieces) for rank in range(len(parts))], dim)


def inputs(rows: int, width: int, step: int, seed: int = 0) -> torch.Tensor:
    """Whole tensors [rows, batch, width], whose ranks' parts have maxima of their own."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    t = torch.randn(rows, BATCH, width, generator=generator)
    return (t * (1 + torch.arange(rows) % 5)[:, None, None]).bfloat16()


def shapes(kind: str) -> tuple[int, int]:
    """(width of the input, width of the output)."""
    return H, F if kind in ("column", "row", "norm column") else H


def cut_ends(kind: str, sequence: bool) -> tuple[int | None, int | None]:
    """Along which dimension a rank has its part of the input, and of the output."""
    start = {"row": 2}.get(kind, 0 if sequence else None)
    end = {"column": 2, "norm column": 2}.get(kind, 0 if sequence else None)
    return start, end


def piece(t: torch.Tensor, dim: int | None, rank: int, world: int) -> torch.Tensor:
    return t if dim is None else t.chunk(world, dim)[rank].contiguous()


def tensors(kind: str, rank: Rank, sequence: bool, number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's parts of an input and of an output gradient, larger from step to step."""
    ends = zip(shapes(kind), cut_ends(kind, sequence), strict=True)
    return tuple(  # type: ignore[return-value]
        ((1 + number) * piece(inputs(rows, width, number, seed), end, rank.number, rank.world)).to(rank.device)
        for seed, (width, end) in enumerate(ends)
    )


def spread(kind: str, rank: Rank, sequence: bool = True, group: Any = None, **more: Any) -> Any:
    """A layer of this rank's parts of the whole layer's parameters, over all ranks or a group."""
    group = group or dist.group.WORLD
    size, number = dist.get_world_size(group), dist.get_rank(group)
    module = make(kind, rank.device, tp_group=group, tp_size=size, sequence_parallel=sequence, **more)
    whole = dict(make(kind, rank.device).named_parameters())
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(part(whole[name], cut_of(kind, name), number, size))
    return module


def trained(rank: Rank, kind: str, recipe: str | None, sequence: bool, rows: int) -> dict[str, Any]:
    """What a rank finds: outputs, gradients of the input and of the parameters, and the parameters after some steps."""
    return steps(spread(kind, rank, sequence), rank, kind, recipe, sequence, rows)


def alone(kind: str, recipe: str | None, rows: int, device: str) -> dict[str, Any]:
    """What one process finds."""
    return steps(make(kind, device), Rank(0, 1, device), kind, recipe, False, rows)


def steps(module: Any, rank: Rank, kind: str, recipe: str | None, sequence: bool, rows: int) -> dict[str, Any]:
    found: dict[str, Any] = {"y": [], "dx": [], "grads": []}
    for number in range(STEPS):
        x, dy = tensors(kind, rank, sequence, number, rows)
        with region(recipe):
            y = module(x.requires_grad_())
        y.backward(dy)
        for p in module.parameters():
            if rank.world > 1 and getattr(p, "sequence_parallel", False):  # the trainer's part
                dist.all_reduce(p.grad)
        found["y"].append(y)
        found["dx"].append(x.grad)
        found["grads"].append({n: p.grad for n, p in module.named_parameters()})
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(p.grad, alpha=0.001)
                p.grad = None
    return on_cpu(found | {"weights": dict(module.named_parameters())})  # type: ignore[no-any-return]


def options(rank: Rank, sequence: bool = True) -> dict[str, Any]:
    return {"tp_group": dist.group.WORLD, "tp_size": rank.world, "sequence_parallel": sequence}
