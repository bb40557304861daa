"""`bisect`: which GEMMs spoil a result. The step is run again and again, with some of them in high precision.

    def step(model):
        with te_torch.autocast(recipe=recipe):
            loss = loss_of(model(x))
        loss.backward()
        return loss

    print(te_torch.debug.bisect(step, model))

A GEMM in high precision is the one that the layer runs outside of a region: its operands are put in by an inspector.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_core.errors import ArgumentError
from te_core.layers.inspector import PLAIN
from te_core.spelling import choice_error
from te_torch.debug.layers import team_of
from te_torch.debug.snapshot import Snapshot, main_gradient
from te_torch.debug.watched import Around, Guest, Layers, chosen, products_of
from te_torch.exchange import all_reduce
from te_torch.listing import table
from te_torch.runtime import is_dtensor

GEMMS = ("fprop", "dgrad", "wgrad")
Unit = tuple[str, tuple[str, ...]]  # a layer, and those of its GEMMs that are switched together

#: Where no tolerance is given: what a result may be off by, of what it is off by with nothing switched.
PART = 1 / 3
#: What a fault by itself comes to, of all that is wrong: up to four that are alike.
ALONE = 0.45
#: Below this nothing is at fault: what the rounding of healthy GEMMs may come to.
HEALTHY = {"loss": 1e-3, "gradients": 0.02}
#: More than so many, or than a quarter of all, are not faults but what every GEMM loses.
FEW = 6
#: Then the best set so far has to do.
MOST_RUNS = 200


class Culprit(NamedTuple):
    """GEMMs of a layer without whose high precision the result stays bad."""

    layer: str
    gemms: tuple[str, ...]
    without: float  # what the result is off by with all of the set in high precision but these


class Bisection:
    """The smallest set that was found. Printable; `as_dict()` for programs.

    verdict: "found"; "nothing", where the result is as good as in high precision; "everything", where no few GEMMs
    stand out, or no small set was found in the runs there were: then it is the recipe's fault, and not a layer's;
    "elsewhere", where the layers that were chosen, all in high precision, do not make it good.
    """

    def __init__(
        self, verdict: str, culprits: list[Culprit], off: tuple[float, float], compared: str, runs: int, of: int
    ) -> None:
        self.verdict = verdict
        self.culprits = culprits
        self.off, self.left = off  # what the result was off by, and is with the culprits in high precision
        self.compared = compared  # "loss" or "gradients"
        self.runs = runs
        self.candidates = of

    @property
    def layers(self) -> list[str]:
        """The layers of the culprits."""
        return list(dict.fromkeys(culprit.layer for culprit in self.culprits))

    def as_dict(self) -> dict[str, Any]:
        """{"verdict": ..., "culprits": [{"layer": ..., "gemms": [...], "without": ...}], "off": ..., ...}."""
        rows = [{**c._asdict(), "gemms": list(c.gemms)} for c in self.culprits]
        return {"culprits": rows, **{k: v for k, v in vars(self).items() if k != "culprits"}}

    def __str__(self) -> str:
        what, runs = self.compared, f"{self.runs} runs"
        if self.verdict == "nothing":
            return f"nothing is at fault: the {what} are off by {_share(self.off)} from high precision ({runs})"
        if self.verdict == "elsewhere":
            off = _share(self.left)
            return f"not among these {self.candidates}: with all in high precision the {what} are off by {off}"
        count = f"{len(self.culprits)} of {self.candidates}"
        ends = f"from {_share(self.off)} off to {_share(self.left)}"
        if self.verdict == "everything":
            text = (
                f"no layer is at fault: the {what} are off by {_share(self.off)} ({runs}), and no few GEMMs stand out"
            )
            takes = f"\nit takes {count} in high precision to bring them {ends}" if self.culprits else ""
            return f"{text}{takes}\nevery GEMM loses a little: a finer recipe helps, not one for a layer"
        cells = [(c.layer, ", ".join(c.gemms), _share(c.without)) for c in self.culprits]
        head = f"{count} in high precision bring the {what} {ends} ({runs}):"
        return f"{head}\n\n{table(('layer', 'in high precision', 'off without it'), cells)}"


def _share(off: float) -> str:
    return "NaN or infinity" if math.isinf(off) else f"{100 * off:.3g} %"


class _High(Around):
    """Has some of a product's GEMMs read their operands unquantized."""

    operation = "bisect"

    def __init__(self, layers: list[str], high: set[tuple[str, str]], number: int, own: Any) -> None:
        super().__init__(frozenset(PLAIN), own)  # all operands
        self._layer, self._high = layers[number], high

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> Any:
        """The value itself in the place of what it was quantized to."""
        replaced = super().inspect(rt, gemm, tensor, value, cast, out)
        return value if (gemm, tensor) in self.points and (self._layer, gemm) in self._high else replaced


class _Steps(Guest):
    """Runs of the step, each from the same state, with some GEMMs in high precision."""

    def __init__(self, step_fn: Any, model: torch.nn.Module, compare: str | None, restore: Sequence[Any]) -> None:
        super().__init__()
        self._products = products_of("bisect", model)
        self.names = list(dict.fromkeys(name for name, _, _ in self._products))
        self._step, self._model, self.compare = step_fn, model, compare
        self._snapshot = Snapshot(model, restore)
        self._high: set[tuple[str, str]] = set()
        self._device = next(map(_place, model.parameters()), torch.device("cpu"))
        teams = [team_of(module, number).group for _, module, number in self._products]
        self._shards = _shards(model)
        self._groups = list(dict.fromkeys(g for g in (*teams, *_copies(model), *self._shards) if g is not None))
        self.runs = 0

    def __enter__(self) -> _Steps:
        self.closed = False
        by_module: dict[Any, list[str]] = {}
        for name, module, _ in self._products:
            by_module.setdefault(module, []).append(name)
        for module, names in by_module.items():
            self.put(module, partial(_High, names, self._high))
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()
        self._snapshot.restore()

    def run(self, high: Any) -> tuple[float, list[torch.Tensor | None]]:
        """(loss, gradients) of a step with these (layer, gemm) in high precision."""
        self._snapshot.restore()
        self._high.clear()
        self._high.update(high)
        self.runs += 1
        loss = self._step(self._model)
        if self.compare == "gradients" and isinstance(loss, torch.Tensor) and loss.requires_grad and not self._left():
            loss.backward()
        if self.compare is None:
            self.compare = "gradients" if self._left() else "loss"
        if self.compare == "gradients":
            grads = [_gradient(p) for p in self._model.parameters()]
            if not any(g is not None for g in grads):
                raise _bad_step("left no gradients", "compare='loss', or call loss.backward() in it")
            return math.nan, grads
        if not isinstance(loss, (int, float, torch.Tensor)) or isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise _bad_step(f"returned {type(loss).__name__}", "return the loss, one number")
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss), []

    def off(self, found: tuple[float, list[Any]], want: tuple[float, list[Any]]) -> float:
        """What a result is off by, on the worst of the ranks."""
        if self.compare == "loss":
            off = abs(found[0] - want[0]) / max(abs(want[0]), 1e-30)
            return self.worst(math.inf if math.isnan(off) else off)
        return self.worst(_share_off(self._squares(found[1], want[1])))

    def worst(self, off: float) -> float:
        """The largest on any rank of the groups that share weights, whole or in parts: all ranks search alike."""
        for group in self._groups:
            most = torch.tensor([off], device=self._device, dtype=torch.float32)
            all_reduce("bisect", most, group, "max")
            off = float(most)
        return off

    def _squares(self, found: list[Any], want: list[Any]) -> list[list[float]]:
        """[the error squared, the gradient squared, elements] of each parameter that has one: of all its shards."""
        rows = []
        for a, b in zip(found, want, strict=True):
            error = math.inf if a is None else 0.0 if b is None else float((a - b).norm())
            rows.append([0.0] * 3 if b is None else [error**2, float(b.norm()) ** 2, float(b.numel())])
        for group, numbers in self._shards.items():
            of_all = torch.tensor([rows[i] for i in numbers], device=self._device, dtype=torch.float64)
            all_reduce("bisect", of_all, group, "sum")
            for i, row in zip(numbers, of_all.tolist(), strict=True):
                rows[i] = row
        return [row for row in rows if row[2]]

    def _left(self) -> bool:
        return any(_gradient(p) is not None for p in self._model.parameters())


def _gradient(p: Any) -> torch.Tensor | None:
    """The gradient of a parameter, or of this rank's shard of it."""
    main = main_gradient(p)
    found: Any = p.grad if main is None else main
    if found is None:
        return None
    part: torch.Tensor = found.to_local() if is_dtensor(found) else found
    return part.detach().float().clone()


def _place(p: torch.Tensor) -> torch.device:
    """Where what ranks exchange of a parameter lies; shards may be kept in the memory of the host."""
    return torch.device(p.device_mesh.device_type) if is_dtensor(p) else p.device  # type: ignore[attr-defined]


def _shards(model: torch.nn.Module) -> dict[Any, list[int]]:
    """The groups of ranks that have shards of parameters, or copies of shards, and of which ones (by number) shards."""
    found: dict[Any, list[int]] = {}
    for number, p in enumerate(model.parameters()):
        if is_dtensor(p):
            shared: Any = p
            for group, placement in zip(shared.device_mesh.get_all_groups(), shared.placements, strict=True):
                found.setdefault(group, []).extend([number] * placement.is_shard())
    return found


def _copies(model: torch.nn.Module) -> list[Any]:
    """The groups over which DistributedDataParallel and FSDP1 spread a model, or parts of it."""
    named = [getattr(m, name, None) for m in model.modules() for name in ("process_group", "_inter_node_pg")]
    return [group for group in named if dist.is_available() and isinstance(group, dist.ProcessGroup)]


def _bad_step(got: str, do: str) -> ArgumentError:
    return ArgumentError("bisect", f"a step_fn that {got}", "one that returns a loss, or leaves gradients", do)


def _share_off(rows: list[list[float]]) -> float:
    """What gradients are off by, as a share of what they should be, in the worst parameter; infinite where it is no
    number. One that is as good as zero counts little."""
    total = sum(wanted for _, wanted, _ in rows) / max(sum(count for *_, count in rows), 1)
    worst = 0.0
    for error, wanted, count in rows:
        share = math.sqrt(error) / max(math.sqrt(wanted), 0.1 * math.sqrt(total * count), 1e-30)
        worst = max(worst, math.inf if math.isnan(share) else share)
    return worst


class _Enough(Exception):  # noqa: N818
    """The runs are used up."""


class _Search:
    """The smallest set of units that makes the result good, by halves; results are kept."""

    def __init__(self, steps: _Steps, want: Any, tolerance: float, most_runs: int, told: Callable[[str], None]) -> None:
        self.steps, self._want, self._most, self._told = steps, want, most_runs, told
        self.tolerance = tolerance
        self._known: dict[frozenset[Unit], float] = {}
        self.best: list[Unit] = []  # the smallest good set so far
        self.few: float = math.inf  # at most so many are looked for
        self._needed = 0

    def off(self, units: Sequence[Unit]) -> float:
        """What the result is off by with these in high precision."""
        key = frozenset(units)
        if key not in self._known:
            if self.steps.runs >= self._most:
                raise _Enough
            high = [(layer, gemm) for layer, gemms in units for gemm in gemms]
            off = self._known[key] = self.steps.off(self.steps.run(high), self._want)
            good = off <= self.tolerance
            self._told(f"run {self.steps.runs}: {len(units)} in high precision: off by {_share(off)}"
                       f"{', good' if good else ''}")  # fmt: skip
            if good and (not self.best or len(units) < len(self.best)):
                self.best = list(units)
        return self._known[key]

    def known(self, units: Sequence[Unit]) -> float:
        """The same if it has been run; NaN otherwise."""
        return self._known.get(frozenset(units), math.nan)

    def good(self, units: Sequence[Unit]) -> bool:
        """Whether the result is good with these in high precision."""
        return self.off(units) <= self.tolerance

    def smallest(self, given: list[Unit], added: bool, units: list[Unit]) -> list[Unit]:
        """What of `units` it takes besides `given`, none of it without need; with all of both the result is good."""
        if added and self.good(given):
            return []
        if len(units) == 1:
            self._needed += 1
            if self._needed > self.few:
                raise _Enough
            return units
        left, right = units[: len(units) // 2], units[len(units) // 2 :]
        of_right = self.smallest(given + left, True, right)
        return self.smallest(given + of_right, bool(of_right), left) + of_right

    def faults(self, given: list[Unit], units: list[Unit]) -> list[Unit]:
        """Those without which the result is much worse: what every healthy GEMM adds is no fault.

        A tolerance may lie below that; then it takes some of the healthy ones as well, of which each matters little.
        """
        self._needed, off = 0, self.off(given)
        self.tolerance = 0.1 if math.isinf(off) else PART * off
        try:
            found = self.smallest(given, True, units)
            worse = [self.off(given + [u for u in found if u is not unit]) for unit in found]
        except _Enough:
            return []
        few = 2 * len(found) <= len(units) or len(units) < 3
        return [unit for unit, without in zip(found, worse, strict=True) if few and without >= ALONE * off]


def bisect(
    step_fn: Callable[[torch.nn.Module], Any],
    model: torch.nn.Module,
    *,
    layers: Layers = None,
    level: str = "gemm",
    compare: str | None = None,
    tolerance: float | None = None,
    restore: Sequence[Any] = (),
    progress: bool = True,
) -> Bisection:
    """Find the fewest GEMMs that, in high precision, bring the result of `step_fn(model)` back.

    step_fn runs the model in its `autocast` region, over one step or several, and returns the loss; if it leaves
    gradients, these are compared, else the loss (`compare`: "loss" or "gradients"). It has to do the same each time:
    before every run the model, its gradients, its FP8 state and all generators are set back, and what `restore` lists
    (optimizers and schedulers, whose state_dict is loaded). Afterwards everything is as it was before.

    level: "gemm" switches the GEMMs of a layer one by one, "layer" all together. tolerance: what a good result may be
    off by, as a share (of the loss, or of the gradient of the worst parameter); None: what stands out of what healthy
    GEMMs lose is found.

    Returns:
        A printable `Bisection`.

    Raises:
        ArgumentError: An argument has a value that is not allowed, or no layer is chosen.
    """
    told = (lambda line: print(f"bisect: {line}", file=sys.stderr, flush=True)) if progress else lambda line: None
    if not callable(step_fn):
        raise ArgumentError("bisect", f"step_fn={step_fn!r}", "a function of the model", "pass one that runs a step")
    if level not in ("gemm", "layer"):
        raise choice_error("bisect", "level", level, ("gemm", "layer"))
    if compare not in (None, "loss", "gradients"):
        raise choice_error("bisect", "compare", compare, ("loss", "gradients", None))
    if tolerance is not None and (not isinstance(tolerance, Real) or not tolerance >= 0):
        raise ArgumentError("bisect", f"tolerance={tolerance!r}", "a number >= 0, or None", "correct it")
    with _Steps(step_fn, model, compare, restore) as steps:
        names = chosen("bisect", steps.names, layers)
        groups: list[tuple[str, ...]] = [GEMMS] if level == "layer" else [(gemm,) for gemm in GEMMS]
        units: list[Unit] = [(name, gemms) for name in steps.names if name in names for gemms in groups]
        want = steps.run([(name, gemm) for name in steps.names for gemm in GEMMS])
        compared = str(steps.compare)
        if compared == "loss" and steps.worst(0.0 if math.isfinite(want[0]) else 1.0):
            raise _bad_step("returns no number in high precision either", "look at the model: it is not the precision")
        search = _Search(steps, want, math.inf, MOST_RUNS, told)
        off = search.off([])
        if off != steps.off(steps.run([]), want):
            raise _bad_step("gives another result when it is run again", "fix its data and generators, or use restore=")
        if off <= (HEALTHY[compared] if tolerance is None else tolerance):
            return Bisection("nothing", [], (off, off), compared, steps.runs, len(units))
        if tolerance is None:
            return _stand_out(search, units, off, steps)
        search = _Search(steps, want, tolerance, MOST_RUNS, told)
        return _within(search, units, off, steps)


def _stand_out(search: _Search, units: list[Unit], off: float, steps: _Steps) -> Bisection:
    """Faults, the worst first: with these in high precision there may be others that they hid."""
    search.few = max(FEW, len(units) // 4)
    found: list[Unit] = []
    try:
        if search.off(units) > PART * off:
            return _made("elsewhere", [], search, units, (off, search.off(units)))
        while search.off(found) > max(HEALTHY[str(steps.compare)], off / 10):
            more = search.faults(found, [unit for unit in units if unit not in found])
            found += more
            if not more or steps.compare == "loss":  # in a loss errors of both signs meet: what is left says little
                break
    except _Enough:
        pass
    found.sort(key=units.index)
    return _made("found" if found else "everything", found, search, units, (off, search.known(found)))


def _within(search: _Search, units: list[Unit], off: float, steps: _Steps) -> Bisection:
    """The smallest set that brings the result within a tolerance."""
    try:
        if not search.good(units):
            return _made("elsewhere", [], search, units, (off, search.off(units)))
        found = search.smallest([], True, units)
        spread = 2 * len(found) > len(units) > 2 or not search.good(found)
    except _Enough:
        found, spread = search.best or units, True
    return _made("everything" if spread else "found", found, search, units, (off, search.known(found)))


def _made(verdict: str, found: list[Unit], search: _Search, units: list[Unit], off: tuple[float, float]) -> Bisection:
    culprits = []
    for unit in found:
        try:
            without = search.off([u for u in found if u is not unit]) if len(found) <= 8 else math.nan
        except _Enough:
            without = math.nan
        culprits.append(Culprit(*unit, without))
    return Bisection(verdict, culprits, off, str(search.steps.compare), search.steps.runs, len(units))
