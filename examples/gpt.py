"""A small GPT built of te_torch's modules: what a user of the project would write.

Shapes: tokens [B, S], hidden states [B, S, H], logits [B, S, V].

Parameters are float32 and the model runs under `torch.autocast(bfloat16)`, with `te.autocast` around it for FP8.
That is how most training scripts use such modules (plain PyTorch mixed precision): an ordinary AdamW then has
float32 master weights, FP8 weights are cast from those and not from rounded copies, and no update is lost
because it is smaller than bf16's eight bits can show. Parameters in bf16 would save memory and a cast per
step, but ask for an optimizer that keeps a master copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F

import te_torch as te


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model. FP8 GEMMs want widths that are multiples of 16; others are padded inside."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocabulary: int = 256  # bytes
    plain_blocks: int = 0  # so many blocks at the beginning stay in high precision inside a region, too

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"hidden={self.hidden} does not give heads={self.heads} an even width each: "
                f"choose a multiple of {2 * self.heads}"
            )


Turn = tuple[torch.Tensor, torch.Tensor]  # cosine and sine [S, D / 2] of the angle of each position and feature pair


def turns(sequence: int, width: int, device: torch.device, dtype: torch.dtype) -> Turn:
    """The angles of rotary position embedding for heads of this width."""
    speed = 10000.0 ** -torch.linspace(0, 1, width // 2 + 1, device=device)[:-1]
    angle = torch.outer(torch.arange(sequence, device=device, dtype=torch.float32), speed)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Queries or keys [B, heads, S, D], their pairs of features turned with the position."""
    (cos, sin), (a, b) = turn, x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def normal(deviation: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An initialiser."""
    return lambda weight: torch.nn.init.normal_(weight, 0.0, deviation)


class Block(torch.nn.Module):
    """One Transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig, device: torch.device) -> None:
        super().__init__()
        self.heads = config.heads
        wide = config.hidden
        first = normal(1 / sqrt(wide))  # keeps the variance of what goes through
        # What ends a branch starts small, so that the model begins as its embedding. But not at zero: delayed
        # scaling quantizes with the maximum of steps before and would clip weights that grow from nothing.
        last = normal(0.02 / sqrt(2 * config.layers))
        self.qkv = te.LayerNormLinear(wide, 3 * wide, init_method=first, device=device)
        self.projection = te.Linear(wide, wide, init_method=last, device=device)
        self.mlp = te.LayerNormMLP(
            wide, 4 * wide, init_method=first, output_layer_init_method=last, device=device
        )

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        """x [B, S, H] to [B, S, H]."""
        batch, sequence, wide = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, wide // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, D]
        mixed = F.scaled_dot_product_attention(
            rotate(q, turn), rotate(k, turn), v, is_causal=True
        )
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, sequence, wide))
        return x + self.mlp(x)


class GPT(torch.nn.Module):
    """Embedding, blocks, norm; the head shares the embedding's weight and stays in high precision, as is usual."""

    def __init__(self, config: GPTConfig, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embedding = torch.nn.Embedding(config.vocabulary, config.hidden, device=device)
        self.blocks = torch.nn.ModuleList(Block(config, device) for _ in range(config.layers))
        self.norm = te.RMSNorm(config.hidden, device=device)
        normal(0.02)(self.embedding.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of the next token at every position."""
        x = self.embedding(tokens)
        kind, config = x.device.type, self.config
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        turn = turns(tokens.shape[1], config.hidden // config.heads, x.device, dtype)
        for number, block in enumerate(self.blocks):
            if number < config.plain_blocks:
                with te.autocast(enabled=False):
                    x = block(x, turn)
            else:
                x = block(x, turn)
        return F.linear(self.norm(x), self.embedding.weight)
