"""A small GPT whose MLPs are experts (a mixture of experts): it learns the text of te_cli/text, byte by byte.

A router sends each token to two of eight experts. `te.moe_permute` brings the tokens of each expert together,
`te.GroupedLinear` multiplies them in FP8, one product for each expert, and `te.moe_unpermute` adds up what the experts
made of a token. Some 20 seconds on a CPU core; on a GPU the model is larger.

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
import torch.nn.functional as F

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
BALANCE = 0.1  # weight of the loss that keeps the router from sending all tokens to the same experts


class Experts(torch.nn.Module):
    """x + the weighted sum of what a token's experts make of norm(x)."""

    def __init__(self, s: Sizes, device: str) -> None:
        super().__init__()
        self.chosen = s.chosen
        self.norm = te.RMSNorm(s.width, device=device)
        self.router = torch.nn.Linear(s.width, s.experts, bias=False, device=device)  # stays in high precision
        self.up = te.GroupedLinear(s.experts, s.width, 2 * s.inner, bias=False, device=device)
        self.down = te.GroupedLinear(s.experts, s.inner, s.width, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores = self.router(tokens.float()).softmax(dim=-1)
        routing = torch.zeros_like(scores, dtype=torch.int32).scatter_(1, scores.topk(self.chosen).indices, 1)
        self.counts = routing.sum(dim=0)
        # Least where tokens are spread evenly: the share that an expert gets, times what the router gives it.
        self.balance = (self.counts / routing.sum() * scores.mean(dim=0)).sum() * len(self.counts)
        rows, places = te.moe_permute(tokens, routing, num_out_tokens=len(tokens) * self.chosen)
        splits = self.counts.tolist()  # the host waits for the router here
        gate, value = self.up(rows, splits).chunk(2, dim=-1)
        rows = self.down(F.silu(gate) * value, splits)
        merged = te.moe_unpermute(rows, places, merging_probs=scores * routing, restore_shape=tokens.shape)
        return x + merged.view_as(x)


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
        self.experts = torch.nn.ModuleList(Experts(s, device) for _ in range(s.layers))
        self.norm = te.RMSNorm(s.width, device=device)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss of foretelling each of tokens [batch, sequence + 1] from those before it, loss of balance)."""
        x, angles = self.embedding(tokens[:, :-1]), self.rotary(tokens.shape[1] - 1)
        for attention, experts in zip(self.attentions, self.experts, strict=True):
            x = experts(x + attention(x, rotary_pos_emb=angles))
        loss = te.linear_cross_entropy(self.norm(x), self.embedding.weight, tokens[:, 1:])
        return loss, sum(experts.balance for experts in self.experts) / len(self.experts)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; then show how evenly the experts are used."""
    run = Run("moe", __doc__, SIZES, arguments)
    s, draw = run.sizes, torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, text = Model(s, run.device), Text(TEXT, torch.device(run.device))
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=s.rate)

    def step(number: int) -> torch.Tensor:
        with run.precision():
            loss, balance = model(text.batch(s.batch, s.sequence, draw))
        (loss + BALANCE * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = run.learn(step)
    for number, experts in enumerate(model.experts):
        print(f"layer {number}: tokens of each expert in the last step {experts.counts.tolist()}")
    return losses


if __name__ == "__main__":
    main()
