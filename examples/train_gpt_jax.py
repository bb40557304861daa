"""Train the small GPT of examples/gpt_jax.py on the text of te_cli/text, in JAX: in FP8, then in bf16 beside it.

Runs on JAX's first device, or on several: on the CPU with te_core's reference backend, some two minutes on two cores.
Sizes are those of `te train`, larger on a GPU.

    python examples/train_gpt_jax.py --recipe current --steps 100
    python examples/train_gpt_jax.py --devices 2 --tensor-parallel
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # before NumPy is imported: as te_cli does
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "bindings" / "jax"))

from te_cli.arguments import UserError, mistakes_end, positive, rate, seed, writable
from te_cli.curve import write_curve
from te_cli.progress import Progress
from te_cli.settings import DEFAULTS, NAMES, RECIPES, TEXT, GPTConfig, Settings, check, learnt, read_text
from te_cli.train import write_csv

PROGRAM = "train_gpt_jax.py"
WARMUP = 20


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options; what is left out is None."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=[n for n in RECIPES if n != "nvfp4"], help="none: bf16 only (delayed)")
    for name in ("steps", "layers", "hidden", "heads", "batch", "sequence"):
        usual = f"({getattr(DEFAULTS['cpu'], name)} on a CPU, {getattr(DEFAULTS['cuda'], name)} on a GPU)"
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=usual)
    parser.add_argument("--lr", dest="rate", type=rate, metavar="X", help="highest learning rate")
    parser.add_argument("--seed", type=seed, metavar="N", help="of weights and batches (0)")
    parser.add_argument("--devices", type=positive, default=1, metavar="N", help="that divide the batch (1)")
    parser.add_argument("--tensor-parallel", action="store_true", help="they divide heads and hidden channels instead")
    parser.add_argument("--text", type=Path, default=TEXT, help="file to learn")
    parser.add_argument("--out", type=Path, default=Path("build/train_jax"), help="folder of the results")
    parser.add_argument("--no-compare", action="store_true", help="leave the bf16 run out")
    return parser.parse_args(arguments)


def check_devices(options: argparse.Namespace, s: Settings, here: int) -> None:
    """That there are so many devices, and that they can divide what they are to divide."""
    n, what = options.devices, "heads" if options.tensor_parallel else "batch"
    if n > here:
        raise UserError(f"--devices {n}: JAX sees {here}. Choose fewer")
    if getattr(s, what) % n:
        raise UserError(f"--devices {n} do not divide --{what} {getattr(s, what)} evenly. Choose a multiple of {n}")


def train(settings: Settings, text: Any, devices: int, tensor_parallel: bool) -> dict[str, Any]:
    """A run, with a bar; its name, its losses, and how fast it was."""
    import jax.numpy as jnp
    import numpy as np

    from examples import gpt_jax, gpt_jax_devices

    s, recipe = settings, RECIPES[settings.recipe]
    config = GPTConfig(s.layers, s.hidden, s.heads)
    params = gpt_jax.parameters(config, s.seed)
    if devices > 1:
        step, params, scaling = gpt_jax_devices.training(config, recipe, params, devices, tensor_parallel)
    else:
        step, scaling = gpt_jax.training_step(config, recipe), gpt_jax.states(config, recipe)
    moments, draw = gpt_jax.moments_of(params), np.random.default_rng(s.seed)
    bar, losses, begin = Progress(NAMES[s.recipe], s.steps), [], time.perf_counter()
    for number in range(s.steps):
        starts = draw.integers(len(text) - s.sequence, size=(s.batch, 1))
        tokens = jnp.asarray(text[starts + np.arange(s.sequence + 1)], jnp.int32)
        warm = min((number + 1) / min(WARMUP, max(1, s.steps // 10)), max(0.05, 1 - number / s.steps))
        params, moments, scaling, value = step(params, moments, scaling, tokens, number, s.rate * warm)
        losses.append(float(value))
        if number == 0:
            begin = time.perf_counter()
        speed = number * s.batch * s.sequence / max(1e-9, time.perf_counter() - begin)
        bar.show(number + 1, f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s")
    return {"name": NAMES[s.recipe], "losses": losses, "tokens_per_second": speed}


def main(arguments: list[str] | None = None) -> int:
    """Train, compare, report."""
    options = parse(arguments)
    with mistakes_end(PROGRAM):
        try:
            import jax
        except ImportError as error:
            raise UserError(f"{error}. Install it: pip install jax") from error
        import numpy as np

        jax.config.update("jax_num_cpu_devices", options.devices)  # of a CPU as many as are asked for
        kind = "cpu" if jax.default_backend() == "cpu" else "cuda"
        given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Settings)}
        settings = dataclasses.replace(DEFAULTS[kind], **{n: v for n, v in given.items() if v is not None})
        tokens = np.frombuffer(read_text(options.text), np.uint8)
        check(settings, len(tokens))
        check_devices(options, settings, jax.device_count())
        writable(options.out, ["loss.csv", "loss.png"])
        names = [settings.recipe] + ["none"] * (not options.no_compare and settings.recipe != "none")
        on = f"{options.devices} x {jax.devices()[0].device_kind}"
        print(f"Training on {on}: {options.text.name}", flush=True)
        part = tokens[: learnt(len(tokens))]
        divided = options.devices, options.tensor_parallel
        results = [train(dataclasses.replace(settings, recipe=name), part, *divided) for name in names]
    share = np.bincount(tokens, minlength=256) / len(tokens)
    entropy = float(-(share[share > 0] * np.log(share[share > 0])).sum())
    runs, level = {r["name"]: r["losses"] for r in results}, ("unigram entropy", entropy)
    curve = write_curve(options.out / "loss.png", runs, "training loss (nats a byte)", level)
    written = [write_csv(options.out / "loss.csv", results), curve]
    count = max(1, settings.steps // 10)
    for result in results:
        last = sum(result["losses"][-count:]) / count
        print(f"  {result['name']:12s} training loss {last:.4f}, {result['tokens_per_second']:,.0f} tokens/s")
    print(f"  unigram entropy {entropy:.4f}. Written: {', '.join(str(path) for path in written if path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
