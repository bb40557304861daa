"""`DisableQuantizationLayer`: layers that stay in high precision."""

from __future__ import annotations

from typing import Any

from te_torch.debug.features.api import Switching


class DisableQuantizationLayer(Switching):
    """All GEMMs of a layer run in high precision. It has no key but `enabled`."""

    def parse_config_and_api(self, config: dict[str, Any], **kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
        """Every GEMM is meant."""
        for name in config:
            if name != "enabled":
                raise ValueError(f"{type(self).__name__} has no key {name!r}. Allowed: enabled.")
        return True, None
