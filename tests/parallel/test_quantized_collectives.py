"""Collectives that write into weights held quantized; ranks that begin with other weights than the first one's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.recipe import DelayedScaling
from te_torch.tensors import collectives
from tests.covering import covering
from tests.module_steps import values
from tests.parallel.ranks import Rank, Ranks
from tests.recipes import region, rule

WIDTH, ROWS, STEPS = 128, 32, 3
KINDS = ("delayed", "current", "block", "mxfp8", "nvfp4 nearest")


def held(name: str, device: str, seed: int, scale: float = 0.05) -> Any:
    with te.quantized_model_init(recipe=rule(name)):
        module = te.Linear(WIDTH, WIDTH, device=device)
    module.load_state_dict({"weight": scale * values(WIDTH, WIDTH, seed=seed, device=device)}, strict=False)
    return module


# ------------------------------------------------------------------------------------------------ each collective

#: What each does to a tensor of a rank: (t, what the rank sends to each of two, or what all have, the rank, async).
COLLECTIVES: dict[str, Any] = {
    "broadcast": lambda t, each, rank, later: dist.broadcast(t, 0, async_op=later),
    "all_reduce": lambda t, each, rank, later: dist.all_reduce(t, async_op=later),
    "all_reduce max": lambda t, each, rank, later: dist.all_reduce(t, dist.ReduceOp.MAX, async_op=later),
    "reduce": lambda t, each, rank, later: dist.reduce(t, rank.world - 1, async_op=later),
    "all_gather": lambda t, each, rank, later: dist.all_gather([t, *each[1:]], each[0], async_op=later),
    "all_gather_into_tensor": lambda t, each, rank, later: dist.all_gather_into_tensor(
        t, getattr(each[0], "dequantize", each[0].clone)()[: WIDTH // rank.world].contiguous(), async_op=later
    ),
    "scatter": lambda t, each, rank, later: dist.scatter(t, None if rank.number else each, 0, async_op=later),
    "reduce_scatter": lambda t, each, rank, later: dist.reduce_scatter(t, each, async_op=later),
    "all_to_all_single": lambda t, each, rank, later: dist.all_to_all_single(t, each[0], async_op=later),
    "send and receive": lambda t, each, rank, later: (
        (dist.irecv if later else dist.recv)(t, rank.number - 1)
        if rank.number % 2
        else (dist.isend if later else dist.send)(t, rank.number + 1)
    ),
}


def collected(rank: Rank, name: str, later: bool) -> dict[str, bool]:
    """By collective, whether a quantized tensor holds what the same collective writes to a plain one, quantized."""
    same = {}
    for what, collective in COLLECTIVES.items():
        t, twin, other = (held(name, rank.device, rank.number + n).weight.detach() for n in (1, 1, 9))
        plain, sent = t.dequantize(), other.dequantize()
        for target, given in ((t, other), (plain, sent)):
            work = collective(target, [given] * rank.world, rank, later)
            if later:
                work.wait()
        before = twin.dequantize()
        if what == "send and receive" and not rank.number % 2:
            same[what] = torch.equal(t.dequantize(), before)
            continue
        twin.copy_(plain)
        changes = what != "broadcast" or rank.number > 0
        if what == "reduce":  # of the other ranks' tensors engines make what they like
            same[what] = rank.number < rank.world - 1 or torch.equal(t.dequantize(), twin.dequantize())
        else:
            same[what] = torch.equal(t.dequantize(), twin.dequantize())
        same[what] &= not changes or what == "reduce" or not torch.equal(t.dequantize(), before)
    return same


@pytest.mark.four_ranks(name="current")
@covering(name=KINDS, when=["later", "now"])
def test_what_collectives_write(ranks: Ranks, name: str, when: str) -> None:
    for same in ranks.run(collected, name, when == "later"):
        assert same == dict.fromkeys(COLLECTIVES, True)


def read(rank: Rank) -> bool:
    """Quantized tensors that a collective only reads: what it sends has to last until it has been sent."""
    t = held("current", rank.device, rank.number).weight.detach()
    found = [torch.empty(WIDTH, WIDTH, device=rank.device) for _ in range(rank.world)]
    dist.all_gather(found, t)
    rows = WIDTH // rank.world
    piece = torch.empty(rows, WIDTH, device=rank.device)
    dist.reduce_scatter_tensor(piece, t, dist.ReduceOp.MAX)
    mine = torch.stack(found).amax(0)[rank.number * rows :][:rows]
    return torch.equal(found[rank.number], t.dequantize()) and torch.equal(piece, mine)


def test_what_collectives_read(ranks: Ranks) -> None:
    assert all(ranks.run(read))


def together(rank: Rank) -> str:
    t, state = held("current", rank.device, 0).weight.detach(), dist.distributed_c10d._world.pg_coalesce_state
    state[dist.group.WORLD] = []  # as batch_isend_irecv does around its calls on GPUs
    try:
        dist.broadcast(t, 0)
    except UnsupportedError as error:
        return str(error)
    finally:
        state.clear()
    return ""


def test_calls_sent_together_are_refused(pair: Ranks) -> None:
    for said in pair.run(together):
        assert "sent together" in said and "copy_()" in said


class Noted:
    """An operator that notes what it is given, and waits for nothing."""

    namespace, _schema = "c10d", torch.ops.c10d.broadcast_.default._schema

    def __call__(self, **given: Any) -> Any:
        self.given, self.waited = given, 0
        return given["tensors"], self

    def wait(self) -> None:
        self.waited += 1


def test_there_is_something_to_wait_for() -> None:
    """NCCL hands back a null pointer of a call that is not asynchronous, and who waits for that is gone."""
    noted, t = Noted(), torch.zeros(2)
    tensors, work = collectives.run(noted, [[t], None, 0, 0, False], {"timeout": 7}, changes=True)
    assert noted.given == {
        "tensors": [t],
        "process_group": None,
        "root_rank": 0,
        "root_tensor": 0,
        "async_op": True,
        "timeout": 7,
    }
    assert tensors == [t] and noted.waited == 1 and work is not noted
    work.wait()
    assert noted.waited == 1


# ------------------------------------------------------------------------------------------- ranks that begin apart


def begun(rank: Rank, name: str, way: str, reduces: bool) -> dict[str, Any]:
    """Weights after ranks begin apart and follow the first, then after steps; rank 0's own, had it been alone."""
    module = held(name, rank.device, 0)
    if rank.number:
        torch.manual_seed(7 * rank.number)
        with te.quantized_model_init(recipe=rule(name)):
            module = te.Linear(WIDTH, WIDTH, device=rank.device)
    else:  # a checkpoint that the first rank alone loads, of much greater values
        loaded = values(WIDTH, WIDTH, seed=3, device=rank.device)
        loaded *= 2.0253906 / loaded.abs().max()  # a maximum whose scale is another one, once it has been quantized
        module.load_state_dict({"weight": loaded}, strict=False)
    first = module.weight.detach().dequantize().cpu()
    if way == "moved":  # and built elsewhere
        module = module.to(torch.float64).to(torch.float32)
    with torch.no_grad():
        for p in module.parameters() if way == "sent" else ():
            dist.broadcast(p.data, 0)
    model = DistributedDataParallel(module) if way != "sent" else module
    after = module.weight.detach().dequantize().cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(STEPS):
        with region(name) if reduces else te.autocast(recipe=DelayedScaling(reduce_amax=False)):
            y = model(values(ROWS, WIDTH, seed=i + (0 if way == "sent" else rank.number), device=rank.device))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"first": first, "after": after, "trained": module.weight.detach().dequantize().cpu()}


CASES = [(name, way, True) for name in KINDS for way in ("wrapped", "sent")]
CASES += [("delayed", "wrapped", False), ("delayed", "sent", False), ("delayed", "moved", True)]


SOME = [("delayed", "wrapped", True), ("current", "sent", True), ("mxfp8", "wrapped", True), *CASES[-3:]]


@pytest.mark.four_ranks(name="current", way="sent")
@pytest.mark.parametrize(
    ("name", "way", "reduces"), [pytest.param(*c, marks=[] if c in SOME else pytest.mark.full) for c in CASES]
)
def test_ranks_follow_the_first(ranks: Ranks, name: str, way: str, reduces: bool) -> None:
    """DistributedDataParallel and trainers' loops send the first rank's weights: all have and train the same."""
    found = ranks.run(begun, name, way, reduces)
    for mine in found:
        assert torch.equal(mine["after"], found[0]["after"])
        assert torch.equal(mine["trained"], found[0]["trained"])
        assert not torch.equal(mine["trained"], mine["after"])
    error = (found[0]["after"] - found[0]["first"]).abs().max() / found[0]["first"].abs().max()
    assert error <= 1e-6  # they are the first rank's, not clipped to what others began with


def redundant(rank: Rank, name: str, options: dict[str, Any]) -> Any:
    """Weights after steps of an optimizer each of whose ranks updates some of them, and sends these."""
    layers = [held(name, rank.device, n) for n in (0, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    try:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **options)
    except UnsupportedError as error:
        return str(error)
    for i in range(STEPS):
        with region(name):
            y = model(values(ROWS, WIDTH, seed=10 * i + rank.number, device=rank.device))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [layer.weight.detach().dequantize().cpu() for layer in layers]


@pytest.mark.four_ranks(name="delayed")
@pytest.mark.parametrize(
    "name", [n if n in ("delayed", "mxfp8") else pytest.param(n, marks=pytest.mark.full) for n in KINDS]
)
def test_zero_redundancy(ranks: Ranks, name: str) -> None:
    found = ranks.run(redundant, name, {})
    for mine in found:
        for a, b in zip(mine, found[0], strict=True):
            assert torch.equal(a, b)


def test_buckets_of_zero_redundancy_are_refused(pair: Ranks) -> None:
    for said in pair.run(redundant, "current", {"parameters_as_bucket_view": True}):
        assert "parameters_as_bucket_view=True" in said and "one by one" in said
