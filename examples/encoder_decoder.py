"""An encoder and a decoder: it learns to write a sequence of digits backwards.

The encoder reads the digits, the decoder writes them, one after the other. A decoder's layer has a second attention,
which reads what the encoder made of them. Sequences differ in length: masks hide the padding. Some 15 seconds on a CPU
core; on a GPU the model is larger.

    python examples/encoder_decoder.py --recipe delayed
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

DIGITS, START, PADDING, SYMBOLS = 10, 10, 11, 16  # sixteen: FP8 products want widths that are multiples of it

SIZES = {  # by device
    "cpu": Sizes(layers=1, width=64, heads=4, batch=64, longest=8, rate=3e-3, steps=150),
    "cuda": Sizes(layers=4, width=512, heads=8, batch=256, longest=64, rate=3e-4, steps=1500),
}


class Model(torch.nn.Module):
    """Both stacks share the embedding of symbols, and each has one of places."""

    def __init__(self, s: Sizes, device: str) -> None:
        super().__init__()
        self.symbols = torch.nn.Embedding(SYMBOLS, s.width, device=device)
        self.places = torch.nn.Embedding(s.longest + 1, s.width, device=device)
        usual = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd", "device": device}
        usual |= {"init_method": normal(s.width**-0.5)}
        read = {"layer_type": "encoder", "self_attn_mask_type": "padding"}
        write = {"layer_type": "decoder", "self_attn_mask_type": "causal", "enc_dec_attn_mask_type": "padding"}
        self.encoder, self.decoder = (
            torch.nn.ModuleList(
                te.TransformerLayer(s.width, 4 * s.width, s.heads, **kind, **usual) for _ in range(s.layers)
            )
            for kind in (read, write)
        )
        self.head = te.LayerNormLinear(s.width, SYMBOLS, device=device)

    def embedded(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.symbols(symbols) + self.places(torch.arange(symbols.shape[1], device=symbols.device))

    def read(self, source: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the encoder makes of source [batch, longest]; `hidden` [batch, 1, 1, longest] is True at padding."""
        x = self.embedded(source)
        for layer in self.encoder:
            x = layer(x, attention_mask=hidden)
        return x

    def forward(self, written: torch.Tensor, memory: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the symbol that follows each of `written`."""
        x = self.embedded(written)
        ours = torch.zeros(len(x), 1, 1, x.shape[1], dtype=torch.bool, device=x.device)  # nothing of it is padding
        for layer in self.decoder:
            x = layer(x, encoder_output=memory, enc_dec_attn_mask=(ours, hidden))
        return self.head(x)


def batch_of(s: Sizes, draw: torch.Generator, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(digits, what hides their padding, the digits backwards), in rows that are filled up with PADDING."""
    lengths = torch.randint(s.longest // 2, s.longest + 1, (s.batch, 1), generator=draw)
    place = torch.arange(s.longest)
    digits = torch.randint(DIGITS, (s.batch, s.longest), generator=draw).where(place < lengths, PADDING)
    back = digits.gather(1, (lengths - 1 - place).clamp(min=0)).where(place < lengths, PADDING)
    return digits.to(device), (digits == PADDING)[:, None, None].to(device), back.to(device)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; then write some sequences backwards without being told the answer."""
    run = Run("encoder_decoder", __doc__, SIZES, arguments)
    s, draw = run.sizes, torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Model(s, run.device)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=s.rate)

    def step(number: int) -> torch.Tensor:
        digits, hidden, back = batch_of(s, draw, run.device)
        told = F.pad(back[:, :-1], (1, 0), value=START)  # each step of the decoder is told what came before
        with run.precision():
            scores = model(told, model.read(digits, hidden), hidden)
        loss = F.cross_entropy(scores.flatten(0, 1).float(), back.flatten(), ignore_index=PADDING)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = run.learn(step)
    digits, hidden, back = batch_of(s, draw, run.device)
    told = torch.full((s.batch, s.longest + 1), START, device=run.device)  # what is not written yet changes nothing
    with torch.no_grad(), run.precision():
        memory = model.read(digits, hidden)
        for i in range(s.longest):
            told[:, i + 1] = model(told[:, :-1], memory, hidden)[:, i].argmax(-1)
    right = ((told[:, 1:] == back) | (back == PADDING)).all(1)
    print(f"{int(right.sum())} of {s.batch} new sequences are written backwards without a mistake")
    return losses


if __name__ == "__main__":
    main()
