"""Training of the small GPT on a text file, byte by byte: data, one step, held-out loss, exact checkpoints.

`te train` (train.py) is the program around it; the training benchmark and its test use the same code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import te_torch as te
from te_cli.arguments import UserError, replacing
from te_cli.gpt import GPT
from te_cli.settings import RECIPES, GPTConfig, Settings, learnt, read_text
from te_core.recipe import Recipe

WARMUP = 20  # steps in which the learning rate rises; a tenth of a shorter run
HELD_OUT_BATCHES = 100  # of the held-out text are read at most: its loss is for a report, not worth minutes

#: Blocks that stay in bf16, by recipe: FP4 is too coarse for what the first one reads (docs/benchmarks.md, training).
PLAIN_BLOCKS = {"nvfp4": 1}


class Text:
    """The bytes of a file as tokens on the device: most of them to learn from, the end held out."""

    def __init__(self, path: Path, device: torch.device) -> None:
        tokens = torch.frombuffer(read_text(path), dtype=torch.uint8).to(device, torch.long)
        cut = learnt(len(tokens))
        self.train, self.held_out = tokens[:cut], tokens[cut:]
        share = torch.bincount(tokens, minlength=256).double() / len(tokens)
        #: The loss, in nats a byte, of a model that knows only how frequent each byte is.
        self.unigram_entropy = -float(torch.special.xlogy(share, share).sum())

    def __len__(self) -> int:
        return len(self.train) + len(self.held_out)

    def batch(self, size: int, sequence: int, generator: torch.Generator) -> torch.Tensor:
        """Random excerpts [size, sequence + 1]: what is read, and shifted by one what is to be foretold."""
        starts = torch.randint(len(self.train) - sequence, (size, 1), generator=generator)
        return self.train[starts.to(self.train.device) + torch.arange(sequence + 1, device=self.train.device)]


def mean_loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of foretelling each token [B, S + 1] from those before it, without all logits at once."""
    return te.linear_cross_entropy(model.states(tokens[:, :-1]), model.embedding.weight, tokens[:, 1:])


class Trainer:
    """A model in training. `before_backward(model)` may interfere between forward and backward; an optimizer of another
    kind takes `step(grad_scale=factor)`, too."""

    def __init__(
        self,
        settings: Settings,
        text: Text,
        device: torch.device,
        recipe: Recipe | None = None,
        before_backward: Callable[[GPT], None] | None = None,
        plain_blocks: int | None = None,  # None: as PLAIN_BLOCKS says
        optimizer: Callable[..., Any] = te.optimizers.FusedAdam,
    ) -> None:
        self.settings, self.text, self.device = settings, text, device
        self.recipe = recipe if recipe is not None else RECIPES[settings.recipe]
        self.before_backward = before_backward
        torch.manual_seed(settings.seed)
        plain = PLAIN_BLOCKS.get(settings.recipe, 0) if plain_blocks is None else plain_blocks
        config = GPTConfig(settings.layers, settings.hidden, settings.heads, plain_blocks=plain)
        self.model = GPT(config, device)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]  # biases and norms do not decay
        self.optimizer = optimizer(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.rate,
            betas=(0.9, 0.95),
        )
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.losses: list[float] = []
        self.job: dict[str, Any] = {}  # what `te train --resume` has to know beside the settings

    def precision(self) -> te.autocast:
        """The low-precision region of one forward (or none, for bf16); formats that the chip lacks are emulated."""
        return te.autocast(enabled=self.recipe is not None, recipe=self.recipe, emulate=True)

    def step(self, number: int) -> torch.Tensor:
        """One step of training; its loss, still on the device."""
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = s.rate * schedule(number, s.steps)
        tokens = self.text.batch(s.batch, s.sequence, self.generator)
        with torch.autocast(self.device.type, torch.bfloat16), self.precision():
            loss = mean_loss(self.model, tokens)
        if self.before_backward is not None:
            self.before_backward(self.model)
        loss.backward()  # type: ignore[no-untyped-call]
        _, factor = te.optimizers.clip_by_norm(self.model.parameters(), 1.0)
        self.optimizer.step(grad_scale=factor)
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def train(self, on_step: Callable[[int, float], bool] | None = None, until: int | None = None) -> None:
        """Train to step `until` (default: to the end). `on_step(done, loss)` returns True to stop."""
        until = self.settings.steps if until is None else until
        # Reading a loss waits for the GPU: so not after every step there, and then several at once.
        every = max(1, self.settings.steps // 100) if self.device.type == "cuda" else 1
        unread: list[torch.Tensor] = []
        while (done := len(self.losses) + len(unread)) < until:
            unread.append(self.step(done))
            if len(unread) == every or done + 1 == until:
                self.losses += torch.stack(unread).tolist()
                unread.clear()
                if on_step is not None and on_step(done + 1, self.losses[-1]):
                    return

    @torch.no_grad()
    def held_out_loss(self, on_batch: Callable[[int, int], None] = lambda done, of: None) -> float:
        """Mean loss on the beginning of the held-out text, in the precision of the training.

        `on_batch(done, of)` is told how far it has come.
        """
        s = self.settings
        count = min((len(self.text.held_out) - 1) // s.sequence, HELD_OUT_BATCHES * s.batch)
        rows = self.text.held_out.unfold(0, s.sequence + 1, s.sequence)[:count]
        losses, parts = [], torch.split(rows, s.batch)
        for i, part in enumerate(parts):
            with torch.autocast(self.device.type, torch.bfloat16), self.precision():
                losses.append(mean_loss(self.model, part) * len(part))
            on_batch(i + 1, len(parts))
        return float(torch.stack(losses).sum()) / count

    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters())

    # -------------------------------------------------------------------------------- checkpoints

    def save(self, path: Path) -> None:
        """Write everything that the next step depends on. A write that fails leaves the old file."""
        state = {
            "settings": dataclasses.asdict(self.settings),
            "model": self.model.state_dict(),  # with the scales and histories of FP8: `....fp8_state.*`
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "rng": torch.get_rng_state(),
            "device rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,  # stochastic rounding
            "losses": self.losses,
            "job": self.job,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            torch.save(state, file)

    def load(self, state: dict[str, Any]) -> None:
        """Go on exactly where a checkpoint was saved."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["rng"])
        if state["device rng"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["device rng"])
        self.losses = list(state["losses"])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint as `Trainer.save` wrote it: tensors and plain values, nothing that runs on loading."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a file that is none makes torch raise is of many kinds
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__} of torch.load"
        raise UserError(f"{path} cannot be read as a checkpoint ({reason}): start anew without it") from error
    missing = CHECKPOINT if not isinstance(state, dict) else CHECKPOINT - state.keys()
    if missing:
        raise UserError(f"{path} is no checkpoint of te train: it has no {', '.join(sorted(missing))}")
    wrong = settings_of(state)
    if isinstance(wrong, str):
        raise UserError(f"{path} is of another version of te train: {wrong}. Start anew without it")
    return state


#: What a checkpoint holds.
CHECKPOINT = {"settings", "model", "optimizer", "generator", "rng", "device rng", "losses"}


def settings_of(state: dict[str, Any]) -> Settings | str:
    """The settings in a checkpoint, or what is wrong with them."""
    saved, known = state["settings"], dataclasses.asdict(Settings())
    if not isinstance(saved, dict) or saved.keys() != known.keys():
        return "its settings are others"
    for name, value in known.items():
        if type(saved[name]) is not type(value):
            return f"its {name} is {saved[name]!r}"
    return Settings(**saved) if saved["recipe"] in RECIPES else f"its recipe is {saved['recipe']!r}"


def model_of(path: Path, state: dict[str, Any], device: torch.device) -> GPT:
    """The model that a checkpoint holds."""
    settings = Settings(**state["settings"])
    plain = PLAIN_BLOCKS.get(settings.recipe, 0)
    try:
        model = GPT(GPTConfig(settings.layers, settings.hidden, settings.heads, plain_blocks=plain), device)
        model.load_state_dict(state["model"])
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its weights are not those of its settings. Start anew without it") from error
    return model


def schedule(step: int, steps: int) -> float:
    """The share of the highest learning rate: a short rise, then a straight line down to a twentieth."""
    warmup = min(WARMUP, max(1, steps // 10))
    return min((step + 1) / warmup, max(0.05, 1 - step / steps))
