"""What goes wrong on one rank of several: every other one ends with an error within the group's timeout."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_core.errors import LibraryError, UnsupportedError
from te_torch import exchange
from te_torch.training import collectives
from tests.parallel.conftest import NCCL
from tests.parallel.exchanges import CASES, prepared, said_by, unclear
from tests.parallel.fsdp_steps import mesh_of, shard
from tests.parallel.ranks import Outcome, Rank, Ranks, meet, wait_no_longer_than
from tests.parallel.steps import by_ranks, error_of, says

#: Seconds that a collective waits, where it waits in vain; on the CPU from there on, so that no rank is late before.
#: Ranks on GPUs compile kernels in the first step, not all as fast.
PATIENCE = {"cpu": 6.0, "cuda": 15.0}
SHORT = 0.4  # the same where several wait, one after the other
#: Of our exchanges (tests/parallel/exchanges.py) those that wait for a rank that never comes: one of each way.
WAITED = {
    name: CASES[name] for name in ("gather", "quantized gather, later", "scatter", "forward maxima", "statistics")
}


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
@by_ranks()
def test_late_gradients_of_shards(rank: Rank, option: str) -> None:
    """Weight gradients that FSDP2 does not see in backward."""
    layer = te.Linear(64, 64, device=rank.device, params_dtype=torch.bfloat16, **{option: True})
    shard(torch.nn.Sequential(layer), mesh_of(rank.device, rank.world))
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device=rank.device)  # type: ignore[attr-defined]
    with torch.no_grad():  # no gradient comes late
        layer(torch.randn(32, 64, device=rank.device, dtype=torch.bfloat16))
    x = torch.randn(32, 64, device=rank.device, dtype=torch.bfloat16)
    says(error_of(lambda: layer(x).sum().backward()), "fully_shard", f"leave {option} out")


def left_alone(rank: Rank, folder: str, dead: bool) -> dict[str, tuple[str, float]]:
    """What each exchange of ours says where the last rank is missing, and after how many seconds.

    It has died, or takes part with a group of itself, and goes on for as long as the others wait.
    """
    last = rank.number == rank.world - 1
    # Of more than two ranks some have no connection to the one that died: they wait for those that have, which fail.
    seconds = 60.0 if dead and rank.world == 2 else SHORT
    calls = prepared(rank, CASES if dead else WAITED, seconds)
    meet(rank, "prepared")  # all have what they were sent before
    if last:
        if dead:
            os._exit(3)
        alone = dist.new_group([rank.number], use_local_synchronization=True)
        for name in WAITED:
            CASES[name].prepare(rank, alone)()
        while len(list(Path(folder).iterdir())) < rank.world - 1:
            time.sleep(0.1)
        raise RuntimeError("this rank is done")
    said = {}
    for name, call in calls.items():
        begun = time.monotonic()
        said[name] = said_by(call), time.monotonic() - begun
    (Path(folder) / str(rank.number)).touch()
    raise Said(json.dumps(said))


class Said(Exception):  # noqa: N818
    """What a rank has to tell that cannot return: the others do not come to the barrier at the end of a run."""


def told(outcome: Outcome) -> dict[str, tuple[str, float]]:
    assert (outcome.how, outcome.error) == ("raised", "Said"), str(outcome)
    found: dict[str, tuple[str, float]] = json.loads(outcome.text.rpartition("Said: ")[2])
    return found


@pytest.mark.four_ranks()
def test_our_exchanges_with_a_rank_that_died(gloo_ranks: Ranks, tmp_path: Path) -> None:
    """Each says the operation, the ranks and where to look, of two ranks long before the timeout."""
    *others, last = gloo_ranks.outcomes(left_alone, str(tmp_path), True)
    assert (last.how, last.text) == ("died", "exit code 3")
    for outcome in others:
        found = told(outcome)
        assert found.keys() == CASES.keys()
        assert not unclear({name: text for name, (text, _) in found.items()}, gloo_ranks.world)
        assert max(seconds for _, seconds in found.values()) < 30, found


@by_ranks("pair")
def test_what_a_backend_does_not_take(rank: Rank) -> None:
    """All ranks are there: it is said that the tensor may be what is wrong."""
    group = dist.new_group()  # gloo may raise the error again in the group's next collective
    said = error_of(lambda: collectives.allreduce(torch.ones(4, dtype=torch.int16), group), LibraryError)
    says(said, "LibraryError: allreduce", "Invalid scalar type", "its backend takes")


def gone_before(rank: Rank) -> str:
    """A rank waits for another that died, when its own group is gone."""
    wait_no_longer_than(PATIENCE["cpu"])
    if rank.number:
        os._exit(0)
    _, handle = collectives.allreduce(torch.ones(4), async_op=True)
    dist.destroy_process_group()
    with pytest.raises(LibraryError) as error:
        handle.wait()
    return str(error.value)


def test_a_group_that_is_gone(pair: Ranks) -> None:
    first, _ = pair.outcomes(gone_before)
    assert first.how == "returned" and "of a group that is gone" in first.value, str(first)


def test_a_want_of_memory_is_no_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("of memory")

    monkeypatch.setattr(dist, "all_reduce", fails)
    with pytest.raises(torch.OutOfMemoryError):
        exchange.all_reduce("x", torch.ones(2), None)


@pytest.mark.parametrize("name", [exchange.ALL_GATHER, exchange.REDUCE_SCATTER, "all_reduce", "all_gather_object"])
def test_a_refusal_is_no_missing_rank(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What we refuse inside of a collective keeps its words."""
    refusal = UnsupportedError("a collective", "a tensor", "another", "pass another")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise refusal

    monkeypatch.setattr(dist, name, refuse)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    t = torch.ones(2)
    calls = {
        exchange.ALL_GATHER: lambda: exchange.all_gather("x", t, t, None),
        exchange.REDUCE_SCATTER: lambda: exchange.reduce_scatter("x", t, t, None),
        "all_reduce": lambda: exchange.all_reduce("x", t, None),
        "all_gather_object": lambda: exchange.all_gather_object("x", 1, None),
    }
    with pytest.raises(UnsupportedError) as error:
        calls[name]()
    assert error.value is refusal


def test_groups_of_other_sizes(gloo_ranks: Ranks, tmp_path: Path) -> None:
    """A rank that took another group never comes: the same error, once the timeout is over."""
    *others, last = gloo_ranks.outcomes(left_alone, str(tmp_path), False)
    assert last.how == "raised" and "this rank is done" in last.text, str(last)
    for outcome in others:
        found = told(outcome)
        assert found.keys() == WAITED.keys()
        assert not unclear({name: text for name, (text, _) in found.items()}, gloo_ranks.world)
        assert all(seconds < SHORT + 20 for _, seconds in found.values()), found
        # (A rank that has given up closes its connections: to the next one that is what it waited for.)
        assert any("imed out" in text and seconds > SHORT / 2 for text, seconds in found.values()), found


def other_group(rank: Rank) -> None:
    """The last rank takes part in a gather with a group of itself, the others with all."""
    alone = dist.new_group([rank.world - 1])
    group = alone if rank.number == rank.world - 1 else None
    dist.barrier()  # for its first meeting NCCL would wait without end
    collectives.gather_along_first_dim(torch.ones(4, 4, device=rank.device), group)
    if rank.device == "cuda":
        torch.cuda.synchronize()
    if group is None:
        raise AssertionError("a gather without one of its ranks has ended")
    raise RuntimeError("this rank is done")


@NCCL
def test_groups_of_other_sizes_on_gpus(ranks_of: Callable[..., Ranks]) -> None:
    """There the watchdog ends the process, and says what it waited for."""
    *others, last = ranks_of(2, "cuda").outcomes(other_group, group_timeout=PATIENCE["cuda"])
    assert (last.how, last.error) == ("raised", "RuntimeError"), str(last)
    for outcome in others:
        assert outcome.waited_in_vain() and outcome.error != "AssertionError", str(outcome)
