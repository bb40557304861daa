"""The command `te` itself: its help, its version, and how a command ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import te_core
from te_cli import bench, main, train

ROOT = Path(__file__).resolve().parents[2]


def test_doctor_is_that_of_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--variables"]) == 0
    assert "TE_CORE_CACHE_DIR" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main.main(["doctor", "--help"])
    assert "usage: te doctor" in capsys.readouterr().out


@pytest.mark.parametrize("command", main.COMMANDS)
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([command, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"\n    te {command} " in said and "--json" in said


WITHOUT_TORCH = """
import sys
from importlib import metadata
known = metadata.version
sys.modules["torch"] = None  # to import it is an error
def version(name):
    return known("no package" if name == "torch" else name)
metadata.version = version
from te_cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_help_version_and_doctor_need_no_torch() -> None:
    for words, said in {
        ("--version",): f"te-runtime {te_core.__version__}",
        ("--help",): "report",
        ("bench", "--help"): "TransformerLayer",
        ("doctor", "--variables"): "TE_CORE_TAPES",
    }.items():
        ran = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 0 and said in ran.stdout, ran.stderr


@pytest.mark.parametrize("words", (["train"], ["bench"], ["report", "json:loads"], ["warmup", "json:loads"]))
def test_a_missing_torch_is_told_in_a_line(words: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 1 and "pip install" in ran.stderr and "Traceback" not in ran.stderr


ENDS = {
    "CUDA": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "smaller --batch (CUDA out"),
    "NumPy": (MemoryError(), 1, "out of memory. Choose smaller sizes"),
    "the CPU": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "out of memory"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "te bench: error: interrupted"),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_a_user_can_mend_ends_in_a_line(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error, code, said = ENDS[case]

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(bench, "run", fails)
    with pytest.raises(SystemExit) as ended:
        main.main(["bench"])
    assert ended.value.code == code and said in capsys.readouterr().err


def test_a_fault_of_ours_is_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(bench, "run", fails)
    with pytest.raises(RuntimeError, match="a fault"):
        main.main(["bench"])


LONG = """
from te_cli import main
class Long:
    add_arguments = staticmethod(lambda parser: None)
    run = staticmethod(lambda options: ({}, "x" * 1000000, 0))
main.import_module = lambda name: Long
main.main(["warmup"])
"""


def test_a_reader_that_has_seen_enough_ends_the_command() -> None:
    shell = f'{sys.executable} -c "$0" | head -c 10'
    ran = subprocess.run(["bash", "-c", shell, LONG], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "x" * 10 and not ran.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (["train", "--stpes", "3"], r"usage: te train .*--stpes 3 \(did you mean --steps\?\)"),
        (["report", "a.py:step", "--foo"], r"usage: te report .*arguments: --foo\n"),
        (["warmup", "a.py:step", "b"], r"usage: te warmup .*arguments: b\n"),
    ],
)
def test_an_unknown_option_is_told_by_its_command(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    assert ended.value.code == 2 and re.match(f"(?s){said}", capsys.readouterr().err)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a short training, but for its text."""
    monkeypatch.setattr(train, "Interrupt", lambda: type("Never", (), {"seen": 0})())
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    (tmp_path / "text").write_bytes(b"to be or not to be, that is the question; " * 40)
    size = "--device cpu --steps 2 --layers 1 --hidden 32 --heads 2 --batch 2 --seq 16 --recipe current".split()
    return ["train", *size, "--out", str(tmp_path / "out")]


@pytest.mark.parametrize("file", ["current", "loss"])  # a checkpoint, the table of losses
def test_a_full_disk(file: str, training: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that says so, status 1, and no half of a file."""
    draft = tmp_path / "out" / f"{file}.tmp"
    draft.parent.mkdir()
    (draft.with_suffix(".pt")).write_bytes(b"before")
    draft.symlink_to("/dev/full")
    with pytest.raises(SystemExit) as ended:
        main.main([*training, "--no-compare", "--text", str(tmp_path / "text")])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.count("\n") == 1 and "cannot be written (No space left on device)" in said
    assert not draft.is_symlink() and draft.with_suffix(".pt").read_bytes() == b"before"
    assert ("one from before is as it was" in said) == (file == "current")


def test_a_training_goes_on_as_it_began(
    training: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its recipe, with its text, without the run that was left out; what may change does so for both runs."""
    assert main.main([*training, "--no-compare", "--text", str(tmp_path / "text")]) == 0
    again = ["train", "--device", "cpu", "--out", str(tmp_path / "out"), "--resume"]
    for words, said in {
        ("--steps", "1"): "current.pt is of step 2. Choose --steps 2, or more",
        ("--compare", "--steps", "3"): "none.pt is of step 0, so that another --steps would change one run",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main.main([*again, *words])
        assert ended.value.code == 2 and said in capsys.readouterr().err
    for words, runs, steps in (((), 1, 2), (("--steps", "3"), 1, 3), (("--compare",), 2, 3), (("--lr", "1e-4"), 2, 3)):
        assert main.main([*again, *words, "--json"]) == 0
        said = capsys.readouterr()
        found = json.loads(said.out)
        assert [run["name"] for run in found["runs"]] == ["FP8 current", "bf16"][:runs]
        assert {len(run["losses"]) for run in found["runs"]} == {steps} and found["settings"]["recipe"] == "current"
        assert ": text, " in said.err
    (tmp_path / "out" / "block.pt").touch()
    with pytest.raises(SystemExit):
        main.main(again)
    assert "has checkpoints of current, block. Choose one" in capsys.readouterr().err


def test_json_of_a_training_is_all_that_is_printed(
    training: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main.main([*training, "--text", str(tmp_path / "text"), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [run["name"] for run in found["runs"]] == ["FP8 current", "bf16"] and len(found["runs"][0]["losses"]) == 2
    assert found["settings"]["recipe"] == "current" and found["settings"]["steps"] == 2
    assert all(Path(path).is_file() for path in found["written"]) and "loss" in said.err

    (out / "loss.png").unlink(missing_ok=True)  # as without matplotlib: --resume draws it, and trains nothing again
    assert main.main([*training, "--text", str(tmp_path / "text"), "--resume"]) == 0
    assert (out / "loss.png").is_file() and re.search(r"tokens/s +- +-\n", capsys.readouterr().out)
