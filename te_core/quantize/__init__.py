"""Recipes put to work: scaling state and what each GEMM reads."""

from te_core.quantize.state import Scales

__all__ = ["Scales"]
