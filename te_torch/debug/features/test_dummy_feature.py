"""`TestDummyFeature`: looks at every tensor and does nothing, for tests of the routing."""

from __future__ import annotations

from typing import Any

from nvdlfw_inspect.registry import api_method

from te_torch.debug.features.api import TEConfigAPIMapper


class TestDummyFeature(TEConfigAPIMapper):
    """Looks at tensors and does nothing.

    inspect_only_once:  whether one iteration is enough
    """

    __test__ = False  # its name is a test's, for pytest

    @api_method
    def inspect_tensor_enabled(
        self, config: dict[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Always, or in the first iteration."""
        return (iteration == 0, None) if config.get("inspect_only_once") else (True, iteration + 1)

    @api_method
    def inspect_tensor(self, config: dict[str, Any], layer_name: str, **kwargs: Any) -> None:
        """Nothing."""
