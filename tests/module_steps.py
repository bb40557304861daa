"""The older name of tests/world.py."""

from __future__ import annotations

from tests.world import (
    FP8,
    GEMM_MODULES,
    MODULES,
    NO_REGION,
    RECIPES,
    WIDTH,
    differences,
    fp8_state,
    gradient_for,
    make,
    on,
    randomise,
    region,
    step,
    values,
)

__all__ = [
    "FP8",
    "GEMM_MODULES",
    "MODULES",
    "NO_REGION",
    "RECIPES",
    "WIDTH",
    "differences",
    "fp8_state",
    "gradient_for",
    "make",
    "on",
    "randomise",
    "region",
    "step",
    "values",
]
