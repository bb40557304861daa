"""Attention in FP8 in exported files, run by onnxruntime on the CPU beside the modules."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.covering import covering
from tests.export_cases import ATTENTION, FP8_ATTENTION, PRODUCTS, alike_in_fp8, eager, made
from tests.onnx.test_onnx import CALLS, export, run

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]


def check(name: str, kind: str, path: Path, **options: Any) -> Any:
    recipe = FP8_ATTENTION[kind]
    module, args, named = made(ATTENTION[name], recipe)
    export(module, args, named, recipe, path, **options)
    for value, reference in zip(run(path, args, named), eager(module, recipe, args, named), strict=True):
        alike_in_fp8(value, reference)
    return module


#: Which other tests here export, or whose nodes are those of others.
SEEN_ELSEWHERE = ("TransformerLayer", "window", "no_mask", "cross", "padding_causal", "MultiheadAttention", "padding")
KINDS = list(FP8_ATTENTION)
OFTEN = {(name, KINDS[i % len(KINDS)]) for i, name in enumerate(ATTENTION) if name not in SEEN_ELSEWHERE}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*case, marks=[] if case in OFTEN else [pytest.mark.full])
        for case in itertools.product(ATTENTION, KINDS)
    ],
)
def test_modules(name: str, kind: str, tmp_path: Path) -> None:
    check(name, kind, tmp_path / "m.onnx")


@covering(call={**CALLS, "dynamo": {"dynamo": True}}, name=["TransformerLayer", "padding"], kind=FP8_ATTENTION)
def test_however_the_exporter_is_called(call: str, name: str, kind: str, tmp_path: Path) -> None:
    check(name, kind, tmp_path / "m.onnx", **CALLS.get(call, {"dynamo": True}))


mostly_full = pytest.mark.parametrize(
    "kind", ["delayed mha", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("delayed", "current"))]
)


@mostly_full
def test_as_the_emulation(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    for name in ("DotProductAttention", "MultiheadAttention", "padding"):
        check(name, kind, tmp_path / f"{name}.onnx")


@mostly_full
def test_batch_and_length_stay_open(kind: str, tmp_path: Path) -> None:
    recipe = FP8_ATTENTION[kind]
    for name, wider in (("TransformerLayer with GQA", ()), ("padding", (torch.zeros(3, 1, 1, 9).bool(),))):
        module, args, _ = made(ATTENTION[name], recipe)
        path = tmp_path / f"{len(args)}.onnx"
        export(module, args, {}, recipe, path, dynamic_shapes=({0: "s", 1: "b"}, {0: "b", 3: "s"})[: len(args)])
        inputs = (torch.randn(9, 3, 64), *wider)
        alike_in_fp8(run(path, inputs, {})[0], eager(module, recipe, inputs, {})[0])


@pytest.mark.parametrize("kind", ["delayed", "delayed mha"])
def test_the_scales_of_each_part_stand_in_the_file(kind: str, tmp_path: Path) -> None:
    """In pairs of standard operators: q, k and v by attention's scale, or, handed over, by the projection's."""
    import onnx
    from onnx import numpy_helper

    recipe = FP8_ATTENTION[kind]
    module, args, named = made(PRODUCTS["MultiheadAttention"], recipe)
    export(module, args, named, recipe, tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version >= 19) for o in model.opset_import] == [("", True)]
    kept = {t.name: t for t in model.graph.initializer}
    pairs = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    found = sorted(float(numpy_helper.to_array(kept[n.input[1]])) for n in pairs)
    first, core, last = (p.fp8_state.scale_fwd for p in (module.layernorm_qkv, module.core_attention, module.proj))
    qkv = first[2] if kind == "delayed mha" else core[2]
    scales = torch.stack([first[0], first[1], qkv, core[8], core[3], last[1]])
    np.testing.assert_allclose(found, sorted((1 / scales).tolist()), rtol=1e-6)
    assert sum(n.op_type == "DequantizeLinear" for n in model.graph.node) == len(pairs)
