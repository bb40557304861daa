"""What each GEMM of a model, and each product of its attention, was computed in: `precision_report`.

    with te_torch.autocast(recipe=recipe):
        loss = model(x).sum()
    print(te_torch.precision_report(model))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from te_core.layers.explain import GemmFacts, explain_attention, explain_linear
from te_core.layers.linear import LinearSpec
from te_core.quantized import Format
from te_core.tensor import CPU, Device, cuda_device
from te_torch.attention import choose, flash
from te_torch.attention.dot_product import DotProductAttention
from te_torch.attention.plan import Plan
from te_torch.modules.base import BaseModule
from te_torch.quantized import QuantizedTorch, core_of
from te_torch.report import table


class Row(NamedTuple):
    """A GEMM of a layer."""

    layer: str
    facts: GemmFacts


class PrecisionReport:
    """A row for each GEMM of each layer and each product of attention. Printable; `as_dict()` for programs.

    `fallbacks` is what was not as asked.
    """

    def __init__(self, rows: list[Row], idle: list[str]) -> None:
        self.rows = rows
        self.idle = idle  # layers that have not run

    @property
    def fallbacks(self) -> list[Row]:
        """The GEMMs that were not computed as the recipe asks."""
        return [row for row in self.rows if not row.facts.as_asked]

    def as_dict(self) -> dict[str, Any]:
        """{"gemms": [{"layer": ..., "gemm": ..., "a": ..., ...}], "idle": [layer, ...]}."""
        return {"gemms": [{"layer": row.layer, **row.facts._asdict()} for row in self.rows], "idle": self.idle}

    def __str__(self) -> str:
        cells = [
            (row.layer, f.gemm, f"{f.a} x {f.b}" if f.a else "-", f.accumulation or "-", f.family or "-",
             ("" if f.as_asked else "NOT AS ASKED: ") + f.reason)
            for row, f in ((row, row.facts) for row in self.rows)
        ]  # fmt: skip
        text = table(("layer", "gemm", "operands", "accumulation", "computed by", "why"), cells)
        count = len(self.fallbacks)
        lines = [text, "", f"{count} of {len(self.rows)} not as the recipe asks" if count else "all as the recipe asks"]
        if self.idle:
            lines.append(f"not run yet: {', '.join(self.idle)}")
        return "\n".join(lines)


def precision_report(model: torch.nn.Module) -> PrecisionReport:
    """What the last forward of every layer computes its GEMMs in, backward included."""
    rows: list[Row] = []
    idle: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, BaseModule):
            continue
        if isinstance(module, DotProductAttention):
            if module._last_plan is None:
                idle.append(name or module.name)
            else:
                rows += [Row(name or module.name, facts) for facts in _products(module, module._last_plan)]
            continue
        if module._last is None:
            idle.append(name or module.name)
            continue
        for part, spec, weight in _linears(module):
            layer = f"{name or module.name}{part}"
            rows += [Row(layer, facts) for facts in explain_linear(spec, _place(weight), _held_as(weight))]
    return PrecisionReport(rows, idle)


def _linears(module: BaseModule) -> Iterator[tuple[str, LinearSpec, torch.Tensor]]:
    """(suffix of the layer's name, spec, weight) of each GEMM triple of a module's last call."""
    assert module._last is not None
    names = module._weight_names()
    specs = module._last.layer.linears(module._last.spec)
    for i, spec in enumerate(specs):
        part = f".{names[i].removesuffix('_weight')}" if len(specs) > 1 else ""
        yield part, spec, getattr(module, names[i])


def _products(module: DotProductAttention, plan: Plan) -> list[GemmFacts]:
    """The products of an attention's last call."""
    rule = module._last_rule if plan.key.fp8 else None
    emulated = rule is not None and plan.backend == choose.UNFUSED
    place = CPU if plan.request.device is None else cuda_device(plan.key.a.device.index or 0)
    forward = plan.backend
    if forward == choose.FUSED:
        own = "NumPy, exact emulation" if rule is not None else "NumPy"
        forward = f"{forward} ({own if place is CPU else 'cuDNN'})"
    backward = choose.FLASH2 if plan.run is flash.run_backward_only and rule is None else forward
    families = forward, backward if any(plan.layer.needs) else None
    return explain_attention(plan.request.dtype, rule, place, families, emulated)


def _place(weight: torch.Tensor) -> Device:
    return cuda_device(weight.get_device()) if weight.is_cuda else CPU


def _held_as(weight: torch.Tensor) -> Format | None:
    return core_of(weight).format if isinstance(weight, QuantizedTorch) else None
