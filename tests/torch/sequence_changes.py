"""What may change between two calls of a sequence (`tests/torch/sequences.py`), and the hooks and modules it takes.

Hooks, inspectors and modules are of classes that pickle, for they are copied along with the modules that have them.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm

import te_torch as te
from te_core.layers.inspector import POINTS
from tests.layer_options import DTYPES
from tests.torch.sequence_world import LOG, Record, World, attempt, seen

# ------------------------------------------------------------------------------------------------ hooks and modules


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with its first floating tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) is tuple and value:
        return mapped(change, value[0]), *value[1:]
    return value


class Hook:
    """What a hook does: it looks on, changes what it is given, or raises an error."""

    def __init__(self, name: str, how: str) -> None:
        self.name, self.how = name, how

    def __call__(self, *given: Any) -> Any:
        given = given if isinstance(given[0], torch.Tensor) else given[1:]
        LOG.append((self.name, *map(seen, given)))
        if self.how == "raise":
            raise ValueError(f"{self.name} does not like it")
        return mapped(lambda t: t * 1.25, given[-1]) if self.how == "change" else None


class Looker:
    """An inspector that changes nothing."""

    def __init__(self, request: frozenset[Any] = POINTS) -> None:
        self.request = request

    def inspect(self, rt: Any, gemm: str, tensor: str, value: Any, cast: Any, out: Any) -> None:
        LOG.append((gemm, tensor, value.shape, rt.numpy(value).tobytes()))


class Adapted(torch.nn.Module):
    """A module with something added to what it gives, as adapters do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.gain = torch.nn.Parameter(torch.tensor(0.25))

    def forward(self, *args: Any, **options: Any) -> Any:
        """The module's own results, of which the first grows."""
        return mapped(lambda t: t + t * self.gain.to(t.dtype), self.inner(*args, **options))


class Louder(te.Linear):
    """A Linear of a user's class."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Twice its results."""
        return mapped(lambda t: t * 2, super().forward(*args, **options))


class Plain(torch.nn.Linear):
    """One of torch's in the place of ours."""

    def forward(self, x: Any, *args: Any, **options: Any) -> Any:
        """As ours, without its bias added where that is returned."""
        if getattr(self, "return_bias", False):
            return torch.nn.functional.linear(x, self.weight), self.bias
        return super().forward(x)


class Halved(torch.nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Half of it."""
        return x * 0.5


# ------------------------------------------------------------------------------------------------ the list


class Change(NamedTuple):
    """A change, how often it is drawn, and with which options."""

    run: Callable[..., Any]
    often: float
    options: dict[str, tuple[Any, ...]]


CHANGES: dict[str, Change] = {}
WHICH = tuple(range(7))  # one of the modules, parameters ..., counted on from the first
ATTRIBUTES: dict[str, tuple[Any, ...]] = {
    "eps": (1e-2, 0.5),
    "zero_centered_gamma": (True, False),
    "attn_mask_type": ("no_mask", "causal"),
    "self_attn_mask_type": ("no_mask", "causal"),
    "window_size": ((2, 0), (-1, -1)),
    "logit_softcap": (2.0, 0.0),
    "hidden_dropout": (0.0, 0.3),
    "activation": ("relu", "silu"),
    "checkpoint": (True, False),
    "return_layernorm_output": (True, False),
    "return_bias": (True, False),
    "recompute_norm_output": (True, False),
    "save_original_input": (True, False),
    "name": ("another", "a third"),
    "mark": (1, 2),  # a user's own
}


def change(often: float, **options: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function of (world, *, options) into the list under its name."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        CHANGES[function.__name__.strip("_")] = Change(function, often, options)
        return function

    return enter


def apply(world: World, record: Record, name: str, options: dict[str, Any]) -> None:
    """Change it; an error is noted. What is left out of the options is their first value."""
    found = {option: options.get(option, drawn[0]) for option, drawn in CHANGES[name].options.items()}
    attempt(record, name, lambda: CHANGES[name].run(world, record, **found))


def _part(world: World, which: int) -> Any:
    parts = [m for m in world.module.modules() if type(m).__name__ != "ScalingState"]
    return parts[which % len(parts)]


def _parameter(world: World, which: int) -> Any:
    found = world.parameters()
    return found[which % len(found)]


def _place(world: World, p: torch.Tensor) -> tuple[Any, str]:
    """The module that has it, and its name there."""
    for module in world.module.modules():
        for name, found in module.named_parameters(recurse=False):
            if found is p:
                return module, name
    raise LookupError("a parameter without a place")


def _children(world: World, kind: type) -> list[tuple[Any, str, Any]]:
    return [(m, name, c) for m in world.module.modules() for name, c in m.named_children() if isinstance(c, kind)]


# ------------------------------------------------------------------------------------------------ weights


@change(2, which=WHICH, foreach=(False, True))
def in_place(world: World, record: Record, which: int, foreach: bool) -> None:
    with torch.no_grad():
        if foreach:
            torch._foreach_mul_(world.parameters(), 0.875)
        else:
            _parameter(world, which).mul_(1.5)


@change(2.5, which=WHICH, how=("new", "in place", "strides", "dtype"))
def data(world: World, record: Record, which: int, how: str) -> None:
    p = _parameter(world, which)
    if how == "new":
        p.data = p.data * 1.25
    elif how == "in place":
        p.data.mul_(1.25)
    elif how == "dtype":
        p.data = p.data.to(torch.float16 if p.dtype == torch.bfloat16 else torch.bfloat16)
    else:
        p.data = p.data.t().contiguous().t() if p.ndim == 2 else torch.stack([p.data, p.data], -1)[..., 0]


@change(2, assign=(False, True), which=WHICH)
def load(world: World, record: Record, assign: bool, which: int) -> None:
    state = {}
    for i, (name, t) in enumerate(world.module.state_dict().items()):
        t = t.clone() if isinstance(t, torch.Tensor) else t
        float_ = isinstance(t, torch.Tensor) and t.is_floating_point() and "fp8_state" not in name
        state[name] = t * 1.25 if float_ and i % 3 == which % 3 else t
    world.module.load_state_dict(state, assign=assign)


@change(2, which=WHICH)
def swap(world: World, record: Record, which: int) -> None:
    p = _parameter(world, which)
    other = torch.nn.Parameter(p.detach().clone() * 1.25, p.requires_grad)
    torch.utils.swap_tensors(p, other)


@change(2, which=WHICH, needs=(True, True, False))
def assign(world: World, record: Record, which: int, needs: bool) -> None:
    p = _parameter(world, which)
    module, name = _place(world, p)
    setattr(module, name, torch.nn.Parameter(p.detach().clone() * 1.25, needs))


@change(2, how=("SGD", "AdamW", "fused"))
def optimize(world: World, record: Record, how: str) -> None:
    found = world.parameters()
    kept = world.optimizers.get(how)
    if kept is None or [id(p) for p in kept.param_groups[0]["params"]] != [id(p) for p in found]:
        if how == "SGD":
            kept = torch.optim.SGD(found, lr=0.1, momentum=0.9, foreach=True)
        else:
            kept = torch.optim.AdamW(found, lr=0.01, foreach=how == "AdamW", fused=how == "fused")
        world.optimizers[how] = kept
    kept.step()


@change(1, which=WHICH, other=WHICH)
def tie(world: World, record: Record, which: int, other: int) -> None:
    p = _parameter(world, which)
    alike = [q for q in world.parameters() if q is not p and q.shape == p.shape and q.dtype == p.dtype]
    if not alike:
        return
    module, name = _place(world, alike[other % len(alike)])
    setattr(module, name, p)


@change(1.5, to=("fp32", "bf16", "fp16"), which=(0, 0, 0, 0, 0, 1))
def dtype(world: World, record: Record, to: str, which: int) -> None:
    _part(world, which).to(DTYPES[to])


@change(1.5, which=WHICH, how=("prune", "weight_norm", "spectral_norm"))
def computed(world: World, record: Record, which: int, how: str) -> None:
    """A hook of torch's older kind computes a parameter before each forward, and a plain tensor stands in its place."""
    module, name = _place(world, _parameter(world, which))
    if how == "prune":
        prune.l1_unstructured(module, name, 0.5)
    elif how == "weight_norm" or any(options.get("threads") for _, options in world.sequence.steps):
        weight_norm(module, name)
    else:  # its forward changes a buffer, which threads would do in any order
        spectral_norm(module, name)


@change(1.5, which=WHICH, how=("buffer", "tensor", "nothing"))
def instead(world: World, record: Record, which: int, how: str) -> None:
    """Something else stands in the place of a parameter."""
    module, name = _place(world, _parameter(world, which))
    t = module._parameters[name].detach().clone() * 1.25
    delattr(module, name)
    if how == "buffer":
        module.register_buffer(name, t)
    elif how == "tensor":
        setattr(module, name, t)


# ------------------------------------------------------------------------------------------------ modes and options


@change(3, which=WHICH, on=(True, False), all=(False, False, True))
def needs(world: World, record: Record, which: int, on: bool, all: bool) -> None:
    for p in world.parameters() if all else [_parameter(world, which)]:
        p.requires_grad_(on)


@change(3, which=(0, 0, *WHICH), on=(True, False))
def train(world: World, record: Record, which: int, on: bool) -> None:
    _part(world, which).train(on)


@change(4, which=WHICH, attribute=tuple(range(len(ATTRIBUTES))), value=(0, 1))
def attribute(world: World, record: Record, which: int, attribute: int, value: int) -> None:
    """Of the attributes that are there: of which module, and which of its own."""
    module = _part(world, which)
    there = [n for n in ATTRIBUTES if hasattr(module, n) or n == "mark"]
    name = there[attribute % len(there)]
    setattr(module, name, ATTRIBUTES[name][value])
    record["set"] = f"{type(module).__name__}.{name}"


@change(2, left=(0, 1, 3))
def window(world: World, record: Record, left: int) -> None:
    """The list that calls are given changes in place."""
    world.window[0] = left


@change(1, which=WHICH, attribute=tuple(range(len(ATTRIBUTES))))
def deleted(world: World, record: Record, which: int, attribute: int) -> None:
    """An attribute of the object is gone."""
    module = _part(world, which)
    there = [n for n in ATTRIBUTES if n in vars(module)]
    if there:
        delattr(module, there[attribute % len(there)])


@change(1.5, which=WHICH, on=(True, True, False), points=("all", "fprop"))
def inspect(world: World, record: Record, which: int, on: bool, points: str) -> None:
    parts = [m for m in world.module.modules() if hasattr(m, "inspector")]
    if not parts:
        return
    request = POINTS if points == "all" else frozenset((("fprop", "activation"), ("fprop", "output")))
    parts[which % len(parts)].inspector = Looker(request) if on else None


@change(1, how=("reset", "length", "restore"))
def scaling(world: World, record: Record, how: str) -> None:
    for module in world.module.modules():
        if how == "reset" and hasattr(module, "reset_fp8_meta_tensors"):
            module.reset_fp8_meta_tensors()
        elif how == "length" and hasattr(module, "adjust_amax_history_length"):
            module.adjust_amax_history_length(2)
        elif how == "restore" and hasattr(module, "get_fp8_meta_tensors"):
            module.reset_fp8_meta_tensors(module.get_fp8_meta_tensors())


# ------------------------------------------------------------------------------------------------ hooks


@change(
    9,
    which=(0, *WHICH),
    kind=(
        *("forward", "forward_pre", "forward", "forward_pre", "full_backward", "full_backward_pre", "parameter"),
        *("accumulated", "everywhere"),
    ),
    how=("look", "change", "look"),
)
def hook(world: World, record: Record, which: int, kind: str, how: str) -> None:
    if kind in ("parameter", "accumulated"):
        p = _parameter(world, which)
        seen_by = Hook(f"{kind} {which}", how if kind == "parameter" else "look")
        found = p.register_hook(seen_by) if kind == "parameter" else p.register_post_accumulate_grad_hook(seen_by)
    elif kind == "everywhere":
        found = torch.nn.modules.module.register_module_forward_hook(Hook(kind, how))
    else:
        found = getattr(_part(world, which), f"register_{kind}_hook")(Hook(f"{kind} {which}", how))
    world.handles.append(found)


@change(3, which=(-1, 0))
def unhook(world: World, record: Record, which: int) -> None:
    if world.handles:
        world.handles.pop(which).remove()


@change(2, which=(0, *WHICH), kind=("forward", "forward_pre"), times=(1, 2))
def raising(world: World, record: Record, which: int, kind: str, times: int) -> None:
    """A hook raises an error in a call, and is removed."""
    handle = getattr(_part(world, which), f"register_{kind}_hook")(Hook(f"{kind} {which}", "raise"))
    call = next(options for name, options in world.sequence.steps if name == "call")
    world.call(record, {**call, "times": times})
    handle.remove()


# ------------------------------------------------------------------------------------------------ modules


@change(2, which=WHICH, how=("louder", "plain", "adapted", "copy", "back"))
def exchange(world: World, record: Record, which: int, how: str) -> None:
    kind = {"louder": te.Linear, "plain": te.Linear, "back": Adapted}.get(how, torch.nn.Module)
    found = _children(world, kind)
    if not found:
        return
    parent, name, child = found[which % len(found)]
    if how == "adapted":
        child = Adapted(child)
    elif how == "copy":
        child = copy.deepcopy(child)
    elif how == "back":
        child = child.inner
    else:
        child = _another_linear(child, Louder if how == "louder" else Plain)
    setattr(parent, name, child)


def _another_linear(child: Any, kind: type[Any]) -> Any:
    sizes = child.in_features, child.out_features
    options = {"bias": child.use_bias, "device": "cpu"}
    if kind is Louder:
        new = Louder(*sizes, return_bias=child.return_bias, params_dtype=child.weight.dtype, **options)
    else:
        new = Plain(*sizes, dtype=child.weight.dtype, **options)
        new.return_bias = child.return_bias
    new.weight = torch.nn.Parameter(child.weight.detach().clone())
    if child.use_bias:
        new.bias = torch.nn.Parameter(child.bias.detach().clone())
    return new


@change(1, which=(0, 0, *WHICH), on=(True, True, False))
def own_forward(world: World, record: Record, which: int, on: bool) -> None:
    module = _part(world, which)
    if on:
        module.forward = Adapted(type(module).forward.__get__(module)).forward
    else:
        vars(module).pop("forward", None)


class OfClass:
    """The `forward` of one of our classes with something added to what it gives, until it is removed."""

    def __init__(self, kind: type[Any], gain: float) -> None:
        self.kind, plain = kind, FORWARDS[kind]

        def forward(module: Any, *args: Any, **options: Any) -> Any:
            LOG.append(("forward of", kind.__name__))
            return mapped(lambda t: t * gain, plain(module, *args, **options))

        kind.forward = forward

    def remove(self) -> None:
        """The class's own again."""
        self.kind.forward = FORWARDS[self.kind]


FORWARDS: dict[type[Any], Any] = {
    kind: kind.forward
    for kind in (te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.DotProductAttention, te.MultiheadAttention)
}


@change(1.5, which=WHICH, gain=(1.0, 1.25))
def class_forward(world: World, record: Record, which: int, gain: float) -> None:
    kinds = [kind for kind in FORWARDS if any(type(m) is kind for m in world.module.modules())]
    if kinds:
        world.handles.append(OfClass(kinds[which % len(kinds)], gain))


@change(2, which=WHICH, how=("drop path", "norms", "written", "none"))
def between(world: World, record: Record, which: int, how: str) -> None:
    """A module comes or goes where none has to be."""
    kind = te.MultiheadAttention if how == "norms" else te.TransformerLayer
    found = [m for m in world.module.modules() if isinstance(m, kind)]
    if not found:
        return
    module = found[which % len(found)]
    if how == "norms":
        module.q_norm = module.k_norm = torch.nn.LayerNorm(module.kv_channels, dtype=world.dtype)
    elif how == "written":
        vars(module).pop("drop_path", None)
        module._modules["drop_path"] = torch.nn.Hardtanh(-0.02, 0.02)
    else:
        module.drop_path = torch.nn.Hardtanh(-0.01, 0.01) if how == "drop path" else None


@change(1, which=WHICH, on=(True, True, False))
def parametrization(world: World, record: Record, which: int, on: bool) -> None:
    if on:
        module, name = _place(world, _parameter(world, which))
        parametrize.register_parametrization(module, name, Halved())
        return
    for module in list(world.module.modules()):
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):
                parametrize.remove_parametrizations(module, name)


@change(2.5, how=("deepcopy", "pickle", "save"), spoil=(True, True, False))
def copied(world: World, record: Record, how: str, spoil: bool) -> None:
    """Go on with a copy; what becomes of the other one afterwards is nothing to it."""
    before = world.module
    if how == "deepcopy":
        world.module = copy.deepcopy(before)
    elif how == "pickle":
        world.module = pickle.loads(pickle.dumps(before))
    else:
        file = io.BytesIO()
        torch.save(before, file)
        file.seek(0)
        world.module = torch.load(file, weights_only=False)
    world.others.append(before)
    if spoil:
        with torch.no_grad():
            for p in before.parameters():
                p.mul_(-0.5)


@change(1.5)
def other(world: World, record: Record) -> None:
    """Go on with a module that was left."""
    if world.others:
        world.others.append(world.module)
        world.module = world.others.pop(0)


@change(3, reverse=(False, True))
def backward(world: World, record: Record, reverse: bool) -> None:
    """The backward of calls that were put off."""
    world.backward_of_waiting(record, reverse)
