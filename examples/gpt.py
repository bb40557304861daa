"""A small GPT built of te_torch's modules: what a user of the project would write.

Shapes: tokens [B, S], hidden states [B, S, H], logits [B, S, V].

Parameters are float32 and the model runs under `torch.autocast(bfloat16)`, with `te.autocast` around it for FP8.
That is how most training scripts use such modules (as plain PyTorch mixed precision): a plain AdamW then
has float32 master weights, FP8 weights are cast from those and not from rounded copies, and a learning rate
decaying to nothing is not lost in bf16's eight bits. Parameters in bf16 save memory and a cast per step, but ask
for an optimizer that keeps its own master copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F

import te_torch as te


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model. FP8 wants widths that are multiples of 16; other widths are padded inside."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    context: int = 256  # longest sequence
    vocabulary: int = 256  # bytes

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} does not divide into heads={self.heads}: choose a multiple")


class Block(torch.nn.Module):
    """One Transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig, device: torch.device) -> None:
        super().__init__()
        self.heads = config.heads
        wide = config.hidden
        # Each branch adds to the residual stream; scaled down so that the sum over all layers starts near one.
        last = sqrt(2 * config.layers)
        self.qkv = te.LayerNormLinear(wide, 3 * wide, init_method=normal(wide), device=device)
        self.projection = te.Linear(wide, wide, init_method=normal(wide, last), device=device)
        self.mlp = te.LayerNormMLP(
            wide, 4 * wide, init_method=normal(wide), output_layer_init_method=normal(4 * wide, last), device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, H] to [B, S, H]."""
        batch, sequence, wide = x.shape
        qkv = self.qkv(x).view(batch, sequence, 3, self.heads, wide // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, S, H / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, sequence, wide))
        return x + self.mlp(x)


def normal(fan_in: int, divided_by: float = 1.0):
    """An initialiser that keeps the variance of what goes through."""
    return lambda weight: torch.nn.init.normal_(weight, 0.0, 1.0 / sqrt(fan_in) / divided_by)


class GPT(torch.nn.Module):
    """Embedding, blocks, norm, and a head of its own (which stays in high precision, as usual)."""

    def __init__(self, config: GPTConfig, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.token = torch.nn.Embedding(config.vocabulary, config.hidden, device=device)
        self.position = torch.nn.Embedding(config.context, config.hidden, device=device)
        self.blocks = torch.nn.ModuleList(Block(config, device) for _ in range(config.layers))
        self.norm = te.RMSNorm(config.hidden, device=device)
        self.head = torch.nn.Linear(config.hidden, config.vocabulary, bias=False, device=device)
        for table in (self.token, self.position):
            torch.nn.init.normal_(table.weight, 0.0, 0.5)
        torch.nn.init.zeros_(self.head.weight)  # the first loss is exactly log(vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V] of the next token at every position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
