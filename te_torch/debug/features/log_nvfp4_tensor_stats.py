"""`LogNvfp4TensorStats`: what NVFP4 makes of a tensor."""

from __future__ import annotations

from typing import Any

from te_torch.debug.features.api import SELECTORS, Looking, Seen
from te_torch.debug.features.log_fp8_tensor_stats import FORMULAS as OF_CASTS
from te_torch.debug.features.log_fp8_tensor_stats import core_tensor, held_copy
from te_torch.debug.schedule import KEYS
from te_torch.debug.stats import STATS_BUFFERS

FORMULAS = {name: OF_CASTS[name] for name in ("underflows%", "mse", "snr_db")}


class LogNvfp4TensorStats(Looking):
    """Logs what NVFP4 makes of tensors; names are written with nvfp4_ before them.

    stats:      underflows%, mse, snr_db
    tensors, tensors_struct:  activation, weight, gradient
    freq, start_step, end_step, start_end_list:  in which iterations; all ends are included
    """

    keys = SELECTORS | KEYS | {"stats"}

    def _check_stats(self, stats: Any) -> None:
        for name in stats:
            if name not in FORMULAS:
                raise ValueError(f"LogNvfp4TensorStats: {name!r} is no statistic. Allowed: {', '.join(FORMULAS)}.")

    def _look(self, config: dict[str, Any], seen: Seen) -> bool:
        """Merge the tensor and its cast into a record."""
        held, tensor = held_copy(self, seen), seen.values
        if held is None:
            return False
        q = core_tensor(held)
        if q.format.scaling != "nvfp4":
            raise ValueError(f"LogNvfp4TensorStats of {seen.layer}, {seen.name}: it is {q.format}. Allowed: NVFP4.")
        where = (seen.layer, seen.name, "nvfp4")
        if tensor is not None and tensor.numel() and q.rowwise is not None and STATS_BUFFERS.expects(*where):
            formulas = {f"nvfp4_{name}": FORMULAS[name] for name in config["stats"]}
            STATS_BUFFERS.feed(where, formulas, seen.iteration, tensor, q)
        return True
