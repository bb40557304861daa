"""A small GPT built of te_torch's Transformer layers: what a user of the project would write.

Shapes: tokens [B, S], hidden states [B, S, H], logits [B, S, V].

Parameters are float32 and the model runs under `torch.autocast(bfloat16)`, with `te.autocast` around it for FP8.
That is how most training scripts use such modules (plain PyTorch mixed precision): an ordinary AdamW then has
float32 master weights, FP8 weights are cast from those and not from rounded copies, and no update is lost
because it is smaller than bf16's eight bits can show. Parameters in bf16 would save memory and a cast per
step, but ask for an optimizer that keeps a master copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import sqrt

import torch
import torch.nn.functional as F

import te_torch as te
from te_cli.settings import GPTConfig


def normal(deviation: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """An initialiser."""
    return lambda weight: torch.nn.init.normal_(weight, 0.0, deviation)


def block(config: GPTConfig, number: int, device: torch.device) -> te.TransformerLayer:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)), causal, on hidden states [B, S, H]."""
    return te.TransformerLayer(
        config.hidden,
        4 * config.hidden,
        config.heads,
        layer_number=number,
        attn_input_format="bshd",
        fuse_qkv_params=True,  # one weight for queries, keys and values: quantized at once
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=normal(1 / sqrt(config.hidden)),  # keeps the variance of what goes through
        # What ends a branch starts small, so that the model begins as its embedding. But not at zero: delayed
        # scaling quantizes with the maximum of steps before and would clip weights that grow from nothing.
        output_layer_init_method=normal(0.02 / sqrt(2 * config.layers)),
        device=device,
    )


class GPT(torch.nn.Module):
    """Embedding, blocks, norm; the head shares the embedding's weight and stays in high precision, as is usual."""

    def __init__(self, config: GPTConfig, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embedding = torch.nn.Embedding(config.vocabulary, config.hidden, device=device)
        self.rotary = te.RotaryPositionEmbedding(config.hidden // config.heads).to(device)
        self.blocks = torch.nn.ModuleList(block(config, i + 1, device) for i in range(config.layers))
        self.norm = te.RMSNorm(config.hidden, device=device)
        normal(0.02)(self.embedding.weight)

    def forward(self, tokens: torch.Tensor, cache: te.InferenceParams | None = None) -> torch.Tensor:
        """Logits [B, S, V] of the next token at every position; with a cache, the tokens go on where it ends."""
        return F.linear(self.states(tokens, cache), self.embedding.weight)

    def states(self, tokens: torch.Tensor, cache: te.InferenceParams | None = None) -> torch.Tensor:
        """What the head reads, [B, S, H]."""
        x = self.embedding(tokens)
        angles = self.rotary(tokens.shape[1] if cache is None else cache.max_sequence_length)
        mask = "causal" if cache is None else "padding_causal"  # sequences in a cache differ in length
        for number, layer in enumerate(self.blocks):
            with te.autocast(enabled=False) if number < self.config.plain_blocks else nullcontext():
                x = layer(x, self_attn_mask_type=mask, rotary_pos_emb=angles, inference_params=cache)
        normed: torch.Tensor = self.norm(x)
        return normed
