"""Sequences of what autograd is asked for: a model is frozen, evaluated, trained and unfrozen in any order, as those do
who fine-tune (LoRA), who train two models in turns (GANs), or who have several models of equal sizes.

What a call was recorded or planned for must not serve a call of which autograd wants something else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.layer_options import Chance
from tests.torch import sequence_options
from tests.torch.sequence_changes import Adapted, change
from tests.torch.sequence_options import SIZES, Sequence, Step
from tests.torch.sequence_world import Record, World

#: How often each kind of module is drawn.
KINDS = {
    "Linear": 4,
    "LayerNormLinear": 3,
    "LayerNormMLP": 3,
    "GroupedLinear": 2,
    "LayerNorm": 1,
    "RMSNorm": 1,
    "DotProductAttention": 1,
    "Linears": 2,
    "MultiheadAttention": 3,
    "TransformerLayer": 4,
}
#: How a call may differ from a plain one: names with their values, and how likely each is.
MORE: dict[str, tuple[float, tuple[Any, ...]]] = {
    "checkpoint": (0.06, ("reentrant", "not reentrant", "te")),
    "amp": (0.05, ("bf16",)),
    "backward": (0.15, ("later", "input alone", "first alone", "twice", "drop")),
    "between": (0.05, ("freeze", "eval")),
    "first": (0.05, (True, False)),
    "layout": (0.05, ("no leaf", "Parameter")),
    "functional": (0.04, (True,)),
    "accumulate": (0.1, (True,)),
}

# Of these `tests/torch/sequences.py` draws none by itself.


@change(0)
def twin(world: World, record: Record) -> None:
    """Go on with another model of the same sizes: a new one, then each in turn."""
    if not world.others:
        world.others.append(world.build())
        with torch.no_grad():
            for p in world.others[0].parameters():
                p.mul_(0.75)
    world.others.append(world.module)
    world.module = world.others.pop(0)


@change(0, on=(True, False))
def adapt(world: World, record: Record, on: bool) -> None:
    """Freeze the model below an adapter, or take the adapter away and train all of it."""
    if isinstance(world.module, Adapted) is on:
        return
    dtype, module = world.dtype, world.module
    module.requires_grad_(not on)
    world.module = Adapted(module) if on else module.inner
    if on:
        world.module.gain.data = world.module.gain.data.to(dtype)


# ------------------------------------------------------------------------------------------------ what programs do


class Program:
    """Draws what a program does, step by step."""

    def __init__(self, r: Chance, recipe: bool) -> None:
        self.r = r
        #: Of all calls. The first layer of a model is given data alone.
        self.plain: dict[str, Any] = ({"recipe": 0} if recipe else {}) | ({"frozen": True} if r.some(0.5) else {})
        self.sizes = [tuple(r.of(*sizes) for sizes in SIZES) for _ in range(2)]

    def call(self, **more: Any) -> Step:
        """A call of the model."""
        r, times = self.r, {"times": self.r.of(1, 1, 1, 2)}
        sizes = {"sizes": r.of(*self.sizes)} if r.some(0.6) else {}
        drawn = {name: r.of(*values) for name, (p, values) in MORE.items() if r.some(p)}
        return "call", sequence_options.reconciled(self.plain | times | sizes | drawn | more)

    def train(self) -> list[Step]:
        """Calls with a backward; an optimizer may step."""
        return [self.call(), *([("optimize", {"how": self.r.of("SGD", "AdamW")})] if self.r.some(0.3) else [])]

    def evaluate(self) -> list[Step]:
        """Calls without gradients."""
        r = self.r
        calls = [self.call(grad=r.of("no_grad", "inference_mode", "set_grad_enabled"), backward="drop")]
        return [("train", {"on": False}), *calls, ("train", {"on": True})] if r.some(0.5) else calls

    def needs(self) -> list[Step]:
        """Freeze or unfreeze one parameter, or all."""
        r = self.r
        return [("needs", {"which": r.randrange(7), "on": r.some(0.5), "all": r.some(0.5)})]

    def adversary(self) -> list[Step]:
        """Train another model through this one, which is frozen, and then this one."""
        generated = self.call(through=True, frozen=False)
        return [*_all(False), generated, *_all(True), self.call(frozen=True), *self.turn()]

    def adapter(self) -> list[Step]:
        """Train an adapter, and perhaps the model itself afterwards."""
        back: list[Step] = [("adapt", {"on": False}), self.call()] if self.r.some(0.6) else []
        return [("adapt", {"on": True}), self.call(), *back]

    def turn(self) -> list[Step]:
        """Another model of the same sizes has its turn."""
        return [("twin", {})] if self.r.some(0.7) else []

    def copied(self) -> list[Step]:
        """Go on with a copy of the model."""
        return [("copied", {"how": self.r.of("deepcopy", "pickle"), "spoil": False})]


def _all(on: bool) -> list[Step]:
    return [("needs", {"on": on, "all": True})]


#: How often each thing is done.
DEEDS = {"train": 5, "evaluate": 4, "needs": 7, "adversary": 1.5, "adapter": 1, "turn": 2, "copied": 0.4}


def draw(seed: int) -> Sequence:
    """The sequence of this seed."""
    r = Chance(f"wants {seed}")
    module = sequence_options.draw_module(r, r.choices([*KINDS], [*KINDS.values()])[0])
    quantized = bool(module.recipe) and module.kind != "DotProductAttention" and r.some(0.5)
    if quantized:
        module.way["quantized"] = True
        module.layer["fuse_qkv_params"] = True
        module.call.get("linears", {}).pop("parameters_split", None)
    module = replace(module, sizes=(r.of(1, 2, 5), r.of(1, 2), module.sizes[2]), seed=seed)
    program = Program(r, quantized or r.some(0.6))
    steps: list[Step] = []
    for _ in range(r.randint(3, 6)):
        deed = r.choices([*DEEDS], [*DEEDS.values()])[0]
        steps += getattr(program, deed)()
        if deed in ("needs", "turn", "copied") and r.some(0.7):
            steps.append(program.call())
    steps.append(program.call())
    return Sequence(seed, module, sequence_options.draw_recipes(r, module), r.of("first", "second"), tuple(steps))
