"""`quantized_model_init`: modules made inside hold their GEMM weights as quantized tensors only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.precision import Precision
from te_core.quantize.state import FORWARD_SLOTS, WEIGHT
from te_core.recipe import Recipe, resolve
from te_torch.autocast import get_default_recipe
from te_torch.custom import custom_precisions
from te_torch.module_names import name_of, warn_once
from te_torch.precisions import number_of, precision_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import deprecated
from te_torch.state import make_state
from te_torch.tensors.sharding import Sharded
from te_torch.tensors.wrap import quantizer_of
from te_torch.values import is_flag


class _Regions(threading.local):
    """Those that the calling thread is in, the innermost last: [(recipe, keep initial values) or None]."""

    def __init__(self) -> None:
        self.stack: list[list[tuple[Recipe, bool] | None]] = []


_regions = _Regions()


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Modules constructed inside keep only quantized copies of their GEMM weights, in the format of `recipe`.

    With `preserve_high_precision_init_val` each such parameter also has `get_high_precision_init_val()`, its initial
    value on the CPU (for an optimizer's master weights), until `clear_high_precision_init_val()`.

    Raises:
        ArgumentError: An argument is of a wrong kind.

    Example:
        from te_torch.recipe import Float8CurrentScaling

        with te.quantized_model_init(recipe=Float8CurrentScaling()):
            layer = te.Linear(256, 256, device="cpu")
        assert isinstance(layer.weight, te.QuantizedTensor)
    """
    operation = "quantized_model_init"
    if not is_flag(enabled):
        raise ArgumentError(operation, f"enabled={enabled!r}", "True or False", "pass a recipe by name: recipe=...")
    if not is_flag(preserve_high_precision_init_val):
        got = f"preserve_high_precision_init_val={preserve_high_precision_init_val!r}"
        raise ArgumentError(operation, got, "True or False", "correct it")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise ArgumentError(
            operation, f"recipe={recipe!r}", "a recipe of te_core.recipe, or None", "pass DelayedScaling(), say"
        )
    region = [(recipe or get_default_recipe(), preserve_high_precision_init_val) if enabled else None]
    _regions.stack.append(region)
    try:
        yield
    finally:  # by what it is, not by its place: another one may end before those inside it
        _regions.stack = [other for other in _regions.stack if other is not region]


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """The documented older name of `quantized_model_init`."""
    deprecated("fp8_model_init", "quantized_model_init")
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def leave_all() -> None:
    """Take the thread out of every region that it is in."""
    _regions.stack = []


def initialising() -> bool:
    """Whether modules are to hold their weights quantized."""
    return bool(_regions.stack) and _regions.stack[-1][0] is not None


def initialisation() -> tuple[Recipe, bool]:
    """(recipe, whether the initial values are kept) of the innermost region."""
    found = _regions.stack[-1][0]
    assert found is not None
    return found


def quantize_parameter(module: Any, name: str, gemm: int, how: tuple[Recipe, bool]) -> bool:
    """Replace a GEMM weight of a module by its quantized copy, if the recipe quantizes weights."""
    recipe, preserve = how
    weight: torch.nn.Parameter = module._parameters[name]
    precision = resolve(recipe)
    if precision.factory is not None:
        precision = precision_of(custom_precisions(module, number_of(recipe))[gemm])  # type: ignore[assignment]
    rule = precision.weight
    if rule is None:
        return False
    # One copy is enough where the other can be made of it whenever backward wants it.
    derivable = rule.format.scaling == "tensor" or (rule.format.scaling == "block" and rule.tiled)
    trains, delayed = torch.is_grad_enabled(), rule.scaling == "delayed"
    with torch.no_grad():
        quantizer = quantizer_of(rule, device=weight.device)
        quantizer.set_usage(rowwise=True, columnwise=trains and not derivable)
        sharded = Sharded.of(weight)  # fully_shard came before the weights had memory
        values = weight.detach() if sharded is None else sharded.local
        if delayed:
            state = make_state(module, weight.device, precision, recipe)
            state.begins = 0 if precision.history is None else precision.history.margin
            point(quantizer, state, "fwd", FORWARD_SLOTS * gemm + WEIGHT)
            if note_own_maxima not in module._load_state_dict_post_hooks.values():
                module.register_load_state_dict_post_hook(note_own_maxima)
        quantized: Any = quantizer(values) if sharded is None else sharded.quantized(quantizer, module)
        if delayed:
            getattr(quantized, "_local_tensor", quantized)._memory.state = state
    parameter = torch.nn.Parameter(quantized, weight.requires_grad)
    carry_over(weight.__dict__, parameter)
    module._held = (*module._held, f"{gemm} {rule.scaling} {rule.format}")
    if preserve:
        _preserve(parameter, weight.detach().cpu())
    module._parameters[name] = parameter
    return True


def note_own_maxima(module: Any, _keys: Any = None) -> None:
    """Let a rank that has loaded shards count its own values among the maxima of now.

    Since the last reduction each rank's row has what its own shards took: a distributed checkpoint keeps one rank's.
    """
    state = module.fp8_state
    if state is None:
        return
    for gemm, name in enumerate(module._weight_names()):
        sharded = Sharded.of(module._parameters.get(name))  # none below a parametrization
        if sharded is None or not sharded.local.numel() or not isinstance(sharded.local, QuantizedTorch):
            continue
        at = FORWARD_SLOTS * gemm + WEIGHT
        now = state.amax_history_fwd[0][at : at + 1]
        with torch.no_grad():
            own = sharded.local.dequantize().abs().amax().float()
            # FP8 has rounded it, by an eighth at most (E5M2): if no more than that is between, it is the one kept.
            now.copy_(torch.where(own > now * 1.125, own, now))


def point(quantizer: Any, state: Any, way: str, index: int) -> None:
    """Let a delayed quantizer read the scale of a slot ("fwd" or "bwd") of this state, and note its maximum there."""
    quantizer.scale = getattr(state, f"scale_{way}")[index : index + 1]
    quantizer.amax = getattr(state, f"amax_history_{way}")[0][index : index + 1]


def link(weight: torch.Tensor, state: Any, gemm: int) -> None:
    """Let a quantized weight requantize with the scale in this state, and note its maximum there."""
    if isinstance(weight, QuantizedTorch):
        quantizer = weight._quantizer
        if quantizer is not None and quantizer.operand is not None and quantizer.operand.scaling == "delayed":
            point(quantizer, state, "fwd", FORWARD_SLOTS * gemm + WEIGHT)
            weight._memory.state = state


def begin(*modules: Any) -> None:
    """Let scales of quantized weights follow their maxima from now on; before, each write starts them anew."""
    for state in [m.fp8_state for m in modules if m.fp8_state is not None]:
        state.begins = None


def check_recipe_fits(module: Any, precision: Precision | None) -> None:
    """A quantized weight runs in the recipe it was made for; outside of a region it is dequantized, with a warning."""
    if not (module._primary or module._quantize_later):  # nearly always
        return
    later = {name for name, _, _ in module._quantize_later}
    for name in module._weight_names():
        weight = module._parameters.get(name)
        if weight is None:  # computed by a parametrization, which is not run for a look
            continue
        if not isinstance(weight, QuantizedTorch):
            if name in later and not weight.is_meta:  # it came with a checkpoint, or nobody has filled it
                warn_once(
                    module,
                    f"{name} was made on the meta device to be held quantized, and is in {weight.dtype}. To do: "
                    "reset_parameters() after to_empty(), before a checkpoint is loaded",
                )
            continue
        quantizer = weight._quantizer
        rule = None if quantizer is None else quantizer.operand
        if precision is None or precision.weight is None:
            warn_once(module, f"{name} is held quantized and used outside autocast: it is dequantized at each use")
        elif precision.weight.scaling == "calibrate":
            continue  # in high precision, as asked
        elif rule is not None and (rule.scaling, rule.format) != (precision.weight.scaling, precision.weight.format):
            raise RuntimeError(
                f"Recipe mismatch for {name_of(module)}.{name}: it was initialised as {rule.scaling} {rule.format}, "
                f"the active recipe asks for {precision.weight.scaling} {precision.weight.format}. Enter autocast with "
                "the recipe that quantized_model_init was given."
            )


def carry_over(attributes: dict[str, Any], new: torch.Tensor) -> None:
    """Give a parameter that replaces another one what users and we have attached to that one."""
    attached = {k: v for k, v in attributes.items() if k not in new.__dict__ and not isinstance(v, MethodType)}
    new.__dict__.update(attached)
    if "_high_precision_init_val" in attached:
        _preserve(new, attached["_high_precision_init_val"])


def _preserve(parameter: torch.Tensor, value: torch.Tensor) -> None:
    parameter._high_precision_init_val = value  # type: ignore[attr-defined]
    parameter.get_high_precision_init_val = MethodType(_get, parameter)  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = MethodType(_clear, parameter)  # type: ignore[attr-defined]


def _get(self: Any) -> torch.Tensor | None:
    return getattr(self, "_high_precision_init_val", None)


def _clear(self: Any) -> None:
    if hasattr(self, "_high_precision_init_val"):
        del self._high_precision_init_val
