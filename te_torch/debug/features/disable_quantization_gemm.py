"""`DisableQuantizationGEMM`: GEMMs that stay in high precision."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.registry import api_method

from te_torch.debug.features.api import TEConfigAPIMapper


class DisableQuantizationGEMM(TEConfigAPIMapper):
    """These GEMMs of a layer run in high precision.

    gemms, gemms_struct:  fprop, dgrad, wgrad
    """

    @api_method
    def fp8_gemm_enabled(
        self, config: dict[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Not those that are configured."""
        return False, None

    def parse_config_and_api(self, config: dict[str, Any], **kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
        """Only GEMMs can be named."""
        for name in config:
            if name not in ("enabled", "gemms", "gemms_struct"):
                raise ValueError(f"{type(self).__name__} has no key {name!r}. Allowed: enabled, gemms, gemms_struct.")
        return super().parse_config_and_api(config, **kwargs)
