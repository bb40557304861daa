"""Registers the namespace `transformer_engine` and its features with nvdlfw_inspect."""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any

from nvdlfw_inspect import config_manager
from nvdlfw_inspect.registry import Registry

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
_SELECTORS = ("exact_layer_names", "layer_name_regex_pattern", "layer_numbers", "layer_types")
FEATURES = (
    LogTensorStats, LogFp8TensorStats, LogFp8Stats, LogNvfp4TensorStats, DisableQuantizationGEMM,
    DisableQuantizationLayer, DisableFP8GEMM, DisableFP8Layer, PerTensorScaling, FakeQuant, DumpTensors,
    TestDummyFeature,
)  # fmt: skip


def register() -> None:
    """Once for each `initialize`: what is registered already stays."""
    _adapt_selection()
    known = Registry.data.get(NAMESPACE)
    if known is None or known.api is None:
        Registry.register_namespace_api(namespace=NAMESPACE)(TransformerEngineAPI)
    for feature in FEATURES:
        Registry.register_feature(namespace=NAMESPACE)(feature)


def _adapt_selection() -> None:
    """Have sections of the configuration select layers where nvdlfw_inspect 0.2.2 has an error and no answer: once for
    a process, another time changes nothing.

    `layer_numbers: 3` is `layer_numbers: [3]`; a layer that `exact_layer_names` does not list is one that the section
    does not select. A key under `layers` that is no selector is a warning: the package does not read it.
    """
    selects, parse = config_manager.is_layer_in_cfg, config_manager.LayerSpec._parse_layer_numbers
    if hasattr(selects, "__wrapped__"):
        return

    @wraps(selects)
    def selected(layer_name: str, cfg: Any) -> bool:
        listed = cfg.layers.exact_layer_names
        return bool(selects(layer_name, cfg)) if listed is None else layer_name in listed

    @wraps(parse)
    def parsed(self: Any, numbers: Any) -> Any:
        return parse(self, [numbers] if type(numbers) is int else numbers)

    initialize = config_manager.LayerSpec.initialize

    @wraps(initialize)
    def initialized(self: Any, cfg: Any) -> None:
        for key in cfg:
            if key not in _SELECTORS:
                warnings.warn(
                    f"precision debugging: layers: {key!r} selects nothing. Allowed: {', '.join(_SELECTORS)}.",
                    stacklevel=2,
                )
        initialize(self, cfg)

    config_manager.LayerSpec.initialize = initialized
    config_manager.is_layer_in_cfg = selected
    config_manager.LayerSpec._parse_layer_numbers = parsed
