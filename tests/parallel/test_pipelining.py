"""Schedules of torch.distributed.pipelining with our layers as stages: as one process that runs both stages.

A schedule first runs each stage for its shapes, on memory that nobody has filled: nothing of that may stay anywhere.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import te_torch as te
from te_torch import shape_runs
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks, place_of, same
from tests.recipes import region, rule
from tests.world import values

WIDTH, ROWS, MICROBATCHES, STEPS = 64, 32, 4, 3
STATE = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
#: Where the region is: around the step, in each stage's forward, there and run again in backward, around with gradients
#: that are added to `main_grad`.
WAYS = ("around", "inside", "checkpointed", "fused")


class Stage(torch.nn.Module):
    def __init__(self, number: int, name: str | None, way: str, group: Any, device: str) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layer = te.LayerNormMLP(WIDTH, 2 * WIDTH, device=device, fuse_wgrad_accumulation=way == "fused")
        self.name, self.way, self.group = name, way, group
        for p in self.layer.parameters():
            p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]

    def around(self) -> Any:
        return region(self.name if self.way in ("around", "fused") else None, amax_reduction_group=self.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "checkpointed":
            return checkpoint(self.in_region, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.in_region(x)

    def in_region(self, x: torch.Tensor) -> torch.Tensor:
        if self.way in ("around", "fused"):
            return self.layer(x)  # type: ignore[no-any-return]
        with region(self.name, amax_reduction_group=self.group):
            return self.layer(x)  # type: ignore[no-any-return]

    def update(self) -> list[torch.Tensor]:
        """A step of the optimizer; what it leaves, and the FP8 state."""
        with torch.no_grad():
            for p in self.layer.parameters():
                p -= 0.1 * (p.main_grad if p.grad is None or self.way == "fused" else p.grad)  # type: ignore[attr-defined]
                p.grad = None
        state = self.layer.fp8_state
        found = [*self.layer.parameters(), *[getattr(state, n) for n in STATE if state is not None]]
        return [t.detach().cpu().clone() for t in found]


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def batch(step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, target = (values(MICROBATCHES * ROWS, WIDTH, seed=10 * step + i, device=device) for i in range(2))
    return x, target


def check(rank: Rank, schedule: str, name: str | None, way: str, known: bool = False) -> None:
    """What a rank's stage is after each step is what it is in one process that runs both stages."""
    from torch.distributed import pipelining

    groups = [dist.new_group([number]) for number in range(2)]
    module = Stage(rank.number, name, way, groups[rank.number], rank.device)
    device = place_of(rank)
    shape = torch.zeros(ROWS, WIDTH, device=device, requires_grad=True)  # outputs that do not say so get no gradient
    shapes = {"input_args": shape if rank.number else shape.detach(), "output_args": shape} if known else {}
    stage = pipelining.PipelineStage(module, rank.number, 2, device, **shapes)  # type: ignore[arg-type]
    steps = getattr(pipelining, schedule)(stage, MICROBATCHES, loss_fn=loss_of)
    wanted = in_one(rank, name, way)[rank.number]
    with patch.object(pipelining.PipelineStage, "_to_tensor", _rubbish, create=True):
        for i in range(STEPS):
            x, target = batch(i, rank.device)
            with module.around():
                steps.step(x) if rank.number == 0 else steps.step(target=target)
            assert same(module.update(), wanted[i]), i


def _rubbish(stage: Any, given: Any) -> torch.Tensor:
    """What unfilled memory may hold, in the place of torch 2.13's `torch.empty`."""
    t = torch.linspace(-1e10, 1e10, given.shape.numel(), device=stage.device).reshape(given.shape).to(given.dtype)
    return t.requires_grad_(given.requires_grad) if t.is_floating_point() else t


def in_one(rank: Rank, name: str | None, way: str) -> list[list[list[torch.Tensor]]]:
    """By stage and step. In ranks, which compute with as many threads: sums are in the same order."""
    groups = [dist.new_group([number]) for number in range(2)]
    stages = [Stage(number, name, way, groups[rank.number], rank.device) for number in range(2)]
    found: list[list[list[torch.Tensor]]] = [[], []]
    for i in range(STEPS):
        with stages[0].around():
            for x, target in zip(*[t.chunk(MICROBATCHES) for t in batch(i, rank.device)], strict=True):
                y = stages[0](x)
                between = y.detach().requires_grad_()
                loss_of(stages[1](between), target).backward()
                y.backward(between.grad)
        for stage, steps in zip(stages, found, strict=True):
            for p in stage.parameters():
                if p.grad is not None:
                    p.grad /= MICROBATCHES  # as a schedule does
            steps.append(stage.update())
    return found


CASES = [("ScheduleGPipe", name, "around") for name in ("delayed", "current")]
CASES += [("Schedule1F1B", name, way) for name in ("delayed", "current") for way in WAYS]
SOME = [CASES[0], *(("Schedule1F1B", "delayed", way) for way in WAYS[:3]), ("Schedule1F1B", "current", "fused")]


@pytest.mark.parametrize(
    ("schedule", "name", "way"), [pytest.param(*c, marks=[] if c in SOME else pytest.mark.full) for c in CASES]
)
@by_ranks("two")
def test_a_schedule_is_as_one_process(rank: Rank, schedule: str, name: str, way: str) -> None:
    check(rank, schedule, name, way)


@pytest.mark.parametrize("name", [pytest.param(None, marks=pytest.mark.full), "delayed"])
@by_ranks("two")
def test_shapes_may_be_given(rank: Rank, name: str | None) -> None:
    check(rank, "Schedule1F1B", name, "around", known=True)


class OlderStage:
    """As torch 2.11 has it: forward without gradients, on zeros."""

    def __init__(self, submod: torch.nn.Module) -> None:
        self.submod = submod

    @torch.no_grad()
    def _shape_inference(self, x: torch.Tensor) -> torch.Tensor:
        return self.submod(x)  # type: ignore[no-any-return]


class Unknown:
    pass


@pytest.fixture
def a_stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = type("module", (), {"PipelineStage": request.param})
    monkeypatch.setitem(shape_runs.sys.modules, shape_runs.STAGES, module)
    monkeypatch.setattr(shape_runs, "watching", False)
    return request.param


@pytest.mark.parametrize("a_stage", [type("Stage", (OlderStage,), dict(vars(OlderStage)))], indirect=True)
def test_a_run_for_shapes_of_older_torch(a_stage: Any) -> None:
    layer = te.Linear(32, 32, device="cpu")
    with region("delayed"):
        y = a_stage(layer)._shape_inference(torch.ones(32, 32))
        assert layer.fp8_state is None and y.shape == (32, 32)
        layer(torch.ones(32, 32))  # what is around it goes on as before
        assert layer.fp8_state.amax_history_fwd[0, 0] == 1


@pytest.mark.parametrize("a_stage", [type("Stage", (OlderStage,), dict(vars(OlderStage)))], indirect=True)
def test_weights_held_quantized_are_not_complained_of(a_stage: Any, recwarn: pytest.WarningsRecorder) -> None:
    """They are dequantized in such a run, but the user did enter a region."""
    with te.quantized_model_init(recipe=rule("delayed")):
        layer = te.Linear(32, 32, device="cpu")
    with region("delayed"):
        a_stage(layer)._shape_inference(torch.ones(32, 32))
        layer(torch.ones(32, 32))
    assert not [w for w in recwarn if "held quantized" in str(w.message)]


@pytest.mark.parametrize("a_stage", [Unknown], indirect=True)
def test_stages_that_are_not_known_are_told_of(a_stage: Any) -> None:
    with pytest.warns(UserWarning, match="input_args"), region("delayed"):
        pass
