"""Statistics between two `step()`: fed on the device, reduced over ranks and written when an iteration ends.

What is fed is known by (layer, tensor, variant); a variant is the values themselves, or what they were cast to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from te_core.quantized import QuantizedTensor
from te_core.statistics import SLOTS, Statistics, merge
from te_core.tensor import Tensor
from te_torch.debug.records import Records
from te_torch.runtime import runtime_for, to_core

#: Gives the value of a statistic from a record.
Formula = Callable[[Statistics], float]


@dataclass
class _Asked:
    """Statistics of one variant of a tensor that will be written: by their names, in their order."""

    tensor: str
    formulas: dict[str, Formula] = field(default_factory=dict)
    extremes: list[str] = field(default_factory=list)  # those that have a maximum of their own, by name
    iteration: int = -1


class StatsBuffers:
    """All that was fed since the last step."""

    def __init__(self) -> None:
        self.records = Records()
        self.weights_reduced_in_tp_group = True
        self._asked: dict[tuple[str, str, Hashable], _Asked] = {}
        self._extremes: dict[str, torch.Tensor] = {}  # float64 maxima on their devices, by the name they are written by

    def expects(self, layer: str, tensor: str, variant: Hashable) -> bool:
        """Whether a tensor shall be fed now: a weight is the same in each microbatch, so once."""
        asked = self._asked.get((layer, tensor, variant))
        return tensor != "weight" or asked is None or asked.iteration < 0

    def feed(
        self,
        where: tuple[str, str, Hashable],
        formulas: dict[str, Formula],
        iteration: int,
        tensor: torch.Tensor,
        quantized: QuantizedTensor | None = None,
        columnwise: bool = False,
    ) -> None:
        """Merge a tensor, with what it was cast to, and have these statistics of it written: {name: formula}."""
        asked = self._ask(where, iteration)
        asked.formulas.update(formulas)
        x: Tensor = to_core(tensor.contiguous())
        if x.size:
            self.records.feed(runtime_for(tensor), where, x, quantized, columnwise=columnwise)

    def raise_to(self, where: tuple[str, str, Hashable], name: str, iteration: int, value: torch.Tensor) -> None:
        """Raise a maximum that no record has (float64, of one element), to be written under this name."""
        asked = self._ask(where, iteration)
        if name not in asked.extremes:
            asked.extremes.append(name)
        before = self._extremes.get(name)
        self._extremes[name] = value if before is None else torch.maximum(before, value)

    def _ask(self, where: tuple[str, str, Hashable], iteration: int) -> _Asked:
        asked = self._asked.setdefault(where, _Asked(where[1]))
        asked.iteration = iteration
        return asked

    def write(self, group: Any, log: Callable[[str, float, int], None], together: bool) -> None:
        """Read what was fed, reduce it over the ranks of `group` (`together`), log it, begin anew."""
        fed = {where: asked for where, asked in self._asked.items() if asked.iteration >= 0}
        numbers: dict[Any, Any] = self.records.numbers() if fed else {}
        extremes = {name: value.item() for name, value in self._extremes.items()}
        if together:
            numbers, extremes = _reduced(group, {w: numbers[w] for w in fed if w in numbers}, extremes)
        for where, asked in fed.items():
            if where in numbers and numbers[where][0] > 0:
                statistics = Statistics(numbers[where])
                for name, formula in asked.formulas.items():
                    log(f"{where[0]}_{where[1]}_{name}", formula(statistics), asked.iteration)
            for name in asked.extremes:
                log(name, extremes[name], asked.iteration)
            asked.iteration = -1
            asked.formulas.clear()
            asked.extremes.clear()
        if fed:
            self.records.reset()
        self._extremes.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]


def _reduced(
    group: Any, numbers: dict[Any, Any], extremes: dict[str, float]
) -> tuple[dict[Any, Any], dict[str, float]]:
    """Records and maxima of all ranks together. Those of weights are each rank's own: ranks hold the same ones."""
    shared = {w: n for w, n in numbers.items() if w[1] != "weight"}
    lists: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, (shared, {n: v for n, v in extremes.items() if "_weight_" not in n}), group=group)
    joined: dict[Any, list[np.ndarray[Any, Any]]] = {}
    for records, tops in lists:
        for where, record in records.items():
            joined.setdefault(where, []).append(record)
        for name, value in tops.items():
            extremes[name] = max(extremes.get(name, value), value)
    merged = {where: merge(np.stack(parts).reshape(-1, SLOTS)) for where, parts in joined.items()}
    return {**numbers, **merged}, extremes


STATS_BUFFERS = StatsBuffers()


def write() -> None:
    """Write the statistics of the iteration that ended."""
    from nvdlfw_inspect import api
    from nvdlfw_inspect.logging import MetricLogger

    group = api.get_tensor_reduction_group()
    ended = api.DEBUG_MANAGER._trainer_iteration_count - 1
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1 and _logs_in(ended)

    def log(name: str, value: float, iteration: int) -> None:
        MetricLogger.log_scalar(name, value, iteration=iteration)

    STATS_BUFFERS.write(group, log, together)


def _logs_in(iteration: int) -> bool:
    """Whether the configuration wants statistics of this iteration: all ranks agree on that."""
    from nvdlfw_inspect.config_manager import ConfigManager

    from te_torch.debug.schedule import asked

    for section in ConfigManager.configs:
        for name, config in section.extension_config.get("transformer_engine", {}).items():
            if config.get("enabled") and name.endswith(("TensorStats", "Fp8Stats")):
                schedules = [config, *config.get("tensors_struct", ())]
                if any(asked({**config, **schedule}, iteration)[0] for schedule in schedules):
                    return True
    return False


def clear() -> None:
    """Forget what was fed."""
    STATS_BUFFERS.clear()
