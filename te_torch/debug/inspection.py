"""`inspect`: statistics of every layer, GEMM and tensor over steps. Nothing to configure, nothing else to install.

    with te_torch.debug.inspect(model) as seen:
        for batch in batches:
            train(model, batch)
            seen.step()
    print(seen)
    seen.to_html("precision.html")

The layers run as they do without it; an inspector of their own goes on acting, and what is measured is what it leaves.
Sums stay on the device until the result is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers.inspector import ATTENTION_POINTS, POINTS, quantized_whole
from te_core.quantized import QuantizedTensor
from te_torch.autocast import active
from te_torch.base.module import BaseModule
from te_torch.debug.ledger import Ledger
from te_torch.debug.report import Report, Series
from te_torch.debug.watched import Around, Guest, Layers, chosen, listed, products_of
from te_torch.draws import capturing
from te_torch.reruns import first_of_a_checkpoint, in_backward

#: The points in the order in which a step meets them.
ORDER = (
    ("fprop", "activation"), ("fprop", "weight"), ("fprop", "output"),
    ("dgrad", "gradient"), ("dgrad", "weight"), ("dgrad", "dgrad"),
    ("wgrad", "activation"), ("wgrad", "gradient"), ("wgrad", "wgrad"),
    ("fprop", "q"), ("fprop", "k"), ("fprop", "v"), ("fprop", "kv"), ("fprop", "qkv"), ("fprop", "s"),
    ("dgrad", "do"), ("dgrad", "dp"),
)  # fmt: skip
assert frozenset(ORDER) == POINTS | ATTENTION_POINTS
TENSORS = tuple(dict.fromkeys(tensor for _, tensor in ORDER))
#: What forward shows of what backward will read.
_KEPT = frozenset((("wgrad", "activation"), ("dgrad", "weight")))
#: Which of them their GEMM reads along the columns.
_COLUMNS = frozenset((("dgrad", "weight"), ("wgrad", "activation"), ("wgrad", "gradient")))


def _some(what: str, given: Iterable[str] | None, allowed: tuple[str, ...]) -> frozenset[str]:
    """A selection of these names."""
    names = allowed if given is None else (given,) if isinstance(given, str) else listed("inspect", what, given)
    for name in names:
        if name not in allowed:
            raise ArgumentError("inspect", f"{what}={name!r}", ", ".join(allowed), "correct the name")
    return frozenset(names)


class Watch(Around):
    """Measures what the module's own inspector leaves."""

    operation = "inspect"

    def __init__(self, session: Inspection, number: int, own: Any) -> None:
        super().__init__(session.points, own)
        self._session, self._number = session, number

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> Any:
        """The module's own inspector acts; what it leaves is measured."""
        replaced = super().inspect(rt, gemm, tensor, value, cast, out)
        self._session.look(rt, self._number, (gemm, tensor), value, cast, out if replaced is None else replaced)
        return replaced

    def quantized_whole(self, rt: Any, gemm: str, tensor: str, form: Any) -> None:
        """A part that was seen in high precision is multiplied in this format."""
        self._session._told(self._number, (gemm, tensor), form)
        quantized_whole(rt, self.own, (gemm, tensor), form)


class Inspection(Guest):
    """What `inspect` gives: `step()` ends a step; printed or written to a file it is the report of what was seen."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Layers,
        points: frozenset[tuple[str, str]],
        when: tuple[int, int, int | None],
        group: Any,
    ) -> None:
        super().__init__()
        products = products_of("inspect", model, attention=True)
        names = chosen("inspect", [name for name, _, _ in products], layers)
        self.names: list[str] = []
        self._attention: set[int] = set()  # numbers of those that are attention, which is seen in FP8 only
        self._modules: dict[BaseModule, list[int | None]] = {}  # the number among `names` of each product
        for name, module, _ in products:
            self._modules.setdefault(module, []).append(len(self.names) if name in names else None)
            if name in names and not module._weight_names():
                self._attention.add(len(self.names))
            self.names += [name] if name in names else []
        self._modules = {m: numbers for m, numbers in self._modules.items() if any(n is not None for n in numbers)}
        self._model, self.points, self._when, self._group = model, points, when, group
        first = next(model.parameters(), None)
        self._ledger = Ledger(len(self.names) * len(ORDER), torch.device("cpu") if first is None else first.device)
        self._slots = {point: i for i, point in enumerate(ORDER)}
        self._read: tuple[int, Report] | None = None
        self.current = 0  # the number of the step
        self._last: dict[tuple[int, str], tuple[int, int, int]] = {}  # by layer and tensor: what was shown last
        self._twins: dict[int, int] = {}  # rows that are as good as others
        self._shown: set[int] = set()  # rows, in this step
        self._looking = False  # whether this step is looked at
        self._blind = 0  # how many steps were looked at in vain

    # ------------------------------------------------------------------------------------- the steps

    def __enter__(self) -> Inspection:
        if not self.closed:
            raise RuntimeError("this inspect is already active: make another one for a nested region")
        self.closed = False
        self._look_or_not()
        return self

    def __exit__(self, kind: Any, *exc: object) -> None:
        if self._shown:
            # All ranks reduce or none: what follows a step(), or is ended by an error, only some of them may see.
            alone = self.current > 0 or kind is not None
            self._ledger.close(self.current, None if alone else self._group)
            self.current += 1
        self._looking = False
        self.leave()

    def step(self) -> None:
        """End a step: what comes now belongs to the next one. With a group all its ranks have to call it alike."""
        if self.closed:
            raise RuntimeError("step() belongs inside of `with inspect(model) as seen:`")
        if self._looking:
            self._blind += self._group is None and not self._shown
            self._ledger.close(self.current, self._group)
        self._shown.clear()
        self._last.clear()
        self.current += 1
        self._look_or_not()

    def _look_or_not(self) -> None:
        """In a step that nobody looks at, layers run as if there were no inspection."""
        every, start, end = self._when
        self._looking = self.current % every == 0 and self.current >= start and (end is None or self.current <= end)
        for module, numbers in self._modules.items():
            if self._looking:
                self.put(module, partial(self._watch, numbers))
            else:
                self.take(module)

    def _watch(self, numbers: list[int | None], product: int, own: Any) -> Any:
        number = numbers[product % len(numbers)]  # attention is one product, of three slots
        return own if number is None else Watch(self, number, own)

    def look(self, rt: Any, number: int, point: tuple[str, str], value: Any, cast: Any, out: Any) -> None:
        """Called by a watch: measure a tensor. What a checkpoint runs again was seen, or will be seen then."""
        if not self._looking or point not in self.points:
            return
        if point in _KEPT:
            if first_of_a_checkpoint():
                return
        elif point[0] == "fprop" and (active.recomputing or in_backward()):
            return
        if rt.device.kind == "cuda" and capturing():
            raise UnsupportedError(
                "inspect", "a CUDA graph that is being captured", "steps that run eagerly", "capture it outside"
            )
        slot = number * len(ORDER) + self._slots[point]
        if point[1] == "weight" and slot in self._shown:  # the same in every microbatch
            return
        self._shown.add(slot)
        if self._is_known(number, point, slot, value, out):
            return
        self._ledger.enter(rt, slot, value, cast, out, point in _COLUMNS)

    def _told(self, number: int, point: tuple[str, str], form: Any) -> None:
        """Called by a watch: how a tensor was quantized of which it has seen a part."""
        if self._looking and point in self.points:
            slot = number * len(ORDER) + self._slots[point]
            self._ledger.quantized_whole(self._twins.get(slot, slot), form)

    def _is_known(self, number: int, point: tuple[str, str], slot: int, value: Any, out: Any) -> bool:
        """Whether the other GEMM that reads this tensor has shown the same: the same codes, if it is quantized."""
        if isinstance(out, QuantizedTensor) and out.format.scaling != "tensor":
            return False
        this = slot, value.ptr, id(out)
        other = self._last.pop((number, point[1]), None)
        if other is not None and other[0] != slot and other[1:] == this[1:]:
            self._twins[slot] = other[0]
            return True
        self._last[number, point[1]] = this
        return False

    # ------------------------------------------------------------------------------------ the result

    def report(self) -> Report:
        """All that was seen in the steps that have ended. Waits for the device."""
        if self._read is not None and self._read[0] == self.current and self.closed:
            return self._read[1]
        steps, columns = self._ledger.read()
        series, seen = [], set()
        for slot, (order, kind, figures) in sorted(columns.items()):
            number, place = divmod(slot, len(ORDER))
            twins = [twin for twin, other in self._twins.items() if other == slot and twin not in columns]
            gemms = [ORDER[i][0] for i in sorted({place, *[twin % len(ORDER) for twin in twins]})]
            seen.add(number)
            series.append(Series(self.names[number], tuple(gemms), ORDER[place][1], kind, **figures, order=order))
        idle = [name for i, name in enumerate(self.names) if i not in seen and i not in self._attention]
        self._read = self.current, Report(steps, series, idle, self._blind)
        return self._read[1]

    def to_html(self, path: str | Path, title: str = "Precision") -> Path:
        """Write the report as a page that needs nothing but a browser: no network, no second file."""
        return self.report().to_html(path, title)

    def to_png(self, folder: str | Path) -> list[Path]:
        """Draw a heat map of layers and steps, and the curves of the worst layers. Needs matplotlib."""
        return self.report().to_png(folder)

    def to_json(self, path: str | Path) -> Path:
        """Write all figures to a file."""
        return self.report().to_json(path)

    def __str__(self) -> str:
        return str(self.report())


def inspect(
    model: torch.nn.Module,
    layers: Layers = None,
    *,
    gemms: Iterable[str] | None = None,
    tensors: Iterable[str] | None = None,
    freq: int = 1,
    start_step: int = 0,
    end_step: int | None = None,
    group: Any = None,
) -> Inspection:
    """Context: look at the tensors of a model's GEMMs. `step()` of what it gives ends a step, and so does its end.

    layers: a regular expression, several, or a function of the name; None: all. gemms: of fprop, dgrad and wgrad.
    tensors: of activation, weight, gradient (of the output), output, dgrad and wgrad, and of attention in FP8: q, k, v
    (kv or qkv where they are packed), s (softmax's result) and dp where they are tensors, do. Steps `start_step` to
    `end_step` are looked at, every `freq`-th; in the others layers run as fast as without. What microbatches add up to
    is one step. group: over which processes the statistics are reduced, at each `step()`; None: each has its own.

    Example:
        from te_torch.recipe import Float8CurrentScaling

        layer = te.Linear(64, 64, device="cpu")
        with te.debug.inspect(layer) as seen, te.autocast(recipe=Float8CurrentScaling(), emulate=True):
            layer(torch.randn(32, 64)).sum().backward()
        print(seen)
    """
    given = _some("gemms", gemms, ("fprop", "dgrad", "wgrad"))
    named = _some("tensors", tensors, TENSORS)
    points = frozenset(point for point in ORDER if point[0] in given and point[1] in named)
    if not points:
        got = f"gemms={sorted(given)} with tensors={sorted(named)}"
        raise ArgumentError("inspect", got, ", ".join(" ".join(p) for p in ORDER), "choose a tensor of these GEMMs")
    whole = (("freq", freq, 1), ("start_step", start_step, 0), ("end_step", 0 if end_step is None else end_step, 0))
    for name, value, least in whole:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError("inspect", f"{name}={value!r}", f"an integer >= {least}", "correct it")
    if group is not None and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ArgumentError(
            "inspect", "a group without torch.distributed", "group=None in one process", "call init_process_group first"
        )
    return Inspection(model, layers, points, (freq, start_step, end_step), group)
