"""`DumpTensors`: tensors in files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvdlfw_inspect.logging import get_logger
from nvdlfw_inspect.registry import api_method

from te_torch.debug.features.api import SELECTORS, Looking
from te_torch.debug.schedule import KEYS


class DumpTensors(Looking):
    """Writes tensors to <log_dir>/tensor_dumps/rank_<r>/iter_<i>/<layer>_<tensor>.pt, a dictionary for torch.load.

    high_precision_tensor, quantized_tensor:  what goes into it ("high_precision", "quantized")
    tensors, tensors_struct:                  activation, weight, gradient, output, wgrad, dgrad
    freq, start_step, end_step, start_end_list:  in which iterations; all ends are included
    """

    keys = SELECTORS | KEYS | {"high_precision_tensor", "quantized_tensor"}

    @api_method
    def inspect_tensor(
        self,
        config: dict[str, Any],
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tp_group: Any,
        tensor: torch.Tensor | None,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Any = None,
    ) -> None:
        """Write the file."""
        quantized = columnwise_quantized_tensor if rowwise_quantized_tensor is None else rowwise_quantized_tensor
        found = {}
        if config.get("high_precision_tensor") and tensor is not None:
            found["high_precision"] = tensor.detach().cpu()
        if config.get("quantized_tensor") and quantized is not None:
            found["quantized"] = quantized
        if not found:
            return
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        folder = Path(get_logger().root_log_dir, "tensor_dumps", f"rank_{rank}", f"iter_{iteration:06d}")
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r'[/\\:*?"<>| .]', "_", f"{layer_name}_{tensor_name}")
        torch.save(found, folder / f"{name}.pt")
        self._say("inspect_tensor", layer_name, tensor_name)
