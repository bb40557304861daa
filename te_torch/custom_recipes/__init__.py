"""Factories for `CustomRecipe`: the built-in recipes as factories, and mixes of formats."""
