"""`DisableFP8Layer`: the older name of `DisableQuantizationLayer`."""

from __future__ import annotations

import warnings
from typing import Any

from nvdlfw_inspect.registry import api_method

from te_torch.debug.features.disable_quantization_layer import DisableQuantizationLayer


class DisableFP8Layer(DisableQuantizationLayer):
    """The older name of DisableQuantizationLayer."""

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """As under the newer name."""
        warnings.warn("DisableFP8Layer is the older name of DisableQuantizationLayer", DeprecationWarning, stacklevel=2)
        return super().fp8_gemm_enabled(config, layer_name, gemm, iteration)
