"""Time a layer of te_torch beside the same layer of torch, as it is and under torch.compile, on the device at hand.

One of ours (--module), or a module of torch that a function of yours returns with its input; te.convert then makes the
one to compare. All have the same weights and input. Each row is one of them: a forward, a step of forward and backward,
its speed (torch is 1), the memory at the peak, how long the first step took (which compiles), and how far the output is
from torch's. It takes less than a minute.

    te bench
    te bench --module LayerNormMLP --hidden 4096 --ffn 14336 --recipe current block
    te bench --module model.py:layer --out bench.png      # def layer(): return module, input
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_cli.arguments import UserError, add_device, positive, rate, replacing
from te_cli.progress import Progress
from te_cli.settings import NAMES, RECIPES
from te_core.errors import LibraryError, UnsupportedError
from te_core.recipe import Recipe
from te_core.spelling import meant

if TYPE_CHECKING:
    import torch

LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer")  # of te_cli/layers.py
SIZES = {
    "hidden": "width",
    "ffn": "width inside",
    "heads": "attention heads",
    "batch": "sequences",
    "sequence": "tokens",
}
WARM, ROUNDS = 4, 3  # steps before any is timed; turns in which all are timed
BAR = 30  # characters of the fastest one's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    about = f"{', '.join(LAYERS)}, or FILE.py:FUNCTION (TransformerLayer)"
    parser.add_argument("--module", default="TransformerLayer", metavar="NAME", help=about)
    recipes = [name for name in RECIPES if name != "none"]
    parser.add_argument("--recipe", choices=recipes, nargs="+", default=["current"], help="of ours (current)")
    for name, what in SIZES.items():
        short = ("--seq",) if name == "sequence" else ()
        parser.add_argument(f"--{name}", *short, type=positive, metavar="N", help=what)
    parser.add_argument("--seconds", type=rate, default=1.0, metavar="X", help="of timing for each row (1)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="draw a picture of the rows, too: FILE.png, .svg, .pdf"
    )
    add_device(parser)


@dataclasses.dataclass
class Row:
    """One of those that are compared. What could not run says why, and has no figures."""

    name: str
    forward_ms: float | None = None
    step_ms: float | None = None
    speed: float | None = None  # of a step, torch's is 1
    peak_mib: float | None = None  # above what weights and input hold; on a GPU
    first_step_s: float | None = None
    difference: float | None = None  # of the output from torch's, as a share of its norm
    failed: str = ""


class Form:
    """A module that is timed, in a recipe or none."""

    def __init__(self, name: str, module: Any, inputs: tuple[Any, ...], recipe: Recipe | None) -> None:
        self.row, self.module, self.inputs, self.recipe = Row(name), module, inputs, recipe
        self.dy: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """The output."""
        import te_torch as te

        if self.recipe is None:
            return self.module(*self.inputs)  # type: ignore[no-any-return]
        with te.autocast(recipe=self.recipe):
            return self.module(*self.inputs)  # type: ignore[no-any-return]

    def step(self) -> None:
        """Forward and backward."""
        import torch

        y = self.forward()
        if self.dy is None:
            self.dy = torch.randn_like(y)
        y.backward(self.dy)  # type: ignore[no-untyped-call]
        self.module.zero_grad(set_to_none=True)
        for x in self.inputs:
            if isinstance(x, torch.Tensor):
                x.grad = None


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """Compare; 1 if one of ours could not run."""
    check(options)
    import torch

    from te_cli.train import device_name

    place = torch.device(options.device)
    forms = forms_of(options, place)
    measure(forms, place, options.seconds)
    rows = [form.row for form in forms]
    for row in rows:
        row.speed = rows[0].step_ms / row.step_ms if rows[0].step_ms and row.step_ms else None
    found = {
        "device": device_name(place),
        "torch": torch.__version__,
        "module": options.module,
        "input": [list(x.shape) if isinstance(x, torch.Tensor) else repr(x) for x in forms[0].inputs],
        "dtype": str(next(forms[0].module.parameters()).dtype).removeprefix("torch."),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    title = (
        f"{found['module']} on {found['device']}\ninput {found['input'][0]}, {found['dtype']}, torch {found['torch']}"
    )
    words = [f"\n{title}\n", *table(rows), "", *bars(rows)]
    if options.out:
        draw(options.out, rows, title)
        words.append(f"\nWritten: {options.out}")
    return found, "\n".join(words), int(any(row.failed for row in rows if row.name.startswith("te")))


def check(options: argparse.Namespace) -> None:
    """What can be wrong with the options, told before torch is imported."""
    of_user = ":" in options.module
    if not of_user and options.module not in LAYERS:
        said = f"{', '.join(LAYERS)}, or FILE.py:FUNCTION{meant([options.module], LAYERS)}"
        raise UserError(f"--module {options.module}: choose one of {said}")
    given = [name for name in SIZES if getattr(options, name) is not None]
    if of_user and given:
        raise UserError(f"--{given[0]}: the sizes of {options.module} are those that the function chooses")
    if options.out is None:
        return
    if options.out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {options.out}: name a file that ends in .png, .svg or .pdf")
    if not options.out.resolve().parent.is_dir():
        raise UserError(f"--out {options.out}: there is no such folder")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--out needs matplotlib (pip install matplotlib); the bars are printed without") from None


# ------------------------------------------------------------------------------------------- what is compared


def forms_of(options: argparse.Namespace, place: torch.device) -> list[Form]:
    """Torch's module, the same compiled, and ours: without a recipe, and in each that was asked for."""
    import torch

    theirs, ours, inputs = of_user(options.module, place) if ":" in options.module else of_name(options, place)
    forms = [Form("torch", theirs, inputs, None)]
    if not options.no_compile:
        torch._dynamo.reset()
        forms.append(Form("torch.compile", torch.compile(theirs, dynamic=False), inputs, None))
    dtype = str(next(ours.parameters()).dtype).removeprefix("torch.")
    forms.append(Form(f"te, {dtype}", ours, inputs, None))
    return forms + [Form(f"te, {NAMES[name]}", copy.deepcopy(ours), inputs, RECIPES[name]) for name in options.recipe]


def of_name(
    options: argparse.Namespace, place: torch.device
) -> tuple[torch.nn.Module, torch.nn.Module, tuple[Any, ...]]:
    """(torch's, ours, input) of one of our layers."""
    import torch

    from te_cli import layers

    usual = layers.SIZES[place.type]
    given = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    if "hidden" in given and "ffn" not in given:
        given["ffn"] = 4 * given["hidden"]
    sizes = dataclasses.replace(usual, **given)
    if sizes.hidden % sizes.heads:
        raise UserError(f"--hidden {sizes.hidden} is no multiple of --heads {sizes.heads}: choose one")
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    theirs, ours = layers.named(options.module, sizes, place, dtype)
    x = torch.randn(sizes.batch, sizes.sequence, sizes.hidden, device=place, dtype=dtype, requires_grad=True)
    return theirs, ours, (x,)


def of_user(name: str, place: torch.device) -> tuple[torch.nn.Module, torch.nn.Module, tuple[Any, ...]]:
    """The same of a module that a function of the user's returns with its input."""
    import torch

    import te_torch as te
    from te_cli.steps import function_of

    made = function_of(name)()
    if not isinstance(made, tuple) or len(made) < 2 or not isinstance(made[0], torch.nn.Module):
        raise UserError(f"{name} returned {type(made).__name__}: let it return a module of torch and its input")
    theirs, inputs = made[0].to(place), tuple(x.to(place) if isinstance(x, torch.Tensor) else x for x in made[1:])
    holder = torch.nn.ModuleList([copy.deepcopy(theirs)])
    report = te.convert(holder)
    if not report.converted:
        raise UserError(f"{name}: te.convert finds nothing to convert in it ({report})")
    return theirs, holder[0], inputs


# ------------------------------------------------------------------------------------------- measuring


def measure(forms: list[Form], place: torch.device, seconds: float) -> None:
    """Fill the rows: the first steps of each, then all in turns."""
    bar = Progress("bench", len(forms) * (1 + ROUNDS), lines=len(forms))
    done, reference = 0, None
    times: dict[int, tuple[list[float], list[float]]] = {id(form): ([], []) for form in forms}

    def show(form: Form, what: str) -> None:
        nonlocal done
        done += 1
        bar.show(done, f"{what} {form.row.name}"[:40])

    for i, form in enumerate(forms):
        with failing(form, always=i == 0):
            prepare(form, place)
            y = form.forward().detach()
            reference = y if reference is None else reference
            form.row.difference = float((y - reference).norm() / reference.norm())
        show(form, "compiled")
    for _ in range(ROUNDS):
        for form in forms:
            if not form.row.failed:
                with failing(form):
                    for found, work in zip(times[id(form)], (form.forward, form.step), strict=True):
                        found.append(timed(work, place, seconds / ROUNDS / 2))
            show(form, "timed")
    for form in forms:
        if not form.row.failed:
            form.row.forward_ms, form.row.step_ms = map(median, times[id(form)])


@contextmanager
def failing(form: Form, always: bool = False) -> Iterator[None]:
    """Note what keeps a form from running in its row; `always` raises it, as nothing can be compared without."""
    from te_cli.main import out_of_memory

    try:
        yield
    except Exception as error:
        compiled = form.row.name == "torch.compile"  # which raises errors of many kinds, as where there is no compiler
        if always or not (compiled or isinstance(error, (UnsupportedError, LibraryError)) or out_of_memory(error)):
            raise
        form.row = Row(form.row.name, failed="out of memory" if out_of_memory(error) else str(error).strip())


def prepare(form: Form, place: torch.device) -> None:
    """The first steps, which compile and record, and the memory of one that does not."""
    import torch

    started = time.perf_counter()
    form.step()
    synchronize(place)
    form.row.first_step_s = time.perf_counter() - started
    for _ in range(WARM):
        form.step()
    if place.type == "cuda":
        synchronize(place)
        before = torch.cuda.memory_allocated(place)
        torch.cuda.reset_peak_memory_stats(place)
        form.step()
        synchronize(place)
        form.row.peak_mib = (torch.cuda.max_memory_allocated(place) - before) / 2**20


def timed(work: Callable[[], Any], place: torch.device, seconds: float) -> float:
    """Milliseconds of one piece of work, from as many as fill the seconds."""
    work()
    synchronize(place)
    count, started = 0, time.perf_counter()
    while count == 0 or (time.perf_counter() - started < seconds and count < 1000):
        work()
        count += 1
        if count % 8 == 0:  # the host may be far ahead of a GPU
            synchronize(place)
    synchronize(place)
    return 1e3 * (time.perf_counter() - started) / count


def synchronize(place: torch.device) -> None:
    """Wait for a GPU."""
    import torch

    if place.type == "cuda":
        torch.cuda.synchronize(place)


def median(values: list[float]) -> float:
    """The one in the middle."""
    return sorted(values)[len(values) // 2]


# ------------------------------------------------------------------------------------------- showing


def table(rows: list[Row]) -> list[str]:
    """The rows' figures."""
    lines = [f"  {'':18s}{'forward':>12s}{'step':>12s}{'speed':>8s}{'peak':>12s}{'first step':>12s}{'difference':>12s}"]
    for row in rows:
        if row.failed:
            lines.append(f"  {row.name:18s}  did not run: {row.failed.partition(chr(10))[0]}")
            continue
        peak = "-" if row.peak_mib is None else f"{row.peak_mib:,.0f} MiB"
        lines.append(
            f"  {row.name:18s}{row.forward_ms:9.3f} ms{row.step_ms:9.3f} ms{row.speed:8.2f}{peak:>12s}"
            f"{row.first_step_s:10.1f} s{row.difference:12.1e}"
        )
    return lines


def bars(rows: list[Row]) -> list[str]:
    """A bar for each row that ran: the longer, the faster."""
    fastest = max((row.speed for row in rows if row.speed), default=1.0)
    return [
        f"  {row.name:18s}{'█' * max(1, round(BAR * row.speed / fastest))} {row.speed:.2f}" for row in rows if row.speed
    ]


def draw(path: Path, rows: list[Row], title: str) -> None:
    """A picture: for each row that ran, the time of a step, its forward first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ran = [row for row in rows if not row.failed][::-1]
    forward = [row.forward_ms or 0.0 for row in ran]
    backward = [(row.step_ms or 0.0) - start for row, start in zip(ran, forward, strict=True)]
    figure, axes = plt.subplots(figsize=(7, 1 + 0.5 * len(ran)), layout="constrained")
    names = [row.name for row in ran]
    axes.barh(names, forward, label="forward")
    axes.barh(names, backward, left=forward, label="backward")
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize=8)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format="png")
    plt.close(figure)
