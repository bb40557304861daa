"""A pipeline of two stages, one forward and one backward in turns: as one process that runs both. A stage is one
process, or two that share its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_torch.training.graphs import device as seam
from tests.fake_graphs import FakeDevice
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.tensor_steps import CUTS, joined, part
from tests.recipes import KINDS, region, rule
from tests.tolerances import snr_db
from tests.world import values

WIDTH, ROWS, MICROBATCHES, STEPS = 128, 32, 4, 2
FULL = pytest.mark.full
#: Of each stage, as make_graphed_callables takes it: forwards, and backwards below zero.
ORDERS = ([1, 1, -1, 1, -1, 1, -1, -1], [1, -1] * MICROBATCHES)


def stage_of(number: int, device: str, team: Any = None) -> Any:
    """A stage, or this rank's part of it."""
    torch.manual_seed(number)
    whole = te.LayerNormMLP(WIDTH, 2 * WIDTH, device=device, params_dtype=torch.bfloat16)
    if team is None:
        return whole
    options: dict[str, Any] = {"set_parallel_mode": True, "tp_group": team, "device": device}
    module = te.LayerNormMLP(WIDTH, 2 * WIDTH, params_dtype=torch.bfloat16, **options)
    with torch.no_grad():
        for (name, p), value in zip(module.named_parameters(), whole.parameters(), strict=True):
            p.copy_(part(value, CUTS["mlp"].get(name), dist.get_rank(team), dist.get_world_size(team)))
    return module


def batch(step: int, microbatch: int, device: str) -> torch.Tensor:
    return values(ROWS, WIDTH, dtype=torch.bfloat16, seed=10 * step + microbatch, device=device)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean() / MICROBATCHES


class Stage:
    """What one process does of a schedule: `begin` a microbatch, `end` the oldest that is open."""

    def __init__(self, number: int, name: str | None, device: str, group: Any, team: Any = None) -> None:
        self.module, self.name, self.device, self.group = stage_of(number, device, team), name, device, group
        self.number, self.functions = number, None
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.open: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.gradients: list[torch.Tensor] = []  # of the last step

    def begin(self, x: torch.Tensor, microbatch: int) -> torch.Tensor:
        x = x.detach().requires_grad_()
        run = self.module if self.functions is None else self.functions[microbatch]
        with region(self.name, amax_reduction_group=self.group):
            y = run(x, is_first_microbatch=microbatch == 0)
        self.open.append((x, y if self.number == 0 else loss_of(y)))
        return y

    def end(self, grad: torch.Tensor | None) -> Any:
        x, y = self.open.pop(0)
        y.backward(grad)
        return x.grad

    def update(self) -> None:
        self.gradients = [p.grad for p in self.module.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()


def gradients_and_weights(stage: Stage) -> list[torch.Tensor]:
    return [t.detach().float().cpu() for t in (*stage.gradients, *stage.module.parameters())]


def pipelined(rank: Rank, name: str | None, graphed: bool, tp: int = 1) -> list[torch.Tensor]:
    """1F1B: the first stage is one microbatch ahead. Maxima are reduced within a stage, never over the pipeline."""
    number, place = divmod(rank.number, tp)
    stages = [dist.new_group(range(n * tp, (n + 1) * tp)) for n in range(2)]
    ways = [[dist.new_group([i, tp + i]) for i in range(tp)] for _ in range(2)]
    onward, back = (way[place] for way in ways)  # neither waits for the other's
    sent = []
    stage = Stage(number, name, rank.device, stages[number], stages[number] if tp > 1 else None)
    if graphed:
        stage.functions = graph(stage, rank)
    other = (1 - number) * tp + place

    def received(group: Any) -> torch.Tensor:
        t = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device=rank.device)
        dist.recv(t, other, group=group)
        return t

    for i in range(STEPS):
        begun = 0
        for what in ORDERS[number]:
            if what < 0:
                grad = stage.end(received(back) if number == 0 else None)
                if number == 1:
                    sent.append((grad, dist.isend(grad, other, group=back)))
                continue
            y = stage.begin(batch(i, begun, rank.device) if number == 0 else received(onward), begun)
            if number == 0:
                sent.append((y, dist.isend(y.detach(), other, group=onward)))
            begun += 1
        stage.update()
    for _, work in sent:
        work.wait()
    for function in stage.functions or ():
        function.reset()
    return gradients_and_weights(stage)


def graph(stage: Stage, rank: Rank) -> Any:
    sample = tuple((batch(0, 0, rank.device).requires_grad_(),) for _ in range(MICROBATCHES))
    before = seam.device
    if rank.device == "cpu":
        seam.device = FakeDevice(stage.module)
    try:
        made = te.make_graphed_callables(
            (stage.module,),
            sample,
            enabled=stage.name is not None,
            recipe=rule(stage.name),
            amax_reduction_group=stage.group,
            cache_quantized_params=True,
            _order=ORDERS[stage.number],
        )
    finally:
        if rank.device != "cpu":
            seam.device = before
    return made


def in_one(name: str | None, device: str, group: Any = None) -> list[list[torch.Tensor]]:
    stages = [Stage(n, name, device, group) for n in range(2)]
    for i in range(STEPS):
        for m in range(MICROBATCHES):
            stages[1].begin(stages[0].begin(batch(i, m, device), m), m)
            stages[0].end(stages[1].end(None))
        for stage in stages:
            stage.update()
    return [gradients_and_weights(stage) for stage in stages]


def alone(rank: Rank, name: str | None) -> list[list[torch.Tensor]]:
    """Both stages in each rank, which computes with as many threads as in the pipeline: sums are in the same order."""
    groups = [dist.new_group([number]) for number in range(rank.world)]
    return in_one(name, rank.device, groups[rank.number])


@pytest.mark.parametrize(
    "name",
    [n if n in ("delayed", "mxfp8") else pytest.param(n, marks=FULL) for n in (None, *KINDS[:-1], "nvfp4 nearest")],
)
def test_two_stages(two: Ranks, name: str | None) -> None:
    for found, wanted in zip(two.run(pipelined, name, False), two.run(alone, name)[0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["delayed", pytest.param("current", marks=FULL)])
def test_two_stages_of_graphs(two: Ranks, name: str) -> None:
    """Graphed with `_order`: on the CPU by graphs that run their Python again."""
    for found, wanted in zip(two.run(pipelined, name, True), two.run(alone, name)[0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.more
@pytest.mark.parametrize("name", [pytest.param(None, marks=FULL), pytest.param("delayed", marks=FULL), "current"])
def test_two_stages_of_two_ranks(ranks_of: Callable[[int, str], Ranks], name: str | None) -> None:
    """Tensor parallelism inside of a stage, eagerly and in graphs."""
    gloo = ranks_of(4, "cpu")
    eager, graphed = (gloo.run(pipelined, name, graphs, 2) for graphs in (False, True))
    assert all(
        torch.equal(a, b) for one, other in zip(eager, graphed, strict=True) for a, b in zip(one, other, strict=True)
    )
    names = [n for n, _ in stage_of(0, "cpu").named_parameters()]
    for number, (plain, whole) in enumerate(zip(in_one(None, "cpu"), in_one(name, "cpu"), strict=True)):
        parts = zip(*eager[2 * number : 2 * number + 2], strict=True)
        for parameter, found, exact, wanted in zip(names, parts, plain, whole, strict=False):  # gradients come first
            made = joined(list(found), CUTS["mlp"].get(parameter))
            least = 30 if name is None else snr_db(wanted, exact) - 3  # in FP8: as near as one process comes
            assert snr_db(made, exact) > least, parameter
