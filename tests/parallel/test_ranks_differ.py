"""Tensor-parallel ranks that differ in one option: all are told which, and which rank has what, before they compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_core import dtypes
from te_core.layers.linear import LinearSpec, Needs
from te_core.layers.meeting import _OWN, disagreement, facts_of, words
from te_core.layers.mlp import MLPSpec
from te_core.layers.norm import NormSpec
from te_core.layers.parallel import Split
from te_core.ops.activation import Clamp
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling, resolve
from tests.backends import more_without_gpu
from tests.parallel.ranks import Rank
from tests.parallel.steps import alike, by_ranks, error_of, says
from tests.parallel.tensor_steps import F, H, options

ROWS = 32


def _made(kind: type, *sizes: Any, **plain: Any) -> Callable[..., Any]:
    return lambda rank, **more: kind(*sizes, device=rank.device, **options(rank), **{**plain, **more})


_PLAIN: dict[str, Any] = {"set_parallel_mode": True, "attention_dropout": 0.0, "fuse_qkv_params": True}
_mlp = _made(te.LayerNormMLP, H, F, set_parallel_mode=True)
_layer = _made(te.TransformerLayer, H, F, 4, hidden_dropout=0.0, **_PLAIN)
_row, _column = (_made(te.Linear, H, F, parallel_mode=mode) for mode in ("row", "column"))
_norm_linear = _made(te.LayerNormLinear, H, F, parallel_mode="column")
_attention = _made(te.MultiheadAttention, H, 4, num_gqa_groups=2, **_PLAIN)


#: What is made, the option that rank 1 alone has, and what the error says of it.
MODULES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (_mlp, {"activation": "relu"}, "activation: 'gelu' on rank 0, 'relu' on rank 1"),
    (_mlp, {"normalization": "RMSNorm"}, "norm kind: 'LayerNorm' on rank 0, 'RMSNorm' on rank 1"),
    (_mlp, {"eps": 1e-3}, "norm epsilon: 1e-05 on rank 0, 0.001 on rank 1"),
    (_mlp, {"zero_centered_gamma": True}, "norm zero_centered: False on rank 0, True on rank 1"),
    (_mlp, {"bias": False}, r"fc1_bias: \(48,\) on rank 0, none on rank 1"),
    (_mlp, {"return_bias": True}, r"fc2_bias: \(64,\) on rank 0, none on rank 1"),
    (_mlp, {"checkpoint": True}, "checkpoint: False on rank 0, True on rank 1"),
    (_norm_linear, {"eps": 1e-3}, "norm epsilon: 1e-05 on rank 0, 0.001 on rank 1"),
    (_row, {"bias": False}, r"bias: \(96,\) on rank 0, none on rank 1"),
    (_column, {"bias": False}, r"bias: \(48,\) on rank 0, none on rank 1"),
    (_attention, {"qkv_weight_interleaved": False}, "qkv_weight_interleaved: True on rank 0, False on rank 1"),
    (_attention, {"rotary_pos_interleaved": True}, "rotary_pos_interleaved: False on rank 0, True on rank 1"),
    (_attention, {"attn_mask_type": "no_mask"}, "attn_mask_type: 'causal' on rank 0, 'no_mask' on rank 1"),
    (_attention, {"window_size": (4, 0)}, r"window_size: none on rank 0, \(4, 0\) on rank 1"),
    (_attention, {"softmax_type": "off-by-one"}, "softmax_type: 'vanilla' on rank 0, 'off-by-one' on rank 1"),
    (_attention, {"qk_norm_type": "L2Normalization"}, "qk_norm_type: none on rank 0, 'L2Normalization' on rank 1"),
    (_layer, {"self_attn_mask_type": "no_mask"}, "self_attn_mask_type: 'causal' on rank 0, 'no_mask' on rank 1"),
    (_layer, {"hidden_dropout": 0.1}, "hidden_dropout: 0.0 on rank 0, 0.1 on rank 1"),
    (_layer, {"parallel_attention_mlp": True}, "parallel_attention_mlp: False on rank 0, True on rank 1"),
    (_layer, {"drop_path_rate": 0.1}, "drop_path_rate: 0.0 on rank 0, 0.1 on rank 1"),
    (_layer, {"output_layernorm": True}, "output_layernorm: False on rank 0, True on rank 1"),
]


def _x(rank: Rank, module: Any) -> torch.Tensor:
    width = module.in_features if isinstance(module, te.Linear) else H
    return torch.randn(ROWS, 2, width, device=rank.device)


#: What differs, the recipe of each rank, and what the error says of it.
RECIPES: list[tuple[str, tuple[Any, Any], str]] = [
    ("powers of two", (Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True)),
     r"input power_of_two \(use_power_2_scales\): False on rank 0, True on rank 1"),
    ("float scales", (Float8BlockScaling(), Float8BlockScaling(use_f32_scales=True)),
     r"input power_of_two \(use_power_2_scales\): True on rank 0, False on rank 1"),
    ("transform", (NVFP4BlockScaling(), NVFP4BlockScaling(disable_rht=True)),
     r"transform \(disable_rht\): True on rank 0, False on rank 1"),
    ("rounding", (NVFP4BlockScaling(), NVFP4BlockScaling(disable_stochastic_rounding=True)),
     r"stochastic \(disable_stochastic_rounding\): True on rank 0, False on rank 1"),
    ("tiles", (NVFP4BlockScaling(), NVFP4BlockScaling(disable_2d_quantization=True)),
     r"tiled \(scaling of dimension 2\): True on rank 0, False on rank 1"),
    ("margin", (DelayedScaling(), DelayedScaling(margin=1)), "history margin: 0 on rank 0, 1 on rank 1"),
    ("history", (DelayedScaling(), DelayedScaling(amax_history_len=4)), "history length: 1024 on rank 0, 4 on rank 1"),
]  # fmt: skip


def _said(rank: Rank, call: Callable[[], Any], wanted: str) -> None:
    said = error_of(call)
    assert said.startswith("ArgumentError") and re.search(wanted, said), f"{wanted!r} is not said in {said[:600]!r}"
    assert alike(said.partition(": got ")[2])


@by_ranks("two", group_timeout=60)
def test_options_of_modules(rank: Rank) -> None:
    """Each of them would have made rows that are wrong on every rank."""
    for make, more, wanted in MODULES:
        module = make(rank, **(more if rank.number else {}))
        _said(rank, lambda module=module: module(_x(rank, module)), wanted)  # type: ignore[misc]


@by_ranks("pair", group_timeout=60)
def test_options_of_recipes(rank: Rank) -> None:
    for _, pair, wanted in RECIPES:
        module = _row(rank)

        def forward(module: Any = module, recipe: Any = pair[rank.number]) -> None:
            with te.autocast(recipe=recipe):
                module(_x(rank, module))

        _said(rank, forward, wanted)


@by_ranks("pair", group_timeout=60)
def test_what_a_call_says(rank: Rank) -> None:
    """The mask and the window of a call are compared when they come for the first time, and not again."""
    module = _attention(rank)
    core = te.DotProductAttention(4, 16, **{k: v for k, v in options(rank).items() if k != "sequence_parallel"})
    x = _x(rank, module)
    q = torch.randn(ROWS, 2, 2, 16, device=rank.device)
    module(x), core(q, q, q), module(x, attn_mask_type="no_mask")
    with patch.object(dist, "all_to_all_single", side_effect=AssertionError("compared again")):
        module(x, attn_mask_type="no_mask"), module(x), module(x[:16])
    # Both come to something new: they compare, and see that it is not the same.
    window, mask = (4, 0) if rank.number else (8, 0), "no_mask" if rank.number else "causal_bottom_right"
    _said(rank, lambda: module(x, window_size=window), "DotProductAttention.*left: 8 on rank 0, 4 on rank 1")
    other = "attn_mask_type: 'causal_bottom_right' on rank 0, 'no_mask' on rank 1"
    _said(rank, lambda: core(q, q, q, attn_mask_type=mask), other)


@more_without_gpu
@by_ranks("two", group_timeout=60)
def test_a_compiled_module(rank: Rank) -> None:
    """Its attention is compared when it is traced."""
    module, x = torch.compile(_attention(rank), backend="eager"), torch.randn(ROWS, 2, H, device=rank.device)
    module(x)
    mask = "no_mask" if rank.number else "causal_bottom_right"
    says(error_of(lambda: module(x, attn_mask_type=mask)), "'causal_bottom_right' on rank 0, 'no_mask' on rank 1")


def _others(spec: Any) -> Iterator[tuple[str, Any]]:
    """The spec with one of its values changed, for each that a rank may not have for itself; by the value's place."""
    names = spec._fields if hasattr(spec, "_fields") else [f.name for f in fields(spec) if f.compare and f.init]
    for name in names:
        value = getattr(spec, name)
        if name in _OWN or name == "inspect" or (name == "bias" and isinstance(spec, Needs)):
            continue
        if name == "turned":  # refused over ranks
            continue
        changed: list[tuple[str, Any]] = []
        if is_dataclass(value) or hasattr(value, "_fields"):
            changed = [(f"{name}.{where}", other) for where, other in _others(value)]
        elif isinstance(value, bool):
            changed = [(name, not value)]
        elif isinstance(value, (int, float, str)):
            changed = [(name, value * 2 or 1)]
        elif name.endswith("dtype"):
            changed = [(name, dtypes.float16)]
        elif value is None:
            changed = [(name, _another)]
        for where, other in changed:
            yield where, spec._replace(**{name: other}) if hasattr(spec, "_replace") else replace(spec, **{name: other})


def _another() -> None:
    """A value where there is none."""


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), DelayedScaling(fp8_dpa=True)], ids=lambda r: type(r).__name__)
def test_every_value_of_a_spec_is_compared(recipe: Any) -> None:
    """One that is added to a recipe or a layer, too."""
    linear = LinearSpec(dtypes.bfloat16, resolve(recipe), Needs(True, True, True), parallel=Split("column", 2, True))
    spec = MLPSpec(linear, linear, NormSpec(dtypes.bfloat16, "LayerNorm", 1e-5), "clamped_swiglu", clamp=Clamp())
    others = list(_others(spec))
    assert len(others) > 100 and not [where for where, other in others if dict(facts_of(other)) == dict(facts_of(spec))]


def test_words_are_those_of_all_ranks() -> None:
    """No address gets into them, and equal values are said alike."""
    assert words(lambda: 0) == words(words).replace("te_core.layers.meeting.words", words(lambda: 0))
    assert "0x" not in words(object()) + words([object(), print]) and words([1, 2]) == words((1, 2)) == "(1, 2)"
    assert words(True) == "True" and words(1.0) == "1.0" and words(None) == "none"


@pytest.mark.parametrize("world", [2, 4])
def test_a_difference_names_ranks(world: int) -> None:
    facts = [{"layer": "Linear", "alike": "1", "bias": "none" if rank == 1 else "(8,)"} for rank in range(world)]
    said = str(disagreement("tensor parallelism", facts))
    ranks = "rank 0" if world == 2 else "ranks 0, 2, 3"
    assert f"bias: (8,) on {ranks}, none on rank 1" in said and "alike" not in said.partition(" Allowed")[0]
