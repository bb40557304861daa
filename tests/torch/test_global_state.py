"""`FP8GlobalStateManager`: what programs of the peer ask about the regions that they are in."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_torch.availability import check_fp8_block_scaling_support, check_fp8_support
from tests.programs import python
from tests.refusals import not_refused


@pytest.fixture
def manager() -> Iterator[Any]:
    """Without the alias, which has names of its own for the classes."""
    import te_torch.compat

    te_torch.compat.uninstall()
    from te_torch.compat.global_state import FP8GlobalStateManager

    yield FP8GlobalStateManager
    FP8GlobalStateManager.reset()


def test_shows_the_region_of_the_thread(manager: Any) -> None:
    group, outer, inner = torch.distributed.GroupMember.NON_GROUP_MEMBER, DelayedScaling(), MXFP8BlockScaling()

    def seen() -> tuple[Any, ...]:
        return manager.is_fp8_enabled(), manager.get_fp8_recipe(), manager.get_fp8_group()

    default = te.get_default_recipe()
    assert seen() == (False, default, None) and manager.quantization_state.autocast_depth == 0
    with te.autocast(recipe=outer, amax_reduction_group=group):
        assert seen() == (True, outer, group) and manager.get_fp8_recipe() is outer
        with te.autocast(recipe=inner):
            assert seen() == (True, inner, None) and manager.quantization_state.autocast_depth == 2
        with te.autocast(enabled=False):
            assert seen() == (False, default, None)
        assert seen() == (True, outer, group)
        other: list[Any] = []
        thread = Thread(target=lambda: other.append(seen()))
        thread.start()
        thread.join()
        assert other == [(False, default, None)]
        state = manager.quantization_state
        assert (state.fp8_enabled, state.fp8_recipe, state.fp8_distributed_group) == seen()
    assert seen() == (False, default, None)


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), CustomRecipe(lambda role: None)])
def test_calibration_is_not_low_precision(manager: Any, recipe: Any) -> None:
    for enabled in (False, True):
        with te.autocast(enabled=enabled, calibrating=True, recipe=recipe):
            assert manager.is_fp8_enabled() is enabled and manager.is_fp8_calibration() is True
    with te.autocast(recipe=recipe):
        assert manager.is_fp8_calibration() is False


def test_whether_a_module_is_the_first(manager: Any) -> None:
    layer, x = te.Linear(32, 32, device="cpu"), torch.randn(16, 32)
    assert not manager.is_first_fp8_module()
    with te.autocast(recipe=DelayedScaling()):
        assert manager.is_first_fp8_module() and manager.is_first_fp8_module(), "to ask changes nothing"
        with te.autocast(recipe=DelayedScaling()):
            layer(x)
            assert not manager.is_first_fp8_module()
        assert not manager.is_first_fp8_module()
    with te.autocast(recipe=DelayedScaling()):
        assert manager.is_first_fp8_module()


def test_what_modules_would_be_made_as(manager: Any) -> None:
    seen = lambda: (manager.with_fp8_parameters(), manager.with_high_precision_init_val())  # noqa: E731
    assert seen() == (False, False)
    with te.quantized_model_init(recipe=DelayedScaling()):
        assert seen() == (True, False)
        with te.quantized_model_init(recipe=DelayedScaling(), preserve_high_precision_init_val=True):
            assert seen() == (True, True)
        with te.quantized_model_init(enabled=False, preserve_high_precision_init_val=True):
            assert seen() == (False, False)


def test_reset_leaves_every_region(manager: Any) -> None:
    layer, x = te.Linear(32, 32, device="cpu"), torch.randn(16, 32)
    high = layer(x)
    with te.autocast(recipe=Float8CurrentScaling()), te.quantized_model_init(recipe=DelayedScaling()):
        low, kept = layer(x), manager.get_autocast_state()
        manager.reset()
        assert not manager.is_fp8_enabled() and not manager.with_fp8_parameters()
        assert torch.equal(layer(x), high) and not torch.equal(low, high)
        assert type(te.Linear(16, 16, device="cpu").weight) is torch.nn.Parameter
        manager.set_autocast_state(kept)
        assert torch.equal(layer(x), low)
    assert not manager.is_fp8_enabled() and torch.equal(layer(x), high)


def test_availability_and_captures(manager: Any) -> None:
    assert manager.is_fp8_available() == check_fp8_support() and len(manager.is_mxfp8_available()) == 2
    assert manager.is_fp8_block_scaling_available() == check_fp8_block_scaling_support()
    assert manager.is_nvfp4_available()[0] in (True, False) and manager.fp8_graph_capturing() is False


def test_what_it_does_not_have_says_what_to_use(manager: Any) -> None:
    assert not hasattr(manager, "set_skip_fp8_weight_update_tensor") and not hasattr(manager, "nothing")
    state = manager.quantization_state
    rows = [
        (AttributeError, "is_first_microbatch", lambda: manager.set_skip_fp8_weight_update_tensor(True)),
        (AttributeError, "te.autocast", lambda: manager.autocast_enter(enabled=True)),
        (AttributeError, "te.checkpoint", lambda: manager.restore_fp8_meta_tensors({})),
        (AttributeError, "keeps its own scales", lambda: state.global_amax_buffer),
        (AttributeError, "no attribute 'nothing'", lambda: state.nothing),
        (RuntimeError, "fp8_enabled = True.*enter te.autocast", lambda: setattr(state, "fp8_enabled", True)),
        (ValueError, "'tuple'.*get_autocast_state", lambda: manager.set_autocast_state((True, None))),
    ]
    wrong = [not_refused(error, message, call) for error, message, call in rows]
    assert not any(wrong), wrong


ALIAS = """
import te_torch.compat, warnings
warnings.simplefilter("ignore")
import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, FP8GlobalState
from transformer_engine.pytorch.quantization import get_default_fp8_recipe, fp8_model_init, fp8_autocast
from transformer_engine.pytorch.attention import _get_qkv_layout
from transformer_engine.pytorch.attention.dot_product_attention.utils import get_qkv_layout
assert te.fp8.FP8GlobalStateManager is FP8GlobalStateManager and _get_qkv_layout is get_qkv_layout
assert isinstance(FP8GlobalStateManager.quantization_state, FP8GlobalState)
assert te.fp8.get_default_fp8_recipe is get_default_fp8_recipe and te.fp8.fp8_model_init is fp8_model_init
with fp8_autocast():
    assert FP8GlobalStateManager.is_fp8_enabled()
print("ok")
"""


def test_where_programs_find_it() -> None:
    done = python(ALIAS)
    assert "ok" in done.stdout.splitlines(), done.stderr[-2000:]
