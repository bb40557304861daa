"""The recipes, where a user of the modules looks for them: the names of `te_core.recipe`."""

from typing import TYPE_CHECKING

from te_core.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from te_core.spelling import getter as _getter

__all__ = [
    "CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MMParams",
    "MXFP8BlockScaling", "NVFP4BlockScaling", "QParams", "Recipe",
]  # fmt: skip

if not TYPE_CHECKING:  # a checker would take every name for one of this module's
    __getattr__ = _getter(__name__)
