"""A layer's call that is replayed gives the bits that the layer itself gives, however it is called and whatever happens
between two calls. What is not recorded says why. (Memory and tapes themselves: test_tapes_memory.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling
from tests.backends import devices
from tests.covering import covering
from tests.recipes import KINDS, RECIPES, region
from tests.tape_steps import GEMM_MODULES, HIDDEN, MODULES, ROWS, drawn, made, same, step, training

on_devices = pytest.mark.parametrize("device", devices())


# ------------------------------------------------------------------------------------------------- modules, recipes


@on_devices
@covering(turns=2, name=MODULES, recipe=[None, *KINDS])
def test_training(name: str, recipe: str | None, device: str) -> None:
    """Three steps: values, gradients, weights, scales and histories."""
    same(lambda: training(made(name, device), recipe))


@covering(
    recipe=["current high_precision", "block dequantized", "delayed e4m3", "nvfp4 rows"],
    name=["Linear", "LayerNormMLP gated"],
)
def test_other_backwards_and_options(name: str, recipe: str) -> None:
    same(lambda: training(made(name), recipe))


@pytest.mark.parametrize("off", ["weight", "bias", "layer_norm_weight", "all"])
def test_frozen_parameters(off: str) -> None:
    def program() -> Any:
        module = made("LayerNormLinear")
        for name, p in module.named_parameters():
            p.requires_grad_(off != "all" and not name.startswith(off))
        return training(module, "current")

    same(program)


@covering(
    options=[{"return_layernorm_output": True}, {"return_bias": True}],
    name=["LayerNormLinear", "LayerNormMLP"],
    recipe=[None, "delayed", "block"],
)
def test_more_than_one_result(name: str, options: dict[str, bool], recipe: str | None) -> None:
    same(lambda: training(made(name, **options), recipe, steps=2))


def test_only_the_second_result_is_used() -> None:
    def program() -> Any:
        module = made("LayerNormLinear", return_layernorm_output=True)
        x = drawn(ROWS, HIDDEN).requires_grad_()
        found = []
        for which in (0, 1, 0, 1):
            module(x)[which].square().sum().backward()
            found.append([p.grad if p.grad is None else p.grad.clone() for p in (x, *module.parameters())])
        return found

    same(program)


# -------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("recipe", KINDS)
def test_a_quantized_weight_gains_and_loses_a_copy(recipe: str) -> None:
    def program() -> Any:
        with te.quantized_model_init(recipe=RECIPES[recipe]):
            module = te.Linear(HIDDEN, 48, device="cpu")
        found = [step(module, drawn(ROWS, HIDDEN), recipe)]
        for has in (False,) if recipe == "mxfp8" else (False, True, False, True):  # mxfp8 cannot make one of the other
            module.weight.update_usage(rowwise_usage=True, columnwise_usage=has)
            found.append(step(module, drawn(ROWS, HIDDEN), recipe))
        return found

    same(program)


@covering(name=GEMM_MODULES, recipe=[None, *KINDS])
def test_gradients_that_go_into_main_grad(name: str, recipe: str | None) -> None:
    """It moves, has another dtype, and is overwritten, from one step to the next."""

    def program() -> Any:
        module, found = made(name, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True), []
        weights = [p for p in module.parameters() if p.ndim == 2]
        for i in range(6):
            for w in weights:
                if i in (0, 1, 3):  # other memory
                    w.main_grad = torch.zeros(w.shape, dtype=torch.bfloat16 if i == 3 else torch.float32)
                w.overwrite_main_grad = i == 4
            x = drawn(ROWS, HIDDEN, dtype=torch.bfloat16)
            found.append(step(module, x, recipe, is_first_microbatch=i == 5))
            found.append([w.main_grad.clone() for w in weights])
        return found

    same(program)


@covering(name=GEMM_MODULES, recipe=[None, "delayed", "block"])
def test_weights_in_other_places(name: str, recipe: str | None) -> None:
    """Parameters and state that are exchanged, converted and loaded between steps."""

    def program() -> Any:
        module, other, found = made(name), made(name), []
        training(other, recipe, 1)
        found.append(training(module, recipe, 2))
        module.load_state_dict(other.state_dict(), assign=True)
        found.append(training(module, recipe, 2))
        module.to(torch.bfloat16)
        found += [step(module, drawn(ROWS, HIDDEN, dtype=torch.bfloat16), recipe) for _ in range(2)]
        module.to(torch.float32)
        found.append(training(module, recipe, 2))
        with torch.no_grad():
            for p in module.parameters():
                p.data = p.data.clone()  # other memory
        found.append(training(module, recipe, 2))
        return found

    same(program)


def test_another_history() -> None:
    def program() -> Any:
        module = made("LayerNormMLP")
        rules = [
            DelayedScaling(amax_history_len=n, amax_compute_algo=a) for n in (4, 2, 7) for a in ("max", "most_recent")
        ]
        return [training_in(module, rule) for rule in (*rules, rules[0])]

    def training_in(module: Any, rule: Any) -> Any:
        found = []
        for _ in range(2):
            x = drawn(ROWS, HIDDEN).requires_grad_()
            with te.autocast(recipe=rule):
                y = module(x)
            y.square().sum().backward()
            found.append([y, x.grad, [t.clone() for t in module.buffers()]])
        return found

    same(program)


# --------------------------------------------------------------------------------------------------------- inputs


@covering(name=MODULES, recipe=[None, "delayed", "mxfp8"])
def test_inputs_and_gradients_that_lie_otherwise(name: str, recipe: str | None) -> None:
    """Transposed, in the middle of a larger tensor, expanded."""

    def program() -> Any:
        module, found = made(name), []
        lying: list[Callable[[], torch.Tensor]] = [
            lambda: drawn(2, ROWS, HIDDEN).transpose(0, 1),
            lambda: drawn(ROWS + 1, 2, HIDDEN)[1:],
            lambda: drawn(ROWS * 2 * HIDDEN + 1)[1:].view(ROWS, 2, HIDDEN),
            lambda: drawn(ROWS, 1, HIDDEN).expand(ROWS, 2, HIDDEN),
            lambda: drawn(ROWS, 2, HIDDEN + 3)[..., :HIDDEN],
        ]
        for make in (*lying, *lying):
            x = make().requires_grad_()
            with region(recipe):
                y = module(x)
            y.backward(make()[..., : y.shape[-1]] if y.shape[-1] <= HIDDEN else torch.ones(()).expand(y.shape))
            found.append([y, x.grad, *[p.grad.clone() for p in module.parameters()]])
        return found

    same(program)


FORMATS = ("bshd", "sbhd", "thd")
MASKS = {
    "causal": {"attn_mask_type": "causal"},
    "no_mask": {"attn_mask_type": "no_mask"},
    "window": {"attn_mask_type": "causal", "window_size": (3, 0)},
    "padding": {"attn_mask_type": "padding_causal"},
}


@on_devices
@covering(turns=2, mask=MASKS, form=FORMATS, dropout=[0.0, 0.2])
def test_attention(mask: str, form: str, dropout: float, device: str) -> None:
    """Apart and packed; lengths of packed sequences are values."""

    def program() -> Any:
        options = dict(MASKS[mask], attention_dropout=dropout, qkv_format=form)
        if form == "thd":
            options["attn_mask_type"] = {"causal": "padding_causal", "no_mask": "padding"}.get(mask, "padding_causal")
        module = te.DotProductAttention(2, 16, num_gqa_groups=1, **options)
        module.train()
        found = []
        for lengths in ([8, 8], [5, 11], [8, 8], [16, 0]):
            shape = {"bshd": (2, 16), "sbhd": (16, 2), "thd": (16,)}[form]
            q, k, v = (drawn(*shape, n, 16, device=device, dtype=torch.bfloat16).requires_grad_() for n in (2, 1, 1))
            call: dict[str, Any] = {}
            if form == "thd" or mask == "padding":
                cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device)
                call = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 16, "max_seqlen_kv": 16}
            y = module(q, k, v, **call)
            y.backward(drawn(*y.shape, device=device, dtype=torch.bfloat16))
            found.append([y, q.grad, k.grad, v.grad])
        return found

    same(program)


@covering(
    options=[{"num_gqa_groups": 2}, {"input_layernorm": True}, {"qk_norm_type": "RMSNorm"}],
    recipe=[None, "delayed", "current"],
)
def test_multihead(options: dict[str, Any], recipe: str | None) -> None:
    def program() -> Any:
        module = te.MultiheadAttention(HIDDEN, 4, attention_dropout=0.1, fuse_qkv_params=True, device="cpu", **options)
        turn = te.RotaryPositionEmbedding(HIDDEN // 4).cpu()(ROWS)
        return training(module, recipe, rotary_pos_emb=turn)

    same(program)
