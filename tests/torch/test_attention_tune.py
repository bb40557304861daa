"""The tuner of attention's speed table: what it would measure, and what it writes. The timing itself needs a GPU."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from te_core.device import DeviceInfo
from te_torch.attention import choose, plan, tune
from te_torch.attention.choose import FLASH_TORCH, FUSED, UNFUSED
from te_torch.attention.dot_product import RUN
from tests.backends import requires_cuda

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 50 << 20, 141 << 30, (13, 0))


def test_a_case_is_of_the_class_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(tune.classes())
    assert len(set(names)) == len(names) == 112
    for name in names:
        case = tune.case_of(name, torch.device("meta"))
        request = plan.make_plan(case.module._static, case.key, tune.env.Switches()).request
        assert choose.shape_class(request) == name
        assert request.training == name.startswith("train")
        assert request.aligned or request.spec.bottom_right or not request.spec.banded


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "HEADS", 4)
    monkeypatch.setattr(tune, "GROUPS", 2)
    monkeypatch.setattr(tune, "WIDTHS", {"d64": (8, 8)})
    monkeypatch.setattr(tune, "LENGTHS", {"decode": (2, 1, 5), "short": (2, 5, 5)})


def test_every_eligible_backend_runs(small: None) -> None:
    ran: dict[str, set[str]] = {}

    def timer(runs: dict[str, Any]) -> dict[str, float]:
        for run in runs.values():
            run()
        ran[name] = set(runs)
        return {backend: 2.0 if backend == FUSED else 1.0 for backend in runs}

    said: list[str] = []
    for name in tune.classes():
        found = tune.measure([name], torch.device("cpu"), timer, said.append)
        assert list(found[name]) == [UNFUSED, FUSED], "fastest first"
    assert all(backends == {FUSED, UNFUSED} for backends in ran.values()) and len(ran) == 12
    assert said[0].startswith("[1/1] train/dense/d64/short/banded: UnfusedDotProductAttention 1 us, Fused")


def test_a_class_that_does_not_fit_is_left_out(small: None) -> None:
    def timer(runs: dict[str, Any]) -> dict[str, float]:
        raise torch.OutOfMemoryError

    said: list[str] = []
    assert tune.measure(["infer/dense/d64/short/full"], torch.device("cpu"), timer, said.append) == {}
    assert "not enough memory" in said[0]


def test_what_is_written_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path / "cache"))
    times = {UNFUSED: 1.0, FLASH_TORCH: 2.0, FUSED: 3.0}
    choose.forget()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        patch.setattr(tune, "measure", lambda names, device, say: {name: times for name in names})
        assert tune.main(["--only", "infer/dense/d64/short"]) == 0
        assert tune.main(["--only", "train/dense/d64/short"]) == 0
    path = choose.local_table_path()
    assert f"2 classes written to {path}" in capsys.readouterr().out
    entry = json.loads(path.read_text())["measured"]["9.0"]
    assert entry["device"] == "NVIDIA H200" and entry["date"] and entry["versions"]["torch"]
    assert len(entry["microseconds"]) == 4, "classes measured before stay"
    choose.forget()
    case = tune.case_of("infer/dense/d64/short/full", torch.device("meta"))
    monkeypatch.setattr(plan, "device_info", lambda device: H200)
    monkeypatch.setattr(choose, "installed", lambda: choose.Installed(cudnn=(9, 19, 0)))
    found = case.module.explain_key(case.key)
    assert found.backend == FLASH_TORCH and "this machine's table" in found.why
    order, _ = choose.ranking(plan.make_plan(case.module._static, case.key, choose.Switches()).request)
    assert order[-1] == UNFUSED, "it is measured fastest here, and its memory is the square of the length"
    monkeypatch.undo()
    choose.forget()


def test_without_a_gpu(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 1
    assert "nothing to measure" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tune.main(["--only", "nothing/like/this"])
    monkeypatch.setattr(sys, "argv", ["tune"])
    with pytest.raises(SystemExit, match="^1$"):
        runpy.run_module("te_core.tools.tune", run_name="__main__")
    assert "nothing to measure" in capsys.readouterr().out


@requires_cuda
def test_one_class_on_the_gpu() -> None:
    times = tune.measure(["infer/dense/d64/short/banded"], torch.device("cuda", 0), say=lambda line: None)
    (found,) = times.values()
    assert set(found) <= set(RUN) and all(0 < t < 1e6 for t in found.values())
