"""`LogFp8TensorStats`: what quantization makes of a tensor, by the recipe in use or by another one."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from nvdlfw_inspect import api as debug_api
from nvdlfw_inspect.logging import custom_assert

from te_core import dtypes
from te_core.ops import raw as ops
from te_core.quantized import Cast, Format, QuantizedTensor
from te_core.statistics import Statistics
from te_torch.debug.features.api import SELECTORS, Looking, Seen
from te_torch.debug.schedule import KEYS
from te_torch.debug.stats import STATS_BUFFERS, Formula
from te_torch.quantized import QuantizedTorch, core_of
from te_torch.runtime import runtime_for, to_core
from te_torch.tensors import Float8Quantizer

_SCALE = ("scale_inv_min", "scale_inv_max")
FORMULAS: dict[str, Formula] = {
    "underflows%": lambda s: s.underflow_percent,
    "overflows%": lambda s: s.overflow_percent,
    "saturations%": lambda s: s.saturated_percent,
    "scale_inv_min": lambda s: s.scale_inv_min,
    "scale_inv_max": lambda s: s.scale_inv_max,
    "mse": lambda s: s.mse,
    "snr_db": lambda s: s.snr_db,
}
#: What other recipes a tensor may be cast by, to see what they would make of it.
RECIPES = ("fp8_delayed_scaling", "fp8_current_scaling", "mxfp8", "fp8_block_scaling")
_COLUMNWISE = "_columnwise"


class Asked(NamedTuple):
    """A statistic as it was configured: `[recipe_]stat[_columnwise]`."""

    name: str
    recipe: str  # "": the one in use
    stat: str
    columnwise: bool


def parse(name: str) -> Asked:
    """The parts of a statistic's name."""
    rest, columnwise = name.removesuffix(_COLUMNWISE), name.endswith(_COLUMNWISE)
    recipe = next((r for r in RECIPES if rest.startswith(f"{r}_")), "")
    stat = rest.removeprefix(f"{recipe}_") if recipe else rest
    if stat not in FORMULAS:
        raise ValueError(
            f"LogFp8TensorStats: {name!r} is no statistic. Allowed: [recipe_]stat[_columnwise] with a recipe of "
            f"{', '.join(RECIPES)} and a stat of {', '.join(FORMULAS)}."
        )
    if columnwise and recipe in ("fp8_delayed_scaling", "fp8_current_scaling"):
        raise ValueError(
            f"LogFp8TensorStats: {name!r}: both copies of a tensor scaled as a whole hold the same values."
        )
    return Asked(name, recipe, stat, columnwise)


def recipe_of(form: Format, quantizer: Any) -> str:
    """The name of the recipe in use; "nvfp4" for what this feature has no name for."""
    if form.scaling == "tensor":
        return "fp8_delayed_scaling" if type(quantizer) is Float8Quantizer else "fp8_current_scaling"
    return {"block": "fp8_block_scaling", "mxfp8": "mxfp8"}.get(form.scaling, form.scaling)


def core_tensor(t: Any) -> QuantizedTensor:
    """The core's view of a quantized tensor."""
    return core_of(t) if isinstance(t, QuantizedTorch) else t.to_core()


class LogFp8TensorStats(Looking):
    """Logs what quantization makes of tensors: by the recipe in use, or, named before the statistic, by another one.

    stats:      underflows%, overflows%, saturations%, scale_inv_min, scale_inv_max, mse, snr_db; each as
                [recipe_]stat[_columnwise], recipe one of fp8_current_scaling, fp8_block_scaling, mxfp8,
                and fp8_delayed_scaling where that is in use
    tensors, tensors_struct:  activation, weight, gradient
    freq, start_step, end_step, start_end_list:  in which iterations; all ends are included
    """

    keys = SELECTORS | KEYS | {"stats"}

    def _check_stats(self, stats: Any) -> None:
        for name in stats:
            parse(name)

    def _look(self, config: dict[str, Any], seen: Seen) -> bool:
        """Merge the tensor and what its casts make of it into their records."""
        held, tensor = held_copy(self, seen), seen.values
        if held is None:
            return False
        q = core_tensor(held)
        running = recipe_of(q.format, seen.quantizer)
        groups: dict[tuple[str, bool], dict[str, Formula]] = {}
        for stat in map(parse, config["stats"]):
            check_recipe(stat, running, tensor)
            # The copy of what is scaled as a whole that there is: both hold the same values.
            columnwise = q.rowwise is None if q.format.scaling == "tensor" and not stat.recipe else stat.columnwise
            recipe = running if stat.recipe in ("", running) else stat.recipe
            groups.setdefault((recipe, columnwise), {})[stat.name] = FORMULAS[stat.stat]
        if tensor is None:
            tensor = STATS_BUFFERS.plain_of(held)
        for (recipe, columnwise), formulas in groups.items():
            where = (seen.layer, seen.name, (recipe, columnwise))
            if tensor.numel() and STATS_BUFFERS.expects(*where):
                made = q if recipe == running else what_if(tensor, recipe, columnwise, q.format)
                if (made.columnwise if columnwise else made.rowwise) is None:
                    columnwise = not columnwise
                STATS_BUFFERS.feed(where, formulas, seen.iteration, tensor, made, columnwise)
        return True


class LogFp8Stats(LogFp8TensorStats):
    """The other name of LogFp8TensorStats."""


def held_copy(feature: Looking, seen: Seen) -> Any:
    """The quantized tensor; None, with a warning, where the layer runs in high precision."""
    name, rowwise, columnwise = type(feature).__name__, seen.rowwise, seen.columnwise

    def nothing(why: str) -> None:
        text = f"Feature={name}: {seen.name} is {why} here, so there is nothing to log."
        debug_api.log_message(text, seen.layer, level=logging.WARNING, extra_cachable_args=(seen.name, why))

    if rowwise is None and columnwise is None:
        return nothing("in high precision")
    custom_assert(
        rowwise is columnwise or rowwise is None or columnwise is None,
        f"{name} of {seen.layer}, {seen.name}: both GEMMs have to read the same quantized tensor; leave out what "
        "changes one.",
    )
    q = core_tensor(seen.quantized)
    if q.format.scaling == "nvfp4" and q.rowwise is None:
        return nothing("quantized to NVFP4 along its columns alone, which may be transformed,")
    return seen.quantized


def check_recipe(stat: Asked, running: str, tensor: torch.Tensor | None) -> None:
    """A statistic can be had of this tensor."""
    if stat.recipe == "fp8_delayed_scaling" and running != stat.recipe:
        raise ValueError(
            f"LogFp8TensorStats: {stat.name!r} under {running}: delayed scaling needs a history of maxima: "
            "it can only be logged where it is in use."
        )
    recipe = stat.recipe or running
    if stat.stat == "overflows%" and recipe != "fp8_delayed_scaling":
        raise ValueError(
            f"LogFp8TensorStats: {stat.name!r}: a scale made of the tensor's own maximum has no overflows."
        )
    if tensor is None and (stat.stat not in _SCALE or recipe != running):
        raise ValueError(
            f"LogFp8TensorStats: {stat.name!r} of a weight that is held quantized: only {', '.join(_SCALE)}."
        )


def what_if(tensor: torch.Tensor, recipe: str, columnwise: bool, running: Format) -> QuantizedTensor:
    """The tensor cast by another recipe: in the FP8 dtype in use, E4M3 where that is MXFP8 or NVFP4."""
    dtype = running.dtype if running.scaling in ("tensor", "block") else dtypes.float8_e4m3
    scaling = {"fp8_current_scaling": "tensor", "fp8_block_scaling": "block", "mxfp8": "mxfp8"}[recipe]
    blocks = scaling == "block"
    cast = Cast(Format(dtype, scaling, blocks), rowwise=not columnwise, columnwise=columnwise, power_of_two=blocks)
    return ops.quantize(runtime_for(tensor), to_core(tensor.contiguous()).matrix(), cast)


__all__ = ["FORMULAS", "LogFp8Stats", "LogFp8TensorStats", "Statistics"]
