"""`expert_report`: loads and entropies of each layer and step are those of the router's choice."""

from __future__ import annotations

import pytest
import torch

import te_torch as te
from te_torch.tools.expert_report import ExpertUse, picture
from tests.backends import on_devices
from tests.world import values

HIDDEN, EXPERTS, TOP = 32, 4, 2


class Model(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        kinds = ({}, {"score_function": "sigmoid", "aux_loss_coeff": 0.1})
        layers = [te.MoELayer(HIDDEN, 16, EXPERTS, TOP, **kind, device=device) for kind in kinds]
        self.layers = torch.nn.ModuleList(layers)
        for i, layer in enumerate(layers):
            with torch.no_grad():
                layer.router.weight.copy_(values(EXPERTS, HIDDEN, seed=i))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + te.checkpoint(layer, x)
        return x


def wanted(layer: te.MoELayer, x: torch.Tensor, name: str) -> ExpertUse:
    logits = layer.router(x)
    chosen = logits.topk(TOP).indices.flatten().bincount(minlength=EXPERTS)
    scores = logits.sigmoid() if layer.score_function == "sigmoid" else logits.softmax(-1)
    scores = (scores / scores.sum(-1, keepdim=True)).double()
    return ExpertUse(name, tuple(chosen.tolist()), -(scores * scores.log()).sum(-1).mean().item())


@on_devices
def test_a_step_is_what_ran_since_the_last(device: str) -> None:
    model = Model(device)
    report = te.expert_report(model)
    assert str(report) == "nothing has run yet"
    for step in range(2):
        parts = [values(8 + step, HIDDEN, device=device, seed=10 * step + i).requires_grad_() for i in range(2)]
        for x in parts:
            model(x).sum().backward()  # which runs the layers once more
        found = report.step()
        x = torch.cat(parts).detach()
        for i, (layer, row) in enumerate(zip(model.layers, found, strict=True)):
            expected = wanted(layer, x, f"layers.{i}")
            assert row.layer == expected.layer and row.load == expected.load
            assert row.entropy == pytest.approx(expected.entropy, abs=1e-5)
            x = x + layer.eval()(x)
            layer.train()
        report.step()  # what evaluation of the test ran
    assert [len(rows) for rows in report.steps] == [2, 2, 2, 2]
    (first, *_), *_ = report.as_dict()["steps"]
    assert first["layer"] == "layers.0" and sum(first["load"]) == 16 * TOP
    lines = str(report).splitlines()
    assert len(lines) == 4 and lines[2].startswith("layers.0")
    report.close()
    model(torch.zeros(3, HIDDEN, device=device))
    assert report.step() == []


def test_pictures() -> None:
    assert picture((0, 1, 4, 8)) == " ▁▄█" and picture((0, 0)) == "  "
    assert picture((3,) * 64 + (1,) * 64) == "█" * 32 + "▃" * 32
    row = ExpertUse("a", (6, 0, 0, 2), 0.0)
    assert row.idle == 2 and row.imbalance == 3.0
    assert str(te.expert_report(torch.nn.Linear(1, 1))).startswith("nothing to report")
