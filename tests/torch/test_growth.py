"""Nothing grows without bound: what a program makes anew in every step is let go."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_torch import calls, precisions
from te_torch import state as scaling
from te_torch.attention.dot_product import _PLANS


def _calls() -> int:
    gc.collect()
    return sum(type(o) is calls.Call for o in gc.get_objects())


class Looks:
    """An inspector that wants to see nothing."""

    request = ()

    def inspect(self, *args: Any) -> None:
        return None


def test_calls_of_dead_modules_are_let_go() -> None:
    def use(inspector: Any) -> None:
        module = te.Linear(16, 16, device="cpu")
        module.inspector = inspector
        with te.autocast(recipe=Float8CurrentScaling()):
            module(torch.randn(2, 16))

    use(None)
    before = _calls()
    for _ in range(20):
        use(Looks())
    assert _calls() <= before + 1


def test_a_module_keeps_a_bounded_number_of_calls() -> None:
    module, x = te.Linear(16, 16, device="cpu"), torch.randn(2, 16)
    for _ in range(300):
        module.inspector = Looks()
        module(x)
    assert len(module._calls) <= 256


@pytest.mark.more
def test_packed_batches_keep_a_bounded_number_of_plans() -> None:
    """Each has another longest sequence."""
    module = te.DotProductAttention(1, 4, qkv_format="thd", attn_mask_type="padding")
    q = torch.randn(2, 1, 4)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    before = _calls()
    for longest in range(2, 2300):
        module(q, q, q, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)
    assert len(module._plans) <= _PLANS and _calls() - before <= _PLANS


def test_a_fresh_function_in_every_recipe() -> None:
    """What a recipe with a lambda leaves behind is bounded, and the latest ones compute as they say."""
    module, x = te.Linear(16, 16, device="cpu"), torch.randn(4, 16)
    module._calls.clear()
    held = len(precisions._by_number)  # by what other tests keep
    for step in range(300):
        recipe = DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history, step=step: history.amax(dim=0))
        with te.autocast(recipe=recipe):
            module(x)
    assert len(precisions._by_number) <= 200 + held
    assert sum(known.users for known in precisions._by_number.values()) <= 64
    assert len(module._calls) <= 256 and len(module.fp8_state.update_plans) <= 9
    assert module.fp8_state.scale_fwd[0] == 448 / x.abs().max()


def test_a_module_that_changes_its_recipe_in_every_step_is_one_state() -> None:
    """Each update follows the rule of its own step, beside a module that has one rule."""
    (first, module), x = [te.Linear(16, 16, device="cpu") for _ in range(2)], torch.full((2, 16), 2.0)
    recipes = [DelayedScaling(amax_history_len=1, margin=margin) for margin in (0, 3)]
    gc.collect()
    before, seen = len(scaling._by_token), []
    for recipe in recipes * 4:
        with te.autocast(recipe=recipes[0]):
            first(x)
            with te.autocast(recipe=recipe):
                module(x)
        seen.append(module.fp8_state.scale_fwd[0].item())
    gc.collect()
    assert seen == [224.0, 28.0] * 4 and len(scaling._by_token) <= before + 2
