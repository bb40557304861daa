"""Whether this thread exports (`te_torch.onnx_export`), and what cannot be exported."""

from __future__ import annotations

import threading

from te_core.errors import ArgumentError, UnsupportedError


class _Exporting(threading.local):
    """What `onnx_export` says in the calling thread. Looked at only where `torch.compiler.is_compiling()` is true."""

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


def not_warmed_up(module: str) -> NotWarmedUpError:
    """The error for a module without the scales that an exported program needs."""
    return NotWarmedUpError(
        "onnx_export",
        f"{module}, which has not run yet",
        "modules that have run once in the recipe of the export, so that their scales exist",
        "call the model once on the example inputs, in the same te.autocast region, before the export",
    )
