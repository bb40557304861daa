"""Statistics between two `step()`: fed on the device, reduced over ranks and written when an iteration ends.

What is fed is known by (layer, tensor, variant); a variant is the values themselves, or what they were cast to. One
pass over a tensor has both, so it waits until all features have seen the tensor (`flush`), and its record says which
variants it holds: a statistic is that of all records which hold its variant. Microbatches share their records, unless a
statistic is asked for that combines those of each (`combined_std`).

Ranks that have parts of one tensor (a `team`, of tensor parallelism) make one record of theirs. A weight's is reduced
over its team, and any other tensor's over the reduction group.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from te_core.quantized import QuantizedTensor
from te_core.statistics import Statistics
from te_torch.debug.layers import Team
from te_torch.debug.records import Records, merged
from te_torch.debug.state import TEDebugState
from te_torch.exchange import all_gather_object
from te_torch.runtime import runtime_for, to_core

_MARK = "\0"

#: Gives the value of a statistic from a record.
Formula = Callable[[Any], float]  # of `Statistics`

#: The ranks that have parts of a tensor; () where this one has all of it.
Ranks = tuple[int, ...]


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

    formulas: dict[str, Formula] = field(default_factory=dict)
    extremes: list[str] = field(default_factory=list)  # those that have a maximum of their own, by name
    iteration: int = -1


class _Top(NamedTuple):
    """A maximum that no record has."""

    tensor: str
    team: Ranks
    value: Any  # float64, a tensor of one element; a number once it was read


class _Key(NamedTuple):
    """Of a record."""

    layer: str
    tensor: str
    variants: tuple[Hashable, ...]
    number: int  # that of a microbatch, where its record is its own
    team: Ranks


@dataclass
class _Waiting:
    """A tensor that was fed and not measured yet: each variant with the copy that it is compared with."""

    where: tuple[str, str]
    tensor: torch.Tensor
    team: Ranks
    variants: dict[Hashable, tuple[QuantizedTensor | None, bool]] = field(default_factory=dict)
    apart: bool = False  # whether its record is to be its own


class StatsBuffers:
    """All that was fed since the last step."""

    def __init__(self) -> None:
        self.records = Records()
        self._asked: dict[tuple[str, str, Hashable], _Asked] = {}
        self._buffers: dict[tuple[str, str], int] = {}  # how many records a tensor has that are their own
        self._local = threading.local()  # what waits, and the values of the weight that was dequantized last
        self._extremes: dict[str, _Top] = {}  # on their devices, by the name they are written by
        self._groups: dict[Ranks, Any] = {}  # the process group of each team

    def expects(self, layer: str, tensor: str, variant: Hashable) -> bool:
        """Whether a tensor shall be fed now: a weight is the same in each microbatch, so once."""
        asked = self._asked.get((layer, tensor, variant))
        return tensor != "weight" or asked is None or asked.iteration < 0

    def begin(self, team: Team) -> None:
        """What is fed until the next call is this rank's part of tensors that a team has (`ALONE`: all of them)."""
        self._local.team = team.ranks
        if team.ranks:
            self._groups[team.ranks] = team.group

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
            waiting = self._local.waiting = _Waiting((layer, name), tensor, self._team)
        waiting.variants[variant] = quantized, columnwise
        waiting.apart = waiting.apart or combined_std in formulas.values()

    @property
    def _team(self) -> Ranks:
        found: Ranks = getattr(self._local, "team", ())
        return found

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
        x, rt = to_core(waiting.tensor.contiguous()), runtime_for(waiting.tensor)
        # Rows before columns, for which the values may have to be turned.
        casts = sorted((v for v in waiting.variants.items() if v[1][0] is not None), key=lambda v: v[1][1])
        values = [variant for variant, (q, _) in waiting.variants.items() if q is None]
        if values and not casts:
            self.records.feed(rt, _Key(*waiting.where, tuple(values), number, waiting.team), x)
        for variant, (q, columnwise) in casts:
            key = _Key(*waiting.where, (*values, variant), number, waiting.team)
            self.records.feed(rt, key, x, q, columnwise=columnwise)
            values = []

    def raise_to(self, where: tuple[str, str, Hashable], name: str, iteration: int, value: torch.Tensor) -> None:
        """Raise a maximum that no record has (float64, of one element), to be written under this name."""
        asked = self._ask(where, iteration)
        if name not in asked.extremes:
            asked.extremes.append(name)
        before = self._extremes.get(name)
        top = value if before is None else torch.maximum(before.value, value)
        self._extremes[name] = _Top(where[1], self._team, top)

    def _ask(self, where: tuple[str, str, Hashable], iteration: int) -> _Asked:
        asked = self._asked.setdefault(where, _Asked())
        asked.iteration = iteration
        return asked

    def write(self, group: Any, together: bool) -> list[tuple[str, float, int]]:
        """Read what was fed, reduce it over the ranks of `group` (`together`), begin anew: (name, value, iteration)."""
        scalars: list[tuple[str, float, int]] = []
        self.flush()
        fed = {where: asked for where, asked in self._asked.items() if asked.iteration >= 0}
        numbers: _Numbers = {key: [n] for key, n in (self.records.numbers() if fed else {}).items()}  # type: ignore[misc]
        values = _read([top.value for top in self._extremes.values()])
        extremes = {name: top._replace(value=v) for (name, top), v in zip(self._extremes.items(), values, strict=True)}
        if together:
            _reduce(group, numbers, extremes, lambda tensor, team: tensor != "weight")
        if TEDebugState.weight_tensor_tp_group_reduce:
            for team in sorted({key.team for key in numbers if key.tensor == "weight"} - {()}):
                _reduce(self._groups[team], numbers, extremes, lambda *of, team=team: of == ("weight", team))
        found: dict[Any, list[np.ndarray[Any, Any]]] = {}
        for key, records in numbers.items():
            for variant in key.variants:
                parts = [merged(records)] if key.team else records
                found.setdefault((key.layer, key.tensor, variant), []).extend(parts)
        for where, asked in fed.items():
            if where in found:
                statistics = Statistics(merged(found[where]))
                for name, formula in asked.formulas.items():
                    apart = formula is combined_std
                    value = combined_std([*map(Statistics, found[where])]) if apart else formula(statistics)
                    scalars.append((f"{where[0]}_{where[1]}_{name}", value, asked.iteration))
            for name in asked.extremes:
                scalars.append((name, extremes[name].value, asked.iteration))
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


_Numbers = dict[_Key, list[np.ndarray[Any, Any]]]


def _reduce(group: Any, numbers: _Numbers, extremes: dict[str, _Top], means: Callable[[str, Ranks], bool]) -> None:
    """Put the records of all ranks of a group in the place of this one's, and their maxima: of the tensors (name, team)
    that are meant."""
    mine = {key: n for key, n in numbers.items() if means(key.tensor, key.team)}
    tops = {name: top for name, top in extremes.items() if means(top.tensor, top.team)}
    lists = all_gather_object("debug statistics", (mine, tops), group)
    for key in mine:
        numbers[key] = []
    for records, others in lists:
        for key, record in records.items():
            numbers.setdefault(key, []).extend(record)
        for name, top in others.items():
            before = extremes.get(name, top)
            extremes[name] = top if top.value > before.value else before


STATS_BUFFERS = StatsBuffers()


def write() -> None:
    """Write the statistics of the iteration that ended."""
    from nvdlfw_inspect import api

    group = api.get_tensor_reduction_group()
    ended = api.DEBUG_MANAGER._trainer_iteration_count - 1
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1 and _logs_in(ended)
    log(STATS_BUFFERS.write(group, together))


def log(scalars: Sequence[tuple[str, float, int]]) -> None:
    """Hand (name, value, iteration) to every logger of nvdlfw_inspect that is enabled.

    Its own one writes hundreds of lines at once, for the next step waits: the time, the level and the rest of a line
    are all the same.
    """
    from nvdlfw_inspect.logging import FileLogger, MetricLogger

    if not scalars:
        return
    for logger in MetricLogger.enabled_loggers:
        own = getattr(logger, "stats_logger", None)
        if type(logger) is not FileLogger or not isinstance(own, logging.Logger) or not _is_plain(own):
            for name, value, iteration in scalars:
                logger.log_scalar(name, value, iteration=iteration)
            continue
        texts = [f"{name} \t\t\t\t iteration={at:06d} \t\t\t\t value={value:.4f}" for name, value, at in scalars]
        for handler in own.handlers:
            record: Any = logging.LogRecord(own.name, logging.INFO, __file__, 0, _MARK, None, None)
            before, _, after = handler.format(record).partition(_MARK)
            record.msg = f"{after}\n{before}".join(texts)
            handler.handle(record)


def _is_plain(logger: logging.Logger) -> bool:
    """Whether it does nothing but write lines into files."""
    plain = all(type(h) is logging.FileHandler and not h.filters and h.level <= logging.INFO for h in logger.handlers)
    return plain and not (logger.filters or logger.propagate) and logger.isEnabledFor(logging.INFO)


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
