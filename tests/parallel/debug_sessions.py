"""nvdlfw_inspect on a rank: a session with some features, and what it writes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

FEATURE = '''
from nvdlfw_inspect.registry import Registry, api_method
from te_torch.debug.features.api import TEConfigAPIMapper


@Registry.register_feature(namespace="transformer_engine")
class Same(TEConfigAPIMapper):
    """Quantizes as the layer would have."""

    @api_method
    def modify_tensor_enabled(self, config, layer_name, gemm, tensor_name, iteration):
        return True, iteration + 1

    @api_method
    def modify_tensor(self, config, layer_name, gemm, tensor_name, tensor, default_quantizer, iteration, **others):
        return tensor if default_quantizer is None else default_quantizer(tensor)

    @api_method
    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return True, iteration + 1

    @api_method
    def inspect_tensor(self, config, layer_name, tensor_name, iteration, tp_group, tensor, tp_size=1):
        seen.append((tensor_name, tp_group, tp_size, tuple(tensor.shape)))


seen = []
'''


class Session:
    """With these features, if any; `seen` has what is written, by name and iteration."""

    def __init__(self, chosen: dict[str, Any]) -> None:
        self.chosen, self.seen = chosen, {}

    def __enter__(self) -> Session:
        from nvdlfw_inspect import api

        from tests.debug.conftest import FEATURES, config

        folder = tempfile.mkdtemp()
        Path(folder, "same.py").write_text(FEATURE)
        if self.chosen:
            api.initialize(config(**self.chosen), [str(FEATURES), folder], log_dir=folder, tb_writer=self)
        return self

    def step(self) -> None:
        """The iteration is over."""
        from nvdlfw_inspect import api

        if self.chosen:
            api.step()

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.seen[name, iteration] = value

    def __exit__(self, *error: object) -> None:
        from nvdlfw_inspect import api

        api.end_debug()
