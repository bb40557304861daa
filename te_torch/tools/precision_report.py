"""What each GEMM of a model, and each product of its attention, was computed in: `precision_report`.

with te_torch.autocast(recipe=recipe):
    loss = model(x).sum()
print(te_torch.precision_report(model))
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch

from te_core.layers.linear import LinearSpec
from te_core.tensor import CPU, Device, cuda_device
from te_core.tools.explain import OUTSIDE, PRODUCTS, GemmFacts, explain_attention, explain_linear
from te_torch.attention import choose, flash
from te_torch.attention.dot_product import DotProductAttention
from te_torch.attention.plan import Plan
from te_torch.base.module import BaseModule
from te_torch.listing import table, together
from te_torch.module_names import known_as
from te_torch.quantized import QuantizedTorch, core_of
from te_torch.values import check_model


class Row(NamedTuple):
    """A GEMM of a layer."""

    layer: str
    facts: GemmFacts


class PrecisionReport:
    """A row for each GEMM of each layer and each product of attention. Printable; `as_dict()` for programs.

    `fallbacks` is what was not as asked. Printed, layers that are equal in all of it stand in one row.
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
        idle = ", ".join(label for label, _ in together((name, None) for name in self.idle))
        if not self.rows:
            return f"nothing has run yet: {idle}" if idle else NOTHING
        layers = [(layer, tuple(row.facts for row in rows)) for layer, rows in groupby(self.rows, lambda r: r.layer)]
        cells = [
            (
                layer,
                f.gemm,
                f"{f.a} x {f.b}" if f.a else "-",
                f.accumulation or "-",
                f.family or "-",
                ("" if f.as_asked else "NOT AS ASKED: ") + f.reason,
            )
            for layer, all_facts in together(layers)
            for f in all_facts
        ]
        text = table(("layer", "gemm", "operands", "accumulation", "computed by", "why"), cells)
        return "\n".join([text, "", self._verdict(), *([f"not run yet: {idle}"] if idle else [])])

    def _verdict(self) -> str:
        if self.fallbacks:
            return f"{len(self.fallbacks)} of {len(self.rows)} not as the recipe asks"
        # Attention is in high precision unless asked for, inside of a region too.
        gemms = [row.facts.reason for row in self.rows if row.facts.family and row.facts.gemm not in PRODUCTS]
        outside = sum(reason.startswith(OUTSIDE) for reason in gemms)
        if gemms and outside == len(gemms):
            return "all in high precision: nothing ran inside te.autocast"
        return "all as the recipe asks" + (f"; {outside} of {len(gemms)} outside of te.autocast" if outside else "")


#: The report of a model without layers of ours.
NOTHING = (
    "nothing to report: the model holds no layer of te_torch that multiplies matrices (te.convert(model) puts them "
    "in the place of torch's)"
)


def precision_report(model: torch.nn.Module) -> PrecisionReport:
    """What the last forward of every layer computes its GEMMs in, backward included.

    Returns:
        A printable report with a row for each layer.

    Example:
        from te_torch.recipe import Float8CurrentScaling

        layer = te.Linear(64, 64, device="cpu")
        with te.autocast(recipe=Float8CurrentScaling(), emulate=True):
            layer(torch.randn(32, 64))
        print(te.precision_report(layer))
    """
    check_model("precision_report", model)
    rows: list[Row] = []
    idle: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, BaseModule):
            continue
        name = name or known_as(module)
        if isinstance(module, DotProductAttention):
            if module._last_plan is None:
                idle.append(name)
            else:
                rows += [Row(name, facts) for facts in _products(module, module._last_plan)]
            continue
        if module._last_call() is None:
            idle.append(name)
            continue
        for part, spec, weight in _linears(module):
            layer, idle_flags = f"{name}{part}", module.flags_without_effect() if spec.parallel is None else ""
            held_as = core_of(weight).format if isinstance(weight, QuantizedTorch) else None
            for facts in explain_linear(spec, _place(weight), held_as):
                rows.append(Row(layer, facts._replace(reason="; ".join(filter(None, (facts.reason, idle_flags))))))
    return PrecisionReport(rows, idle)


def _linears(module: BaseModule) -> Iterator[tuple[str, LinearSpec, torch.Tensor]]:
    """(suffix of the layer's name, spec, weight) of each GEMM triple of a module's last call."""
    last = module._last_call()
    names, weights = module._gemm_names(), module._weight_names()
    specs = last.layer.linears(last.spec)
    for i, spec in enumerate(specs):
        part = f".{names[i].removesuffix('_weight')}" if len(specs) > 1 else ""
        yield part, spec, getattr(module, weights[min(i, len(weights) - 1)])  # of a stack each is in the same one


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
