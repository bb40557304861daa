"""What a layer cannot do while a feature touches it, and does where none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests.debug.conftest import config

STATS: dict[str, Any] = {"LogTensorStats": {"stats": ["max"], "tensors": ["activation"]}}
BF16: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}


def step(layer: Any, region: dict[str, Any] | None = None, **options: Any) -> None:
    with te.autocast(**(region or {"recipe": DelayedScaling()})):
        layer(torch.randn(32, 32).bfloat16(), **options)


@pytest.mark.parametrize("touched", [True, False])
@pytest.mark.parametrize(
    ("made", "called", "error", "says"),
    [
        ({"delay_wgrad_compute": True}, {}, RuntimeError, "delay_wgrad_compute"),
        (
            {},
            {"region": {"enabled": False, "calibrating": True, "recipe": DelayedScaling()}},
            RuntimeError,
            "calibrates",
        ),
        ({}, {"fp8_output": True}, AssertionError, "fp8_output"),
    ],
)
def test_refused(debugging: Any, touched: bool, made: Any, called: Any, error: Any, says: str) -> None:
    debugging(config({"layer_types": ["layer" if touched else "nobody"]}, **STATS))
    layer = te.Linear(32, 32, name="layer", **made, **BF16)
    if touched:
        with pytest.raises(error, match=says):
            step(layer, **called)
    else:
        step(layer, **called)


@pytest.mark.parametrize(
    ("features", "error", "says"),
    [
        ({"DisableQuantizationGEMM": {"gemms": ["sprop"]}}, AssertionError, "sprop"),
        ({"DisableQuantizationGEMM": {"gemms": ["fprop"], "tensors": ["weight"]}}, ValueError, "tensors"),
        ({"DisableQuantizationLayer": {"gemms": ["fprop"]}}, ValueError, "gemms"),
        ({"DisableQuantizationGEMM": {}}, ValueError, "gemms_struct"),
        ({"FakeQuant": {"gemms": ["fprop"], "tensors": ["weight"]}}, ValueError, "quant_format"),
        ({"FakeQuant": {"gemms": ["fprop"], "tensors": ["weight"], "x": 1}}, ValueError, "x"),
        ({"LogTensorStats": {"stats": ["median"], "tensors": ["weight"]}}, AssertionError, "median"),
        ({"LogFp8TensorStats": {"stats": ["median"], "tensors": ["weight"]}}, ValueError, "median"),
        ({"PerTensorScaling": {"gemms": ["fprop"], "tensors": ["weight"]}}, AssertionError, "DelayedScaling"),
        ({"LogFp8TensorStats": {"stats": ["fp8_delayed_scaling_mse"], "tensors": ["weight"]}}, ValueError, "history"),
        *[
            ({feature: {"tensors": ["weight"], "frequency": 2}}, ValueError, "no key 'frequency'.*freq,")
            for feature in ("LogTensorStats", "LogFp8TensorStats", "LogFp8Stats", "LogNvfp4TensorStats", "DumpTensors")
        ],
        (
            {"LogTensorStats": {"stats": ["max"], "tensors": ["activations"]}},
            ValueError,
            "no 'activations'.*activation,",
        ),
        ({"LogTensorStats": {"stats": ["max"], "tensors": "weights"}}, ValueError, "no 'weights'"),
        ({"LogTensorStats": {"tensors": ["weight"]}}, ValueError, "LogTensorStats without stats"),
        ({"LogTensorStats": {"tensors_struct": [{"tensor": "x", "stats": ["max"]}]}}, ValueError, "no 'x'"),
        ({"LogTensorStats": {"tensors_struct": [{"tensor": "weight", "stat": []}]}}, ValueError, "no key 'stat'"),
        ({"LogTensorStats": {"stats": ["max"], "tensors_struct": ["weight"]}}, ValueError, "lists of mappings"),
        ({"LogTensorStats": {"stats": ["max"], "tensors": ["weight"], "start_step": "a"}}, ValueError, "start_step"),
        ({"PerTensorScaling": {"gemms": ["fprop"], "tensors": ["weight"], "margin": 1}}, ValueError, "no key 'margin'"),
        ({"FakeQuant": {"gemms_struct": [{"gemm": "fprop", "tensors": ["w"]}]}}, ValueError, "no 'w'"),
    ],
)
def test_wrong_configurations(debugging: Any, features: Any, error: Any, says: str) -> None:
    debugging(config(**features))
    with pytest.raises(error, match=says):
        step(te.Linear(32, 32, name="layer", **BF16), {"recipe": Float8CurrentScaling()})


def test_attention_is_handed_quantized_tensors(debugging: Any) -> None:
    """That a module around the layer asks for: the step is the one without features, bit for bit."""
    found = []
    for features in (False, True):
        if features:
            session = debugging(config(LogTensorStats={"stats": ["max"], "tensors": ["qkv", "output", "do"]}))
        torch.manual_seed(0)
        layer = te.TransformerLayer(64, 128, 2, name="t", hidden_dropout=0.0, attention_dropout=0.0, **BF16)
        x = torch.randn(32, 2, 64).bfloat16().requires_grad_()
        for _ in range(2):
            with te.autocast(recipe=DelayedScaling(fp8_dpa=True, fp8_mha=True)):
                out = layer(x)
            out.float().square().sum().backward()
        found.append((out.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    session.step()
    assert ("t.self_attention.core_attention_qkv_max", 0) in session.statistics()


def test_names_of_the_documented_classes() -> None:
    import te_torch.compat

    te_torch.compat.install()
    try:
        from transformer_engine.debug.pytorch.debug_quantization import DebugQuantizedTensor, DebugQuantizer
    finally:
        te_torch.compat.uninstall()
    x = torch.randn(16, 16)
    quantizer = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, "cpu")
    for made, like in ((quantizer, quantizer.quantize(x).dequantize()), (None, x)):
        tensor = DebugQuantizer("layer", "activation", made).quantize(x)
        assert isinstance(tensor, DebugQuantizedTensor)
        got = tensor.get_tensor(transpose=False)
        assert torch.equal(got if made is None else got.dequantize(), like)


def test_inspect_beside_features(debugging: Any) -> None:
    """Of other layers; of one that features touch it would hide what they do."""
    debugging(config({"layer_types": ["touched"]}, **STATS))
    touched, free = (torch.nn.Sequential(te.Linear(32, 32, name=name, **BF16)) for name in ("touched", "free"))
    with te.debug.inspect(free) as seen:
        step(free)
    assert seen.report().series
    with pytest.raises(RuntimeError, match=r"feature.*touches \(touched\).*end_debug"), te.debug.inspect(touched):
        pass
    both = torch.nn.Sequential(*free, *touched)
    with pytest.raises(RuntimeError, match="touches"), te.debug.inspect(both):
        pass
    assert not isinstance(free[0].inspector, tuple), "nothing stays behind"
    step(both)
    assert touched[0].inspector is not None
