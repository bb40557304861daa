"""FP8 state in checkpoints: what a module takes from one before its entries are loaded, and what it puts in.

A stateful module has four float32 entries under `fp8_state`, and no others. Loading accepts them whether or not the
module has run, the peer's `_extra_state` in their place (`extra_state.py`), and a checkpoint that has neither, by which
a module starts anew. None of these is missing or unexpected.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.quantize.state import BACKWARD_SLOTS, FORWARD_SLOTS, WEIGHT
from te_core.recipe import Recipe, resolve
from te_torch.base.extra_state import read_extra_state, write_extra_state
from te_torch.precisions import number_of, precision_of
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import FLOATS, default_device
from te_torch.state import BACKWARD, FORWARD, NAMES, ScalingState, require_usable
from te_torch.tensors.scales import own_scale
from te_torch.values import check_model

_ENTRY = "_extra_state"
_INSIDE = f"fused_attention.{_ENTRY}"  # where versions 1.6 and 1.7 of the peer kept that of an attention core


@contextmanager
def adopting(module: torch.nn.Module) -> Iterator[None]:
    """While a module is loaded: its state comes first, but after the hooks of programs, which may rewrite entries."""
    hook = module._register_load_state_dict_pre_hook(
        lambda entries, prefix, *rest: _adopt(module, entries, prefix, rest[-1])
    )
    try:
        yield
    finally:
        hook.remove()


def _adopt(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> None:
    """Before a module's entries are loaded: give it the state that they describe, and rewrite the peer's as ours.

    `state_dict` is the copy that load_state_dict hands down, which the module's children are loaded from next. What is
    wrong with one of the four entries goes to `errors`, as torch's words of sizes do, and none of the four is taken.
    """
    theirs = state_dict.pop(prefix + _ENTRY, None)
    for key in [key for key in state_dict if key.startswith(prefix) and key.endswith(_ENTRY)]:
        below = key[len(prefix) :]
        if module._modules.get(below.partition(".")[0]) is None:  # the peer's, of a part that ours does not have
            taken = state_dict.pop(key)
            if below == _INSIDE and theirs is None:
                theirs = taken
    if "fp8_state" not in module._modules:
        return  # a module that runs no GEMM: its entry is empty
    keys = {name: f"{prefix}fp8_state.{name}" for name in NAMES}
    runs = True  # scales and maxima come with it
    if not any(key in state_dict for key in keys.values()):
        state: Any = module.fp8_state
        read = read_extra_state(theirs, prefix + _ENTRY)
        if read is not None:
            for name, t in read.items():
                require_usable("load_state_dict", f"{name} of {prefix}{_ENTRY}", t)
            state_dict.update({keys[name]: t for name, t in read.items()})
        elif state is not None and state.in_use and _has_parameters(module, state_dict, prefix):
            # Saved by a module that never ran in FP8: start as it would.
            start, runs = state.start(), False
            _start_from_weights(module, state_dict, prefix, start["scale_fwd"])
            state_dict.update({keys[name]: t for name, t in start.items()})
    gemms: Any = module.gemms
    wrong = _misfits(state_dict, keys, gemms)
    if wrong:
        errors += wrong
        for name, key in keys.items():
            if state_dict.pop(key, None) is not None and module.fp8_state is not None:
                state_dict[key] = getattr(module.fp8_state, name)
        return
    lengths = [_rows(state_dict, keys[name]) for name in ("amax_history_fwd", "amax_history_bwd")]
    for key in keys.values():
        require_usable("load_state_dict", key, state_dict.get(key))
    if not any(lengths):
        return
    if module.fp8_state is None:
        module.fp8_state = ScalingState(gemms, max(lengths), device_of(module))
    for direction, length in zip((FORWARD, BACKWARD), lengths, strict=True):
        if length:
            module.fp8_state.resize_history(length, direction, quiet=True)  # type: ignore[operator,union-attr]
    scales = state_dict.get(keys["scale_fwd"])
    mine = module.fp8_state.scale_fwd  # type: ignore[union-attr]
    runs = runs and _has_run(scales, state_dict.get(keys["amax_history_fwd"]))
    if getattr(module, "_primary", False) and isinstance(scales, torch.Tensor) and scales.shape == mine.shape:
        # Plain values for a quantized weight are quantized as they are copied, which is before the state is loaded.
        module._link_weights(module.fp8_state, runs)  # type: ignore[operator]
        with torch.no_grad():
            mine.copy_(scales)  # type: ignore[operator]


class WithExtraState(OrderedDict[str, Any]):
    """A module's state_dict, in which who asks for the documented `_extra_state` finds the state, packed as the peer's.

    Megatron-core does, to cut it into an entry for each expert. It is no entry: what is saved has `fp8_state` alone.
    """

    def __init__(self, module: Any, prefix: str) -> None:
        super().__init__()
        self._metadata: OrderedDict[str, Any] = OrderedDict()  # where torch notes versions
        self._module, self._key = module, f"{prefix}{_ENTRY}"

    def __missing__(self, key: str) -> torch.Tensor:
        if key != self._key:
            raise KeyError(key)
        state = self._module._scaling()
        if state is None and not self._module.fp8:
            return torch.empty(0, dtype=torch.uint8)
        tensors = {} if state is None else {name: getattr(state, name) for name in NAMES}
        return write_extra_state(tensors, {"num_gemms": self._module.gemms})

    def __reduce__(self) -> Any:  # in files, and in copies, it is what torch makes
        return OrderedDict, (), {"_metadata": self._metadata}, None, iter(self.items())


def _has_run(scales: Any, history: Any) -> bool:
    """Whether a checkpoint is of a module that has run: there are maxima of inputs, not of weights alone."""
    if type(scales) is not torch.Tensor or type(history) is not torch.Tensor or scales.is_meta or history.is_meta:
        return True
    inputs = [slot for slot in range(len(scales)) if slot % FORWARD_SLOTS != WEIGHT]
    return bool((scales[inputs] != 1).any() or history[:, inputs].any())


def _start_from_weights(module: Any, state_dict: dict[str, Any], prefix: str, scales: torch.Tensor) -> None:
    """Scales for the values that weights held quantized by delayed scaling are about to take."""
    for gemm, name in enumerate(module._weight_names() if getattr(module, "_primary", False) else ()):
        quantizer, values = getattr(getattr(module, name), "_quantizer", None), state_dict.get(prefix + name)
        rule = None if quantizer is None else quantizer.operand
        values = values.dequantize() if isinstance(values, QuantizedTorch) else values
        plain = isinstance(values, torch.Tensor) and type(values) in (torch.Tensor, torch.nn.Parameter)
        if rule is not None and rule.scaling == "delayed" and plain:
            precision = module.fp8_state.precision
            margin = 0 if precision is None else precision.history.margin
            at = FORWARD_SLOTS * gemm + WEIGHT
            scales[at] = own_scale(values.detach(), rule.dtype.max, margin, scales[at])  # type: ignore[union-attr]


def _has_parameters(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str) -> bool:
    """Whether a checkpoint is about this module (one without parameters has nothing else to tell by)."""
    names = [name for name, p in module._parameters.items() if p is not None]
    return not names or any(f"{prefix}{name}" in state_dict for name in names)


def _misfits(state_dict: dict[str, Any], keys: dict[str, str], gemms: int) -> list[str]:
    """What is wrong with the entries of a state that a checkpoint has, for a module of so many GEMMs."""
    found = []
    for name, key in keys.items():
        if key not in state_dict:
            continue
        value, columns = state_dict[key], gemms * (FORWARD_SLOTS if name.endswith("fwd") else BACKWARD_SLOTS)
        if not isinstance(value, torch.Tensor):
            found.append(f"{key} is of type {type(value).__name__} in the checkpoint; a tensor is expected.")
            continue
        shape = tuple(value.shape)
        history = name.startswith("amax")
        if shape[-1:] != (columns,) or len(shape) != 1 + history or 0 in shape:
            wanted = f"(rows, {columns})" if history else f"({columns},)"
            found.append(f"size mismatch for {key}: {shape} in the checkpoint, {wanted} in this model.")
    return found


def _rows(state_dict: dict[str, Any], key: str) -> int:
    """The length of a history in a checkpoint, 0 without one: memory is made for it, so it is not to lie."""
    history = state_dict.get(key)
    if history is None:
        return 0
    plain = type(history) in (torch.Tensor, torch.nn.Parameter)
    if plain and history.numel() * history.element_size() > history.untyped_storage().nbytes():
        raise ArgumentError(
            "load_state_dict",
            f"{key} of shape {tuple(history.shape)} and strides {history.stride()}",
            "a history that has memory for all its elements",
            "save it with .contiguous()",
        )
    return history.shape[0]


def device_of(module: torch.nn.Module) -> torch.device:
    """Where a module's state belongs."""
    return next((p.device for p in module.parameters()), default_device())


def prepare_state(model: torch.nn.Module, recipe: Recipe) -> list[str]:
    """Give the modules of `model` the FP8 entries that training under `recipe` makes; the names of those that had none.

    For loaders that fill the tensors of `model.state_dict()` in place, or compare its keys, before the first forward.
    A recipe without a history needs no state: nothing is done. Materialise a model on the meta device first.

    Raises:
        ArgumentError: The recipe is none, or a module has no memory yet.
    """
    check_model("prepare_state", model)
    if not isinstance(recipe, Recipe):
        raise ArgumentError(
            "prepare_state", f"recipe={recipe!r}", "a recipe of te_core.recipe", "pass DelayedScaling()"
        )
    made: list[str] = []
    for name, module in model.named_modules():
        if "fp8_state" not in module._modules:
            continue
        own = module._of_custom(number_of(recipe)) if module.own_precision else 0
        precision = precision_of(own) if module.own_precision else resolve(recipe)
        if precision is None or precision.history is None:
            continue
        device = device_of(module)
        if device.type == "meta":
            raise ArgumentError(
                "prepare_state",
                f"{name or 'the model'} on the meta device",
                "a module with memory",
                "call it after to_empty() or reset_parameters()",
            )
        if module.fp8_state is None:
            module.fp8_state = ScalingState(module.gemms, precision.history.length, device)
            made.append(name)
        module.fp8_state.prepare(precision, recipe)
        module.fp8_state.in_use = True
    return made


def plain_state_dict(model: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The model's state_dict as plain tensors that any file format holds: contiguous, none sharing memory with another.

    Quantized parameters are dequantized. `dtype` is that of all floating-point entries but FP8 state, which stays
    float32; None keeps each one's own. An entry that needs no change is the model's own memory.

    Returns:
        A dict of plain tensors by name.

    Example:
        with te.quantized_model_init():
            layer = te.Linear(64, 64, device="cpu")
        state = te.plain_state_dict(layer, dtype=torch.bfloat16)
    """
    check_model("plain_state_dict", model)
    if dtype is not None and dtype not in FLOATS:
        raise ArgumentError(
            "plain_state_dict", f"dtype={dtype}", "None, float32, bfloat16 or float16", "pass one of these"
        )
    plain: dict[str, torch.Tensor] = {}
    memory: set[tuple[torch.device, int]] = set()
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                "plain_state_dict", f"{name} of type {type(value).__name__}", "tensors", "remove the entry's module"
            )
        wanted, tensor = None if "fp8_state" in name.split(".") else dtype, value.detach()
        if type(tensor).dequantize is not torch.Tensor.dequantize:  # a class of quantized tensors
            tensor = tensor.dequantize(dtype=wanted or tensor.dtype)  # type: ignore[call-arg]
        elif wanted is not None and tensor.dtype in FLOATS:
            tensor = tensor.to(wanted)
        tensor = tensor.contiguous()
        place = (tensor.device, tensor.untyped_storage().data_ptr())
        if place in memory or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            place = (tensor.device, tensor.untyped_storage().data_ptr())
        if tensor.numel():
            memory.add(place)
        plain[name] = tensor
    return plain
