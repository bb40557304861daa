"""`DisableQuantizationGEMM`: GEMMs that stay in high precision."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.registry import api_method

from te_torch.debug.features.api import OF_GEMMS, TEConfigAPIMapper


class DisableQuantizationGEMM(TEConfigAPIMapper):
    """These GEMMs of a layer run in high precision.

    gemms, gemms_struct:  fprop, dgrad, wgrad
    """

    keys = OF_GEMMS

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Not those that are configured."""
        return False, None
