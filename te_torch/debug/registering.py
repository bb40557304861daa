"""Registers the namespace `transformer_engine` and its features with nvdlfw_inspect."""

from __future__ import annotations

from nvdlfw_inspect.registry import Registry

from te_torch.debug import selection
from te_torch.debug.features.api import TransformerEngineAPI
from te_torch.debug.features.disable_fp8_gemm import DisableFP8GEMM
from te_torch.debug.features.disable_fp8_layer import DisableFP8Layer
from te_torch.debug.features.disable_quantization_gemm import DisableQuantizationGEMM
from te_torch.debug.features.disable_quantization_layer import DisableQuantizationLayer
from te_torch.debug.features.dump_tensors import DumpTensors
from te_torch.debug.features.fake_quant import FakeQuant
from te_torch.debug.features.log_fp8_tensor_stats import LogFp8Stats, LogFp8TensorStats
from te_torch.debug.features.log_nvfp4_tensor_stats import LogNvfp4TensorStats
from te_torch.debug.features.log_tensor_stats import LogTensorStats
from te_torch.debug.features.per_tensor_scaling import PerTensorScaling
from te_torch.debug.features.test_dummy_feature import TestDummyFeature

NAMESPACE = "transformer_engine"
FEATURES = (
    LogTensorStats, LogFp8TensorStats, LogFp8Stats, LogNvfp4TensorStats, DisableQuantizationGEMM,
    DisableQuantizationLayer, DisableFP8GEMM, DisableFP8Layer, PerTensorScaling, FakeQuant, DumpTensors,
    TestDummyFeature,
)  # fmt: skip


def register() -> None:
    """Once for each `initialize`: what is registered already stays."""
    selection.adapt()
    known = Registry.data.get(NAMESPACE)
    if known is None or known.api is None:
        Registry.register_namespace_api(namespace=NAMESPACE)(TransformerEngineAPI)
    for feature in FEATURES:
        Registry.register_feature(namespace=NAMESPACE)(feature)
