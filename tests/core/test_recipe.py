"""Recipes: the documented fields and defaults, their checks, and what they come down to."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import pickle
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise, product

import pytest

from te_core import dtypes
from te_core import precision as precision_file
from te_core.precision import Gemm, History
from te_core.quantize import state as state_file
from te_core.quantized import Format as Stored
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
    resolve,
)

E4M3, E5M2 = dtypes.float8_e4m3, dtypes.float8_e5m2
E2M1 = dtypes.float4_e2m1
RECIPES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
ATTENTION = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
#: api.md 2.4, in order.
FIELDS = {
    DelayedScaling: {
        "margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024, "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None, "reduce_amax": True, **ATTENTION,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False, "fp8_format": Format.HYBRID, "fp8_gemm_fprop": MMParams(False),
        "fp8_gemm_dgrad": MMParams(True), "fp8_gemm_wgrad": MMParams(True), **ATTENTION,
    },
    Float8BlockScaling: {
        "use_f32_scales": False, "fp8_format": Format.E4M3, "x_block_scaling_dim": 1, "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1, "fp8_gemm_fprop": MMParams(True), "fp8_gemm_dgrad": MMParams(True),
        "fp8_gemm_wgrad": MMParams(True), **ATTENTION,
    },
    MXFP8BlockScaling: {"margin": 0, "fp8_format": Format.E4M3, **ATTENTION, "enable_2d_quantization": False},
    NVFP4BlockScaling: {
        "disable_rht": False, "disable_stochastic_rounding": False, "disable_2d_quantization": False,
        "row_scaled_activation": False, "nvfp4_4over6": "none", "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE", "fp4_format": Format.E2M1, "fp8_format": Format.E4M3, **ATTENTION,
    },
    CustomRecipe: {
        "qfactory": print, "fp8_format": Format.HYBRID, **ATTENTION, "quantization_alignment": 128,
    },
}  # fmt: skip
QUESTIONS = {
    DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
    Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
    Float8BlockScaling: {"float8_block_scaling"},
    MXFP8BlockScaling: {"mxfp8"},
    NVFP4BlockScaling: {"nvfp4"},
    CustomRecipe: {"custom"},
    Recipe: set(),
}


def made(recipe, **fields):
    """A recipe with its required fields."""
    return recipe(**{"qfactory": print, **fields}) if recipe is CustomRecipe else recipe(**fields)


def most_recent(history):
    return history[0]


def test_formats_carry_their_maxima():
    maxima = {f.name: (f.value.max_fwd, f.value.max_bwd) for f in Format}
    assert maxima == {"E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344)}
    assert str(Format.HYBRID).split(".")[1] == "HYBRID" and len(set(Format)) == 4


@pytest.mark.parametrize("recipe", FIELDS)
def test_documented_defaults(recipe):
    one = made(recipe)
    found = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    assert list(found.items()) == list(FIELDS[recipe].items())
    assert recipe(*found.values()) == one, "fields are taken by place too"


def test_documented_parameters():
    assert MMParams() == MMParams(True) and MMParams().use_split_accumulator
    fields = [(f.name, f.default) for f in dataclasses.fields(QParams)]
    assert fields == [
        ("power_2_scale", False),
        ("amax_epsilon", 0.0),
        ("random_hadamard_transform", False),
        ("stochastic_rounding", False),
        ("fp4_2d_quantization", False),
    ]
    for frozen in (MMParams(), QParams()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, dataclasses.fields(frozen)[0].name, False)


@pytest.mark.parametrize("recipe", QUESTIONS)
def test_questions_work_on_classes_and_instances(recipe):
    questions = sorted(set().union(*QUESTIONS.values()))
    for asked in (recipe, made(recipe)):
        assert {q for q in questions if getattr(asked, q)()} == QUESTIONS[recipe]


def test_recipes_compare_by_their_fields():
    assert DelayedScaling() == DelayedScaling() != DelayedScaling(margin=1)
    assert Float8CurrentScaling() != DelayedScaling()


# --- what they come down to -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("fmt", "forward", "backward"), [(Format.HYBRID, E4M3, E5M2), (Format.E4M3, E4M3, E4M3)])
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


def test_block_scaling_resolved():
    p = Float8BlockScaling().resolve()
    assert [(o.scaling, o.tiled, o.power_of_two, o.epsilon) for o in (p.input, p.weight, p.grad)] == [
        ("block", False, True, 0),
        ("block", True, True, 0),
        ("block", False, True, 0),
    ]
    assert {p.fprop, p.dgrad, p.wgrad} == {Gemm(True)} and p.history is None
    assert not any(o.power_of_two for o in _operands(Float8BlockScaling(use_f32_scales=True)))
    for dims in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        names = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        p = Float8BlockScaling(**dict(zip(names, dims, strict=True))).resolve()
        assert tuple(1 + o.tiled for o in (p.input, p.weight, p.grad)) == dims
        assert not p.output.tiled and not p.grad_input.tiled
    recipe = Float8BlockScaling()
    recipe.fp8_quant_fwd_weight = QParams(power_2_scale=False, amax_epsilon=0.25)
    assert [(o.power_of_two, o.epsilon) for o in _operands(recipe)] == [(True, 0), (False, 0.25), (True, 0)]


def _operands(recipe):
    p = recipe.resolve()
    return p.input, p.weight, p.grad


def test_mxfp8_resolved():
    assert [(o.scaling, o.tiled) for o in _operands(MXFP8BlockScaling())] == [("mxfp8", False)] * 3
    tiled = [o.tiled for o in _operands(MXFP8BlockScaling(enable_2d_quantization=True))]
    assert tiled == [False, True, False], "weights only"
    assert MXFP8BlockScaling(margin=3).resolve() == MXFP8BlockScaling().resolve(), "a margin has no effect"


def test_nvfp4_resolved():
    x, w, dy = _operands(NVFP4BlockScaling())
    assert {(o.scaling, o.dtype) for o in (x, w, dy)} == {("nvfp4", E2M1)}
    assert [(o.transform, o.stochastic, o.tiled) for o in (x, w, dy)] == [
        (True, False, False),
        (False, False, True),
        (True, True, False),
    ]
    assert not any(o.transform for o in _operands(NVFP4BlockScaling(disable_rht=True)))
    assert not any(o.stochastic for o in _operands(NVFP4BlockScaling(disable_stochastic_rounding=True)))
    assert not any(o.tiled for o in _operands(NVFP4BlockScaling(disable_2d_quantization=True)))
    rows = _operands(NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True))
    assert [o.row_scaled for o in rows] == [True, False, False]
    recipe = NVFP4BlockScaling()
    assert recipe.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert recipe.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert recipe.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    recipe.fp4_quant_bwd_grad = QParams()
    assert [(o.transform, o.stochastic) for o in _operands(recipe)] == [(True, False), (False, False), (False, False)]


def test_four_over_six_by_scope():
    """Gradients never; the bound of 256 only where the double quantization is."""
    scopes = ("none", "weights", "activations", "all")
    for mode, scope, wide in product(("MAE", "MSE"), scopes, scopes):
        recipe = NVFP4BlockScaling(
            disable_rht=True, nvfp4_4over6=scope, nvfp4_4over6_err_mode=mode, nvfp4_4over6_e4m3_use_256=wide
        )
        for name, operand in zip(("activations", "weights", "gradients"), _operands(recipe), strict=True):
            chosen = name != "gradients" and scope in (name, "all")
            assert operand.four_over_six == (mode if chosen else None), (mode, scope, wide)
            assert operand.bound == (256 if chosen and wide in (name, "all") else 448), (mode, scope, wide)


def test_custom_resolved():
    p = CustomRecipe(qfactory=print).resolve()
    assert p.factory is print and (p.input, p.weight, p.grad) == (None, None, None)


def test_resolving_is_by_value():
    recipe = DelayedScaling(amax_history_len=16)
    before = recipe.resolve()
    recipe.amax_history_len, recipe.fp8_format = 4, Format.E4M3
    after = recipe.resolve()
    assert (before.history.length, before.grad.dtype) == (16, E5M2)
    assert (after.history.length, after.grad.dtype) == (4, E4M3)
    assert before == DelayedScaling(amax_history_len=16).resolve() != after


@pytest.mark.parametrize("recipe", [*RECIPES, NVFP4BlockScaling])
def test_the_description_is_a_frozen_key(recipe):
    p = recipe().resolve()
    assert {p: 1}[recipe().resolve()] == 1
    for part, name in ((p, "input"), (p.input, "dtype"), (p.fprop, "split_accumulator")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)


# --- checks ---------------------------------------------------------------------------------------


def test_a_margin_at_its_bounds_leaves_something() -> None:
    """The largest value of a tensor is a code above zero, and the smallest code that it had is not the largest one."""
    kind = dtypes.float8_e4m3
    for margin in (-18, 18):
        DelayedScaling(margin=margin)
    smallest = 2.0**-9  # of E4M3
    assert kind.max * 2.0**-18 > smallest / 2 >= kind.max * 2.0**-19
    assert smallest / 2 * 2.0**18 < kind.max <= smallest * 2.0**18


# --- names that are none of a recipe's -------------------------------------------------------------


def test_keywords_that_a_recipe_does_not_have_are_dropped_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="params_dtype=None, device='cuda', which it does not have"):  # Megatron-core's
        assert DelayedScaling(params_dtype=None, device="cuda") == DelayedScaling()
    with pytest.warns(UserWarning, match="interval=1, override_linear_precision=None, which it does not have: dropped"):
        assert DelayedScaling(interval=1, override_linear_precision=None, margin=2) == DelayedScaling(margin=2)
    with pytest.warns(UserWarning, match="Float8CurrentScaling: got amax_history_len=16, margin=0, which") as said:
        assert Float8CurrentScaling(amax_history_len=16, margin=0) == Float8CurrentScaling()
    assert len(said) == 1 and said[0].filename == __file__


def test_attributes_of_the_users_own() -> None:
    kept = DelayedScaling()
    kept.note = "of the user's"  # type: ignore[attr-defined]
    assert copy.deepcopy(kept).note == pickle.loads(pickle.dumps(kept)).note == "of the user's"  # type: ignore[attr-defined]

    class Mine(DelayedScaling):
        def __init__(self) -> None:
            super().__init__()
            self.margins = (1, 2)

    assert Mine().margins == (1, 2), "a class of the user's has what attributes it likes"


@pytest.mark.parametrize("recipe", [r for r in FIELDS if r is not DelayedScaling])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_overrides(override, recipe):
    one = made(recipe, backward_override=override)
    assert one.backward_override == override and one.resolve().backward == override
    assert made(recipe).resolve().backward is None


def test_environment_defaults_are_read_once_at_import():
    code = (
        "import os; from te_core.recipe import *; os.environ.clear();"
        "r = Float8CurrentScaling(); print(r.use_power_2_scales, r.backward_override);"
        "r.backward_override = None; print(r.resolve().grad.power_of_two)"
    )
    env = {**os.environ, "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1", "NVTE_BACKWARD_OVERRIDE": "dequantized"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "dequantized", "True"]


ENVIRONMENT = {
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("Float8BlockScaling", "use_f32_scales", {"1": True, "0": False, "": False}),
    "NVTE_NVFP4_DISABLE_RHT": ("NVFP4BlockScaling", "disable_rht", {"1": True, "true": False}),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": ("NVFP4BlockScaling", "disable_stochastic_rounding", {"1": True}),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": ("NVFP4BlockScaling", "disable_2d_quantization", {"1": True}),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": ("NVFP4BlockScaling", "row_scaled_activation", {"1": True}),
    "NVTE_NVFP4_4OVER6": ("NVFP4BlockScaling", "nvfp4_4over6", {"weights": "weights", "": "none"}),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": ("NVFP4BlockScaling", "nvfp4_4over6_e4m3_use_256", {"none": "none", "": "all"}),
    "NVTE_NVFP4_4OVER6_ERR_MODE": ("NVFP4BlockScaling", "nvfp4_4over6_err_mode", {"MSE": "MSE", "": "MAE"}),
    "NVTE_BACKWARD_OVERRIDE": ("MXFP8BlockScaling", "backward_override", {"dequantized": "dequantized", "": None}),
}


def test_environment_defaults():
    """A process reads them once: so many as a variable has values, in each of which all variables have one."""
    code = ["from te_core.recipe import *; import os; os.environ.clear()"]
    for recipe, field, _ in ENVIRONMENT.values():
        # What the other variables turn on may not go together with this one.
        others = {"row_scaled_activation": False} if field == "disable_rht" else {"disable_rht": True}
        code.append(f"print({recipe}(**{others if recipe == 'NVFP4BlockScaling' else {}}).{field})")
    left = {k: v for k, v in os.environ.items() if not k.startswith("NVTE_")}
    for turn in range(max(len(values) for _, _, values in ENVIRONMENT.values())):
        chosen = {name: list(values.items())[turn % len(values)] for name, (_, _, values) in ENVIRONMENT.items()}
        env = {**left, **{name: value for name, (value, _) in chosen.items()}}
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(code)], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [str(wanted) for _, wanted in chosen.values()], chosen


# ---------------------------------------------------------------------------------------------- what is kept


def test_equal_recipes_are_one_precision_while_there_is_one() -> None:
    first = resolve(DelayedScaling(margin=3))
    assert resolve(DelayedScaling(margin=3)) is first and resolve(DelayedScaling(margin=2)) is not first
    rule = lambda history: history[0]  # noqa: E731
    held = resolve(DelayedScaling(amax_compute_algo=rule))
    assert resolve(DelayedScaling(amax_compute_algo=rule)) is held
    found = [resolve(DelayedScaling(margin=7)) for _ in range(2)]
    assert found[0] is found[1]


def test_casts_stay_with_their_rule() -> None:
    """One for each orientation; what is made of the rule, or equal to it, has its own."""
    rule = resolve(Float8CurrentScaling()).input
    ways = [(True, False), (False, True), (True, True)]
    casts = [state_file._stateless(rule, *way) for way in ways]
    assert [(cast.rowwise, cast.columnwise) for cast in casts] == ways
    assert all(state_file._stateless(rule, *way) is cast for way, cast in zip(ways, casts, strict=True))
    for other in (replace(rule), copy.copy(rule), copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert other == rule and hash(other) == hash(rule) and other.format is rule.format and not other.casts
    assert replace(rule, scaling="block").format is Stored(rule.dtype, "block")


def test_a_recipe_made_anew_for_each_step_leaves_nothing() -> None:
    """A function of its own makes it unlike every other one."""
    gc.collect()
    before = len(precision_file._resolved)
    held: list[int] = []
    tracemalloc.start()
    try:
        for turn in range(5):
            for i in range(200 if turn else 1100):
                made = DelayedScaling(amax_compute_algo=lambda history, i=i: history[i])
                resolve(made)
                precision = resolve(CustomRecipe(lambda role, i=i: i))
                operand = replace(resolve(Float8CurrentScaling()).input, custom=precision.factory)
                state_file._stateless(operand, True, True)
            del made, precision, operand
            gc.collect()
            if turn:  # then the bounded caches are full
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(precision_file._resolved) <= before + 2
    # What stays would stay of every 200 steps, which make 600 objects; a table that grows does so in one of them.
    assert min(b - a for a, b in pairwise(held)) < 4_000, held


def test_a_serial_is_one_objects() -> None:
    """Also of copies, and after an object is gone: it stands in keys where an id would be given again."""
    precision = resolve(DelayedScaling())
    copies = [copy.copy(precision), copy.deepcopy(precision), pickle.loads(pickle.dumps(precision)), replace(precision)]
    assert all(c == precision and hash(c) == hash(precision) for c in copies)
    assert len({c.serial for c in (precision, *copies)}) == 5
    seen = set()
    for _ in range(100):
        seen.add(resolve(CustomRecipe(lambda role: None)).serial)
    assert len(seen) == 100


def test_what_cannot_be_hashed_resolves() -> None:
    class Factory:
        """Compares, and so has no hash."""

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Factory)

        __hash__ = None  # type: ignore[assignment]

        def __call__(self, role: object) -> None:
            return None

    made = CustomRecipe(Factory())
    assert resolve(made) is resolve(made) and resolve(made).factory is made.qfactory
