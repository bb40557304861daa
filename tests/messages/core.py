"""Rows of messages of te_core; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from te_core import dtypes
from te_core.layers import linear
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
)
from te_core.runtime import Runtime
from tests.core import face
from tests.messages.rows import Rows, said

ROWS = Rows()
CPU = Runtime.cpu()
NEEDS = linear.Needs(True, True, True)

# ------------------------------------------------------------------------------------------------- memory


def memory(make: str, *wrong: Any) -> None:
    """`empty` or `zeros` of a runtime."""
    getattr(CPU, make)(*wrong)


for kind in ("empty", "zeros"):
    for shape, dtype in (((2, -3), "float32"), (("2",), "float32"), ((2, 3), "float33"), ((2, 3), None)):
        ROWS.add(memory, kind, shape, dtype)
for value in (np.zeros(3, np.float32), [1.0], None, 3):
    ROWS.add(CPU.numpy, value)

# ------------------------------------------------------------------------------------------------- layers

ROWS["LinearSpec('float33')"] = lambda: linear.LinearSpec("float33", None, NEEDS)
for recipe in (DelayedScaling(), NVFP4BlockScaling()):
    ROWS[f"LinearSpec of a recipe that is not resolved: {type(recipe).__name__}"] = lambda recipe=recipe: (
        linear.LinearSpec(dtypes.float32, recipe, NEEDS)
    )
ROWS["AttentionSpec of a recipe that is not resolved"] = lambda: replace(
    face.layer_specs(None)["attention_fp8"], precision=DelayedScaling()
)


def without_scales(layer: str) -> None:
    """A layer in delayed scaling, without its scales."""
    right = face.layers(CPU, DelayedScaling())[layer]
    right.function(*right.args, **{**right.options, "scales": None})


for name, right in face.layers(CPU, DelayedScaling()).items():
    if "scales" in right.options:
        ROWS.add(without_scales, name)


def without_draws(layer: str) -> None:
    """The backward of a layer that rounds stochastically, whose forward got no rng."""
    forward, backward = (face.layers(CPU, NVFP4BlockScaling())[f"{layer} {way}"] for way in ("forward", "backward"))
    assert forward.args[-1].dtype is dtypes.int64
    _, saved = forward.function(*forward.args[:-1], None, **forward.options)
    backward.function(*backward.args[:-1], saved, **backward.options)


for layer in ("linear", "grouped_linear", "norm_linear", "mlp"):
    ROWS.add(without_draws, layer)

# ------------------------------------------------------------------------------------------------- recipes


def recipe_of(kind: Any, **field: Any) -> None:
    """A recipe with a wrong field; the same is said where the field is assigned, and the recipe resolved."""
    required = {"qfactory": print} if kind is CustomRecipe else {}
    later = kind(**required)
    for name, value in field.items():
        setattr(later, name, value)
    make = lambda: kind(**{**required, **field})  # noqa: E731
    assert said(make) == said(later.resolve)
    make()


ONE_OF_TWO = {"backward_override": ("exact", True)}
WRONG: dict[Any, dict[str, tuple[Any, ...]]] = {
    DelayedScaling: {
        "margin": (0.5, True, 1000, -19),
        "fp8_format": ("HYBRID", Format.E2M1, Format.E5M2),
        "amax_history_len": (0, "16", True),
        "reduce_amax": ("no",),
        "amax_compute_algo": ("mean",),
        "scaling_factor_compute_algo": ("linear",),
        "fp8_dpa": (1,),
        "backward_override": ("high_precision",),
    },
    Float8CurrentScaling: {
        "use_power_2_scales": (1,),
        "fp8_format": (Format.E5M2, Format.E2M1),
        "fp8_gemm_wgrad": (True,),
        "fp8_mha": (None,),
        **ONE_OF_TWO,
    },
    Float8BlockScaling: {
        "use_f32_scales": (0,),
        "fp8_format": ("E4M3", Format.E5M2),
        "x_block_scaling_dim": (3,),
        "w_block_scaling_dim": (0,),
        "grad_block_scaling_dim": ("1",),
        "fp8_gemm_fprop": (MMParams(False),),
        "fp8_gemm_dgrad": (MMParams(False),),
        "fp8_gemm_wgrad": (None,),
        "fp8_dpa": (True,),
        "fp8_mha": (True,),
        **ONE_OF_TWO,
    },
    MXFP8BlockScaling: {
        "margin": ("0",),
        "fp8_format": (Format.E2M1, Format.E5M2),
        "enable_2d_quantization": (1,),
        **ONE_OF_TWO,
    },
    NVFP4BlockScaling: {
        "disable_rht": (1,),
        "disable_stochastic_rounding": (None,),
        "disable_2d_quantization": ("1",),
        "row_scaled_activation": (0, True),
        "nvfp4_4over6": ("gradients", "activations", "all"),
        "nvfp4_4over6_e4m3_use_256": (True,),
        "nvfp4_4over6_err_mode": ("mae",),
        "fp4_format": (Format.E4M3,),
        "fp8_format": (Format.HYBRID,),
        "fp8_dpa": ("no",),
        **ONE_OF_TWO,
    },
    CustomRecipe: {"qfactory": ("a name",), "quantization_alignment": (0, 1.5), **ONE_OF_TWO},
}
for recipe_kind, fields in WRONG.items():
    ROWS.each(recipe_of, recipe_kind, **fields)
for dims in ((2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)):
    names = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
    ROWS.add(recipe_of, Float8BlockScaling, **dict(zip(names, dims, strict=True)))


def assigned(kind: Any, **field: Any) -> None:
    """A recipe that gets a wrong field later."""
    one = kind(qfactory=print) if kind is CustomRecipe else kind()
    for name, value in field.items():
        setattr(one, name, value)
    one.resolve()


ROWS.add(assigned, Float8CurrentScaling, fp8_quant_fwd_inp={"power_2_scale": True})
ROWS.add(assigned, Float8BlockScaling, fp8_quant_bwd_grad="no")
ROWS.add(assigned, NVFP4BlockScaling, fp4_quant_fwd_weight=None)
ROWS.add(assigned, DelayedScaling, amax_history_length=1)
ROWS.add(assigned, Float8BlockScaling, fp8_quant_fwd_input=1)
ROWS.add(assigned, CustomRecipe, quantisation_alignment=1)
ROWS.add(MMParams, use_split_accumulator="no")
ROWS.each(QParams, stochastic_rounding=(1,), amax_epsilon=(-1.0, float("nan"), "0"))
ROWS.add(DelayedScaling, amax_history=16)
ROWS.add(DelayedScaling, fp8_fromat=Format.E4M3)
ROWS.add(DelayedScaling, params_dtype=None, device="cuda")
ROWS.add(DelayedScaling, interval=1, override_linear_precision=None, margin=2)
ROWS.add(DelayedScaling, amax_compute_algo="most_recnt")
ROWS.add(Float8CurrentScaling, power_2_scales=True)
ROWS.add(Float8CurrentScaling, backward_override="high_precison")
ROWS.add(NVFP4BlockScaling, disable_RHT=True)
ROWS.add(NVFP4BlockScaling, nvfp4_4over6="weight")
ROWS.add(dtypes.dtype, "bfloat6")
