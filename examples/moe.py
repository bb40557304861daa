"""A small GPT whose MLPs are experts (a mixture of experts): it learns the text of te_cli/text, byte by byte.

The router of a `te.MoELayer` sends each token to two of eight experts, which multiply in FP8; its auxiliary loss keeps
all of them in use. `te.expert_report` draws how many tokens each expert gets. Some 20 seconds on a CPU core; on a GPU
the model is larger.

    python examples/moe.py --recipe mxfp8 --steps 200
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace as Sizes

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # for the CPU backend: its threads poll otherwise
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

import torch

import te_torch as te
from examples.loop import Run
from te_cli.settings import TEXT
from te_cli.training import Text

#: By device. `inner` is the width inside of an expert, `chosen` the experts of a token.
SIZES = {
    "cpu": Sizes(
        layers=2, width=64, heads=4, inner=64, experts=8, chosen=2, batch=16, sequence=64, rate=2e-3, steps=150
    ),
    "cuda": Sizes(
        layers=6, width=1024, heads=16, inner=1024, experts=8, chosen=2, batch=16, sequence=1024, rate=5e-4, steps=400
    ),
}
BALANCE = 0.1  # weight of the losses that keep the routers from sending all tokens to the same experts


class Model(torch.nn.Module):
    """Embedding, then attention and experts in turn, norm; the head shares the embedding's weight."""

    def __init__(self, s: Sizes, device: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, s.width, device=device)
        torch.nn.init.normal_(self.embedding.weight, 0.0, 0.02)
        self.rotary = te.RotaryPositionEmbedding(s.width // s.heads).to(device)
        options = {"input_layernorm": True, "normalization": "RMSNorm", "bias": False, "device": device}
        options |= {"qkv_format": "bshd", "attn_mask_type": "causal", "attention_dropout": 0.0}
        self.attentions = torch.nn.ModuleList(
            te.MultiheadAttention(s.width, s.heads, **options) for _ in range(s.layers)
        )
        self.norms = torch.nn.ModuleList(te.RMSNorm(s.width, device=device) for _ in range(s.layers))
        experts = {"num_experts": s.experts, "topk": s.chosen, "aux_loss_coeff": BALANCE / s.layers, "device": device}
        self.experts = torch.nn.ModuleList(te.MoELayer(s.width, s.inner, **experts) for _ in range(s.layers))
        self.norm = te.RMSNorm(s.width, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of foretelling each of tokens [batch, sequence + 1] from those before it."""
        x, angles = self.embedding(tokens[:, :-1]), self.rotary(tokens.shape[1] - 1)
        for attention, norm, experts in zip(self.attentions, self.norms, self.experts, strict=True):
            x = x + attention(x, rotary_pos_emb=angles)
            x = x + experts(norm(x))
        return te.linear_cross_entropy(self.norm(x), self.embedding.weight, tokens[:, 1:])


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; then show how evenly the experts are used."""
    run = Run("moe", __doc__, SIZES, arguments)
    s, draw = run.sizes, torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, text = Model(s, run.device), Text(TEXT, torch.device(run.device))
    optimizer, report = te.optimizers.FusedAdam(model.parameters(), lr=s.rate), te.expert_report(model)

    def step(number: int) -> torch.Tensor:
        with run.precision():
            loss = model(text.batch(s.batch, s.sequence, draw))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 50 == 0:
            report.step()
        return loss.detach()

    losses = run.learn(step)
    report.step()
    print(report)
    return losses


if __name__ == "__main__":
    main()
