"""`LogTensorStats`: what the values of a tensor are like, in high precision."""

from __future__ import annotations

from typing import Any

import torch
from nvdlfw_inspect.logging import custom_assert

from te_core.statistics import Statistics
from te_torch.debug.features.api import SELECTORS, Looking, Seen
from te_torch.debug.schedule import KEYS
from te_torch.debug.stats import STATS_BUFFERS, Formula, combined_std


def _unless_nan(name: str) -> Formula:
    """Extremes leave NaN out; as a statistic of the tensor they are one then, as in torch."""
    return lambda s: float("nan") if s.nans else getattr(s, name)


FORMULAS: dict[str, Formula] = {
    "min": _unless_nan("min"),
    "max": _unless_nan("max"),
    "mean": lambda s: s.mean,
    "std": combined_std,
    "l1_norm": lambda s: s.l1_norm,
    "l2_norm": lambda s: s.l2_norm,
    "cur_amax": _unless_nan("amax"),
    "dynamic_range": lambda s: s.dynamic_range,
}
_BLOCKWISE = "max_blockwise_dynamic_range"


class LogTensorStats(Looking):
    """Logs statistics of tensors in high precision, as they are before any cast.

    stats:      min, max, mean, std, l1_norm, l2_norm, cur_amax, dynamic_range, and, as a dictionary,
                max_blockwise_dynamic_range: {block_size: 32, dims: 1}
    tensors, tensors_struct:  activation, weight, gradient, output, wgrad, dgrad
    freq, start_step, end_step, start_end_list:  in which iterations; all ends are included
    """

    keys, says = SELECTORS | KEYS | {"stats"}, "look_at_tensor_before_process"

    def _look(self, config: dict[str, Any], seen: Seen) -> bool:
        """Merge the tensor into its record."""
        tensor = STATS_BUFFERS.plain_of(seen.quantized) if seen.values is None else seen.values
        values, blockwise = split_stats(config.get("stats", ()))
        where = (seen.layer, seen.name, "values")
        if not tensor.numel() or not STATS_BUFFERS.expects(*where):
            return False
        STATS_BUFFERS.feed(where, {name: FORMULAS[name] for name in values}, seen.iteration, tensor)
        for size, dims in blockwise:
            both = seen.name in ("activation", "weight")
            name = f"{_BLOCKWISE}_block_size_{size}_dims_{dims}{'_max_over_orientations' if both else ''}"
            top = blockwise_dynamic_range(tensor, size, dims, both)
            STATS_BUFFERS.raise_to(where, f"{seen.layer}_{seen.name}_{name}", seen.iteration, top)
        return True


def split_stats(stats: Any) -> tuple[list[str], list[tuple[int, int]]]:
    """(the names of statistics that a record has, (block size, dimensions) of blockwise ranges)."""
    values, blockwise = [], []
    for stat in stats:
        if isinstance(stat, dict) and list(stat) == [_BLOCKWISE]:
            options = stat[_BLOCKWISE] or {}
            size, dims = options.get("block_size", 32), options.get("dims", 1)
            custom_assert(
                dims in (1, 2) and isinstance(size, int) and size > 0, f"Wrong options of {_BLOCKWISE}: {stat}."
            )
            blockwise.append((size, dims))
            continue
        allowed = [*FORMULAS, f"{_BLOCKWISE}: {{block_size: .., dims: ..}}"]
        custom_assert(
            stat in FORMULAS, f"Statistic {stat!r} is not supported; LogTensorStats has {', '.join(allowed)}."
        )
        values.append(stat)
    return values, blockwise


def blockwise_dynamic_range(tensor: torch.Tensor, size: int, dims: int, both: bool) -> torch.Tensor:
    """The largest log2(amax / amin) of a block, float64 on the device; 0 for blocks of zeros."""
    matrix = tensor.reshape(-1, tensor.shape[-1]).abs().float()
    found = _range_of(matrix, size, dims)
    return torch.maximum(found, _range_of(matrix.t().contiguous(), size, dims)) if both and dims == 1 else found


def _range_of(matrix: torch.Tensor, size: int, dims: int) -> torch.Tensor:
    rows, columns = matrix.shape
    if dims == 1:
        custom_assert(matrix.numel() % size == 0, f"{rows} x {columns} values are not whole blocks of {size}.")
        blocks = matrix.reshape(-1, size)
    else:
        whole = rows % size == 0 and columns % size == 0
        custom_assert(whole, f"{rows} x {columns} values are not whole blocks of {size} x {size}.")
        blocks = matrix.view(rows // size, size, columns // size, size).transpose(1, 2).reshape(-1, size * size)
    top = blocks.amax(1)
    bottom = torch.where(blocks > 0, blocks, torch.inf).amin(1)
    return torch.where(top > 0, top.log2() - bottom.log2(), 0.0).max().double()


__all__ = ["FORMULAS", "LogTensorStats", "Statistics"]
