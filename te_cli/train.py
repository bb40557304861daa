"""Train a small GPT, built of te_torch's modules, on a novel that te-runtime brings along: in FP8, then in bf16 beside
it. A table and a plot compare the two.

It runs on CUDA if there is a device, else on the CPU with the reference backend: FP8 emulated bit for bit. Ctrl-C (and
SIGTERM) saves a checkpoint; --resume goes on exactly from there, with its recipe, settings, text and comparison.

    te train
    te train --recipe current --steps 20
    te train --layers 8 --hidden 1024 --heads 16 --text book.txt --out results
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from te_cli.arguments import UserError, add_device, positive, rate, replacing, seed, writable
from te_cli.curve import write_curve
from te_cli.progress import Progress
from te_cli.settings import DEFAULTS, NAMES, RECIPES, TEXT, Settings, check, option, read_text

if TYPE_CHECKING:  # torch takes seconds: what is wrong with the options is told before
    import torch

    from te_cli.training import Trainer

MAY_CHANGE = {"steps", "rate"}  # of a checkpoint's settings, on --resume
TAIL = 0.1  # the share of the steps whose mean is the final training loss


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; a setting that is left out is None."""
    cpu, cuda = DEFAULTS["cpu"], DEFAULTS["cuda"]
    model = parser.add_argument_group("training", "defaults for the CPU / for CUDA")
    model.add_argument("--recipe", choices=list(RECIPES), help="low-precision recipe; none: bf16 only (delayed)")
    for name, what in {
        "steps": "optimizer steps",
        "layers": "Transformer layers",
        "hidden": "width",
        "heads": "attention heads",
        "batch": "sequences a step",
        "sequence": "bytes a sequence",
    }.items():
        short = ("--seq",) if name == "sequence" else ()
        text = f"{what} ({getattr(cpu, name)} / {getattr(cuda, name)})"
        model.add_argument(f"--{name}", *short, type=positive, metavar="N", help=text)
    model.add_argument("--lr", dest="rate", type=rate, metavar="X", help=f"learning rate ({cpu.rate} / {cuda.rate})")
    model.add_argument("--seed", type=seed, metavar="N", help="of weights and batches (0)")
    parser.set_defaults(**{field.name: None for field in dataclasses.fields(Settings)})
    job = parser.add_argument_group("job")
    add_device(job)
    job.add_argument("--text", type=Path, metavar="FILE", help="what to learn (a novel)")
    job.add_argument(
        "--out", type=Path, default=Path("build/train"), metavar="FOLDER", help="folder of the results (build/train)"
    )
    compare = argparse.BooleanOptionalAction
    job.add_argument("--compare", action=compare, help="train in bf16, too, or leave that out (--compare)")
    resume = (
        "go on from the checkpoints in --out, as they began; only --steps and --lr may change, for both runs at once"
    )
    job.add_argument("--resume", action="store_true", help=resume)
    job.add_argument("--save-every", type=positive, default=100, metavar="N", help="steps between checkpoints (100)")


def settings_for(path: Path, state: dict[str, Any] | None, given: dict[str, Any], kind: str) -> Settings:
    """What was given, else what the checkpoint says, else what fits the kind of device."""
    if state is None:
        return dataclasses.replace(DEFAULTS[kind], **given)
    saved = Settings(**state["settings"])
    for name in sorted(given.keys() - MAY_CHANGE):
        if given[name] != getattr(saved, name):
            raise UserError(
                f"--resume: {path} was trained with {option(name)} {getattr(saved, name)}, but {option(name)} "
                f"{given[name]} was given. Only {' and '.join(sorted(map(option, MAY_CHANGE)))} may change. Leave "
                f"{option(name)} out, or start anew without --resume"
            )
    return dataclasses.replace(saved, **given)


def check_beside(path: Path, state: dict[str, Any], settings: Settings) -> None:
    """The run that is to stand beside the first one is of the same model and the same batches."""
    saved = Settings(**state["settings"])
    for field in dataclasses.fields(Settings):
        mine, other = getattr(settings, field.name), getattr(saved, field.name)
        if mine != other and field.name not in MAY_CHANGE | {"recipe"}:
            raise UserError(
                f"--resume: {path} was trained with {option(field.name)} {other}, not {mine}: it is no run to compare "
                "with. "
                "Leave it out (--no-compare), or choose another folder (--out)"
            )


def check_changes(states: dict[Path, dict[str, Any]], paths: list[Path], given: dict[str, Any]) -> None:
    """What may change does so at the same step of both runs, and no run is beyond its end."""
    done = [len(states[path]["losses"]) if path in states else 0 for path in paths]
    steps = given.get("steps", max(done))
    if steps < max(done):
        path = paths[done.index(max(done))]
        raise UserError(f"--resume: {path} is of step {max(done)}. Choose --steps {max(done)}, or more")
    saved = states[paths[0]]["settings"] if paths[0] in states else given
    changed = [option(name) for name in sorted(MAY_CHANGE & given.keys()) if given[name] != saved[name]]
    if changed and min(done) != max(done):
        runs = " and ".join(f"{path} is of step {n}" for path, n in zip(paths, done, strict=True))
        raise UserError(
            f"--resume: {runs}, so that another {' and '.join(changed)} would change one run otherwise than the other. "
            "First go on without, or leave bf16 out (--no-compare)"
        )


def recipe_in(folder: Path) -> str | None:
    """The recipe of the checkpoints in a folder, beside which bf16 may stand; None if there are none."""
    there = [name for name in RECIPES if (folder / f"{name}.pt").exists()]
    quantized = [name for name in there if name != "none"]
    if len(quantized) > 1:
        raise UserError(f"--resume: {folder} has checkpoints of {', '.join(quantized)}. Choose one of them (--recipe)")
    return next(iter(quantized or there), None)


class Interrupt:
    """Remembers Ctrl-C (and a polite kill) until the step is finished; a second one ends the program at once."""

    def __init__(self) -> None:
        self.seen = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._arrived)

    def _arrived(self, number: int, frame: object) -> None:
        self.seen = number
        signal.signal(number, signal.SIG_DFL)


def again() -> str:
    """What to type to go on: the command that was typed, with --resume."""
    typed = Path(sys.argv[0])
    started, words = (["te"], sys.argv[1:]) if typed.name == "te" else (["python", sys.argv[0]], sys.argv[1:])
    if typed.name == "__main__.py":
        started = ["python", "-m", "te_cli"]
    if "--resume" not in words:
        words = [*words, "--resume"]
    make = os.environ.get("STARTED_BY")  # a target of the Makefile, which hands ARGS over
    if make:
        return f"{make} ARGS={shlex.quote(shlex.join(words[1:])).replace('$', '$$')}"
    return shlex.join([*started, *words])


def train(trainer: Trainer, path: Path, save_every: int, interrupt: Interrupt, resume: str) -> dict[str, Any]:
    """Train to the end or to an interrupt, saving checkpoints; what the report says about the run."""
    s, first = trainer.settings, len(trainer.losses)
    bar = Progress(NAMES[s.recipe], s.steps, first)
    start, saved = time.perf_counter(), first
    steady: tuple[int, float] | None = None  # where the first step, which loads and compiles, was over

    def on_step(done: int, loss: float) -> bool:
        nonlocal saved, steady
        now = time.perf_counter()
        rate = 0.0
        if steady is None:
            steady = (done, now)
        elif done > steady[0]:
            rate = (done - steady[0]) * s.batch * s.sequence / (now - steady[1])
            result["tokens_per_second"] = rate
        bar.show(done, f"loss {loss:.3f}  {rate:,.0f} tokens/s")
        if done - saved >= save_every:
            trainer.save(path)
            saved = done
        return interrupt.seen != 0

    result: dict[str, Any] = {"name": NAMES[s.recipe], "tokens_per_second": 0.0, "checkpoint": str(path)}

    def leave() -> NoReturn:
        bar.stop()
        print(f"\nInterrupted after step {len(trainer.losses)}. Saved in {shown(path)}. To go on:\n\n  {resume}\n")
        raise SystemExit(128 + interrupt.seen)

    def on_batch(done: int, of: int) -> None:
        nonlocal bar
        if done == 1:
            bar = Progress("held out", of, lines=2)
        bar.show(done, f"batches of {s.batch} x {s.sequence} bytes")
        if interrupt.seen:
            leave()

    trainer.train(on_step)
    trainer.save(path)
    if interrupt.seen:
        leave()
    count = max(1, int(s.steps * TAIL))
    result["training"] = sum(trainer.losses[-count:]) / len(trainer.losses[-count:])
    result["held_out"] = trainer.held_out_loss(on_batch)
    result["seconds"] = time.perf_counter() - start
    result["losses"] = trainer.losses
    return result


# ------------------------------------------------------------------------------------------- the report


def report(trainer: Trainer, results: list[dict[str, Any]], written: list[Path]) -> str:
    """The end of the program, to be read."""
    s, entropy = trainer.settings, trainer.text.unigram_entropy
    lines = [
        f"\nA GPT of {trainer.parameters() / 1e6:.2f} million parameters: {s.layers} layers, hidden {s.hidden},",
        f"{s.heads} heads; {s.steps} steps of {s.batch} x {s.sequence} = {s.batch * s.sequence} bytes.\n",
    ]
    rows = {
        "device": [device_name(trainer.device)],
        "": [r["name"] for r in results],
        "training loss": [f"{r['training']:.4f}" for r in results],
        "held-out loss": [f"{r['held_out']:.4f}" for r in results],
        "tokens/s": [f"{r['tokens_per_second']:,.0f}" if r["tokens_per_second"] else "-" for r in results],
        "seconds": [f"{r['seconds']:.1f}" for r in results],
    }
    for label, values in rows.items():
        wide = 0 if label == "device" else 14
        lines.append(f"  {label:18s}" + "".join(f"{value:>{wide}s}" for value in values))
    lines.append(f"  {'unigram entropy':18s}{entropy:14.4f}    what knowing only the bytes' frequencies gives")
    if len(results) == 2:
        low, high = results
        for what in ("training", "held_out"):
            apart = low[what] / high[what] - 1
            lines.append(f"  {low['name']} against bf16, {what.replace('_', '-')} loss: {apart:+.2%}")
    lines.append("\n  Losses are nats a byte; the training loss is the mean of the last tenth of the steps.")
    lines.append("  Written: " + ", ".join(shown(path) for path in written))
    return "\n".join(lines)


def shown(path: Path) -> str:
    """The path as one would type it here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def device_name(device: torch.device) -> str:
    """The device, in words."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return "CPU, reference backend (FP8 emulated bit for bit)"


def write_csv(path: Path, results: list[dict[str, Any]]) -> Path:
    """One row a step, one column a run."""
    with replacing(path, "w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *[r["name"] for r in results]])
        for i, row in enumerate(zip(*[r["losses"] for r in results], strict=False)):
            writer.writerow([i + 1, *[f"{loss:.6f}" for loss in row]])
    return path


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """Train, compare, report. What can be wrong with the options is told before torch is imported."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    first = given.get("recipe") or (recipe_in(options.out) if options.resume else None) or "delayed"
    begun = options.resume and (options.out / f"{first}.pt").exists()
    job = job_of(options, options.out / f"{first}.pt" if begun else None)
    size = len(read_text(options.text or Path(job["text"] or TEXT)))
    if not begun:  # else its settings count
        kind = options.device.partition(":")[0]
        check(dataclasses.replace(DEFAULTS[kind], **given), size)
    names = [first, "none"] if job["compare"] and first != "none" else [first]
    paths = [options.out / f"{name}.pt" for name in names]
    writable(options.out, [*(path.name for path in paths), "loss.csv", "loss.png"])
    trainer, results = trained(options, job, given, paths)
    written = [write_csv(options.out / "loss.csv", results)]
    runs, level = {r["name"]: r["losses"] for r in results}, ("unigram entropy", trainer.text.unigram_entropy)
    curve = write_curve(options.out / "loss.png", runs, "training loss (nats a byte)", level)
    written += [path for path in (curve, *paths) if path is not None]
    found = {
        "device": device_name(trainer.device),
        "settings": dataclasses.asdict(trainer.settings) | {"recipe": names[0]},
        "parameters": trainer.parameters(),
        "unigram entropy": trainer.text.unigram_entropy,
        "runs": results,
        "written": [str(path) for path in written],
    }
    return found, report(trainer, results, written), 0


def job_of(options: argparse.Namespace, begun: Path | None) -> dict[str, Any]:
    """What is asked for beside the settings; what is not, as the run began from whose checkpoint it goes on."""
    job: dict[str, Any] = {"text": "", "compare": True}
    if begun is not None:
        from te_cli.training import read_checkpoint

        job |= read_checkpoint(begun).get("job", {})
    job |= {} if options.text is None else {"text": str(options.text.resolve())}
    return job | ({} if options.compare is None else {"compare": options.compare})


def trained(
    options: argparse.Namespace, job: dict[str, Any], given: dict[str, Any], paths: list[Path]
) -> tuple[Trainer, list[dict[str, Any]]]:
    """The runs that end in these checkpoints. All else that can be wrong is looked at before a step."""
    import torch

    from te_cli.training import Text, Trainer, model_of, read_checkpoint

    place = torch.device(options.device)
    states = {path: read_checkpoint(path) for path in paths if options.resume and path.exists()}
    settings = settings_for(paths[0], states.get(paths[0]), given, place.type)
    check_changes(states, paths, given)
    for path, state in states.items():
        check_beside(path, state, settings)
        model_of(path, state, torch.device("cpu"))
    text = Text(Path(job["text"] or TEXT), place)
    check(settings, len(text))
    if place.type == "cpu" and settings.hidden <= 256:
        # The products are NumPy's and keep all cores. What torch does in between is too small to share: on two idle
        # cores a second thread gains nothing, on two busy ones it costs a factor of three.
        torch.set_num_threads(1)
    interrupt, resume, results = Interrupt(), again(), []
    print(
        f"Training on {device_name(place)}: {Path(job['text'] or TEXT).name}, {len(text.train)} bytes to learn",
        flush=True,
    )
    if options.resume and not states:
        print(f"--resume: there is nothing to go on from in {shown(options.out)}; this begins at step 1", flush=True)
    for path in paths:
        trainer = Trainer(dataclasses.replace(settings, recipe=path.stem), text, place)
        trainer.job = job
        if path in states:
            trainer.load(states[path])
            print(f"{NAMES[path.stem]}: going on after step {len(trainer.losses)} ({shown(path)})")
        results.append(train(trainer, path, options.save_every, interrupt, resume))
    return trainer, results
