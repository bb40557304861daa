"""The recipes, where a user of the modules looks for them: the names of `te_core.recipe`."""

from te_core.recipe import DelayedScaling, Float8CurrentScaling, Format, MMParams, QParams, Recipe

__all__ = ["DelayedScaling", "Float8CurrentScaling", "Format", "MMParams", "QParams", "Recipe"]
