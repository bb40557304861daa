"""The benchmark of four GPUs: what it predicts, and that it goes on after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks import four, parallel, predict, sharded
from benchmarks.catalogue import BENCHMARKS
from benchmarks.four import CONTEXT, SHARDED, TENSOR, Case

SEEN = {"communication ms": 20.0, "hidden": 0.5}


def row(case: str, mode: str, ranks: int, ms: float = 0.0, **more: Any) -> dict[str, Any]:
    return asdict(Case(case, "bf16", mode, ranks)) | {"ms": ms} | more


def test_predictions() -> None:
    """Of tensor parallelism by hand; of shards the step of two comes out as it went in."""
    size = parallel.SIZES["cuda"]
    layers, *shape = sharded.SIZES["cuda"][sharded.LARGE][:5]
    model = predict.Shape("8B", layers, *shape)
    machine = predict.Machine(predict.sent(size, False) / 20e-3, between=1.0)
    step = predict.step(model, predict.Layer(50e-3), machine, predict.Mesh(1, 2), 2)["whole"]
    gathered = predict.GATHERS * layers * model.weights * 2 / 2 / 2**20
    rows = [
        row(TENSOR, "", 1, 100.0),
        row(TENSOR, "", 2, 60.0, **SEEN),
        row(TENSOR, "", 4, 44.0, **SEEN),
        row(TENSOR, "overlap", 4, 50.0, **SEEN),
        row(CONTEXT, "", 1, 100.0),
        row(CONTEXT, "p2p", 4, 50.0, **SEEN),
        row(SHARDED, "", 1, 400.0),
        row(SHARDED, "", 2, step * 1e3, **{"gathered MiB": gathered}),
    ]
    one, two, four_, overlapped, _, context, alone, shards = four.with_predictions(rows, "cuda")
    assert one["predicted ms"] == pytest.approx(100) and two["predicted ms"] == pytest.approx(60)
    assert four_["predicted ms"] == pytest.approx(50 / 2 + 10 * (3 / 4) / (1 / 2))  # halves and what shows, of 60 ms
    assert four_["of_predicted"] == pytest.approx(44 / 40) and four_["speed-up"] == pytest.approx(100 / 44)
    assert "predicted ms" not in overlapped and context["predicted ms"] == 25 and context["of_predicted"] == 2
    assert shards["of_predicted"] == pytest.approx(1) and shards["speed-up"] == pytest.approx(800 / step / 1e3)
    update = machine.update * model.weights * layers / machine.memory * 1e3
    assert alone["predicted ms"] == pytest.approx(layers * 50 + update)


def test_it_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were there stay, the one that fails says why, and those behind it are measured."""

    def spawned(kind: str, found: Any, ranks: int, seconds: float) -> Iterator[dict[str, Any]]:
        for case in found.args[0]:
            if case.mode == "overlap" and case.recipe == "delayed":
                raise RuntimeError("a trace\nthe reason")
            yield asdict(case) | {"ms": 8.0 / ranks}

    monkeypatch.setattr(parallel, "spawned", spawned)
    monkeypatch.setattr(four.harness, "gpus", lambda: 2)
    monkeypatch.setattr(four.harness, "gpu", lambda: False)
    rows = four.measure()
    cases = {Case(*(found[key] for key in Case.__annotations__)): found for found in rows}
    assert len(rows) == len(cases) == 9 + 15 + 15
    failed = {case: found for case, found in cases.items() if "ms" not in found}
    assert set(failed) == {Case(TENSOR, "delayed", "overlap", ranks) for ranks in (2, 4)}
    assert all(f["failed"] == "the reason" and f["trace"] == "a trace\nthe reason" for f in failed.values())
    assert cases[Case(TENSOR, "bf16", "overlap", 4)]["speed-up"] == 4
    assert cases[Case(SHARDED, "bf16", "", 4)]["speed-up"] == 16  # of tokens a second: four times the tokens, too


@pytest.mark.more
def test_it_is_measured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gloo ranks."""
    monkeypatch.setattr(parallel.harness, "gpu", lambda: False)
    monkeypatch.setattr(four, "RECIPES", ("bf16",))
    monkeypatch.setattr(four, "MODES", {TENSOR: ("overlap",), CONTEXT: ("a2a",), SHARDED: ("",)})
    rows = four.measure((2,))
    assert [found["case"] for found in rows] == [TENSOR, CONTEXT, SHARDED] and all(found["ms"] > 0 for found in rows)
    assert {key for found in rows for key in found} <= {*BENCHMARKS["four"].columns, "gathered MiB"}
