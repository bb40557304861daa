"""The documented example, against the files that the peer wrote for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import te_torch as te
from tests.backends import devices

DATA = Path(__file__).parents[1] / "data"


def golden(name: str) -> list[str]:
    return [line.split(" - ", 1)[1] for line in (DATA / name).read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:fp8_autocast")
@pytest.mark.parametrize("device", devices())
def test_the_documented_example(debugging: Callable[..., Any], device: str) -> None:
    session = debugging(str(DATA / "debug_config.yaml"))
    torch.manual_seed(0)
    model = te.TransformerLayer(512, 512, 8, name="transformer_layer").to(device)
    x = torch.randn(10, 32, 512, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0001)
    seen = []
    for _ in range(5):
        qkv = model.self_attention.layernorm_qkv
        norm = torch.nn.functional.layer_norm(x, (512,), qkv.layer_norm_weight, qkv.layer_norm_bias, qkv.eps)
        seen.append(norm.detach().double())
        optimizer.zero_grad()
        with te.fp8_autocast(enabled=True):
            y = model(x)
        y.mean().backward()
        optimizer.step()
        session.step()

    # The texts of the document; the peer's release that wrote the file has other words for two of them.
    want = [
        line.replace("- Quantize", "- FP8 quantization").replace("High Precision", "High precision")
        for line in golden("debug_main.log")
    ]
    assert session.lines()[2:] == want[2:]
    lines = session.lines("nvdlfw_inspect_statistics_logs")
    shown = golden("debug_statistics.log")
    assert [re.sub(r"-?\d+\.\d{4}$", "#", line) for line in lines] == [re.sub(r"-?\d+\.\d{4}$", "#", s) for s in shown]

    found = session.statistics()
    for i in (2, 3, 4):
        v = seen[i]
        of = {"max": v.max(), "min": v.min(), "mean": v.mean(), "std": v.std(), "l1_norm": v.abs().sum()}
        for stat, value in of.items():
            name = f"transformer_layer.self_attention.layernorm_linear_qkv_activation_{stat}"
            assert found[name, i] == pytest.approx(value.item(), rel=1e-5, abs=1e-4), stat
