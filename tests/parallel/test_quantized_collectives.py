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
from tests.parallel.ranks import Rank
from tests.parallel.steps import alike, by_ranks, error_of, everyones, says
from tests.recipes import region, rule
from tests.world import values

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


@pytest.mark.four_ranks(name="current")
@covering(name=KINDS, when=["later", "now"])
@by_ranks()
def test_what_collectives_write(rank: Rank, name: str, when: str) -> None:
    """A quantized tensor holds what the same collective writes to a plain one, quantized."""
    later = when == "later"
    for what, collective in COLLECTIVES.items():
        t, twin, other = (held(name, rank.device, rank.number + n).weight.detach() for n in (1, 1, 9))
        plain, sent = t.dequantize(), other.dequantize()
        for target, given in ((t, other), (plain, sent)):
            work = collective(target, [given] * rank.world, rank, later)
            if later:
                work.wait()
        before = twin.dequantize()
        if what == "send and receive" and not rank.number % 2:
            assert torch.equal(t.dequantize(), before)
            continue
        if what == "reduce" and rank.number < rank.world - 1:  # of the other ranks' tensors engines make what they like
            continue
        twin.copy_(plain)
        assert torch.equal(t.dequantize(), twin.dequantize()), what
        changes = what != "broadcast" or rank.number > 0
        assert not changes or what == "reduce" or not torch.equal(t.dequantize(), before), what


@by_ranks()
def test_what_collectives_read(rank: Rank) -> None:
    """What a collective sends of a quantized tensor has to last until it has been sent."""
    t = held("current", rank.device, rank.number).weight.detach()
    found = [torch.empty(WIDTH, WIDTH, device=rank.device) for _ in range(rank.world)]
    dist.all_gather(found, t)
    rows = WIDTH // rank.world
    piece = torch.empty(rows, WIDTH, device=rank.device)
    dist.reduce_scatter_tensor(piece, t, dist.ReduceOp.MAX)
    mine = torch.stack(found).amax(0)[rank.number * rows :][:rows]
    assert torch.equal(found[rank.number], t.dequantize()) and torch.equal(piece, mine)


@by_ranks("pair")
def test_calls_sent_together_are_refused(rank: Rank) -> None:
    t, state = held("current", rank.device, 0).weight.detach(), dist.distributed_c10d._world.pg_coalesce_state
    state[dist.group.WORLD] = []  # as batch_isend_irecv does around its calls on GPUs
    said = error_of(lambda: dist.broadcast(t, 0), UnsupportedError)
    state.clear()
    says(said, "sent together", "copy_()")


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


CASES = [(name, way, True) for name in KINDS for way in ("wrapped", "sent")]
CASES += [("delayed", "wrapped", False), ("delayed", "sent", False), ("delayed", "moved", True)]


SOME = [("delayed", "wrapped", True), ("current", "sent", True), ("mxfp8", "wrapped", True), *CASES[-3:]]


@pytest.mark.four_ranks(name="current", way="sent")
@pytest.mark.parametrize(
    ("name", "way", "reduces"), [pytest.param(*c, marks=[] if c in SOME else pytest.mark.full) for c in CASES]
)
@by_ranks()
def test_ranks_follow_the_first(rank: Rank, name: str, way: str, reduces: bool) -> None:
    """DistributedDataParallel and trainers' loops send the first rank's weights: all have and train the same."""
    module = held(name, rank.device, 0)
    if rank.number:
        torch.manual_seed(7 * rank.number)
        with te.quantized_model_init(recipe=rule(name)):
            module = te.Linear(WIDTH, WIDTH, device=rank.device)
    else:  # a checkpoint that the first rank alone loads, of much greater values
        loaded = values(WIDTH, WIDTH, seed=3, device=rank.device)
        loaded *= 2.0253906 / loaded.abs().max()  # a maximum whose scale is another one, once it has been quantized
        module.load_state_dict({"weight": loaded}, strict=False)
    first = everyones(module.weight.dequantize())[0]
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
    trained = module.weight.detach().dequantize().cpu()
    assert alike(after) and alike(trained) and not torch.equal(trained, after)
    # They are the first rank's, not clipped to what others began with.
    assert (after - first).abs().max() / first.abs().max() <= 1e-6


@pytest.mark.four_ranks(name="delayed")
@pytest.mark.parametrize(
    "name", [n if n in ("delayed", "mxfp8") else pytest.param(n, marks=pytest.mark.full) for n in KINDS]
)
@by_ranks()
def test_zero_redundancy(rank: Rank, name: str) -> None:
    """Weights after steps of an optimizer each of whose ranks updates some of them, and sends these."""
    layers = [held(name, rank.device, n) for n in (0, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for i in range(STEPS):
        with region(name):
            y = model(values(ROWS, WIDTH, seed=10 * i + rank.number, device=rank.device))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert alike([layer.weight.dequantize() for layer in layers])


@by_ranks("pair")
def test_buckets_of_zero_redundancy_are_refused(rank: Rank) -> None:
    parameters, options = held("current", rank.device, 0).parameters(), {"parameters_as_bucket_view": True}
    said = error_of(lambda: ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options), UnsupportedError)
    says(said, "parameters_as_bucket_view=True", "one by one")
