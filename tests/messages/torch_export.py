"""Rows of messages of `onnx_export`; tests/messages/test_messages.py says how to add one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import te_torch as te
from te_core.layers.inspector import Inspector
from te_core.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from te_torch.training.export import assert_warmed_up
from tests.export_cases import exporting, region
from tests.messages.rows import Rows

ROWS = Rows()


def looking(tensor: str) -> Inspector:
    """Looks at an input."""
    return type("Looking", (Inspector,), {"request": frozenset({("fprop", tensor)})})()  # type: ignore[no-any-return]


def linear(recipe: Any, options: dict[str, Any] | None = None, **changes: Any) -> Callable[[], None]:
    """A Linear in the mode."""

    def run() -> None:
        module = te.Linear(64, 64, device="cpu", name="linear").eval()
        module.__dict__.update(changes)
        with exporting(recipe):
            module(torch.ones(32, 64), **(options or {}))

    return run


CUSTOM = CustomRecipe(qfactory=lambda role: None, fp8_dpa=True)
ROWS["onnx_export: block scaling"] = linear(Float8BlockScaling())
ROWS["onnx_export: nvfp4"] = linear(NVFP4BlockScaling())
ROWS["onnx_export: a custom recipe"] = linear(CUSTOM)
ROWS["onnx_export: an inspector"] = linear(None, inspector=looking("activation"))
ROWS["onnx_export: a layer that has not run"] = linear(DelayedScaling())
ROWS["onnx_export: fp8_output"] = linear(Float8CurrentScaling(), {"fp8_output": True})
ROWS["onnx_export(1)"] = lambda: te.onnx_export(1).__enter__()  # type: ignore[arg-type]
ROWS["assert_warmed_up of a layer that has not run"] = lambda: assert_warmed_up(te.Linear(8, 8, device="cpu", name="a"))


def grouped() -> None:
    """Groups whose sizes are in a tensor."""
    with exporting(None):
        te.GroupedLinear(2, 64, 64, device="cpu", name="groups")(torch.ones(8, 64), torch.tensor([4, 4]))


ROWS["onnx_export: m_splits in a tensor"] = grouped


def experts() -> None:
    """A layer of experts."""
    with exporting(None):
        te.MoELayer(16, 8, 4, 2, device="cpu")(torch.ones(3, 16))


ROWS["onnx_export: experts"] = experts


def attend(recipe: Any, warm: bool = False, change: Any = None, options: Any = None, **call: Any) -> Callable[[], None]:
    """Attention in the mode, behind a call outside of it where it is warm."""

    def run() -> None:
        q = torch.ones(6, 2, 4, 16)
        made = te.DotProductAttention(4, 16, name="attention", **(options or {})).train(bool(options))
        if warm:
            with torch.no_grad(), region(recipe):
                made(q, q, q)
        if change is not None:
            made.inspector = change
        with exporting(recipe):
            made(q, q, q, **call)

    return run


DELAYED, CURRENT = DelayedScaling(fp8_dpa=True), Float8CurrentScaling(fp8_dpa=True)
CACHED = {"attn_mask_type": "padding_causal"}
STILL = {"attention_dropout": 0.0}
ROWS["onnx_export: dropout"] = attend(None, options={"attention_dropout": 0.1})
ROWS["onnx_export: a cache"] = attend(None, options=CACHED | STILL, inference_params=te.InferenceParams(2, 8))
ROWS["onnx_export: attention in mxfp8"] = attend(MXFP8BlockScaling(fp8_dpa=True))
ROWS["onnx_export: a learnable softmax in FP8"] = attend(DELAYED, options=STILL | {"softmax_type": "learnable"})
ROWS["onnx_export: the largest logit"] = attend(CURRENT, options=STILL | {"return_max_logit": True})
ROWS["onnx_export: attention that has not run"] = attend(CURRENT)
ROWS["onnx_export: fp8_output of attention alone"] = attend(DELAYED, True, fp8_output=True)
ROWS["onnx_export: an inspector of attention"] = attend(DELAYED, True, looking("q"))
ROWS["onnx_export: attention in a custom recipe"] = attend(CUSTOM)
