"""What make_graphed_callables may be given: older names, one of each callable, tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_core.recipe import Recipe
from te_torch.autocast import active, prepare_default
from te_torch.precisions import CALIBRATE, CHECK, EMULATE, STRICT, number_of, precision_of
from te_torch.runtime import deprecated
from te_torch.training.graphs.device import OPERATION, unsupported, wrong

#: Older names of arguments, and what they are called now.
OLDER = {
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_weight_caching": "cache_quantized_params",
}
HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@dataclass(frozen=True)
class How:
    """The region that one callable is captured in."""

    number: int  # of its precision; 0: high precision
    recipe: Recipe
    calibrating: bool
    group: Any


@dataclass(frozen=True)
class Options:
    """What holds for all callables."""

    allow_unused: bool
    retain: bool
    clone: bool
    cached: bool  # quantized weights are cached between microbatches
    reuse: bool  # static inputs and outputs are shared by microbatches that never overlap
    training: bool


def newer(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their newer names, given both kinds; the older ones warn."""
    found = {}
    for old, new in OLDER.items():
        if given[old] is not None:
            if given[new] is not None:
                raise wrong(f"both {old} and {new}", "one of the two, which are the same", f"leave {old} out")
            deprecated(f"{OPERATION}: {old}", new, 2)
        found[new] = given[old] if given[new] is None else given[new]
    for name in ("calibrating", "cache_quantized_params"):
        if found[name] not in (None, True, False):
            raise wrong(f"{name}={found[name]!r}", "True or False", "correct it")
    return found


def hows(given: dict[str, Any], count: int) -> list[How]:
    """The region of each module. `strict`, `emulate` and `check_finite` are those of the region around the call."""
    enabled, recipe = given["enabled"], given["recipe"]
    flags = enabled if isinstance(enabled, tuple) else (bool(enabled),) * count
    if not isinstance(enabled, tuple | bool | None) or not all(isinstance(flag, bool) for flag in flags):
        raise TypeError(
            f"{OPERATION}: got enabled={enabled!r}. Allowed: a bool, or a tuple of one for each module. "
            "To do: correct it; a recipe is passed as recipe=."
        )
    if len(flags) != count:
        raise wrong(f"enabled of {len(flags)} flags for {count} modules", "one for each", "pass a bool for all")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise wrong(f"recipe={recipe!r}", "a recipe of te_core.recipe, or None", "correct it")
    recipe, calibrating = recipe or prepare_default(), bool(given["calibrating"])
    around = None if active.region is None else precision_of(active.region.precision)
    mode = 0
    if around is not None:
        mode = EMULATE * around.emulate + STRICT * around.strict + CHECK * around.check_finite
    calibrated = number_of(recipe, CALIBRATE) if calibrating and recipe.delayed() else 0
    numbers = [number_of(recipe, mode) if flag else calibrated for flag in flags]
    return [How(number, recipe, calibrating, given["amax_reduction_group"]) for number in numbers]


def check_ambience() -> None:
    """torch.autocast must not keep its casts of weights: a graph would read what it forgets."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled():
        raise unsupported(
            "a call inside torch.autocast with its cache of casts",
            "torch.autocast(..., cache_enabled=False)",
            "pass cache_enabled=False, there and where the callables are called",
        )


def check_modules(modules: Any) -> tuple[torch.nn.Module, ...]:
    """One module, or a tuple of them, all in one mode, without hooks."""
    found = modules if isinstance(modules, tuple) else (modules,)
    for module in found:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"{OPERATION}: got {type(module).__name__}. Allowed: a torch.nn.Module, or a tuple of modules. "
                "To do: put functions into a module's forward."
            )
    if not found:
        raise wrong("no modules", "one or more", "pass the modules to capture")
    if len({module.training for module in found}) > 1:
        raise unsupported(
            "modules of which some train and some do not", "one mode for all", "call train() or eval() on all"
        )
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for module in found:
        if any(getattr(module, kind, None) for kind in kinds):
            raise unsupported(
                f"a {type(module).__name__} with hooks, which a replay would not call",
                "modules without hooks; they may get some afterwards",
                "remove them, or pass them as capture_time_hooks",
            )
        for name, buffer in module.named_buffers():
            if buffer.requires_grad:
                raise unsupported(
                    f"the buffer {name}, which requires grad", "parameters that do", "make it a parameter"
                )
        if any(hasattr(part.__dict__.get("forward"), "graphed") for part in module.modules()):
            raise unsupported(
                f"a {type(module).__name__} that is graphed already, or holds one",
                "modules as they are",
                "call its reset() first",
            )
    return found


def samples(given: Any, kwargs: Any, several: bool) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(arguments, keyword arguments) of each callable."""
    if not isinstance(given, tuple | list):
        raise TypeError(
            f"{OPERATION}: got sample_args of {type(given).__name__}. Allowed: a tuple of tensors, or of such tuples "
            "for several callables. To do: wrap it in a tuple."
        )
    args = list(given) if several else [given]
    for one in args:
        if not isinstance(one, tuple | list):
            raise TypeError(
                f"{OPERATION}: got sample_args with a {type(one).__name__}. Allowed: a tuple of tensors for each "
                "callable. To do: wrap each callable's arguments in a tuple."
            )
    if kwargs is None:
        keywords: list[Any] = [{} for _ in args]
    else:
        keywords = list(kwargs) if several and not isinstance(kwargs, Mapping) else [kwargs]
    if len(keywords) != len(args) or not all(isinstance(one, Mapping) for one in keywords):
        raise wrong(
            f"sample_kwargs for {len(keywords)} callables beside sample_args for {len(args)}",
            "a dictionary for each callable",
            "pass as many as sample_args",
        )
    for one, more in zip(args, keywords, strict=True):
        for leaf in torch.utils._pytree.tree_leaves((tuple(one), dict(more))):
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(
                    f"{OPERATION}: got a sample of {type(leaf).__name__}. Allowed: tensors, in whatever containers. "
                    "To do: bind other arguments in a module around this one."
                )
    return [(tuple(one), dict(more)) for one, more in zip(args, keywords, strict=True)]


def check_hooks(given: Any, count: int) -> list[dict[str, list[Callable[[Any], Any]]]]:
    """capture_time_hooks by kind, for each module."""
    if given is None:
        return [{} for _ in range(count)]
    if not isinstance(given, Sequence) or len(given) != count:
        raise wrong(
            f"capture_time_hooks={given!r} for {count} callables",
            "a list with a dictionary, or None, for each callable",
            "correct its length",
        )
    found = []
    for one in given:
        one = one or {}
        unknown = sorted(set(one) - set(HOOKS), key=str)
        if unknown:
            raise wrong(f"capture_time_hooks of {unknown}", ", ".join(HOOKS), "correct the names")
        found.append({kind: list(hooks.values()) for kind, hooks in one.items()})
    return found
