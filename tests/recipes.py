"""Every recipe and every option of one, by a short name, for the tests that hold for all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import te_torch as te
from te_core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tests.backends import capability, requires_cuda

_NEAREST = {"disable_stochastic_rounding": True}
_UNTURNED = {"disable_rht": True}
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed e4m3": DelayedScaling(amax_history_len=1, fp8_format=Format.E4M3, amax_compute_algo="most_recent"),
    "current": Float8CurrentScaling(),
    "current e4m3 pow2": Float8CurrentScaling(fp8_format=Format.E4M3, use_power_2_scales=True),
    "block": Float8BlockScaling(),
    "block f32": Float8BlockScaling(use_f32_scales=True),
    "block hybrid": Float8BlockScaling(fp8_format=Format.HYBRID),
    "block no tiles": Float8BlockScaling(w_block_scaling_dim=1),
    "block tiled x": Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "block tiled grad": Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "mxfp8 tiled": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4 nearest": NVFP4BlockScaling(**_NEAREST),
    "nvfp4 no rht": NVFP4BlockScaling(**_UNTURNED),
    "nvfp4 no tiles": NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4 rows": NVFP4BlockScaling(row_scaled_activation=True, **_UNTURNED),
    "nvfp4 4over6 weights": NVFP4BlockScaling(nvfp4_4over6="weights"),
    "nvfp4 4over6 all MAE": NVFP4BlockScaling(nvfp4_4over6="all", **_UNTURNED),
    "nvfp4 4over6 all MSE": NVFP4BlockScaling(
        nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE", nvfp4_4over6_e4m3_use_256="none", **_UNTURNED
    ),
}
#: One of each kind: for tests that are about something else.
KINDS = ("delayed", "current", "block", "mxfp8", "nvfp4")
OVERRIDES: dict[str, Recipe] = {
    f"{name} {override}": dataclasses.replace(RECIPES[name], backward_override=override)  # type: ignore[type-var]
    for name in KINDS[1:]
    for override in ("high_precision", "dequantized")
}
#: For layers with attention, which is FP8 from the projections to the output.
ATTENTION: dict[str, Recipe] = {"fp8 attention": DelayedScaling(amax_history_len=4, fp8_dpa=True, fp8_mha=True)}


def on_devices() -> list[Any]:
    """(recipe, device): every recipe and none on the CPU; on a GPU one of each kind, which is as much in less time."""
    others = (None, *KINDS, *OVERRIDES)
    return [pytest.param(name, "cpu", id=f"{name}-cpu") for name in (None, *RECIPES, *OVERRIDES)] + [
        pytest.param(name, "cuda", id=f"{name}-cuda", marks=requires_cuda) for name in others
    ]


def rule(name: str | None) -> Recipe | None:
    """The recipe of a name; None is high precision."""
    return None if name is None else {**RECIPES, **OVERRIDES, **ATTENTION}[name]


def region(name: str | None, **options: Any) -> te.autocast:
    """Its region: what other GPUs alone multiply is emulated."""
    recipe = rule(name)
    emulate = False
    if recipe is not None:
        emulate = recipe.mxfp8() or recipe.nvfp4() or (recipe.float8_block_scaling() and capability()[0] not in (0, 9))
    return te.autocast(enabled=recipe is not None, recipe=recipe, emulate=emulate, **options)
