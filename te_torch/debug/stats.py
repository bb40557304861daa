"""Statistics between two `step()`: fed on the device, reduced over ranks and written when an iteration ends.

What is fed is known by (layer, tensor, variant); a variant is the values themselves, or what they were cast to. One
pass over a tensor has both, so it waits until all features have seen the tensor (`flush`), and its record says which
variants it holds: a statistic is that of all records which hold its variant. Microbatches share their records, unless a
statistic is asked for that combines those of each (`combined_std`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from te_core.quantized import QuantizedTensor
from te_core.statistics import Statistics
from te_core.tensor import Tensor
from te_torch.debug.records import Records, merged
from te_torch.runtime import runtime_for, to_core

#: Gives the value of a statistic from a record.
Formula = Callable[[Any], float]  # of `Statistics`


def combined_std(parts: Sequence[Statistics]) -> float:
    """The standard deviation as documented, of the buffers (microbatches of ranks) that were fed: unbiased of one, of
    several sqrt(sum(n (var - (mean_i - mean)^2)) / sum n), which is that of the values only where the means agree; NaN
    where they are further apart than the values."""
    count = sum(part.count for part in parts)
    mean = sum(part.sum for part in parts) / count
    total = sum(part.count * (part.std**2 - (part.mean - mean) ** 2) for part in parts) / count
    return math.sqrt(total) if total >= 0 else math.nan


@dataclass
class _Asked:
    """Statistics of one variant of a tensor that will be written: by their names, in their order."""

    tensor: str
    formulas: dict[str, Formula] = field(default_factory=dict)
    extremes: list[str] = field(default_factory=list)  # those that have a maximum of their own, by name
    iteration: int = -1


@dataclass
class _Waiting:
    """A tensor that was fed and not measured yet: each variant with the copy that it is compared with."""

    where: tuple[str, str]
    tensor: torch.Tensor
    variants: dict[Hashable, tuple[QuantizedTensor | None, bool]] = field(default_factory=dict)
    apart: bool = False  # whether its record is to be its own


class StatsBuffers:
    """All that was fed since the last step."""

    def __init__(self) -> None:
        self.records = Records()
        self.weights_reduced_in_tp_group = True
        self._asked: dict[tuple[str, str, Hashable], _Asked] = {}
        self._buffers: dict[tuple[str, str], int] = {}  # how many records a tensor has that are their own
        self._local = threading.local()  # what waits, and the values of the weight that was dequantized last
        self._extremes: dict[str, torch.Tensor] = {}  # float64 maxima on their devices, by the name they are written by

    def expects(self, layer: str, tensor: str, variant: Hashable) -> bool:
        """Whether a tensor shall be fed now: a weight is the same in each microbatch, so once."""
        asked = self._asked.get((layer, tensor, variant))
        return tensor != "weight" or asked is None or asked.iteration < 0

    def plain_of(self, held: Any) -> torch.Tensor:
        """The values of a tensor that is only there quantized: the same object for all features that see it."""
        before = getattr(self._local, "held", None)
        if before is None or before[0] is not held:
            before = self._local.held = held, held.dequantize()
        values: torch.Tensor = before[1]
        return values

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
        if not tensor.numel():
            return
        layer, name, variant = where
        waiting: _Waiting | None = getattr(self._local, "waiting", None)
        same = waiting is not None and waiting.where == (layer, name) and waiting.tensor is tensor
        if waiting is None or not same or variant in waiting.variants:
            self._measure()
            waiting = self._local.waiting = _Waiting((layer, name), tensor)
        waiting.variants[variant] = quantized, columnwise
        waiting.apart = waiting.apart or combined_std in formulas.values()

    def flush(self) -> None:
        """Measure what waits: all features have seen it."""
        self._measure()
        self._local.held = None

    def _measure(self) -> None:
        """Values by themselves are a pass of their own only where no cast is measured."""
        waiting: _Waiting | None = getattr(self._local, "waiting", None)
        if waiting is None:
            return
        self._local.waiting = None
        number = 0
        if waiting.apart:
            number = self._buffers[waiting.where] = self._buffers.get(waiting.where, 0) + 1
        x: Tensor = to_core(waiting.tensor.contiguous())
        rt = runtime_for(waiting.tensor)
        # Rows before columns, for which the values may have to be turned.
        casts = sorted((v for v in waiting.variants.items() if v[1][0] is not None), key=lambda v: v[1][1])
        values = [variant for variant, (q, _) in waiting.variants.items() if q is None]
        if values and not casts:
            self.records.feed(rt, (*waiting.where, tuple(values), number), x)
        for variant, (q, columnwise) in casts:
            self.records.feed(rt, (*waiting.where, (*values, variant), number), x, q, columnwise=columnwise)
            values = []

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

    def write(self, group: Any, together: bool) -> list[tuple[str, float, int]]:
        """Read what was fed, reduce it over the ranks of `group` (`together`), begin anew: (name, value, iteration)."""
        scalars: list[tuple[str, float, int]] = []
        self.flush()
        fed = {where: asked for where, asked in self._asked.items() if asked.iteration >= 0}
        numbers: dict[Any, Any] = {w: [n] for w, n in (self.records.numbers() if fed else {}).items()}
        extremes = dict(zip(self._extremes, _read([*self._extremes.values()]), strict=True))
        if together:
            numbers, extremes = _reduced(group, numbers, extremes)
        found: dict[Any, list[np.ndarray[Any, Any]]] = {}
        for (layer, tensor, variants, _), records in numbers.items():
            for variant in variants:
                found.setdefault((layer, tensor, variant), []).extend(records)
        for where, asked in fed.items():
            if where in found:
                statistics = Statistics(merged(found[where]))
                for name, formula in asked.formulas.items():
                    apart = formula is combined_std
                    value = combined_std([*map(Statistics, found[where])]) if apart else formula(statistics)
                    scalars.append((f"{where[0]}_{where[1]}_{name}", value, asked.iteration))
            for name in asked.extremes:
                scalars.append((name, extremes[name], asked.iteration))
            asked.iteration = -1
            asked.formulas.clear()
            asked.extremes.clear()
        if fed:
            self.records.reset()
        self._extremes.clear()
        self._buffers.clear()
        return scalars

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]


def _read(values: Sequence[torch.Tensor]) -> list[float]:
    """Numbers of one element each, by one wait for each device."""
    found = [0.0] * len(values)
    for device in {v.device for v in values}:
        of_it = [i for i, v in enumerate(values) if v.device == device]
        for i, number in zip(of_it, torch.cat([values[i].reshape(1) for i in of_it]).tolist(), strict=True):
            found[i] = number
    return found


def _reduced(
    group: Any, numbers: dict[Any, Any], extremes: dict[str, float]
) -> tuple[dict[Any, Any], dict[str, float]]:
    """Records of each rank, maxima of all. Those of weights are each rank's own: ranks hold the same ones."""
    shared = {w: n for w, n in numbers.items() if w[1] != "weight"}
    lists: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, (shared, {n: v for n, v in extremes.items() if "_weight_" not in n}), group=group)
    joined: dict[Any, list[np.ndarray[Any, Any]]] = {}
    for records, tops in lists:
        for where, record in records.items():
            joined.setdefault(where, []).extend(record)
        for name, value in tops.items():
            extremes[name] = max(extremes.get(name, value), value)
    return {**numbers, **joined}, extremes


STATS_BUFFERS = StatsBuffers()


def write() -> None:
    """Write the statistics of the iteration that ended."""
    from nvdlfw_inspect import api

    from te_torch.debug import lines

    group = api.get_tensor_reduction_group()
    ended = api.DEBUG_MANAGER._trainer_iteration_count - 1
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1 and _logs_in(ended)
    lines.log(STATS_BUFFERS.write(group, together))


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
