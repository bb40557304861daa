"""`DisableQuantizationLayer`: layers that stay in high precision."""

from __future__ import annotations

from typing import Any

from te_torch.debug.features.api import Switching


class DisableQuantizationLayer(Switching):
    """All GEMMs of a layer run in high precision. It has no key but `enabled`."""

    keys = frozenset(("enabled",))

    def parse_config_and_api(self, config: dict[str, Any], **kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
        """Every GEMM is meant."""
        self._check(config)
        return True, None
