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
from tests.cli.conftest import Te

ROOT = Path(__file__).resolve().parents[2]


def test_doctor_is_that_of_the_core(te: Te) -> None:
    assert "TE_CORE_CACHE_DIR" in te("doctor", "--variables").out
    assert "usage: te doctor" in te("doctor", "--help").out


@pytest.mark.parametrize("command", main.COMMANDS)
def test_help_shows_examples(command: str, te: Te) -> None:
    code, said, _ = te(command, "--help")
    assert code == 0 and f"\n    te {command} " in said and "--json" in said


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--version", f"te-runtime {te_core.__version__}"),
        ("--help", "report"),
        ("bench --help", "TransformerLayer"),
        ("doctor --variables", "TE_CORE_TAPES"),
        *((words, None) for words in ("train", "bench", "report json:loads", "warmup json:loads")),
    ],
)
def test_a_missing_torch_is_told_in_a_line(words: str, said: str | None) -> None:
    """By what needs it."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *words.split()]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if said:
        assert ran.returncode == 0 and said in ran.stdout, ran.stderr
    else:
        assert ran.returncode == 1 and "pip install" in ran.stderr and "Traceback" not in ran.stderr


ENDS = {
    "CUDA": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "smaller --batch (CUDA out"),
    "NumPy": (MemoryError(), 1, "out of memory. Choose smaller sizes"),
    "the CPU": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "out of memory"),
    "Ctrl-C": (KeyboardInterrupt(), 130, "te bench: error: interrupted"),
    "a fault": (RuntimeError("a fault"), 0, "a fault"),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_a_user_can_mend_ends_in_a_line(case: str, monkeypatch: pytest.MonkeyPatch, te: Te) -> None:
    """And a fault of ours is shown whole."""
    error, code, said = ENDS[case]

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(bench, "run", fails)
    if not code:
        with pytest.raises(type(error), match=said):
            te("bench")
        return
    ended = te("bench")
    assert ended.code == code and said in ended.err


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


MISTAKES = {
    "train --stpes 3": r"usage: te train .*--stpes 3 \(did you mean --steps\?\)",
    "report a.py:step --foo": r"usage: te report .*arguments: --foo\n",
    "warmup a.py:step b": r"usage: te warmup .*arguments: b\n",
    "report mine": "write FILE.py:FUNCTION",
    "report other.py:step": "there is no such file",
    "report other.steps:step": "no module other here",
    "report mine:stepp": r"did you mean step\?",
    "report mine:modle": r"has no function modle \(did you mean model\?\)|has no function modle\n",
    "report mine:calls": r"calls of mine is no function, but of type list\n",
    "bench --module TransformerLayr": r"did you mean TransformerLayer\?",
    "bench --recipe fp9": "invalid choice: 'fp9'",
    "bench --device cuda:77": "cuda:77 is not here",
    "bench --hidden 100 --heads 7": "--hidden 100 is no multiple of --heads 7",
    "bench --out bench.txt": r"ends in \.png",
    "bench --out nowhere/bench.png": "no such folder",
    "bench --module mine.py:layer --hidden 64": "that the function chooses",
    "bench --module other.py:layer": "there is no such file",
    "bench --module mine.py:leyer": r"did you mean layer\?",
    "bench --module mine.py:no_layer": "nothing to convert",
    "bench --module mine.py:alone": "let it return a module of torch and its input",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_in_the_command_ends_it_in_a_line(words: str, program: Path, te: Te) -> None:
    given = words.split() + (["--device", "cpu", "--seconds", "0.01"] if words.startswith("bench --module") else [])
    code, _, err = te(*given)
    assert code == 2 and re.search(f"(?s){MISTAKES[words]}", err) and "Traceback" not in err


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a short training."""
    monkeypatch.setattr(train, "Interrupt", lambda: type("Never", (), {"seen": 0})())
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    (tmp_path / "text").write_bytes(b"to be or not to be, that is the question; " * 40)
    size = "--device cpu --steps 2 --layers 1 --hidden 32 --heads 2 --batch 2 --seq 16 --recipe current".split()
    return ["train", *size, "--out", str(tmp_path / "out"), "--text", str(tmp_path / "text")]


@pytest.mark.parametrize("file", ["current", "loss"])  # a checkpoint, the table of losses
def test_a_full_disk(file: str, training: list[str], tmp_path: Path, te: Te) -> None:
    """A line that says so, status 1, and no half of a file."""
    draft = tmp_path / "out" / f"{file}.tmp"
    draft.parent.mkdir()
    (draft.with_suffix(".pt")).write_bytes(b"before")
    draft.symlink_to("/dev/full")
    code, _, said = te(*training, "--no-compare")
    assert code == 1 and said.count("\n") == 1 and "cannot be written (No space left on device)" in said
    assert not draft.is_symlink() and draft.with_suffix(".pt").read_bytes() == b"before"
    assert ("one from before is as it was" in said) == (file == "current")


def test_a_training_goes_on_as_it_began(training: list[str], tmp_path: Path, te: Te) -> None:
    """In its recipe, with its text, without the run that was left out; what may change does so for both runs."""
    assert te(*training, "--no-compare").code == 0
    again = ["train", "--device", "cpu", "--out", str(tmp_path / "out"), "--resume"]
    for words, said in {
        ("--steps", "1"): "current.pt is of step 2. Choose --steps 2, or more",
        ("--compare", "--steps", "3"): "none.pt is of step 0, so that another --steps would change one run",
    }.items():
        ended = te(*again, *words)
        assert ended.code == 2 and said in ended.err
    for words, runs, steps in (((), 1, 2), (("--steps", "3"), 1, 3), (("--compare",), 2, 3), (("--lr", "1e-4"), 2, 3)):
        ended = te(*again, *words, "--json")
        found = json.loads(ended.out)
        assert [run["name"] for run in found["runs"]] == ["FP8 current", "bf16"][:runs]
        assert {len(run["losses"]) for run in found["runs"]} == {steps} and found["settings"]["recipe"] == "current"
        assert ": text, " in ended.err
    (tmp_path / "out" / "block.pt").touch()
    assert "has checkpoints of current, block. Choose one" in te(*again).err


def test_json_of_a_training_is_all_that_is_printed(training: list[str], tmp_path: Path, te: Te) -> None:
    out, said = tmp_path / "out", te(*training, "--json")
    found = json.loads(said.out)
    assert [run["name"] for run in found["runs"]] == ["FP8 current", "bf16"] and len(found["runs"][0]["losses"]) == 2
    assert found["settings"]["recipe"] == "current" and found["settings"]["steps"] == 2
    assert all(Path(path).is_file() for path in found["written"]) and "loss" in said.err

    (out / "loss.png").unlink(missing_ok=True)  # as without matplotlib: --resume draws it, and trains nothing again
    again = te(*training, "--resume").out
    assert (out / "loss.png").is_file() and re.search(r"tokens/s +- +-\n", again)
