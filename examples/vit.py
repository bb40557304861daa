"""A Vision Transformer: it learns to tell circles, squares, triangles and crosses apart, which it draws by itself.

A picture is cut into patches; each is one token of a Transformer without a mask. Some 10 seconds on a CPU core; on a
GPU pictures and model are larger.

    python examples/vit.py --recipe mxfp8
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace as Sizes

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # for the CPU backend: its threads poll otherwise
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

import torch
import torch.nn.functional as F

import te_torch as te
from examples.loop import Run
from te_cli.gpt import normal

KINDS = ("circle", "square", "triangle", "cross")

#: By device; `side` and `patch` in pixels.
SIZES = {
    "cpu": Sizes(layers=2, width=64, heads=4, batch=64, side=16, patch=4, rate=3e-3, steps=120),
    "cuda": Sizes(layers=12, width=768, heads=12, batch=256, side=224, patch=16, rate=3e-4, steps=500),
}


class ViT(torch.nn.Module):
    """Patches and their places, layers without a mask, and a head that reads the mean of all tokens."""

    def __init__(self, s: Sizes, device: str) -> None:
        super().__init__()
        self.patch = s.patch
        self.patches = te.Linear(s.patch**2, s.width, init_method=normal(1 / s.patch), device=device)
        self.places = torch.nn.Parameter(0.5 * torch.randn((s.side // s.patch) ** 2, s.width, device=device))
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd", "device": device}
        options |= {"self_attn_mask_type": "no_mask", "init_method": normal(s.width**-0.5)}
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(s.width, 4 * s.width, s.heads, **options) for _ in range(s.layers)
        )
        self.norm = te.LayerNorm(s.width, device=device)
        self.head = torch.nn.Linear(s.width, len(KINDS), device=device)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Scores [batch, kinds] of pictures [batch, side, side]."""
        cut = pictures.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)  # [batch, row, column, y, x]
        x = self.patches(cut.flatten(3).flatten(1, 2)) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def batch_of(s: Sizes, draw: torch.Generator, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(pictures, their kinds): shapes of random size at random places, with noise."""
    kinds = torch.randint(len(KINDS), (s.batch,), generator=draw)
    radius, row, column = torch.rand(3, s.batch, 1, 1, generator=draw)
    radius = s.side * (0.3 + 0.1 * radius)
    line = torch.arange(s.side) + 0.5
    y, x = (line[:, None] - s.side * (0.4 + 0.2 * row)) / radius, (line - s.side * (0.4 + 0.2 * column)) / radius
    shapes = (
        x**2 + y**2 < 1,
        (x.abs() < 0.9) & (y.abs() < 0.9),
        (y.abs() < 0.9) & (x.abs() < (y + 1) / 2),
        ((x.abs() < 0.3) | (y.abs() < 0.3)) & (x.abs() < 1) & (y.abs() < 1),
    )
    pictures = torch.stack(shapes)[kinds, torch.arange(s.batch)].float()
    pictures = 2 * pictures - 1 + 0.3 * torch.randn(pictures.shape, generator=draw)
    return pictures.to(device), kinds.to(device)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; then count what is recognised of new pictures."""
    run = Run("vit", __doc__, SIZES, arguments)
    s, draw = run.sizes, torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = ViT(s, run.device)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=s.rate)

    def scores(pictures: torch.Tensor) -> torch.Tensor:
        with run.precision():
            return model(pictures).float()

    def step(number: int) -> torch.Tensor:
        pictures, kinds = batch_of(s, draw, run.device)
        loss = F.cross_entropy(scores(pictures), kinds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = run.learn(step)
    with torch.no_grad():
        pictures, kinds = batch_of(s, draw, run.device)
        right = scores(pictures).argmax(-1) == kinds
    print(f"{int(right.sum())} of {s.batch} new pictures are recognised")
    return losses


if __name__ == "__main__":
    main()
