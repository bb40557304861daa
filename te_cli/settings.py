"""What a run of `te train` depends on, and what can be wrong with it: told before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from te_cli.arguments import UserError
from te_core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

TEXT = Path(__file__).resolve().parent / "text" / "persuasion.txt"
HELD_OUT = 0.1  # of the text, from its end

#: The names of --recipe. None: bf16.
RECIPES: dict[str, Recipe | None] = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "none": None,
}


#: What a run in each of them is called in a report.
NAMES = {
    "delayed": "FP8 delayed",
    "current": "FP8 current",
    "block": "FP8 block",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "none": "bf16",
}


@dataclass(frozen=True)
class Settings:
    """All that a run depends on; a checkpoint carries it along."""

    recipe: str = "delayed"
    steps: int = 120
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    batch: int = 16
    sequence: int = 64
    rate: float = 3e-3  # the highest learning rate
    seed: int = 0


#: What fits a device: two to four minutes for two runs on two cores, some seconds on a large GPU.
DEFAULTS = {
    "cpu": Settings(),
    "cuda": Settings(steps=400, layers=6, hidden=512, heads=8, batch=64, sequence=256, rate=2e-3),
}


def option(name: str) -> str:
    """The option that sets it."""
    return "--lr" if name == "rate" else f"--{name}"


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


def read_text(path: Path) -> bytearray:
    """The bytes of a file."""
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise UserError(f"the text {path}: {error.strerror}. --text names a file to learn") from error
    if not content:
        raise UserError(f"the text {path} is empty: --text names a file to learn")
    return content


def learnt(size: int) -> int:
    """How many bytes of a text of this size are learnt; the others are held out."""
    return int(size * (1 - HELD_OUT))


def check(settings: Settings, size: int) -> None:
    """Whether the sizes make a model, and a text of this size has sequences to learn from, and to judge by."""
    try:
        GPTConfig(settings.layers, settings.hidden, settings.heads)
    except ValueError as error:
        raise UserError(error) from error
    for what, tokens in (("to learn from", learnt(size)), ("held out", size - learnt(size))):
        if tokens < settings.sequence + 2:
            raise UserError(
                f"a text of {size} bytes, {tokens} of them {what}, is too short for sequences of "
                f"{settings.sequence}: choose shorter ones (--seq), or a longer text (--text)"
            )
