"""Where modules stand in their models, found without being told: the same names in every process that built the model.

A module does not know who holds it, users give no names, and our own numbers (`Layer_71`) depend on what else a process
has built. What is alive knows: one look over all living modules finds the holders of each (but for what gc.freeze() has
hidden). That takes some 50 ms, so it is for what happens once (a first exchange between processes), never for a step.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Sequential

_STATE = "fp8_state"  # the child, or the place of one, that tells a module that runs GEMMs
_WAYS = 64  # upward, of a module that many hold


class Place(NamedTuple):
    """The module that a state belongs to, and where that one stands."""

    owner: Module | None
    path: str


def places(states: Iterable[Module]) -> list[Place]:
    """For each FP8 state: the module whose child it is, and the path of that one, `GPT.blocks.3.fc1`.

    The path is the class of the model and the names on the way down. A name counts only where its holder has several
    children with GEMM modules, and the model is the highest such holder: so what wraps or holds the whole model on some
    ranks (DistributedDataParallel, torch.compile, an evaluator) changes no name. Of several ways up the longest counts,
    and rather one to a model than to a list: a slice of a ModuleList holds its modules too.

    A module of ours that is in no model goes by the name that it was given, or by its number among its like that are in
    none, in the order of their making.
    """
    found, numbered = _look(states := list(states))
    if numbered:
        gc.collect()  # what is dead shall not count
        found, _ = _look(states)
    return found


def _look(states: list[Module]) -> tuple[list[Place], bool]:
    """The places, and whether a number is in one that counts several modules."""
    living = _Living()
    return [living.place(state) for state in states], living.numbered


class _Living:
    """Who holds whom, among all modules of the process."""

    def __init__(self) -> None:
        self.numbered = False  # a label counts several modules
        self._holders: dict[int, list[tuple[Module, str]]] = {}
        with_gemms = []
        # issubclass: isinstance would ask proxies, which may answer with an error. One without children is none yet, as
        # what a constructor leaves that refused its arguments (its traceback may hold it).
        alive = (thing for thing in gc.get_objects() if issubclass(type(thing), Module))
        self._modules = [module for module in alive if type(module.__dict__.get("_modules")) is dict]
        for module in self._modules:
            for name, child in list(module._modules.items()):
                if name == _STATE:
                    with_gemms.append(module)
                if child is not None:
                    self._holders.setdefault(id(child), []).append((module, name))
        self._choices: dict[int, bool] = {}
        self._relevant: set[int] = set()  # GEMM modules and all that is above them
        while with_gemms:
            module = with_gemms.pop()
            if id(module) not in self._relevant:
                self._relevant.add(id(module))
                with_gemms += [holder for holder, _ in self.holders(module)]

    def holders(self, module: Module) -> list[tuple[Module, str]]:
        return self._holders.get(id(module), [])

    def place(self, state: Module) -> Place:
        owner = next((holder for holder, name in self.holders(state) if name == _STATE), None)
        return Place(owner, "" if owner is None else self._path(owner))

    def _path(self, module: Module) -> str:
        best: Any = None
        for way in islice(self._ways_up(module, ()), _WAYS):
            model = module
            names: list[str] = []
            for holder, name in way:
                if self._has_choice(holder):
                    model = holder
                    names.insert(0, name)
            only_a_list = type(model).__module__ == Sequential.__module__
            order = (only_a_list, -len(way), -sum(len(holder._modules) for holder, _ in way), names)
            if best is None or order < best[0]:
                best = order, model
        return ".".join([self._label(best[1]), *best[0][-1]])

    def _ways_up(self, module: Module, below: tuple[Module, ...]) -> Iterator[tuple[tuple[Module, str], ...]]:
        """Every chain of (holder, name in it) to a module at the top, without holders that add no name."""
        below = (*below, module)
        above = [(h, name) for h, name in self.holders(module) if not self._adds_nothing(h, below)]
        for holder, name in above:
            for way in self._ways_up(holder, below):
                yield ((holder, name), *way)
        if not above:
            yield ()

    def _has_choice(self, holder: Module) -> bool:
        known = self._choices.get(id(holder))
        if known is None:
            known = len({id(child) for child in holder._modules.values()} & self._relevant) > 1
            self._choices[id(holder)] = known
        return known

    def _adds_nothing(self, holder: Module, below: tuple[Module, ...]) -> bool:
        """Whether no way through this holder has a name to add; modules may hold one another in a circle."""
        if any(holder is one for one in below):
            return True
        below = (*below, holder)
        return not self._has_choice(holder) and all(self._adds_nothing(h, below) for h, _ in self.holders(holder))

    def _label(self, module: Module) -> str:
        """The class; of a module of ours also the name, or the number among its like."""
        kind = type(module).__name__
        tops = {base.__module__.partition(".")[0] for base in type(module).__mro__}
        if not tops & {"te_torch", "transformer_engine"}:  # the alias has its classes say the latter
            return kind
        if given := _given_name(module):
            return f"{kind} {given}"
        alike = [m for m in self._modules if type(m) is type(module) and not _given_name(m)]
        alike = [m for m in alike if _shape(m) == _shape(module)]
        alike = sorted((m for m in alike if all(self._adds_nothing(h, (m,)) for h, _ in self.holders(m))), key=_age)
        place = next((i for i, m in enumerate(alike) if m is module), 0)
        self.numbered |= len(alike) > 1
        return kind if place == 0 else f"{kind} #{place + 1}"


_NUMBERED = re.compile(r"Layer_\d+")


def _given_name(module: Module) -> str | None:
    name = module.__dict__.get("name")
    return name if isinstance(name, str) and not _NUMBERED.fullmatch(name) else None


def _shape(module: Module) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in module.named_parameters()]


def _age(module: Module) -> int:
    """Smaller for what was made before."""
    return min((m.__dict__["_token"] for m in module.modules() if "_token" in m.__dict__), default=0)
