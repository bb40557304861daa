"""`DumpTensors`: tensors in files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvdlfw_inspect.logging import get_logger

from te_torch.debug.features.api import SELECTORS, Looking, Seen
from te_torch.debug.schedule import KEYS


class DumpTensors(Looking):
    """Writes tensors to <log_dir>/tensor_dumps/rank_<r>/iter_<i>/<layer>_<tensor>.pt, a dictionary for torch.load.

    high_precision_tensor, quantized_tensor:  what goes into it ("high_precision", "quantized")
    tensors, tensors_struct:                  activation, weight, gradient, output, wgrad, dgrad
    freq, start_step, end_step, start_end_list:  in which iterations; all ends are included
    """

    keys = SELECTORS | KEYS | {"high_precision_tensor", "quantized_tensor"}

    def _look(self, config: dict[str, Any], seen: Seen) -> bool:
        """Write the file."""
        found = {}
        if config.get("high_precision_tensor") and seen.values is not None:
            found["high_precision"] = seen.values.detach().cpu()
        if config.get("quantized_tensor") and seen.quantized is not None:
            found["quantized"] = seen.quantized
        if not found:
            return False
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        folder = Path(get_logger().root_log_dir, "tensor_dumps", f"rank_{rank}", f"iter_{seen.iteration:06d}")
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r'[/\\:*?"<>| .]', "_", f"{seen.layer}_{seen.name}")
        torch.save(found, folder / f"{name}.pt")
        return True
