"""The benchmarks of replayed layers run without a GPU: small ones, whose times mean nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import te_torch as te
from benchmarks import attention, end_to_end, harness, modules, players, replay
from benchmarks.catalogue import BENCHMARKS
from benchmarks.kernel_groups import GROUPS
from benchmarks.modules import BF16, Case
from te_core.tape import taped


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    layer = partial(attention.layer, 64, 64, 2, device="cpu")
    linear = Case("Linear", partial(te.Linear, 64, 64, device="cpu", **BF16), (16, 64), host={"delayed": (1, 1)})
    monkeypatch.setattr(replay, "HOST", [Case("Layer", layer, (8, 2, 64), host={"current": (1, 1)}), linear])
    monkeypatch.setattr(replay, "GPU", replace(replay.HOST[0], recipes=("delayed",)))
    monkeypatch.setattr(replay, "STEP", (8, 64))
    monkeypatch.setattr(replay, "REGIONS", (1, 2))
    for name in ("LAYERS", "STEPS", "ROUNDS"):
        monkeypatch.setattr(replay, name, 2)
    monkeypatch.setattr(modules, "LINEAR_RECIPES", ("bf16", "delayed"))
    monkeypatch.setattr(harness, "gpu", lambda: False)
    monkeypatch.setattr(harness, "HOST_ROUNDS", 2)
    before = taped.when()
    yield
    assert taped.when() == before


@pytest.mark.more
def test_replays(capsys: pytest.CaptureFixture[str]) -> None:
    rows = replay.measure()
    assert not [row["case"] for row in rows if "left out" in row["case"]]
    assert len(capsys.readouterr().out.splitlines()) == len(rows) - 1
    by_case: dict[str, list[harness.Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"].split(":")[0], []).append(row)
    bits = by_case.pop("same bits")
    assert len(bits) == 4 and all(row["equal"] and row["reproducible"] for row in bits)
    (last,) = [row for row in rows if "share" in row]
    assert last["share"] == 1 and last["reasons"] == "none was not"
    assert int(last["case"].split()[-1]) > 100
    regions = [row for row in rows if "modules" in row]
    assert regions[1]["modules"] == 2 * regions[0]["modules"] == 6
    for row in by_case["host"]:
        assert row["of_linear"] == row["fwd+bwd us"] / row["nn.Linear fwd+bwd us"] > 0
    assert {key for row in rows for key in row} >= set(BENCHMARKS["replay"].columns)


@pytest.mark.more
def test_players(monkeypatch: pytest.MonkeyPatch) -> None:
    """By turns; each has what it bound for itself, and the variable is left as it was."""
    linear, begin, bound = replay.HOST[1], players.Turns.begin, []  # type: ignore[var-annotated]

    def noting(turns: players.Turns, number: int) -> None:
        bound.extend((os.environ["TE_CORE_PLAYER"], each) for tape in taped.tapes() for each in tape._bound.values())
        begin(turns, number)

    monkeypatch.setattr(players, "SMALL", [replay.HOST[0], linear])
    monkeypatch.setattr(players, "LARGE", linear)
    monkeypatch.setattr(players, "RECIPES", ("bf16", "delayed"))
    monkeypatch.setattr(players.c_library, "library", lambda *names: None)
    monkeypatch.setattr(players.Turns, "begin", noting)
    monkeypatch.setenv("TE_CORE_PLAYER", "python")
    rows = players.measure()
    assert os.environ["TE_CORE_PLAYER"] == "python"
    assert {key for row in rows for key in row} >= set(BENCHMARKS["players"].columns)
    assert len(rows) == 8 and all(row["ok"] for row in rows if "equal" in row)
    python, c = ({id(each) for name, each in bound if name == player} for player in players.PLAYERS)
    assert python and c and not python & c


def test_bits_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one gradient."""
    real = replay.results

    def results(case: Case, recipe: str, setting: str) -> list[torch.Tensor]:
        found = real(case, recipe, setting)
        if setting == replay.REPLAYED:
            found[-1].view(torch.uint8)[0] ^= 1
        return found

    monkeypatch.setattr(replay, "results", results)
    row = replay.bits_row(replay.HOST[1], "delayed")
    assert not row["equal"] and row["reproducible"]
    taped.set_when(None)


def test_reasons_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = taped.Counts(replayed=5)
    counts.interpreted["why"] = 2
    monkeypatch.setattr(taped, "COUNTS", counts)
    before = replay.tally()
    counts.replayed += 3
    counts.interpreted.update({"why": 1})
    row = replay.share_row(before)
    assert row["share"] == 0.75 and not row["ok"] and row["reasons"] == "1 not: why" and row["case"].endswith("of 4")


def test_what_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "SECONDS", -1)
    rows = replay.measure()
    assert all("left out" in row["case"] for row in rows[:-1]) and len(rows) == len(replay.jobs()) + 1


def test_what_cannot_be_had_costs_no_other_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> harness.Row:
        raise ValueError("no such plan")

    monkeypatch.setattr(replay, "case_row", fails)
    monkeypatch.setattr(replay, "jobs", lambda jobs=replay.jobs: jobs()[:1] + jobs()[-1:])
    first, last, _ = replay.measure()
    assert first["ok"] is False and "no such plan" in first["reasons"] and last["fwd+bwd us"] > 0
    assert "Traceback" in capsys.readouterr().err


def test_a_small_llama_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WARM", "ROUNDS", "STEPS"):
        monkeypatch.setattr(end_to_end, name, 1)
    monkeypatch.setenv("END_TO_END_RECIPES", "bf16,delayed")
    monkeypatch.setenv("END_TO_END_PARTS", "loss, loss + optimizer")
    rows = end_to_end.measure(end_to_end.Size(2, 64, 96, 4, 2, 50, 2, 8))
    ways = ["torch's", "loss", "loss, optimizer"]
    assert [(row["recipe"], row["parts"]) for row in rows] == [
        *(("bf16", way) for way in ways),
        *(("delayed", way) for way in (*ways, "loss, optimizer, FP8 weights")),
    ]
    for row in rows:
        assert row["tokens/s"] == pytest.approx(16 / row["ms"] * 1e3) and row["last loss"] < row["first loss"]
        torchs = next(r for r in rows if r["recipe"] == row["recipe"])
        assert row["first loss"] == pytest.approx(torchs["first loss"], rel=0.01)
        assert row["last loss"] == pytest.approx(torchs["last loss"], rel=0.02)
        # Not predicted: scales, and torch's counts of steps.
        assert row["held GiB"] == pytest.approx(row["predicted GiB"], rel=0.01)
    shown = {key for row in rows for key in row} | set(GROUPS)
    assert shown >= set(BENCHMARKS["end_to_end"].columns) - {"of_before", "target", "ok"}


@pytest.mark.more
def test_one_recipe_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(size: end_to_end.Size, recipe: str, ways: Any) -> list[harness.Row]:
        if recipe == "bf16":
            raise RuntimeError("out of memory")
        return [{"case": "found", "recipe": recipe}]

    monkeypatch.setattr(end_to_end, "train", train)
    rows = end_to_end.measure()
    assert not rows[0]["ok"] and "out of memory" in rows[0]["reason"]
    assert [row["case"] for row in rows[1:]] == ["found"] * 3
    monkeypatch.setenv("END_TO_END_PARTS", "loss+head")
    with pytest.raises(ValueError, match="END_TO_END_PARTS has head in it: choose from loss, optimizer"):
        end_to_end.measure()


def test_the_billion() -> None:
    """Parameters, without memory: 1.1 billion, and the embedding's look-up is no product."""
    size = end_to_end.Size()
    per_layer = 2048 * (32 + 2 * 8) * 64 + 2048**2 + 3 * 2048 * 8192 + 2 * 2048
    weights = 16 * per_layer + 2048 + 32000 * 2048

    class Counted:
        embed: Any = torch.nn.Embedding(size.words, 2048, device="meta")

        def parameters(self) -> list[Any]:
            return [self.embed.weight, torch.empty(weights, device="meta")]

    found = end_to_end.flops(Counted(), size)  # type: ignore[arg-type]
    assert found == 16384 * (6 * weights + 12 * 16 * 2048 * 2048) and 1.0e9 < weights < 1.1e9
