"""Layers whose weights are spread over ranks, and the whole layers that they are parts of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from te_core.tape import taped
from te_torch.exchange import ALL_GATHER, REDUCE_SCATTER
from tests.parallel.ranks import Rank
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


def steps(
    module: Any, recipe: str | None, kind: str, rows: int, ends: tuple[Any, Any], rank: int, world: int, device: str
) -> dict[str, Any]:
    """Outputs, gradients of the input and of the parameters, and the parameters after some steps."""
    found: dict[str, Any] = {"y": [], "dx": [], "grads": []}
    wide, out = shapes(kind)
    for step in range(STEPS):
        x = piece(inputs(rows, wide, step), ends[0], rank, world).to(device).requires_grad_()
        dy = piece(inputs(rows, out, step, seed=1), ends[1], rank, world).to(device)
        with region(recipe):
            y = module(x)
        y.backward(dy)
        for p in module.parameters():
            if world > 1 and getattr(p, "sequence_parallel", False):  # the trainer's part
                dist.all_reduce(p.grad)
        found["y"].append(y.detach().cpu())
        found["dx"].append(x.grad.cpu())  # type: ignore[union-attr]
        found["grads"].append({n: p.grad.cpu() for n, p in module.named_parameters()})
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(p.grad, alpha=0.001)
                p.grad = None
    found["weights"] = {n: p.detach().cpu() for n, p in module.named_parameters()}
    return found


def spread(rank: Rank, kind: str, recipe: str | None, sequence: bool, rows: int, options: dict[str, Any]) -> Any:
    """What a rank finds, with its parts of the whole layer's parameters."""
    whole = make(kind, rank.device)
    module = make(
        kind, rank.device, tp_group=dist.group.WORLD, tp_size=rank.world, sequence_parallel=sequence, **options
    )
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(part(values[name], cut_of(kind, name), rank.number, rank.world))
    with counted() as calls:
        found = steps(module, recipe, kind, rows, cut_ends(kind, sequence), rank.number, rank.world, rank.device)
    return {**found, "calls": calls}


def alone(kind: str, recipe: str | None, rows: int, device: str) -> dict[str, Any]:
    """What one process finds."""
    return steps(make(kind, device), recipe, kind, rows, (None, None), 0, 1, device)


def as_one(rank: Rank, sequence: bool, recipe: str | None) -> bool:
    """Whether a layer that is spread over the ranks runs as one node, with the bits of its parts."""
    found = []
    for one in (True, False):
        torch.manual_seed(rank.number)
        module = te.TransformerLayer(
            64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True, tp_group=dist.group.WORLD,
            tp_size=rank.world, sequence_parallel=sequence, device=rank.device, params_dtype=torch.bfloat16,
        )  # fmt: skip
        module.one_node = one
        results = []
        for i in range(3):
            torch.manual_seed(i + rank.number * sequence)
            x = torch.randn(16, 2, 64, dtype=torch.bfloat16).to(rank.device).requires_grad_()
            module.zero_grad()
            with region(recipe):
                y = module(x)
            planned = [plan for plan in module._plans if type(plan).__name__ == "GraphPlan"]
            assert bool(planned) is (one and taped.when() != "never")
            y.sum().backward()
            results += [y.detach(), x.grad, *[p.grad for p in module.parameters()]]
        found.append(results)
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """The collectives inside, and the bytes that this rank gave to each."""
    names = {ALL_GATHER: 1, REDUCE_SCATTER: 1, "all_reduce": 0}
    said = {ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter", "all_reduce": "all_reduce"}
    before = {name: getattr(dist, name) for name in names}
    calls: list[tuple[str, int]] = []

    def wrapped(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[names[name]]
            calls.append((said[name], given.numel() * given.element_size()))
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, wrapped(name))
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def options(rank: Rank, sequence: bool = True) -> dict[str, Any]:
    return {"tp_group": dist.group.WORLD, "tp_size": rank.world, "sequence_parallel": sequence}


def error_of(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
