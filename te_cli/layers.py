"""What `te bench` times: layers of te_torch, and the same of plain torch with the same weights.

Hidden states are [B, S, H]. A layer of torch is written as its users write it: `torch.nn` modules and
`scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import te_torch as te


@dataclass(frozen=True)
class Sizes:
    """Of a layer, and of what it is given."""

    hidden: int
    ffn: int
    heads: int
    batch: int
    sequence: int


#: For the CPU, whose FP8 is emulated, and for a large GPU.
SIZES = {"cpu": Sizes(128, 512, 4, 2, 64), "cuda": Sizes(4096, 16384, 32, 2, 2048)}


class Attention(nn.Module):
    """Causal attention over the heads of one projection."""

    def __init__(self, sizes: Sizes, **place: Any) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, **place)
        self.proj = nn.Linear(sizes.hidden, sizes.hidden, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] as [B, S, H]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def mlp(sizes: Sizes, **place: Any) -> nn.Sequential:
    """Norm, linear, GELU, linear."""
    first, second = nn.Linear(sizes.hidden, sizes.ffn, **place), nn.Linear(sizes.ffn, sizes.hidden, **place)
    return nn.Sequential(nn.LayerNorm(sizes.hidden, **place), first, nn.GELU("tanh"), second)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, sizes: Sizes, **place: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.hidden, **place)
        self.attention = Attention(sizes, **place)
        self.mlp = mlp(sizes, **place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] as [B, S, H]."""
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


def _block(sizes: Sizes, place: dict[str, Any]) -> te.TransformerLayer:
    return te.TransformerLayer(
        sizes.hidden,
        sizes.ffn,
        sizes.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        fuse_qkv_params=True,
        qkv_weight_interleaved=False,  # all of Q, then all of K, then all of V
        **place,
    )


#: By name: torch's layer, and ours, whose parameters are the same ones in the same order.
Made = tuple[Callable[..., nn.Module], Callable[[Sizes, dict[str, Any]], nn.Module]]
LAYERS: dict[str, Made] = {
    "Linear": (
        lambda s, **place: nn.Linear(s.hidden, s.ffn, **place),
        lambda s, place: te.Linear(s.hidden, s.ffn, **place),
    ),
    "LayerNormLinear": (
        lambda s, **place: nn.Sequential(nn.LayerNorm(s.hidden, **place), nn.Linear(s.hidden, s.ffn, **place)),
        lambda s, place: te.LayerNormLinear(s.hidden, s.ffn, **place),
    ),
    "LayerNormMLP": (mlp, lambda s, place: te.LayerNormMLP(s.hidden, s.ffn, **place)),
    "TransformerLayer": (Block, _block),
}


def named(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """(torch's, ours) of a name, with equal weights."""
    theirs, ours = LAYERS[name]
    torch.manual_seed(0)
    reference = theirs(sizes, device=device, dtype=dtype)
    layer = ours(sizes, {"device": device, "params_dtype": dtype})
    _copy(reference.parameters(), layer.parameters())
    return reference, layer


@torch.no_grad()
def _copy(source: Iterable[nn.Parameter], target: Iterable[nn.Parameter]) -> None:
    for theirs, ours in zip(source, target, strict=True):
        if theirs.shape != ours.shape:
            raise AssertionError(f"a parameter of shape {tuple(theirs.shape)} beside one of {tuple(ours.shape)}")
        ours.copy_(theirs)
