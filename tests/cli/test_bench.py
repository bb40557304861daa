"""`te bench`: what it compares is the same layer, its figures are what was measured, mistakes end it in a line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from te_cli import bench, layers, main
from te_core.errors import UnsupportedError

CPU = torch.device("cpu")
SHORT = ["--device", "cpu", "--no-compile", "--seconds", "0.01"]


@pytest.mark.parametrize("name", layers.LAYERS)
def test_ours_is_the_same_layer_as_torchs(name: str) -> None:
    """Outputs and all gradients, with weights that are not what they begin as."""
    sizes = layers.Sizes(32, 48, 4, 2, 8)
    theirs, ours = layers.named(name, sizes, CPU, torch.float32)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.copy_(other.normal_(0.1, 0.3))
    x = torch.randn(2, 8, 32, requires_grad=True)
    results = []
    for module in (theirs, ours):
        y = module(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
        x.grad = None
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_names_are_those_of_the_layers() -> None:
    assert tuple(layers.LAYERS) == bench.LAYERS


def test_rows_say_what_ran(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--hidden", "32", "--heads", "2", "--seq", "16", "--recipe", "current", "nvfp4"]
    picture = tmp_path / "bench.png"
    assert main.main(["bench", *SHORT, *sizes, "--out", str(picture)]) == 0
    said = capsys.readouterr().out
    assert picture.stat().st_size > 1000 and f"Written: {picture}" in said and "█" * 10 in said
    assert "TransformerLayer on CPU" in said and "input [2, 16, 32], float32" in said
    assert main.main(["bench", *SHORT, *sizes, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows) == ["torch", "te, float32", "te, FP8 current", "te, NVFP4"]
    errors = [row["difference"] for row in rows.values()]
    assert errors[0] == 0 and errors[1] < 1e-6 and 1e-3 < errors[2] < 0.03 < errors[3] < 0.2
    for row in rows.values():
        assert 0 < row["forward_ms"] and 0 < row["first_step_s"] and row["peak_mib"] is None and not row["failed"]
        assert row["speed"] == pytest.approx(rows["torch"]["step_ms"] / row["step_ms"])


MODEL = """
import torch
def layer():
    return torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32)), torch.randn(16, 32, requires_grad=True)
def nothing():
    return torch.nn.Sequential(torch.nn.Tanh()), torch.randn(16, 32)
def alone():
    return torch.nn.Linear(32, 32)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    (tmp_path / "my_model.py").write_text(MODEL)
    return tmp_path


def test_a_module_of_the_user(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", *SHORT, "--module", "my_model.py:layer", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["input"] == [[16, 32]] and [row["name"] for row in found["rows"]][1] == "te, float32"
    assert found["rows"][1]["difference"] < 1e-6 and found["rows"][2]["difference"] > 1e-3


MISTAKES = {
    "a name": (["--module", "TransformerLayr"], "did you mean TransformerLayer?"),
    "a recipe": (["--recipe", "fp9"], "invalid choice: 'fp9'"),
    "no GPU": (["--device", "cuda:77"], "cuda:77 is not here"),
    "heads": (["--hidden", "100", "--heads", "7"], "--hidden 100 is no multiple of --heads 7"),
    "a picture": (["--out", "bench.txt"], "ends in .png"),
    "a folder": (["--out", "nowhere/bench.png"], "no such folder"),
    "sizes of the user": (["--module", "my_model.py:layer", "--hidden", "64"], "that the function chooses"),
    "no file": (["--module", "other.py:layer"], "there is no such file"),
    "no function": (["--module", "my_model.py:leyer"], "did you mean layer?"),
    "nothing to convert": (["--module", "my_model.py:nothing"], "nothing to convert"),
    "no input": (["--module", "my_model.py:alone"], "let it return a module of torch and its input"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = MISTAKES[case]
    with pytest.raises(SystemExit) as ended:
        main.main(["bench", *SHORT, *words])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and said in err and "Traceback" not in err


def forms(*works: object) -> list[bench.Form]:
    """Of modules that are these functions."""

    class Module(torch.nn.Linear):
        def __init__(self, work: object) -> None:
            super().__init__(4, 4)
            self.work = work

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.work()
            return super().forward(x)

    return [bench.Form(name, Module(work), (torch.ones(2, 4),), None) for name, work in works]


def test_times_are_those_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that runs while the modules do, and stands otherwise."""
    clock = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def takes(seconds: float) -> Callable[[], None]:
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    slow, quick = forms(("torch", takes(0.02)), ("te, a", takes(0.002)))
    bench.measure([slow, quick], CPU, 0.1)
    for form, seconds in ((slow, 0.02), (quick, 0.002)):
        row = form.row
        assert (row.forward_ms, row.step_ms, row.first_step_s) == pytest.approx((1e3 * seconds, 1e3 * seconds, seconds))


def test_a_row_that_cannot_run_says_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported() -> None:
        raise UnsupportedError("a GEMM in MXFP8", "sm_90", "sm_100", "pass emulate=True")

    def no_compiler() -> None:
        raise RuntimeError("no compiler: g++\nand more")

    made = forms(("torch", lambda: None), ("torch.compile", no_compiler), ("te, MXFP8", unsupported))
    monkeypatch.setattr(bench, "forms_of", lambda *_: made)
    options = argparse.Namespace(device="cpu", seconds=0.01, module="Linear", out=None, **dict.fromkeys(bench.SIZES))
    found, words, code = bench.run(options)
    assert code == 1 and [bool(row["failed"]) for row in found["rows"]] == [False, True, True]
    assert "did not run: no compiler: g++\n" in words and "did not run: a GEMM in MXFP8: got sm_90" in words
    made[:] = forms(("torch", lambda: None), ("torch.compile", no_compiler))
    assert bench.run(options)[2] == 0  # that torch.compile lacks a compiler is no fault of ours

    made[:] = forms(("torch", unsupported))
    with pytest.raises(UnsupportedError):  # nothing to compare with
        bench.run(options)
    capsys.readouterr()


@pytest.mark.more  # half a minute of a compiler
def test_torch_compile_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "--device", "cpu", "--seconds", "0.01", "--module", "Linear", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert not rows["torch.compile"]["failed"] and rows["torch.compile"]["difference"] < 1e-5
