"""Whether this thread exports (`te_torch.onnx_export`), and what cannot be exported."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_torch.export.handed import Handed
from te_torch.runtime import outside_autocast


class _Exporting(threading.local):
    """What `onnx_export` says in the calling thread. Looked at by traced code alone."""

    def __init__(self) -> None:
        self.on = False


exporting = _Exporting()


def is_in_onnx_export_mode() -> bool:
    """Whether the calling thread is inside `onnx_export(enabled=True)`."""
    return exporting.on


class NotExportedError(UnsupportedError, NotImplementedError):
    """Something that has no form in ONNX. Also the documented NotImplementedError."""


class NotWarmedUpError(ArgumentError, AssertionError):
    """A module that has not run yet. Also the documented AssertionError."""


def not_exported(got: str, allowed: str, do: str) -> NotExportedError:
    """The error for what cannot be exported."""
    return NotExportedError("onnx_export", got, allowed, do)


def custom_recipe() -> NotExportedError:
    """The error for a recipe that asks a user's function."""
    got, do = "a CustomRecipe, whose factory is a function of this process", "choose one of these"
    return not_exported(got, "DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling or high precision", do)


def inspected() -> NotExportedError:
    """The error for a module that somebody looks into."""
    return not_exported("a module with an inspector", "modules that nobody inspects", "set module.inspector = None")


def module_to_module() -> NotExportedError:
    """The error for a call that a user asked to hand over FP8."""
    got, allowed = "FP8 from module to module (fp8_output)", "modules that hand over the activation dtype"
    return not_exported(f"{got} outside of a MultiheadAttention", allowed, "leave it out for the export")


def not_warmed_up(module: str, operation: str = "onnx_export") -> NotWarmedUpError:
    """The error for a module without the scales that an exported program needs."""
    return NotWarmedUpError(
        operation,
        f"{module}, which has not run yet",
        "modules that have run once in the recipe of the export, so that their scales exist",
        "call the model once on the example inputs, in the same te.autocast region, before the export",
    )


def expressed(
    call: Any, state: Any, extra: Any, inputs: Sequence[torch.Tensor | None], handing: str = ""
) -> tuple[torch.Tensor, ...]:
    """A call (te_torch.function.Call) in torch's operators, with nothing in them that belongs to this process.

    `handing`: not "" where the module that takes its output takes it in FP8.
    """
    layer, first = call.layer, inputs[0]
    if call.options:
        raise inspected()
    if layer.plain is None:
        raise not_exported(f"a layer of kind {layer.name!r}", "the documented modules", "leave it out of the model")
    options = {} if extra is None or extra.splits is None else {"sizes": extra.splits.sizes}
    assert first is not None  # every layer's first input is there
    with outside_autocast(first):
        made: tuple[torch.Tensor, ...] = layer.plain(
            inputs, call.spec, None if state is None else state.scale_fwd, **options
        )
    if isinstance(made[0], Handed) and not handing:
        raise module_to_module()
    return made
