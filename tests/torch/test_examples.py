"""The examples as programs: a mistake of their user ends in one line that says what to do, before any work is done."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples import encoder_decoder, generate, lora, microbatches, moe, vit
from te_cli import arguments, train, training
from te_cli.main import main
from te_cli.settings import TEXT, Settings
from te_cli.training import Text, Trainer, read_checkpoint
from tests.covering import covering

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--steps", "3", "--layers", "1", "--hidden", "32", "--heads", "2", "--batch", "2", "--seq", "24"]
SMALL = Settings(steps=3, layers=1, hidden=32, heads=2, batch=2, sequence=24)
SHORT = {f"{short.__name__.split('.')[-1]}.py": short.main for short in (moe, vit, encoder_decoder, lora)}
PROGRAMS = {"generate.py": generate.main, "microbatches.py": microbatches.main, **SHORT}
PROGRAMS["te train"] = lambda given: main(["train", *given])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each of two recipes."""
    folder, text = tmp_path_factory.mktemp("trained"), Text(TEXT, torch.device("cpu"))
    for recipe in ("delayed", "none"):
        trainer = Trainer(Settings(**{**vars(SMALL), "recipe": recipe}), text, torch.device("cpu"))
        trainer.train(until=1)
        trainer.save(folder / f"{recipe}.pt")
    return folder


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may set the number of torch's threads, and takes signals over once it trains."""
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("a step was made before the mistake was noticed"))


def refused(program: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the program says as it ends."""
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program](list(arguments))
    said = capsys.readouterr()
    code = ended.value.code
    assert code not in (0, None) and isinstance(code, int)
    assert len(said.err.strip().splitlines()) <= 12 and f"{program}: error: " in said.err, said.err
    return said.err


NUMBERS = ("0", "-3", "1.5", "many")
ARGUMENTS: list[tuple[str, list[str], str]] = [
    *[("te train", [f"--{name}", n], f"--{name}") for name in ("steps", "layers", "heads", "batch") for n in NUMBERS],
    *[("te train", ["--lr", n], "--lr") for n in ("0", "-1", "nan", "inf", "fast")],
    *[("te train", ["--seed", n], "--seed") for n in ("-1", str(1 << 64), "x")],
    ("te train", ["--recipe", "fp9"], "invalid choice: 'fp9'"),
    ("te train", ["--hidden", "100", "--heads", "7"], "hidden=100"),
    ("te train", ["--save-every", "0"], "--save-every"),
    *[(name, ["--device", d], "--device") for name in PROGRAMS for d in ("gpu", "meta", "cuda:77", "mps")],
    *[(short, ["--steps", n], "--steps") for short in SHORT for n in NUMBERS],
    ("lora.py", ["--recipe", "none"], "--recipe"),
    *[("microbatches.py", [f"--{name}", n], f"--{name}") for name in ("steps", "microbatches") for n in NUMBERS],
    *[("generate.py", [f"--{name}", n], f"--{name}") for name in ("count", "batch") for n in NUMBERS],
    ("generate.py", ["--prompt", ""], "--prompt"),
]


def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {}
    for program, given, said in ARGUMENTS:
        out = ["--out", str(tmp_path)] if program == "te train" else []
        message = refused(program, *out, *given, capsys=capsys)
        if said not in message or list(tmp_path.iterdir()):
            wrong[" ".join([program, *given])] = message
    assert not wrong


EARLY = [case for case in ARGUMENTS if case[0] == "te train" and case[1][-1] in ("fast", "fp9", "7", "cuda:77", "0")]
WITHOUT_TORCH = """
import sys, io, contextlib
sys.modules["torch"] = None  # to import it is an error
from te_cli.main import main
for arguments in {cases}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(["train", *arguments])
        except SystemExit as ended:
            assert ended.code == 2, ended.code
    print(said.getvalue().splitlines()[-1])
"""


def test_an_options_mistake_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    """Its import takes seconds."""
    out = ["--out", str(tmp_path / "out")]
    more = [
        ["--text", "nowhere"],
        ["--seq", "99999"],
        ["--text", str(a_file(tmp_path))],
        ["--out", str(tmp_path / "there")],
    ]
    cases = [*([*out, *arguments] for _, arguments, _ in EARLY), *([*out, *arguments] for arguments in more)]
    code = WITHOUT_TORCH.format(cases=cases)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    wanted = [*(said for _, _, said in EARLY), "the text nowhere", "choose shorter ones", "a text of 1 bytes", "--out"]
    assert len(said) == len(wanted) > 10 and all(w in line for w, line in zip(wanted, said, strict=True)), said
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_torch_is_not_built_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_core import libraries

    monkeypatch.setattr(arguments, "_torch", lambda: "2.13.0+cpu")
    assert arguments.usual_device() == "cpu" and arguments.device("cpu") == "cpu"
    with pytest.raises(argparse.ArgumentTypeError, match=r"cuda:1 is not here: torch 2.13.0.cpu is built for the CPU"):
        arguments.device("cuda:1")
    monkeypatch.setattr(arguments, "_torch", lambda: "2.13.0")
    monkeypatch.setattr(libraries, "driver", lambda: type("Driver", (), {"device_count": 2}))
    assert arguments.usual_device() == "cuda" and arguments.device("cuda:1") == "cuda:1"
    with pytest.raises(argparse.ArgumentTypeError, match="cuda:2 is not here: this machine has 2 GPUs"):
        arguments.device("cuda:2")


def a_file(folder: Path) -> Path:
    (folder / "there").write_text("x")
    return folder / "there"


def short(folder: Path, size: int) -> Path:
    (folder / "short.txt").write_bytes(b"abcd" * (size // 4))
    return folder / "short.txt"


TEXTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "none": (lambda folder: folder / "nothing.txt", "No such file"),
    "a folder": (lambda folder: folder, "Is a directory"),
    "empty": (lambda folder: short(folder, 0), "is empty"),
    "too short": (lambda folder: short(folder, 24), "24 bytes"),
    "held out too short": (lambda folder: short(folder, 160), "held out"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_cannot_be_learnt(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, said = TEXTS[case]
    text = make(tmp_path)
    assert said in refused("te train", *TINY, "--text", str(text), "--out", str(tmp_path / "out"), capsys=capsys)


def locked(folder: Path) -> Path:
    (folder / "locked").mkdir(mode=0o500)
    return folder / "locked" / "out"


OUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (a_file, "there"),
    "below a file": (lambda folder: a_file(folder) / "out", "there"),
    "locked": (locked, "locked"),
    "a folder in the place of a checkpoint": (lambda folder: (folder / "delayed.pt").mkdir() or folder, "delayed.pt"),
    "a folder in the place of the curve": (lambda folder: (folder / "loss.png").mkdir() or folder, "loss.png"),
}


@pytest.mark.parametrize("case", OUTS)
def test_folders_that_cannot_be_written(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Noticed before the first step, not after the last one."""
    if case == "locked" and os.geteuid() == 0:
        pytest.skip("nothing is locked for root")
    make, said = OUTS[case]
    message = refused("te train", *TINY, "--out", str(make(tmp_path)), capsys=capsys)
    assert said in message and "--out" in message


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = b""
    path.write_bytes(data)


def without(key: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        del state[key]
        torch.save(state, path)

    return change


def settings(**changed: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        state["settings"].update(changed)
        torch.save(state, path)

    return change


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "text": lambda path: path.write_text("no checkpoint"),
    "empty": lambda path: path.write_bytes(b""),
    "cut short": damaged,
    "another program's": lambda path: torch.save({"weights": torch.ones(2)}, path),
    "a tensor": lambda path: torch.save(torch.ones(2), path),
    "an object": lambda path: torch.save({"settings": Path("x")}, path),
    "without settings": without("settings"),
    "without model": without("model"),
    "an unknown setting": settings(width=3),
    "another type": settings(layers="two"),
    "a recipe of a later version": settings(recipe="fp6"),
    "another width than its weights": settings(hidden=64),
}


@covering(case=CHECKPOINTS, program=["generate.py", "te train"])
def test_checkpoints_that_are_none(
    case: str, program: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both of the runs that are to go on are looked at before the first one does."""
    for spoiled in ("delayed.pt", "none.pt"):
        shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
        CHECKPOINTS[case](tmp_path / spoiled)
        if program == "te train":
            message = refused(program, "--resume", "--out", str(tmp_path), capsys=capsys)
        else:
            message = refused(program, "--checkpoint", str(tmp_path / spoiled), "--device", "cpu", capsys=capsys)
        assert spoiled in message


def test_runs_that_do_not_belong_together(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bf16 run beside the first one was of another model."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    other, place = Settings(**{**vars(SMALL), "recipe": "none", "hidden": 64}), torch.device("cpu")
    Trainer(other, Text(TEXT, place), place).save(tmp_path / "none.pt")
    message = refused("te train", "--resume", "--out", str(tmp_path), capsys=capsys)
    assert "none.pt" in message and "--hidden 64" in message and "--no-compare" in message


def test_a_checkpoint_that_was_named_has_to_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing.pt" in refused("generate.py", "--checkpoint", str(tmp_path / "nothing.pt"), capsys=capsys)


@pytest.mark.more  # the others call the same function
def test_no_traceback_of_the_program_itself(tmp_path: Path) -> None:
    command = [sys.executable, "examples/train_gpt.py", *TINY, "--out", str(a_file(tmp_path))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2 and ended.stderr.startswith("te train: error: --out ") and not ended.stdout


def shell(line: str) -> list[str]:
    """The words that a shell makes of a line."""
    code = f"printf '%s\\n' {line}"
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def test_what_to_type_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was typed, with --resume; started by make, the line for make, which hands ARGS to a shell once more."""
    typed = ["--out", "two words", "--text", "it's $5.txt"]
    monkeypatch.delenv("STARTED_BY", raising=False)
    for argv, said in {
        ("/usr/bin/te", "train"): ["te", "train"],
        ("/lib/te_cli/__main__.py", "train"): ["python", "-m", "te_cli", "train"],
        ("examples/train_gpt.py",): ["python", "examples/train_gpt.py"],
    }.items():
        for words in (typed, [*typed, "--resume"]):
            monkeypatch.setattr(sys, "argv", [*argv, *words])
            assert shell(train.again()) == [*said, *typed, "--resume"]
    monkeypatch.setenv("STARTED_BY", "make train")
    monkeypatch.setattr(sys, "argv", ["/lib/te_cli/__main__.py", "train", *typed])
    make, target, variable = shell(train.again())
    assert (make, target) == ("make", "train") and variable.startswith("ARGS=")
    assert shell(variable.removeprefix("ARGS=").replace("$$", "$")) == [*typed, "--resume"]
    monkeypatch.setattr(sys, "argv", ["/lib/te_cli/__main__.py", "train"])
    assert train.again() == "make train ARGS=--resume"
    makefile = (ROOT / "Makefile").read_text()
    assert 'STARTED_BY="make train"' in makefile.split("\ntrain:")[1].split("\n\n")[0]


def test_resume_where_there_is_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Trainer, "step", lambda *_: torch.tensor(1.0))
    monkeypatch.setattr(Trainer, "held_out_loss", lambda *_: 1.0)
    monkeypatch.setattr(train, "Interrupt", lambda: type("Never", (), {"seen": 0})())
    assert main(["train", *TINY, "--out", str(tmp_path), "--resume", "--no-compare", "--device", "cpu"]) == 0
    assert "there is nothing to go on from" in capsys.readouterr().out
    assert read_checkpoint(tmp_path / "delayed.pt")["losses"] == [1.0] * 3


def test_the_held_out_text_is_bounded_and_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sequences of a byte or two it would be thousands of batches."""
    read, told = [], []

    def loss(model: object, rows: torch.Tensor) -> torch.Tensor:
        read.append(rows)
        return torch.tensor(float(len(read)))

    monkeypatch.setattr(training, "mean_loss", loss)
    place = torch.device("cpu")
    trainer = Trainer(Settings(**{**vars(SMALL), "sequence": 2, "batch": 3}), Text(TEXT, place), place)
    found = trainer.held_out_loss(lambda done, of: told.append((done, of)))
    assert len(read) == training.HELD_OUT_BATCHES == 100 and told == [(i + 1, 100) for i in range(100)]
    assert found == pytest.approx(50.5) and all(rows.shape == (3, 3) for rows in read)
    assert torch.equal(torch.cat([rows[:, :2].flatten() for rows in read]), trainer.text.held_out[:600])


def test_an_interrupt_in_the_held_out_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is there already; nothing else begins."""
    seen = type("Terminated", (), {"seen": 0})()

    def loss(trainer: Trainer, on_batch: Callable[[int, int], None]) -> float:
        on_batch(1, 9)
        seen.seen = signal.SIGTERM
        on_batch(2, 9)
        raise AssertionError("it went on")

    monkeypatch.setattr(Trainer, "step", lambda *_: torch.tensor(1.0))
    monkeypatch.setattr(Trainer, "held_out_loss", loss)
    monkeypatch.setattr(train, "Interrupt", lambda: seen)
    with pytest.raises(SystemExit) as ended:
        main(["train", *TINY, "--out", str(tmp_path), "--device", "cpu"])
    assert ended.value.code == 128 + signal.SIGTERM
    said = capsys.readouterr().out
    assert "Interrupted after step 3. Saved in" in said and " --resume" in said
    assert read_checkpoint(tmp_path / "delayed.pt")["losses"] == [1.0] * 3 and not (tmp_path / "none.pt").exists()


def test_make_hands_signals_to_the_program() -> None:
    """A shell between them would end by itself, and leave the program behind."""
    recipe = (ROOT / "Makefile").read_text().split("\ntrain:")[1].splitlines()[1]
    assert recipe == '\tSTARTED_BY="make train" exec $(PY) -m te_cli train $(ARGS)'
    line = recipe.strip().replace("$(PY)", "python3").replace("-m te_cli train $(ARGS)", "-c '{}'")
    code = 'import os; print(os.environ["STARTED_BY"], os.getpid())'
    shell = subprocess.Popen(["/bin/sh", "-c", line.format(code) + "\n"], stdout=subprocess.PIPE, text=True)
    assert shell.communicate(timeout=60)[0].split() == ["make", "train", str(shell.pid)]


def test_the_example_for_gpus_says_what_it_needs() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "functional_cupy.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1 and re.search("CuPy and an NVIDIA GPU.*functional_numpy", ran.stderr), ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_mlp_learns_without_a_framework() -> None:
    """The program compares its own losses; one text serves NumPy and CuPy, imports aside."""
    path = ROOT / "examples" / "functional_numpy.py"
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0 and len(re.findall(r"loss \d", ran.stderr)) == 10, ran.stderr
    lines = [line for line in path.read_text().partition('"""\n')[2].splitlines() if line]
    assert len(lines) <= 32
    texts = [(path.parent / f"functional_{name}.py").read_text() for name in ("numpy", "cupy")]
    assert len({text.partition("\nfrom te_core import functional")[2] for text in texts}) == 1
