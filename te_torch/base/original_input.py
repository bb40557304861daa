"""`save_original_input`: what backward is handed is the caller's input itself, which it quantizes again.

Where another module keeps that input anyway, such as the one whose output it is, the quantized copy is saved.
"""

from __future__ import annotations

from typing import Any

from te_core.errors import ArgumentError
from te_core.precision import Precision
from te_core.quantize.operands import repeats
from te_torch.module_names import warn_once
from te_torch.precisions import recipe_of


def keeps_original(module: Any, number: int, precision: Precision | None) -> bool:
    """Whether a product in this precision (its own, of the module's number) keeps its input as it came."""
    if not module.save_original_input or precision is None or precision.input is None:
        return False  # nothing is quantized: the input itself is what is kept
    if precision.backward is not None or repeats(precision.input):
        return precision.backward is None
    recipe = recipe_of(number)
    if (precision.input.columnwise or precision.input).scaling != "delayed":
        warn_once(
            module, "save_original_input is ignored: backward cannot quantize this input again and get the same values"
        )
    elif recipe is not None and recipe.custom():
        warn_once(module, "save_original_input is ignored: under delayed scaling the scale may have changed since")
    else:
        raise ArgumentError(
            f"{type(module).__name__}.forward",
            "save_original_input=True. DelayedScaling recipe is not supported with save_original_input: its scale may "
            "have changed before backward quantizes the input again",
            "a recipe whose scales follow from the input, such as Float8CurrentScaling",
            "leave save_original_input out",
        )
    return False
