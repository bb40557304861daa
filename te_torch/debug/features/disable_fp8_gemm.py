"""`DisableFP8GEMM`: the older name of `DisableQuantizationGEMM`."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.registry import api_method

from te_torch.debug.features.disable_quantization_gemm import DisableQuantizationGEMM
from te_torch.runtime import deprecated


class DisableFP8GEMM(DisableQuantizationGEMM):
    """The older name of DisableQuantizationGEMM."""

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """As under the newer name."""
        deprecated("DisableFP8GEMM", "DisableQuantizationGEMM")
        return super().fp8_gemm_enabled(config, layer_name, gemm, iteration)
