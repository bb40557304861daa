"""Training: FP8 reaches the loss of bf16 (and the check notices when it cannot), checkpoints resume exactly."""

from __future__ import annotations

import csv
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import training
from benchmarks.optimizer import FORMATS
from te_cli.main import main
from te_cli.settings import TEXT, Settings
from te_cli.training import Text, Trainer, read_checkpoint
from te_torch.optimizers import FusedAdam
from tests.backends import devices, more_without_gpu, requires_cuda

ROOT = Path(__file__).resolve().parents[2]
SMALL = Settings(steps=6, layers=1, hidden=32, heads=2, batch=2, sequence=24)
OPTIONS = "--device cpu --layers 1 --hidden 32 --heads 2 --batch 2 --seq 24".split()


@pytest.fixture
def one_thread():
    """One thread of torch: a model this small gains nothing from two, and loses much where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(900)  # half a minute
@pytest.mark.parametrize(
    "recipe", [pytest.param("delayed", marks=pytest.mark.more), pytest.param("current", marks=pytest.mark.full)]
)
def test_fp8_trains_like_bf16_and_frozen_gradient_scales_are_found_out(recipe: str, one_thread: None) -> None:
    """The training check reduced to 60 steps and a recipe."""
    rows = {row["recipe"]: row for row in training.measure(device=torch.device("cpu"), recipes=(recipe,))}
    assert rows["bf16"]["below unigram"] >= 0.15  # it did learn: there is something to lose
    assert abs(rows[recipe]["of_bf16"] - 1) <= 0.01
    # Far outside, not at the edge: the 1 % of the line above tells FP8 from broken FP8.
    assert rows[f"{recipe}, gradient scales frozen"]["of_bf16"] >= 1.05


@pytest.mark.full
@pytest.mark.timeout(900)
@requires_cuda
def test_the_training_check() -> None:
    """300 steps, three seeds, hidden 256."""
    rows = training.measure()
    assert [row["recipe"] for row in rows if not row["ok"]] == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", ["none", *training.CHECKED])
@pytest.mark.parametrize("device", devices())
def test_every_format_of_state_trains_as_torchs_adamw(recipe: str, device: str, one_thread: None) -> None:
    """300 steps from three seeds on a GPU, 60 steps from one on a CPU."""
    rows = training.compare_optimizers(recipe, device=torch.device(device))
    assert [row for row in rows if not row["ok"]] == [] and len(rows) == len(FORMATS)


def test_a_step_of_every_format_of_state_is_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Six steps of a tiny model in bf16: losses so close that another learning rate shows."""
    text = tmp_path / "short.txt"  # the loss of all that is held out takes most of the time
    text.write_bytes(TEXT.read_bytes()[:3000])
    monkeypatch.setattr(training, "TEXT", text)
    size = training.Size(dataclasses.replace(SMALL, rate=3e-3), (0,), 1, 0.0)
    rows = training.compare_optimizers("none", size, torch.device("cpu"))
    assert [row["case"] for row in rows] == [f"FusedAdam, {name}" for name in FORMATS]
    for row in rows:
        assert row["ok"] and row["of_torch's"] == pytest.approx(1, abs=5e-4), row
    monkeypatch.setattr(training, "FusedAdam", lambda groups, **options: FusedAdam(groups, eps=1.0, **options))
    (slow,) = training.compare_optimizers("none", size, torch.device("cpu"), ["moments bf16"])
    assert not slow["ok"] and slow["of_torch's"] < 1.1


@pytest.mark.parametrize("recipe", ["delayed", "current", "none"])
@pytest.mark.parametrize("device", devices())
def test_a_checkpoint_resumes_exactly(recipe: str, device: str, tmp_path: Path) -> None:
    """Six steps, or three, a checkpoint and three more in a new trainer: the same bits."""
    place = torch.device(device)
    settings, text = dataclasses.replace(SMALL, recipe=recipe), Text(TEXT, place)
    straight = Trainer(settings, text, place)
    straight.train()
    first = Trainer(settings, text, place)
    first.train(until=3)
    first.save(tmp_path / "a.pt")
    second = Trainer(dataclasses.replace(settings, seed=99), text, place)  # nothing of its own may survive
    second.load(read_checkpoint(tmp_path / "a.pt"))
    second.settings = settings
    second.train()
    assert second.losses == straight.losses
    wanted, got = straight.model.state_dict(), second.model.state_dict()
    assert list(wanted) == list(got)
    assert any("fp8_state.scale_bwd" in name for name in wanted) == (recipe == "delayed")
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
    assert straight.held_out_loss() == second.held_out_loss()


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "te_cli", "train", *OPTIONS, "--out", str(out), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def signals():
    """The program's handlers of signals end with it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_program_reports_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None, signals: None
) -> None:
    text = tmp_path / "short.txt"  # the loss of all that is held out takes most of the time
    text.write_bytes(TEXT.read_bytes()[:4000])
    assert main(["train", *OPTIONS, "--out", str(tmp_path), "--steps", "5", "--text", str(text)]) == 0
    output = capsys.readouterr().out
    for line in ("FP8 delayed", "bf16", "held-out loss", "unigram entropy", "tokens/s", "reference backend"):
        assert line in output
    with (tmp_path / "loss.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "FP8 delayed", "bf16"] and len(rows) == 6
    assert abs(float(rows[1][1]) - 5.6) < 0.3  # near log(256), where a model that knows nothing begins
    assert (tmp_path / "delayed.pt").exists() and (tmp_path / "none.pt").exists()


@more_without_gpu
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_an_interrupted_program_goes_on_where_it_was(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C (or SIGTERM) after some steps, then --resume: the losses of a run that nobody interrupted."""
    whole = tmp_path / "whole"
    output, _ = start(whole, "--steps", "40", "--no-compare").communicate(timeout=200)
    process = start(tmp_path, "--steps", "40", "--no-compare", "--save-every", "1")
    while not (tmp_path / "delayed.pt").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=200)
    if process.returncode == 0:
        pytest.skip("the run was over before it could be interrupted")
    assert process.returncode == 128 + number and "  python -m te_cli train " in output and " --resume\n" in output, (
        output
    )
    done = len(read_checkpoint(tmp_path / "delayed.pt")["losses"])
    assert 1 <= done < 40
    again = start(tmp_path, "--no-compare", "--resume")
    output, _ = again.communicate(timeout=200)
    assert again.returncode == 0 and f"going on after step {done}" in output, output
    assert read_checkpoint(tmp_path / "delayed.pt")["losses"] == read_checkpoint(whole / "delayed.pt")["losses"]
    wrong = start(tmp_path, "--no-compare", "--resume", "--batch", "4")
    output, _ = wrong.communicate(timeout=200)
    assert wrong.returncode != 0 and "--batch 2, but --batch 4 was given. Only --lr and --steps may" in output
