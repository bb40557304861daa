"""How a model's routers use their experts: `expert_report`.

report = te_torch.expert_report(model)
...  # a step of training
report.step()
print(report)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from te_torch.listing import table
from te_torch.module_names import known_as
from te_torch.training.moe_layer import MoELayer, RouterNotes
from te_torch.values import check_model

_BARS = " ▁▂▃▄▅▆▇█"
_WIDEST = 64  # of a picture; more experts share a place


class ExpertUse(NamedTuple):
    """A layer in a step."""

    layer: str
    load: tuple[int, ...]  # tokens of each expert
    entropy: float  # of a token's scores of all experts, in nats, the mean over tokens; ln(experts) knows no difference

    @property
    def idle(self) -> int:
        """How many experts got no token."""
        return self.load.count(0)

    @property
    def imbalance(self) -> float:
        """The largest load over the mean one: 1 where all are alike."""
        return max(self.load) * len(self.load) / max(sum(self.load), 1)


class ExpertReport:
    """The use of experts in each layer and step. Printable: the last step; `as_dict()` for programs: all of them.

    Layers note what their routers choose until `close()`, on the device: a few small launches for each forward. No row
    is ever dropped, for a layer has room for all.
    """

    def __init__(self, layers: dict[str, MoELayer]) -> None:
        self.steps: list[list[ExpertUse]] = []
        self._layers = layers
        for layer in layers.values():
            layer._notes = RouterNotes(layer.num_experts, layer.router.weight.device)

    def step(self, group: Any = None) -> list[ExpertUse]:
        """The use of experts since the step before, summed over the ranks of `group`. Waits for the device.

        Returns:
            A row for each layer that has run.
        """
        rows = []
        for name, layer in self._layers.items():
            notes = layer._notes
            if notes is None:
                continue
            if group is not None:
                for t in (notes.load, notes.sums):
                    torch.distributed.all_reduce(t, group=group)
            entropy, tokens = notes.sums.tolist()
            if tokens:
                rows.append(ExpertUse(name, tuple(notes.load.tolist()), entropy / tokens))
            notes.load.zero_()
            notes.sums.zero_()
        self.steps.append(rows)
        return rows

    def close(self) -> None:
        """The layers note nothing from now on."""
        for layer in self._layers.values():
            layer._notes = None

    def as_dict(self) -> dict[str, Any]:
        """{"steps": [[{"layer": ..., "load": [...], "entropy": ...}, ...], ...]}."""
        rows = [[{**row._asdict(), "load": list(row.load)} for row in step] for step in self.steps]
        return {"steps": rows}

    def __str__(self) -> str:
        rows = self.steps[-1] if self.steps else []
        if not rows:
            return "nothing has run yet" if self._layers else "nothing to report: the model holds no te_torch.MoELayer"
        cells = [
            (row.layer, str(sum(row.load)), f"{row.imbalance:.2f}", str(row.idle),
             f"{row.entropy:.2f} of {math.log(len(row.load)):.2f}", f"|{picture(row.load)}|")
            for row in rows
        ]  # fmt: skip
        return table(("layer", "rows", "most / mean", "idle", "entropy", "rows of each expert"), cells)


def picture(load: tuple[int, ...]) -> str:
    """A bar for each expert, the fullest as high as a line."""
    each = -(-len(load) // _WIDEST)
    bars = [sum(load[i : i + each]) / len(load[i : i + each]) for i in range(0, len(load), each)]
    most = max(bars) or 1
    return "".join(_BARS[math.ceil(bar / most * (len(_BARS) - 1))] for bar in bars)


def expert_report(model: torch.nn.Module) -> ExpertReport:
    """Have every MoELayer of the model note which experts its router chooses, for a report of each step.

    Returns:
        A report, to which `step()` adds what ran since the step before.

    Example:
        layer = te.MoELayer(64, 128, num_experts=8, topk=2, device="cpu")
        report = te.expert_report(layer)
        layer(torch.randn(32, 64))
        report.step()
        print(report)
    """
    check_model("expert_report", model)
    named = model.named_modules()
    return ExpertReport({name or known_as(m): m for name, m in named if isinstance(m, MoELayer)})
