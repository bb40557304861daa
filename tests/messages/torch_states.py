"""Rows of messages of states, quantized tensors and what holds them; tests/messages/test_messages.py says how to add
one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import te_torch as te
import te_torch.tensors as T
from te_core.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from te_torch.base.checkpoint_state import plain_state_dict, prepare_state
from te_torch.base.extra_state import read_extra_state
from te_torch.training.graphs.make import restore_fp8_tensors
from tests.messages.rows import Rows

ROWS = Rows()
E4M3, DELAYED, CURRENT = T.DType.kFloat8E4M3, DelayedScaling(), Float8CurrentScaling()
LINEAR = te.Linear(16, 16, device="cpu", name="linear")

ROWS.add(te.autocast, recipe="delayed")
ROWS["prepare_state(recipe='delayed')"] = lambda: prepare_state(LINEAR, "delayed")  # type: ignore[arg-type]
ROWS["prepare_state of a module on meta"] = lambda: prepare_state(te.Linear(16, 16, device="meta"), DELAYED)
ROWS["plain_state_dict(dtype=torch.int8)"] = lambda: plain_state_dict(LINEAR, torch.int8)
ROWS["restore_fp8_tensors of too few states"] = lambda: restore_fp8_tensors([LINEAR], [])


def with_history() -> Any:
    """A module that has scales."""
    module = te.Linear(16, 16, device="cpu")
    prepare_state(module, DELAYED)
    return module


ROWS["adjust_amax_history_length(0)"] = lambda: with_history().adjust_amax_history_length(0)

# ------------------------------------------------------------------------------------------------- quantizers

ROWS.add(T.NVFP4Quantizer, nvfp4_use_4over6=True, nvfp4_e4m3_max=300)
ROWS.add(T.NVFP4Quantizer, nvfp4_4over6_err_mode="RMS")
ROWS.add(T.NVFP4Quantizer, nvfp4_use_4over6=True, with_rht=True)
ROWS.add(T.MXFP8Quantizer, T.DType.kFloat16)
ROWS.add(T.Float8CurrentScalingQuantizer, E4M3, "cpu", use_existing_amax=True)


def hybrid(row: Any, column: Any, **options: Any) -> Any:
    """A quantizer of two formats."""
    return T.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column, **options)


MXFP8 = T.MXFP8Quantizer(E4M3)
ROWS["HybridQuantizer of one quantizer twice"] = lambda: hybrid(MXFP8, MXFP8)
ROWS["HybridQuantizer(columnwise_source='x')"] = lambda: hybrid(MXFP8, T.IdentityQuantizer(), columnwise_source="x")
ROWS["HybridQuantizer of a request"] = lambda: hybrid(T.DelayedScalingRequest(), MXFP8)


def factory(made: Any) -> None:
    """A module in a custom recipe whose factory gives this."""
    with te.autocast(recipe=CustomRecipe(qfactory=lambda role: made)):
        LINEAR(torch.ones(4, 16))


ROWS.add(factory, None)
ROWS["factory of a recipe"] = lambda: factory(CURRENT)
ROWS["factory of a Float8Quantizer"] = lambda: factory(T.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3))

# ------------------------------------------------------------------------------------------------- held quantized


def held(kind: str, *sizes: int, recipe: Any = CURRENT, **options: Any) -> Any:
    """A layer whose weights are held quantized."""
    with te.quantized_model_init(recipe=recipe):
        return getattr(te, kind)(*sizes, device="cpu", **options)


for kind in ("Linear", "LayerNormLinear"):
    ROWS.add(held, kind, 32, 48, parameters_split=("a", "b"))
for kind, sizes, more in (
    ("TransformerLayer", (32, 64, 2), {}),
    ("TransformerLayer", (32, 64, 2), {"layer_type": "decoder"}),
    ("MultiheadAttention", (32, 2), {}),
    ("MultiheadAttention", (32, 2), {"input_layernorm": True}),
    ("MultiheadAttention", (32, 2), {"attention_type": "cross"}),
):
    ROWS.add(held, kind, *sizes, **more)


def ran(module: Any, recipe: Any, **options: Any) -> Any:
    """What a layer gives in this recipe."""
    with te.autocast(recipe=recipe):
        return module(torch.ones(32, 32), **options)


for kind in ("Linear", "LayerNormLinear", "LayerNormMLP"):
    ROWS[f"{kind} held for delayed scaling, in current scaling"] = lambda kind=kind: ran(
        held(kind, 32, 48, recipe=DELAYED), CURRENT
    )
ROWS["Linear held for current scaling, outside of autocast"] = lambda: held("Linear", 32, 48)(torch.ones(4, 32))


def turned(name: str, *rest: Any, **options: Any) -> None:
    """Rotary embeddings of what a Linear has quantized."""
    heads: Any = ran(te.Linear(32, 96, device="cpu"), DELAYED, fp8_output=True).view(16, 2, 3, 32)
    angles = te.RotaryPositionEmbedding(32).cpu()(16)
    given = [angles] if name == "apply_rotary_pos_emb" else [angles[..., :8].contiguous()] * 2
    getattr(te.attention.rope, name)(heads, *given, *rest, **options)


ROWS.each(turned, "apply_rotary_pos_emb", fused=(True, False))
ROWS.add(turned, "apply_fused_qkv_rotary_pos_emb", [16, 8, 8])


def columns_alone() -> None:
    """A Linear reads what has no rowwise copy."""
    quantizer = T.NVFP4Quantizer(rowwise=False, columnwise=True)
    with te.autocast(recipe=NVFP4BlockScaling(), emulate=True):
        te.Linear(32, 32, device="cpu", name="linear")(quantizer(torch.ones(32, 32)))


ROWS["Linear of a columnwise copy alone"] = columns_alone

# ------------------------------------------------------------------------------------------------- _extra_state

for value in ({}, "text", 3, np.zeros(4, np.uint8), torch.ones(4), torch.ones(2, 2, dtype=torch.uint8)):
    ROWS.add(read_extra_state, value)
