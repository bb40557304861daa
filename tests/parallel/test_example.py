"""The examples under torchrun: they learn, one goes on from a checkpoint on fewer ranks, and mistakes end them in a
line that says what to do. Over gloo, but for one: with NCCL they need as many GPUs as ranks, and share none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples import context_parallel, overlap, tensor_parallel
from examples.ranks import group_of_torchrun
from te_cli.arguments import UserError
from tests.backends import requires_gpus
from tests.parallel.ranks import LOOPBACK, Rank, Ranks

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
if LOOPBACK:
    ENV["GLOO_SOCKET_IFNAME"] = LOOPBACK[0]


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    options: Any = {"cwd": ROOT, "env": {**ENV, **env}, "text": True, "capture_output": True, "timeout": 240}
    return subprocess.run([sys.executable, *arguments], check=False, **options)


def run(ranks: int, program: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return python(*torchrun, f"examples/{program}.py", *arguments, **env)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r" loss (\d+\.\d+)", done.stderr)]


@pytest.mark.more
def test_two_ranks_then_one(tmp_path: Path) -> None:
    first = losses(run(2, "train_llama", "--quantized", "--steps", "4", "--save", str(tmp_path)))
    assert len(first) == 4 and first[-1] < 0.8 * first[0]
    again = losses(run(1, "train_llama", "--quantized", "--steps", "1", "--load", str(tmp_path)))
    assert again[0] < 0.9 * first[0]


MORE, FULL = pytest.mark.more, pytest.mark.full
DELAYED = ("--recipe", "delayed", "--steps", "3")
QUANTIZED = ("--quantized", *DELAYED)
TWO = ("--tp", "2", "--steps", "16")
#: Ranks, program, options, and how far the loss falls; over NCCL weights are held in FP8, in two shards: of two
#: tensor-parallel parts each, and of two replicas.
LEARN = {
    "replicas": ((4, "train_llama", (*DELAYED, "--replicas", "2"), 1.0, False), FULL),
    "tp": ((4, "train_llama", (*DELAYED, "--tp", "2"), 1.0, False), FULL),
    "tp and replicas": ((4, "train_llama", (*DELAYED, "--tp", "2", "--replicas", "2"), 1.0, False), MORE),
    "mesh_over_nccl tp": ((4, "train_llama", (*QUANTIZED, "--tp", "2"), 1.0, True), requires_gpus(4)),
    "mesh_over_nccl replicas": ((4, "train_llama", (*QUANTIZED, "--replicas", "2"), 1.0, True), requires_gpus(4)),
    "tp 2": ((2, "tensor_parallel", TWO, 0.8, False), MORE),
    "tp 2 x dp 2": ((4, "tensor_parallel", TWO, 0.8, False), FULL),
    "tp 2 over NCCL": ((2, "tensor_parallel", TWO, 0.8, True), requires_gpus(2)),
}


@pytest.mark.parametrize(
    ("ranks", "program", "options", "factor", "gpus"),
    [pytest.param(*row, marks=mark, id=name) for name, (row, mark) in LEARN.items()],
)
def test_losses_fall(ranks: int, program: str, options: tuple[str, ...], factor: float, gpus: bool) -> None:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks)))) if gpus else ""
    found = losses(run(ranks, program, *options, CUDA_VISIBLE_DEVICES=seen))
    assert found[-1] < factor * found[0] and (program == "train_llama" or len(found) == 10), found


@pytest.mark.more
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_context_parallel(recipe: str) -> None:
    """Two ranks with a half of each sequence learn what one rank does."""
    options = "--steps", "50", "--recipe", recipe
    one, two = (losses(run(ranks, "context_parallel", *options)) for ranks in (1, 2))
    assert len(one) == 10 and one[-1] < 0.3 * one[0], one
    assert all(abs(a - b) < 0.05 * a + 0.03 for a, b in zip(one, two, strict=True)), (one, two)


@pytest.mark.more
@pytest.mark.parametrize("arguments", [(), ("--method", "pipeline", "--recipe", "none")])
def test_overlap(arguments: tuple[str, ...]) -> None:
    done = run(2, "overlap", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step ") == 3 and "fc1_fprop overlapped by ring_exchange, in 2 parts" in done.stdout
    assert not arguments or "fc2_fprop overlapped by pipeline, in 4 parts" in done.stdout


# ------------------------------------------------------------------------------------------------------ mistakes


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
MISTAKES = [
    (("--tp", "2"), "1 ranks are no 2 (--tp) x 1 (--replicas) x shards"),
    (("--quantized", "--recipe", "none"), "--quantized needs a --recipe"),
    (("--save", "/dev/null/there"), "--save /dev/null/there: Not a directory. Choose a folder that can be written"),
    (("--load", "nowhere"), "nowhere holds no distributed checkpoint: --load names the folder of a --save"),
]


def said_of_mistakes(rank: Rank) -> list[str]:
    """What a group of one rank is told (`mistakes_end` prints it and ends the program: test_without_torchrun)."""
    from examples import train_llama

    found = []
    for arguments, _ in MISTAKES:
        with pytest.raises(UserError) as error:
            train_llama.train(train_llama.parsed(arguments), "cpu")
        found.append(str(error.value))
    return found


def test_mistakes(ranks_of: Callable[[int, str], Ranks]) -> None:
    (found,) = ranks_of(1, "cpu").run(said_of_mistakes)
    wrong = {
        arguments: text for (arguments, said), text in zip(MISTAKES, found, strict=True) if not text.startswith(said)
    }
    assert not wrong


SIZES = [
    (tensor_parallel, ["--tp", "3"], r"2 ranks are no 3 \(--tp\) x groups"),
    (tensor_parallel, ["--tp", "1", "--heads", "3"], "--heads 3: a multiple of 2"),
    (tensor_parallel, ["--hidden", "50"], "--hidden 50: a multiple of 8"),
    (context_parallel, ["--tokens", "30"], "--tokens 30: a multiple of 4"),
    (context_parallel, ["--heads", "2", "--mode", "a2a"], "--heads 2: a multiple of 4"),
    (context_parallel, ["--hidden", "50"], "--hidden 50: a multiple of 8"),
    (overlap, ["--tokens", "40"], "--tokens 40: a multiple of 32"),
    (overlap, ["--heads", "5"], "--heads 5: a mult"),
]


@pytest.mark.parametrize(("program", "arguments", "said"), SIZES)
def test_sizes_that_do_not_go_into_one_another(program: Any, arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        program.check(program.parsed(arguments), 2)
    program.check(program.parsed([]), 2)


@pytest.mark.parametrize("program", ["tensor_parallel.py", "context_parallel.py", "overlap.py", "train_llama.py"])
def test_without_torchrun(program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended, group_of_torchrun(program):
        pytest.fail("a group was made")
    said = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and f"Start the program by torchrun: torchrun --nproc-per-node 2 examples/{program}" in said
    )


# ------------------------------------------------------------------------------------------------------- the end

#: gloo's thread lets go of so many tensors after the collective is complete, and takes the interpreter for each.
#: The ways to end are tried in forks of one process, which has imported torch and done nothing else.
ENDS = """
import os, sys
import torch, torch.distributed as dist
from examples.ranks import ended

class Closing:
    def __del__(self, say=print):
        say("the interpreter closes", flush=True)

folder, *ways = sys.argv[1:]
for how in ways:
    if not (child := os.fork()):
        for handle, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{how}.{kind}", os.O_CREAT | os.O_WRONLY), handle)
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
closing = Closing()

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.kept = dist.group.WORLD
    sys.kept.allreduce_coalesced(list(torch.ones(20_000).split(1))).wait()
    dist.destroy_process_group()
    print("done")
    if how == "raise":
        raise ZeroDivisionError("a mistake of the program's")
    return sys.exit("a word") if how == "exit" else int(how)

ended(main)
"""


def test_a_rank_ends_without_closing_the_interpreter(tmp_path: Path) -> None:
    """Otherwise this one aborts every second time."""
    ways = {"0": (0, ""), "7": (7, ""), "exit": (1, "a word"), "raise": (1, "a mistake")}
    done = python("-W", "ignore", "-c", ENDS, str(tmp_path), *ways)
    assert done.stdout.splitlines() == [f"{how} {code}" for how, (code, _) in ways.items()], done.stderr
    for how, (_, said) in ways.items():
        out, err = ((tmp_path / f"{how}.{kind}").read_text() for kind in ("out", "err"))
        assert out == "done\n", (how, err)
        assert said in err and ("Traceback" in err) == (how == "raise"), (how, err)
