"""Recipes: the documented fields and defaults, their checks, and what they come down to."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from te_core import ArgumentError, dtypes
from te_core.precision import Gemm, History
from te_core.recipe import DelayedScaling, Float8CurrentScaling, Format, MMParams, QParams, Recipe

E4M3, E5M2 = dtypes.float8_e4m3, dtypes.float8_e5m2
RECIPES = (DelayedScaling, Float8CurrentScaling)


def most_recent(history):
    return history[0]


def test_formats_carry_their_maxima():
    maxima = {f.name: (f.value.max_fwd, f.value.max_bwd) for f in Format}
    assert maxima == {
        "E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344),
    }  # fmt: skip
    assert str(Format.HYBRID).split(".")[1] == "HYBRID" and len(set(Format)) == 4


def test_documented_defaults():
    delayed = DelayedScaling()
    fields = {f.name: getattr(delayed, f.name) for f in dataclasses.fields(delayed)}
    assert fields == {
        "margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024, "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None, "reduce_amax": True, "fp8_dpa": False, "fp8_mha": False,
        "backward_override": None,
    }  # fmt: skip
    current = Float8CurrentScaling()
    fields = {f.name: getattr(current, f.name) for f in dataclasses.fields(current)}
    assert fields == {
        "use_power_2_scales": False, "fp8_format": Format.HYBRID, "fp8_gemm_fprop": MMParams(False),
        "fp8_gemm_dgrad": MMParams(True), "fp8_gemm_wgrad": MMParams(True), "fp8_dpa": False, "fp8_mha": False,
        "backward_override": None,
    }  # fmt: skip
    assert MMParams().use_split_accumulator and not QParams().power_2_scale and QParams().amax_epsilon == 0


def test_questions_work_on_classes_and_instances():
    questions = (
        "delayed", "float8_current_scaling", "float8_per_tensor_scaling", "float8_block_scaling", "mxfp8", "nvfp4",
        "custom",
    )  # fmt: skip
    for asked, yes in (
        (DelayedScaling, {"delayed"}),
        (Float8CurrentScaling, {"float8_current_scaling"}),
        (Recipe, set()),
    ):
        expected = [q in yes or (bool(yes) and q == "float8_per_tensor_scaling") for q in questions]
        assert [getattr(asked, q)() for q in questions] == expected
        assert [getattr(asked(), q)() for q in questions] == expected


def test_recipes_compare_by_their_fields():
    assert DelayedScaling() == DelayedScaling() != DelayedScaling(margin=1)
    assert Float8CurrentScaling() != DelayedScaling()


# --- what they come down to -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("fmt", "forward", "backward"),
    [(Format.HYBRID, E4M3, E5M2), (Format.E4M3, E4M3, E4M3), (Format.E5M2, E5M2, E5M2)],
)
def test_formats_by_role(recipe, fmt, forward, backward):
    p = recipe(fp8_format=fmt).resolve()
    assert (p.input.dtype, p.weight.dtype, p.grad.dtype) == (forward, forward, backward)


def test_delayed_scaling_resolved():
    p = DelayedScaling(margin=2, amax_history_len=8, amax_compute_algo=most_recent, reduce_amax=False).resolve()
    assert p.history == History(8, 2, most_recent, None, False)
    assert {o.scaling for o in (p.input, p.weight, p.grad)} == {"delayed"}
    assert (p.fprop, p.dgrad, p.wgrad) == (Gemm(False), Gemm(True), Gemm(True))


def test_current_scaling_resolved():
    recipe = Float8CurrentScaling(use_power_2_scales=True, fp8_gemm_dgrad=MMParams(False))
    p = recipe.resolve()
    assert p.history is None
    assert all((o.scaling, o.power_of_two, o.epsilon) == ("current", True, 0.0) for o in (p.input, p.weight, p.grad))
    assert (p.fprop, p.dgrad, p.wgrad) == (Gemm(False), Gemm(False), Gemm(True))
    recipe.fp8_quant_bwd_grad = QParams(power_2_scale=False, amax_epsilon=0.5)
    p = recipe.resolve()
    assert [(o.power_of_two, o.epsilon) for o in (p.input, p.weight, p.grad)] == [(True, 0), (True, 0), (False, 0.5)]
    assert Float8CurrentScaling().resolve().grad.epsilon == 0  # assigned on the instance, not for all


def test_resolving_is_by_value():
    recipe = DelayedScaling(amax_history_len=16)
    before = recipe.resolve()
    recipe.amax_history_len, recipe.fp8_format = 4, Format.E4M3
    after = recipe.resolve()
    assert (before.history.length, before.grad.dtype) == (16, E5M2)
    assert (after.history.length, after.grad.dtype) == (4, E4M3)
    assert before == DelayedScaling(amax_history_len=16).resolve() != after


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_description_is_a_frozen_key(recipe):
    p = recipe().resolve()
    assert {p: 1}[recipe().resolve()] == 1
    for part, name in ((p, "input"), (p.input, "dtype"), (p.fprop, "split_accumulator")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)


# --- checks ---------------------------------------------------------------------------------------

WRONG = [
    (DelayedScaling, "margin", 0.5, "an integer"),
    (DelayedScaling, "fp8_format", "HYBRID", "Format.E4M3"),
    (DelayedScaling, "fp8_format", Format.E2M1, "FP8 format"),
    (DelayedScaling, "amax_history_len", 0, ">= 1"),
    (DelayedScaling, "amax_history_len", "16", ">= 1"),
    (DelayedScaling, "amax_compute_algo", "mean", "'max', 'most_recent' or a callable"),
    (DelayedScaling, "scaling_factor_compute_algo", "linear", "callable"),
    (DelayedScaling, "fp8_dpa", 1, "True or False"),
    (DelayedScaling, "backward_override", "high_precision", "None"),
    (Float8CurrentScaling, "use_power_2_scales", 1, "True or False"),
    (Float8CurrentScaling, "fp8_format", Format.E2M1, "FP8 format"),
    (Float8CurrentScaling, "fp8_gemm_wgrad", True, "MMParams"),
    (Float8CurrentScaling, "fp8_mha", None, "True or False"),
    (Float8CurrentScaling, "backward_override", "exact", "'high_precision' or 'dequantized'"),
]


@pytest.mark.parametrize(("recipe", "field", "value", "allowed"), WRONG)
def test_wrong_fields_are_named_when_given_and_when_assigned(recipe, field, value, allowed):
    with pytest.raises(ArgumentError) as given:
        recipe(**{field: value})
    later = recipe()
    setattr(later, field, value)
    with pytest.raises(ArgumentError) as assigned:
        later.resolve()
    for error in (given.value, assigned.value):
        assert error.operation == recipe.__name__ and error.got == f"{field}={value!r}"
        assert allowed in error.allowed and error.do == f"correct {field}"


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_overrides_of_current_scaling(override):
    assert Float8CurrentScaling(backward_override=override).backward_override == override


def test_environment_defaults_are_read_once_at_import():
    code = (
        "import os; from te_core.recipe import *; os.environ.clear();"
        "r = Float8CurrentScaling(); print(r.use_power_2_scales, r.backward_override);"
        "r.backward_override = None; print(r.resolve().grad.power_of_two)"
    )
    env = {
        **os.environ, "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1", "NVTE_BACKWARD_OVERRIDE": "dequantized",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "dequantized", "True"]
