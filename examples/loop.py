"""What the short examples share: options, and a loop with a bar that shows the loss, and a picture of it at the end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from te_cli.arguments import device, mistakes_end, positive, usual_device, writable
from te_cli.curve import write_curve
from te_cli.progress import Progress
from te_cli.settings import RECIPES

OUT = Path("build/examples")


class Run:
    """A run of an example on a device, in a recipe. `sizes` has, for each kind of device, what fits it."""

    def __init__(
        self,
        name: str,
        about: str | None,
        sizes: Mapping[str, Any],
        arguments: Sequence[str] | None,
        recipes: Sequence[str] = tuple(RECIPES),
    ) -> None:
        parser = argparse.ArgumentParser(
            prog=f"{name}.py", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        usual = f"{sizes['cpu'].steps} on a CPU, {sizes['cuda'].steps} on a GPU"
        parser.add_argument("--recipe", choices=recipes, default="current", help="precision of the layers (current)")
        parser.add_argument("--steps", type=positive, metavar="N", help=f"of the training ({usual})")
        parser.add_argument(
            "--device", type=device, default=usual_device(), help="cpu, cuda ... (CUDA if there is one)"
        )
        parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the picture ({OUT})")
        given = parser.parse_args(arguments)
        self.name, self.device, self.out = name, given.device, given.out
        self.kind = given.device.partition(":")[0]
        self.sizes = sizes[self.kind]
        self.steps = given.steps or self.sizes.steps
        self.recipe = RECIPES[given.recipe]

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The region of a forward: bf16, in te-runtime's layers the recipe, emulated where the chip lacks it."""
        import torch

        import te_torch as te

        with (
            torch.autocast(self.kind, torch.bfloat16),
            te.autocast(self.recipe is not None, recipe=self.recipe, emulate=True),
        ):
            yield

    def learn(self, step: Callable[[int], Any]) -> list[float]:
        """Make all steps; their losses."""
        return learn(self.name, self.steps, step, self.out)


def learn(name: str, steps: int, step: Callable[[int], Any], out: Path = OUT, shown: bool = True) -> list[float]:
    """The losses that `step(number)` returns. The bar, and where the picture is, are told on the error output."""
    with mistakes_end(f"{name}.py"):
        if shown:
            writable(out, [f"{name}.png"])
    bar, losses = Progress(name, steps, stream=sys.stderr), []
    for number in range(steps):
        losses.append(float(step(number)))  # reading it waits for a GPU: fine for an example, not for a long training
        if shown:
            bar.show(number + 1, f"loss {losses[-1]:.4f}")
    if shown and (path := write_curve(out / f"{name}.png", {name: losses})):
        sys.stderr.write(f"The curve is in {path}\n")
    return losses
