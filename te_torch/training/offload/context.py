"""`get_cpu_offload_context`: what layers save for backward, and their weights, wait on the host until they are read."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_torch.offloading import STAYS, active
from te_torch.training.offload.blocks import HostBuffers
from te_torch.training.offload.layers import Rules
from te_torch.training.offload.synchronizers import DefaultOffloadSynchronizer, ManualOffloadSynchronizer
from te_torch.training.offload.weights import Weights
from te_torch.values import check_flags

_OPERATION = "get_cpu_offload_context"


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> Any:
    """(context, sync_fn): for each layer `with context: y = layer(x)`, then `y = sync_fn(y)`.

    Of a pass of `model_layers` layers the first `num_layers` leave the device. `model_layers` of 1 stands for one left
    out: then the first pass finds out. With `manual_synchronization` a third result is the ManualOffloadSynchronizer
    by which the caller moves layers itself. `double_buffering` brings each layer back one layer earlier.
    `retain_pinned_cpu_buffers` keeps the host's buffers, for which shapes may not change.

    The older order (enabled, num_layers, offload_activations, offload_weights) is known by its third argument.

    Returns:
        (context, sync_fn), or (context, sync_fn, ManualOffloadSynchronizer) with `manual_synchronization`.

    Raises:
        ArgumentError: Numbers of layers or flags do not fit together.

    Example:
        layers = torch.nn.ModuleList(te.Linear(64, 64, device="cpu") for _ in range(3))
        context, sync = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=3)
        x = torch.randn(32, 64, requires_grad=True)
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)
        x.sum().backward()
    """
    if isinstance(model_layers, bool):
        offload_weights, offload_activations = bool(offload_activations), model_layers
        model_layers = 1
    check_flags(
        _OPERATION,
        enabled=enabled,
        offload_activations=offload_activations,
        offload_weights=offload_weights,
        double_buffering=double_buffering,
        manual_synchronization=manual_synchronization,
        retain_pinned_cpu_buffers=retain_pinned_cpu_buffers,
    )
    if not enabled:
        nothing = nullcontext(), lambda tensor=None: tensor
        return (*nothing, None) if manual_synchronization else nothing
    _check(num_layers, model_layers, manual_synchronization, offload_stream)
    if not offload_activations and not offload_weights:
        raise ArgumentError(
            _OPERATION, "offload_activations=False with offload_weights=False", "one of them at least",
            "pass enabled=False where nothing is to be offloaded",
        )  # fmt: skip
    rules = Rules(
        offload_activations,
        Weights() if offload_weights else None,
        offload_stream,
        HostBuffers(retain_pinned_cpu_buffers),
    )
    layers = None if model_layers == 1 else model_layers
    if manual_synchronization:
        manual = ManualOffloadSynchronizer(layers, rules)
        return manual, manual.sync, manual
    context = DefaultOffloadSynchronizer(num_layers, layers, double_buffering=double_buffering, rules=rules)
    return context, context.sync


def _check(num_layers: Any, model_layers: Any, manual: bool, stream: Any) -> None:
    for name, value in (("num_layers", num_layers), ("model_layers", model_layers)):
        if not isinstance(value, int) or value < 1:
            raise ArgumentError(_OPERATION, f"{name}={value!r}", "a number of layers, 1 or more", f"mend {name}")
    if stream is not None and not manual:
        raise ArgumentError(
            _OPERATION, "offload_stream without manual_synchronization", "a stream of the caller's in manual mode",
            "leave offload_stream out, or pass manual_synchronization=True",
        )  # fmt: skip
    if manual or model_layers == 1:
        return
    if num_layers > model_layers - 1:
        raise ArgumentError(
            _OPERATION, f"num_layers={num_layers} of model_layers={model_layers}",
            "at most model_layers - 1: the last layer's backward comes at once",
            f"pass num_layers={model_layers - 1}, or leave model_layers out",
        )  # fmt: skip
    if num_layers == model_layers - 1:
        warnings.warn(
            f"{_OPERATION}: with num_layers = model_layers - 1 each copy is waited for as soon as it was begun; "
            "num_layers of model_layers - 2 or less lets copies run beside the layers",
            stacklevel=3,
        )


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Let these tensors, and views of them, stay on the device in every offload context."""
    for t in tensors:
        if t is not None:
            setattr(t, STAYS, True)


def mark_activation_offload(*tensors: torch.Tensor | None) -> None:
    """Without effect: whatever is saved for backward inside of the context travels, unmarked too."""


def start_offload(*tensors: torch.Tensor | None, offload_base_tensor: bool = False) -> None:
    """Without effect: what a layer saved is copied when the next layer is entered, views by the memory they are of."""


def is_cpu_offload_enabled() -> bool:
    """Whether the calling thread is inside of an offload context."""
    return active.context is not None
