"""Registers the namespace `transformer_engine` and its features with nvdlfw_inspect."""

from __future__ import annotations

from nvdlfw_inspect.registry import Registry

from te_torch.debug import selection
from te_torch.debug.features import (
    disable_fp8_gemm,
    disable_fp8_layer,
    disable_quantization_gemm,
    disable_quantization_layer,
    dump_tensors,
    fake_quant,
    log_fp8_tensor_stats,
    log_nvfp4_tensor_stats,
    log_tensor_stats,
    per_tensor_scaling,
    test_dummy_feature,
)
from te_torch.debug.features.api import TransformerEngineAPI

NAMESPACE = "transformer_engine"
FEATURES = (
    log_tensor_stats.LogTensorStats,
    log_fp8_tensor_stats.LogFp8TensorStats,
    log_fp8_tensor_stats.LogFp8Stats,
    log_nvfp4_tensor_stats.LogNvfp4TensorStats,
    disable_quantization_gemm.DisableQuantizationGEMM,
    disable_quantization_layer.DisableQuantizationLayer,
    disable_fp8_gemm.DisableFP8GEMM,
    disable_fp8_layer.DisableFP8Layer,
    per_tensor_scaling.PerTensorScaling,
    fake_quant.FakeQuant,
    dump_tensors.DumpTensors,
    test_dummy_feature.TestDummyFeature,
)


def register() -> None:
    """Once for each `initialize`: what is registered already stays."""
    selection.adapt()
    known = Registry.data.get(NAMESPACE)
    if known is None or known.api is None:
        Registry.register_namespace_api(namespace=NAMESPACE)(TransformerEngineAPI)
    for feature in FEATURES:
        Registry.register_feature(namespace=NAMESPACE)(feature)
