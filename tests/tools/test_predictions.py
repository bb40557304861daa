"""The benchmarks of shards and of four GPUs, and the model of many GPUs that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import four, parallel, predict, sharded, sharded_host
from benchmarks.catalogue import BENCHMARKS
from benchmarks.four import CONTEXT, SHARDED, TENSOR, Case
from benchmarks.predict import GIGA, Layer, Machine, Mesh, Shape

MS = 1e-3
#: Two shards and two parts of a layer, as records have them; MiB as a layer of 8192 tokens x 8192 hands over.
SHARDS = [
    {"recipe": "delayed", "bf16 ms": 200.0, "ms": 150.0, "bf16 gathered MiB": 3328.0, "gathered MiB": 3328.0},
    {"recipe": "delayed, weights too", "bf16 ms": 999.0, "ms": 160.0, "gathered MiB": 1664.0},
]
PARALLEL = [
    {"recipe": "bf16", "one ms": 72.0, "ms": 40.0, "MiB a step": 896.0, "communication ms": 8.0, "hidden": 0.5},
    {"recipe": "delayed", "one ms": 45.0, "ms": 24.0, "MiB a step": 704.0, "communication ms": 2.0, "hidden": 0.0},
]
Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Records of these rows, and an older one that would say something else."""

    def write(over: Any = PARALLEL, shards: Any = SHARDS) -> Path:
        for name, rows, case in (("parallel", over, "tp 2"), ("sharded", shards, sharded.LARGE)):
            for number, factor in (("", 3), ("-2", 1)):
                time = f"2026-11-23T0{4 - factor}:00:00Z"
                found = [{"case": case, **row, "ms": row["ms"] * factor} if "ms" in row else row for row in rows]
                text = json.dumps({"name": name, "time": time, "rows": found})
                (tmp_path / f"2026-11-23-h200-{name}{number}.json").write_text(text)
        return tmp_path

    return write


def test_rings() -> None:
    """The slowest link counts; of a ring's steps those between nodes take longer."""
    machine = Machine(inside=4 * GIGA, between=GIGA, inside_step=0.5, between_step=3.0)
    assert predict.collective(8 * GIGA, 1, 8, machine) == 0
    assert predict.collective(8 * GIGA, 4, 4, machine) == pytest.approx(8 * 3 / 4 / 4 + 3 * 0.5)
    # Two nodes of two ranks share two adapters, two nodes of eight ranks more than NVLink gives; one rank has its own.
    assert predict.collective(8 * GIGA, 4, 2, machine) == pytest.approx(8 * 3 / 4 / 2 + 2 * 0.5 + 3)
    assert predict.collective(8 * GIGA, 16, 8, machine) == pytest.approx(8 * 15 / 16 / 4 + 14 * 0.5 + 3)
    assert predict.collective(8 * GIGA, 4, 1, machine) == pytest.approx(8 * 3 / 4 + 3 * 3)


def test_a_step_by_hand() -> None:
    """Ten layers of 10 weights, where products of one and two seconds hide or do not hide what travels."""
    shape = Shape("hand", 10, 1, 2, 1, 1)
    assert shape.weights == 10
    machine = Machine(inside=100.0, between=2.0, inside_step=0.0, between_step=0.0, memory=100.0, update=8, node=4)
    layer = Layer(3.0, halves=1.6, shows=0.2)
    ends = 2 * 10 * (3 / 4) / 100  # the first gather, and the last reduction likewise
    found = predict.step(shape, layer, machine, Mesh(1, 4), 2.0)
    update = 8 * 100 / 4 / 100
    assert found["update"] == pytest.approx(update) and found["added"] == pytest.approx(2 * ends)
    assert found["whole"] == pytest.approx(30 + 2 * ends + update)
    # Two nodes share four adapters: 8 bytes a second. A gather shows in both passes; of one byte a weight less does.
    for nbytes in (2.0, 1.0):
        gather, reduce = nbytes * 10 * (7 / 8) / 8, 2 * 10 * (7 / 8) / 8
        slow = predict.step(shape, layer, machine, Mesh(1, 8), nbytes)
        passes = max(1, gather) + max(2, gather + reduce)
        assert slow["whole"] == pytest.approx(10 * passes + gather + reduce + 8 * 100 / 8 / 100)
    # Copies of it: only gradients cross, a quarter of them from each GPU, by its own adapter, twice.
    mesh = predict.step(shape, layer, machine, Mesh(2, 4), 2.0)
    reduce = ends + 2 * (2 * 10 / 4) * (1 / 2) / 2
    assert mesh["whole"] == pytest.approx(10 * (1 + max(2, ends + reduce)) + ends + reduce + update)
    # Over two ranks, which have the tokens of both: a layer takes twice 1.6 + 0.2, and half the weights travel.
    parts = predict.step(shape, layer, machine, Mesh(1, 2, 2), 2.0)
    ends = 2 * 5 * (1 / 2) / 100
    assert parts["whole"] == pytest.approx(10 * 3.6 + 2 * ends + 8 * 50 / 2 / 100)
    assert parts["added"] == pytest.approx(10 * 0.4 + 2 * ends)
    # Over four each rank has a fourth of the products and sends 3/4 instead of 1/2; computed again: a third more.
    quarters = predict.step(shape, layer, machine, Mesh(1, 1, 4), 2.0, scale=0.5, again=True)
    whole = 2 * (0.8 + 0.3) * 4 / 3
    assert quarters["whole"] == pytest.approx(10 * whole + 8 * 25 / 100)
    assert quarters["added"] == pytest.approx(10 * 2 * 0.3 * 4 / 3)


def test_what_records_say(written: Written) -> None:
    """By hand: the link's rate, the layers, and that on two ranks what was measured is predicted."""
    known = predict.known(written(), "delayed", 8192, None, 40 * GIGA)
    # Six activations gathered of a part each, and four of the whole reduced: a rank sends 448 MiB of FP8 and bf16.
    activation = 2 * 8192 * 8192
    crossing = 6 * activation / 4 + 4 * activation / 2
    assert crossing == 448 * 2**20 and known.machine.inside == pytest.approx(crossing / (2 * MS))
    large = known.layers["70B", "bf16"]
    assert (large.products, large.halves, large.shows) == pytest.approx((72 * MS, 36 * MS, 4 * MS))
    assert known.layers["70B", "delayed"] == known.layers["70B", "delayed, weights too"]
    assert list(known.nbytes.values()) == pytest.approx([2, 2, 1])
    eight = Shape("8 layers", 8, 4096, 14336, 32, 8)
    assert eight.weights == 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    for form, measured in zip(known.forms, (200, 150, 160), strict=True):
        layer = known.layers["8B", form]
        found = predict.step(eight, layer, known.machine, Mesh(1, 2), known.nbytes[form])
        assert found["whole"] == pytest.approx(measured * MS) and 0.9 * measured < 8e3 * layer.products < measured


def test_the_tables(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    """Each figure is said to be measured, and where, or assumed, and why."""
    assert predict.main(["--records", str(folder := written()), "--between", "45"]) == 0
    first, figures, predicted = capsys.readouterr().out.strip().split("\n\n")
    assert "2026-11-23-h200-parallel-2.json" in first and "2026-11-23-h200-sharded-2.json" in first
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in figures.splitlines()[2:]]
    assert {kind for _, _, kind, _ in cells} == {"measured", "assumed", "of both"}
    assert all(source.startswith(("`parallel`, ", "`sharded`, ")) == (kind == "measured") for *_, kind, source in cells)
    assert ["between nodes, a GPU", "45 GB/s", "assumed"] in [row[:3] for row in cells]
    lines = predicted.splitlines()[2:]
    assert len(lines) == 12 and "| 1024 | shard 128, tp 8 |" in lines[-1]
    assert predict.main(["--records", str(folder), "--inside", "350"]) == 0
    assert "| 350 GB/s | assumed | --inside |" in capsys.readouterr().out


def without(rows: Any, recipe: str, column: str = "") -> Any:
    """The rows but one, or but one figure of it."""
    return [
        {k: v for k, v in row.items() if k != column} if row["recipe"] == recipe else row
        for row in rows
        if column or row["recipe"] != recipe
    ]


@pytest.mark.parametrize(
    ("over", "shards", "told"),
    [
        (without(PARALLEL, "bf16"), SHARDS, "parallel-2.json has no row 'bf16'"),
        (without(PARALLEL, "delayed", "hidden"), SHARDS, "the row 'delayed' has no 'hidden' but None"),
        (PARALLEL, without(SHARDS, "delayed, weights too"), "has no row '8 Llama-shape layers, delayed, weights too'"),
        (PARALLEL, without(SHARDS, "delayed", "bf16 gathered MiB"), "'bf16 gathered MiB'"),
        ([{**PARALLEL[0], "MiB a step": 448.0}, PARALLEL[1]], SHARDS, "448.0 MiB a step in bf16"),
        (PARALLEL, [{**SHARDS[0], "bf16 gathered MiB": 900.0}, SHARDS[1]], "0.541 bytes gathered of a weight"),
        (PARALLEL, [{**SHARDS[0], "ms": 25.0}, SHARDS[1]], "in delayed communication shows on two ranks"),
    ],
)
def test_what_a_record_lacks(
    over: Any, shards: Any, told: str, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict.main(["--records", str(written(over, shards))]) == 1
    captured = capsys.readouterr()
    assert told in captured.err and captured.err.startswith("predict: ") and not captured.out


def test_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["--records", str(tmp_path)]) == 1
    assert "python -m benchmarks.run parallel, on two" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded.harness, "gpus", lambda: 0)
    monkeypatch.setattr(sharded.harness, "gpu", lambda: False)


@pytest.mark.more
def test_two_processes_measure() -> None:
    """Fewer bytes with quantized weights: half, but for what is no weight."""
    cases = (sharded.Case(sharded.SMALL, "delayed"), sharded.Case(sharded.SMALL, "current", True))
    plain, held = sharded.measure(cases)
    assert plain["of_bytes"] == 1.0 and 0.49 < held["of_bytes"] < 0.53
    assert held["bf16 gathered MiB"] == plain["bf16 gathered MiB"] == plain["gathered MiB"]
    assert held["ms"] > 0 and held["ok"] == (held["of_bf16"] <= 1) and "ok" not in plain
    assert set(BENCHMARKS["sharded"].columns) == set(held)


@pytest.mark.full
def test_what_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all ranks alike, and in the order in which cases matter."""
    monkeypatch.setattr(sharded, "SECONDS", -1)
    rows = sharded.measure()
    assert [row["case"] for row in rows] == [
        f"{case.model}, {case.shown}: left out, -1 s are over" for case in sharded.CASES
    ]


def test_what_matters_most_comes_first() -> None:
    """All cases are there once: what predictions read, then what has a target, then the others."""
    held = [case.held for case in sharded.CASES]
    assert len(set(sharded.CASES)) == len(sharded.CASES) == 15
    assert sharded.CASES[0] == sharded.Case(sharded.LARGE, "delayed") and held[1:] == [True] * 9 + [False] * 5


@pytest.mark.more
def test_one_gpu_shows_the_host() -> None:
    (row,) = sharded_host.measure((sharded.Case(sharded.SMALL, "current", True),))
    assert set(BENCHMARKS["sharded_host"].columns) == set(row) and row["host ms"] > 0
    assert row["of_bf16"] == row["ms"] / row["bf16 ms"]


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
