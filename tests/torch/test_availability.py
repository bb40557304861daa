"""What the GPU can do, told about made-up devices, and about none."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import te_torch as te
from te_core import device as core
from te_core.device import DeviceInfo
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_torch import availability
from tests.backends import capability, requires_cuda


def gpu(major: int, minor: int = 0, cublaslt: tuple[int, ...] = (13, 1, 0)) -> DeviceInfo:
    return DeviceInfo(f"made-up sm_{major}{minor}", (major, minor), 100, 1 << 25, 1 << 36, (13, 0), cublaslt)


FAMILIES = ("fp8", "fp8_block_scaling", "mxfp8", "nvfp4", "bf16")

# By hand from the documented table; block scaling needs Hopper itself here (cuBLASLt has these modes nowhere else).
TABLE: dict[DeviceInfo | None, str] = {
    None: "",
    gpu(7, 5): "",
    gpu(8, 0): "bf16",
    gpu(8, 9): "fp8 bf16",
    gpu(9, 0): "fp8 fp8_block_scaling bf16",
    gpu(9, 0, (12, 8, 0)): "fp8 bf16",
    gpu(10, 0): "fp8 mxfp8 nvfp4 bf16",
    gpu(10, 3): "fp8 mxfp8 nvfp4 bf16",
    gpu(12, 0): "fp8 nvfp4 bf16",
}


@pytest.fixture(params=TABLE, ids=lambda info: "none" if info is None else f"{info.name}-{info.cublaslt[0]}")
def info(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceInfo | None:
    monkeypatch.setattr(availability, "current_device", lambda: request.param)
    return request.param


def test_answers(info: DeviceInfo | None) -> None:
    """Every family on every device; a reason exactly where the answer is no."""
    for family in FAMILIES:
        ask = getattr(availability, f"is_{family}_available")
        able, reason = ask(return_reason=True)
        assert ask() is able is (family in TABLE[info].split()), family
        assert (reason == "") is able
        if info is None:
            assert reason == "no GPU; the CPU backend emulates it"
        if family != "bf16":
            assert getattr(availability, f"check_{family}_support")() == (able, reason)
    assert availability.get_device_compute_capability() == ((0, 0) if info is None else info.capability)


@pytest.mark.parametrize(
    ("made_up", "recipe"),
    [
        (None, DelayedScaling),
        (gpu(8, 9), DelayedScaling),
        (gpu(9, 0), DelayedScaling),
        (gpu(10, 0), MXFP8BlockScaling),
        (gpu(10, 3), MXFP8BlockScaling),
        (gpu(12, 0), Float8CurrentScaling),
        (gpu(12, 1), Float8CurrentScaling),
    ],
)
def test_the_default_recipe(made_up: DeviceInfo | None, recipe: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """api.md 3.2, on every architecture."""
    monkeypatch.setattr(import_module("te_torch.autocast"), "current_device", lambda: made_up)
    assert te.get_default_recipe() == recipe()


RECIPES: dict[str, list[Any]] = {
    "fp8": [DelayedScaling(), Float8CurrentScaling()],
    "fp8_block_scaling": [Float8BlockScaling()],
    "mxfp8": [MXFP8BlockScaling()],
    "nvfp4": [NVFP4BlockScaling()],
}


@pytest.mark.parametrize("family", RECIPES)
def test_recipe_support(family: str, info: DeviceInfo | None) -> None:
    able, reason = getattr(availability, f"check_{family}_support")()
    for recipe in RECIPES[family]:
        if able:
            availability.check_recipe_support(recipe)
            continue
        with pytest.raises(RuntimeError) as caught:
            availability.check_recipe_support(recipe)
        error = caught.value
        assert isinstance(error, UnsupportedError) and reason in error.got
        if info is not None:  # the doctor's table, whole
            assert info.name in str(error) and all(name in error.allowed for name in core.RECIPES)


def test_custom_recipe_is_for_its_factory_to_say(info: DeviceInfo | None) -> None:
    availability.check_recipe_support(CustomRecipe(qfactory=lambda role: None))


@requires_cuda
def test_this_device() -> None:
    assert availability.get_device_compute_capability() == capability()
    found = availability.current_device()
    assert found is not None and found.name == torch.cuda.get_device_name() and found.cublaslt >= (12, 0)
    major, minor, patch = availability.get_cudnn_version()
    assert major * 10000 + minor * 100 + patch == torch.backends.cudnn.version()


def test_fp8_types() -> None:
    expected = {
        Format.HYBRID: (torch.float8_e4m3fn, torch.float8_e5m2),
        Format.E4M3: (torch.float8_e4m3fn, torch.float8_e4m3fn),
        Format.E5M2: (torch.float8_e5m2, torch.float8_e5m2),
    }
    for form, dtypes in expected.items():
        recipe = CustomRecipe(qfactory=lambda role: None, fp8_format=form)
        for forward, dtype in zip((True, False), dtypes, strict=True):
            assert availability.get_fp8_torch_dtype(recipe, forward) == dtype
            assert availability.get_fp8_max(recipe, forward) == torch.finfo(dtype).max
            number = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 8}[dtype]
            assert availability.get_fp8_te_dtype(recipe, forward) == number
    assert availability.get_fp8_torch_dtype(DelayedScaling()) == torch.float8_e4m3fn
    assert availability.get_fp4_te_dtype(NVFP4BlockScaling()) == 10
    with pytest.raises(ArgumentError, match="FP4"):
        availability.get_fp4_te_dtype(DelayedScaling())
