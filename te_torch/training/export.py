"""`onnx_export`: modules as programs of ONNX's own operators.

Inside it a module's forward is traced in torch's operators and the few of `te_torch/export/operators.py`, which torch's
exporter takes apart into ONNX's. So `torch.onnx.export(model, inputs, path)` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_torch.base.module import CallingModule
from te_torch.doors import as_traced, either
from te_torch.export.mode import exporting, is_in_onnx_export_mode, not_warmed_up
from te_torch.export.operators import tell_older_exporter
from te_torch.module_names import within

__all__ = ["assert_warmed_up", "is_in_onnx_export_mode", "onnx_export", "te_translation_table"]

#: For `torch.onnx.export(..., custom_translation_table=te_translation_table)`. Empty: our operators say themselves what
#: they are in ONNX, with or without it.
te_translation_table: dict[Any, Any] = {}


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Context: modules are as torch.onnx.export can write them (enabled=False: as always, inside an enabled one too).

    The exporter has to run in it, in the `te.autocast` region whose recipe the file shall have; modules that keep
    scales have to have run in it once before. A model that is called in it without an exporter computes what the file
    will.
    """
    if enabled is not True and enabled is not False:
        raise ArgumentError("onnx_export", f"enabled={enabled!r}", "True or False", "pass onnx_export(enabled=True)")
    if enabled:
        tell_older_exporter()
    before, exporting.on = exporting.on, enabled
    try:
        with as_traced(enabled or (either(False, True) and not before)):
            yield
    finally:
        exporting.on = before


def assert_warmed_up(module: torch.nn.Module) -> None:
    """Raise (an AssertionError) if the module, or one of its modules, has never run."""
    for child in module.modules():
        if isinstance(child, CallingModule) and child._last is None:
            if not any(getattr(child, name, None) for name in ("fp8_state", "_last_plan")):
                raise not_warmed_up(f"{type(child).__name__}{within(child)}")
