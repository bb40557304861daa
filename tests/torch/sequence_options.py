"""What `tests/torch/sequences.py` draws: a module with its options, two recipes, and a sequence of steps in words.

A step is a call or a change (`sequence_changes.py`). A call is the sequence's own one most of the time, so that
what is kept for it is met again, or one of two that differ from it in a few respects.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from te_core.errors import ArgumentError
from tests import layer_options
from tests.layer_options import Chance, Draw

Step = tuple[str, dict[str, Any]]

#: How often each is drawn. The last three are drawn by `tests/layer_options.py`.
KINDS = {
    "Linear": 4,
    "LayerNormLinear": 3,
    "LayerNormMLP": 3,
    "GroupedLinear": 2,
    "LayerNorm": 1,
    "RMSNorm": 1,
    "DotProductAttention": 3,
    "Linears": 2,
    "MultiheadAttention": 4,
    "TransformerLayer": 7,
}
COMPOSED = ("Linears", "MultiheadAttention", "TransformerLayer")
#: Of `Linear` and its kin, beside what a layer's options say.
OF_LINEARS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        "return_bias parameters_split delay_wgrad_compute fuse_wgrad_accumulation return_layernorm_output checkpoint "
        "save_original_input"
    ).split(),
    (True,),
)
#: Of a call: what may differ from a plain one. A name is drawn with the probability of its place.
OFTEN: dict[str, tuple[Any, ...]] = {
    "recipe": (0, 0, 0, 1),
    "backward": (
        *("drop", "later", "later", "twice", "input alone", "first alone", "one parameter", "one input", "inside"),
    ),
    "layout": ("transposed", "sliced", "stepped", "expanded", "shifted", "strided leaf", "no leaf", "Parameter"),
}
SELDOM: dict[str, tuple[Any, ...]] = {
    "region": ("nested", "other", "off", "calibrating"),
    "dtype": ("fp32", "bf16", "fp16"),
    "amp": ("bf16", "fp16"),
    "frozen": (True,),
    "needs_more": (True,),
    "grad": ("no_grad", "inference_mode", "set_grad_enabled"),
    "first": (True, False),
    "kept": (True,),
    "values": (1, 2),
    "alias": ("q is k", "one"),
    "accumulate": (True,),
    "window": (True,),
}
RARE: dict[str, tuple[Any, ...]] = {
    "checkpoint": ("reentrant", "not reentrant", "te"),
    "saved": ("cpu", "hooks"),
    "functional": (True,),
    "threads": (True,),
    "mode": ("function", "dispatch"),
    "between": ("input", "weight", "data", "output", "freeze", "eval", "region", "deterministic"),
    "watch": (True,),
    "options": (0, 1, 2),
    "fresh": (True,),
}
SIZES = ((1, 2, 5, 8, 13), (1, 2, 3), (1, 4, 9))


@dataclass(frozen=True)
class Sequence:
    """A module, and what is done with it."""

    seed: int
    module: Draw  # what is called; kinds of its own beside those of layer_options
    recipes: tuple[tuple[str, dict[str, Any]], ...]
    when: str  # calls are recorded: what is compared with calls that are interpreted
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        d = self.module
        lines = [f"seed {self.seed}: {d.kind} {d.layer} {d.sizes} {d.call} {d.way}"]
        lines += [f"  recipes {self.recipes}, recorded when met {self.when}"]
        return "\n".join([*lines, *(f"  {name} {options}" for name, options in self.steps)])


def draw(seed: int, changes: dict[str, tuple[float, dict[str, tuple[Any, ...]]]]) -> Sequence:
    """The sequence of this seed, of these changes: how often each is drawn, and of which options."""
    r = Chance(seed)
    kind = r.choices([*KINDS], [*KINDS.values()])[0]
    module = draw_module(r, kind)
    recipes = draw_recipes(r, module)
    calls = _calls(r, module)
    names, weights = [*changes], [often for often, _ in changes.values()]
    steps: list[Step] = [("call", calls[0])]
    for _ in range(r.randint(3, 11)):
        if steps[-1][0] != "call" or r.some(0.45):
            steps.append(("call", r.of(calls[0], calls[0], calls[0], *calls[1:])))
        else:
            name = r.choices(names, weights)[0]
            steps.append((name, {option: r.of(*values) for option, values in changes[name][1].items()}))
    steps.append(("call", calls[0]))
    return Sequence(seed, module, recipes, r.of("first", "second"), tuple(steps))


def draw_recipe(r: Chance) -> tuple[str, dict[str, Any]]:
    """A recipe, and options that go with it."""
    while True:
        d = layer_options.draw(r.randrange(1 << 30))
        with contextlib.suppress(ArgumentError):
            d.make_recipe()
            return d.recipe, d.recipe_options


def draw_recipes(r: Chance, module: Draw) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The module's recipe, and another one."""
    recipes = (module.recipe, module.recipe_options), draw_recipe(r)
    if any(set(options) & set(layer_options.FP8) for _, options in recipes):
        module.way["unfused"] = True  # on the CPU nothing else attends in FP8
    return recipes


def draw_module(r: Chance, kind: str) -> Draw:
    """Options of a module of this kind."""
    while True:
        d = layer_options.draw(r.randrange(1 << 30))
        if "cache" not in d.way and d.kind == (kind if kind in COMPOSED else "TransformerLayer"):
            break
    way = {name: d.way[name] for name in ("quantized", "main_grad", "unfused", "frozen", "eval") if name in d.way}
    recipe, recipe_options = draw_recipe(r)
    sizes = min(d.sizes[0], 8), min(d.sizes[1], 2), d.sizes[2]
    if d.layer.get("fuse_wgrad_accumulation") or "quantized" in way:
        d.layer["fuse_qkv_params"] = True
    if "quantized" in way or d.layer["ffn_hidden_size"] % 2 or d.layer["hidden_size"] % 2:
        d.call.get("linears", {}).pop("parameters_split", None)
    if r.some(0.15):
        d.layer.update(attention_dropout=0.2, hidden_dropout=0.2)
    d = replace(d, recipe=recipe, recipe_options=recipe_options, way=way, sizes=sizes)
    if kind in COMPOSED:
        return d
    layer, call = d.layer, dict(d.call)
    layer.pop("layer_type", None)
    if kind != "DotProductAttention":
        layer |= {"attn_input_format": r.of("sbhd", "bshd"), "self_attn_mask_type": "causal"}
        call = {"lengths": "mask", "linears": r.options(0.2, OF_LINEARS)}
        if "quantized" in way:
            call["linears"].pop("parameters_split", None)
        elif "parameters_split" in call["linears"]:
            call["linears"]["parameters_split"] = {"a": 16, "b": layer["ffn_hidden_size"] - 16}
            for name in ("delay_wgrad_compute", "fuse_wgrad_accumulation"):
                call["linears"].pop(name, None)
    call.pop("rotary", None)
    return replace(d, kind=kind, layer=layer, call=call)


def _calls(r: Chance, d: Draw) -> list[dict[str, Any]]:
    """The sequence's own call, and two others that differ from it."""
    plain: dict[str, Any] = {"times": r.of(1, 1, 2, 2)}
    if r.some(0.75):
        plain["recipe"] = 0
    plain |= r.options(0.06, SELDOM | RARE)
    found = [plain]
    for _ in range(2):
        other = dict(plain)
        more = r.options(0.25, OFTEN) | r.options(0.08, SELDOM) | r.options(0.04, RARE)
        if r.some(0.3):
            more["sizes"] = tuple(r.of(*sizes) for sizes in SIZES)
        if r.some(0.15):
            other.pop("recipe", None)
        found.append(other | more)
    return [reconciled(call) for call in found]


def reconciled(call: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing beside the rest: threads run forward alone."""
    if call.get("threads"):
        dropped = ("first", "kept", "checkpoint", "between", "backward", "functional", "accumulate", "watch")
        call = {name: value for name, value in call.items() if name not in dropped}
        if call.get("region") == "calibrating":
            del call["region"]
    if call.get("grad"):
        call = {name: value for name, value in call.items() if name not in ("checkpoint", "between")}
    return call
