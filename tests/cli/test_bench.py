"""`te bench`: what it compares is the same layer, its figures are what was measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from te_cli import bench, layers
from te_core.errors import UnsupportedError
from tests.cli.conftest import Te

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


def test_rows_say_what_ran(te: Te, tmp_path: Path) -> None:
    sizes = ["--hidden", "32", "--heads", "2", "--seq", "16", "--recipe", "current", "nvfp4"]
    picture = tmp_path / "bench.png"
    said = te("bench", *SHORT, *sizes, "--out", str(picture)).out
    assert picture.stat().st_size > 1000 and f"Written: {picture}" in said and "█" * 10 in said
    assert "TransformerLayer on CPU" in said and "input [2, 16, 32], float32" in said
    rows = {row["name"]: row for row in json.loads(te("bench", *SHORT, *sizes, "--json").out)["rows"]}
    assert list(rows) == ["torch", "te, float32", "te, FP8 current", "te, NVFP4"]
    errors = [row["difference"] for row in rows.values()]
    assert errors[0] == 0 and errors[1] < 1e-6 and 1e-3 < errors[2] < 0.03 < errors[3] < 0.2
    for row in rows.values():
        assert 0 < row["forward_ms"] and 0 < row["first_step_s"] and row["peak_mib"] is None and not row["failed"]
        assert row["speed"] == pytest.approx(rows["torch"]["step_ms"] / row["step_ms"])


def test_a_module_of_the_user(program: Path, te: Te) -> None:
    found = json.loads(te("bench", *SHORT, "--module", "mine.py:layer", "--json").out)
    assert found["input"] == [[16, 32]] and [row["name"] for row in found["rows"]][1] == "te, float32"
    assert found["rows"][1]["difference"] < 1e-6 and found["rows"][2]["difference"] > 1e-3


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


def test_a_row_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.more  # half a minute of a compiler
def test_torch_compile_is_compared(te: Te) -> None:
    words = ["--device", "cpu", "--seconds", "0.01", "--module", "Linear", "--json"]
    rows = {row["name"]: row for row in json.loads(te("bench", *words).out)["rows"]}
    assert not rows["torch.compile"]["failed"] and rows["torch.compile"]["difference"] < 1e-5
