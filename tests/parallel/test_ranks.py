"""The harness of tests with several processes: what it shows of ranks that return, raise, die and hang."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import backends
from tests.parallel import ranks as harness
from tests.parallel.ranks import Outcome, Rank, Ranks, RanksError


def everyones_sum(rank: Rank, add: int) -> float:
    number = torch.full((1,), float(rank.number + 1), device=rank.device)
    dist.all_reduce(number)
    return number.item() + add


def where(rank: Rank) -> Any:
    facts = (rank.number, rank.world, rank.device, dist.get_rank(), dist.get_world_size(), torch.get_num_threads())
    return *facts, os.getpid(), torch.cuda.device_count()


@pytest.mark.four_ranks()
def test_results_by_rank(ranks: Ranks) -> None:
    assert ranks.run(everyones_sum, 5) == [5 + sum(range(1, ranks.world + 1))] * ranks.world


def test_what_a_rank_is_told(ranks: Ranks) -> None:
    """And processes are reused: a second run finds the same ones."""
    first = ranks.run(where)
    starts = ranks.starts
    assert ranks.run(where) == first and ranks.starts == starts
    for number, (*facts, threads, pid, gpus) in enumerate(first):
        assert facts == [number, ranks.world, ranks.device, number, ranks.world]
        assert threads == 1 and pid != os.getpid() and (gpus == 0) == (ranks.device == "cpu")
    assert len({pid for *_, pid, _ in first}) == ranks.world


@pytest.mark.parametrize(("gpus", "share", "runs", "hosts"), [(1, "0", False, 2), (1, "1", True, 2), (2, "0", True, 0)])
def test_ranks_share_a_gpu_where_they_are_asked_to(
    gpus: int, share: str, runs: bool, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses two ranks of one host on one GPU."""
    for module in (backends, harness):
        monkeypatch.setattr(module, "cuda_devices", lambda: gpus)
    monkeypatch.setenv("TE_TESTS_RANKS_SHARE", share)
    assert backends.requires_gpus(2, ranks=True).args[0] == runs
    assert backends.requires_gpus(2).args[0] == (gpus >= 2), "a test of two devices needs two"
    found = {harness.environment(Rank(i, 2, "cuda")).get("NCCL_HOSTID") for i in range(2)} - {None}
    assert len(found) == hosts
    assert "NCCL_HOSTID" not in harness.environment(Rank(0, 2, "cpu"))


def unmatched(rank: Rank) -> bool:
    """A collective that the others never join, left behind in the group."""
    if rank.number == 0:
        dist.all_reduce(torch.ones(3, device=rank.device), async_op=True)
    return True


def test_a_run_has_a_group_of_its_own(pair: Ranks) -> None:
    with pytest.raises(RanksError):
        pair.run(unmatched, group_timeout=0.5)  # the harness's last barrier meets it
    assert pair.run(everyones_sum, 0) == [3.0, 3.0]


def raises_on_one(rank: Rank) -> float:
    print(f"rank {rank.number} was here")
    if rank.number == 1:
        raise KeyError("of rank 1")
    return everyones_sum(rank, 0)


def test_an_exception(pair: Ranks) -> None:
    """Its traceback and what its rank printed; the other rank waits for it no longer than the group's timeout."""
    pair.run(everyones_sum, 0)
    before = pair.starts
    first, second = pair.outcomes(raises_on_one, group_timeout=30)
    assert pair.seconds < 60
    assert (second.how, second.error) == ("raised", "KeyError")
    assert "raises_on_one" in second.text and "of rank 1" in second.text and "rank 1 was here" in second.output
    assert (first.how, first.error) == ("raised", "RuntimeError") and "all_reduce" in first.text
    with pytest.raises(RanksError, match=r"(?s)raises_on_one on 2 ranks.*rank 1 raised KeyError.*of rank 1"):
        pair.run(raises_on_one, group_timeout=30)
    assert pair.run(everyones_sum, 0) == [3.0, 3.0] and pair.starts == before  # nothing had to be started anew


def dies(rank: Rank) -> float:
    if rank.number == 0:
        print("last words", flush=True)
        os._exit(3)
    return everyones_sum(rank, 0)


def test_a_death(pair: Ranks) -> None:
    first, second = pair.outcomes(dies, group_timeout=30)
    assert (first.how, first.text, second.how) == ("died", "exit code 3", "raised") and "last words" in first.output
    before = pair.starts
    assert pair.run(everyones_sum, 0) == [3.0, 3.0] and pair.starts == before + 1


@pytest.mark.parametrize(
    ("outcome", "so"),
    [
        (Outcome(0, "died", text="exit code -6", output="[rank0] Watchdog caught collective operation timeout"), True),
        (Outcome(0, "raised", error="DistBackendError", text="NCCL error: remote process exited"), True),
        (Outcome(0, "died", text="exit code -11"), False),
        (Outcome(0, "hung", output="Watchdog caught collective operation timeout"), False),
        (Outcome(0, "returned"), False),
    ],
)
def test_an_end_by_the_watchdog(outcome: Outcome, so: bool) -> None:
    """What counts as one: an end, and words of it."""
    assert outcome.waited_in_vain() is so


def hangs(rank: Rank) -> bool:
    if rank.number == 1:
        time.sleep(600)
    return True


@pytest.mark.parametrize("fresh", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_hang(pair: Ranks, fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, and shown with the line where it stood: in the first run of its processes, and in a later one."""
    monkeypatch.setattr(harness, "GRACE", 0.5)
    if fresh:
        pair.stop()
    else:
        pair.run(everyones_sum, 0)
    _, second = pair.outcomes(hangs, group_timeout=0.5)
    assert pair.seconds < 60
    assert second.how == "hung" and "in hangs" in second.output and "test_ranks.py" in second.output
    assert pair.run(everyones_sum, 0) == [3.0, 3.0]


def unpicklable(rank: Rank) -> Any:
    return lambda: rank


def tensors(rank: Rank) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(3) + rank.number}


def noisy(rank: Rank) -> None:
    print("begun", "x" * 100_000, "ended", file=sys.stderr)
    raise ValueError("noise")


def test_what_travels(pair: Ranks) -> None:
    """Tensors do; what cannot be pickled is that rank's error; of much output, both ends."""
    assert [r["x"].tolist() for r in pair.run(tensors)] == [[0, 1, 2], [1, 2, 3]]
    first, _ = pair.outcomes(unpicklable)
    assert first.how == "raised" and "pickle" in first.text.lower()
    first, _ = pair.outcomes(noisy)
    assert first.error == "ValueError" and len(first.output) < 5000, str(first)
    assert first.output.startswith("begun") and first.output.rstrip().endswith("ended")


def test_a_rank_that_ended_between_two_runs(pair: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE", 0.5)
    pids = [facts[-2] for facts in pair.run(where)]
    os.kill(pids[1], signal.SIGKILL)
    _, second = pair.outcomes(everyones_sum, 0, group_timeout=0.5)
    assert (second.how, second.text) == ("died", f"exit code {-signal.SIGKILL}")
    assert pair.run(everyones_sum, 0) == [3.0, 3.0]


def test_ranks_end_with_the_test() -> None:
    """Closed, and also where nothing was closed but the process that started them is gone."""
    own = Ranks(2)
    pids = [facts[-2] for facts in own.run(where)]
    own.close()
    assert not any(alive(pid) for pid in pids)
    own = Ranks(1)
    (pid,) = (facts[-2] for facts in own.run(where))
    os.close(own._processes[0]._lifeline)  # what the system does when the test's process ends
    own._processes[0]._process.join(60)
    assert not alive(pid)
    own._processes[0]._lifeline = os.open(os.devnull, os.O_RDONLY)
    own.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
