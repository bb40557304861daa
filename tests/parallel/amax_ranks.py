"""One rank of the amax reduction's tests: `python -m tests.parallel.amax_ranks RANK WORLD FOLDER cpu|cuda`.

Runs every case below and writes what each returned to FOLDER/RANK.pt; the test compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from tests import module_steps
from tests.module_steps import gradient_for, values

RULE = {"amax_history_len": 4}
STEPS = 4
device = "cpu"  # of this rank


def make(kind: str, seed: int = 0) -> Any:
    return module_steps.make(kind, device, seed=seed)


def fp8_state(module: Any) -> dict[str, torch.Tensor]:
    return {name: t.cpu() for name, t in module_steps.fp8_state(module).items()}


def batch(rank: int, step: int) -> torch.Tensor:
    """Every rank has another largest value, and not always the same rank has the largest."""
    return values(16, 48, device=device, seed=10 * step + rank) * (1 + (rank + step) % 3)


def gradient(y: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    return gradient_for(y, seed=100 + 10 * step + rank) * (1 + (2 * rank + step) % 3)


def largest(history: torch.Tensor) -> torch.Tensor:
    """A rule of the user's."""
    return history.amax(0)


RULES: dict[str, Any] = {
    "max": {},
    "most_recent": {"amax_compute_algo": "most_recent", "margin": 1},
    "callable": {"amax_compute_algo": largest},
    "own rank": {"reduce_amax": False},
}

_calls: list[int] = []


def counted() -> None:
    """Count all-reduces from now on, in `_calls`."""
    plain = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        _calls.append(args[0].numel())
        return plain(*args, **kwargs)

    dist.all_reduce = all_reduce


def train(module: Any, rank: int, *, group: Any = None, inside: bool = False, **rule: Any) -> list[dict[str, Any]]:
    """State and number of all-reduces after each step."""
    recipe, found = DelayedScaling(**RULE, **rule), []
    for step in range(STEPS):
        _calls.clear()
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            y = module(batch(rank, step))
            if inside:
                y.backward(gradient(y, rank, step))
        if not inside:
            y.backward(gradient(y, rank, step))
        found.append({"state": fp8_state(module), "reductions": len(_calls)})
    return found


def halves(rank: int, world: int) -> Any:
    """The group of this rank when the ranks are cut in two."""
    groups = [dist.new_group(list(range(start, start + world // 2))) for start in (0, world // 2)]
    return groups[rank // (world // 2)]


def default_group(rank: int, world: int) -> Any:
    return {name: train(make("Linear"), rank, **rule) for name, rule in RULES.items()}


def subgroups(rank: int, world: int) -> Any:
    return train(make("Linear"), rank, group=halves(rank, world))


def backward_inside(rank: int, world: int) -> Any:
    return train(make("Linear"), rank, inside=True)


def many_modules(rank: int, world: int) -> Any:
    between = torch.nn.Linear(64, 48, device=device)
    model = torch.nn.Sequential(make("LayerNormLinear"), between, make("LayerNormMLP", seed=1))
    torch.nn.init.eye_(model[1].weight)
    return train(model, rank)


def groups_of_two_modules(rank: int, world: int) -> Any:
    """Two regions with different groups before one backward pass: each state is reduced over its own."""
    first, second, recipe = make("Linear"), make("Linear", seed=1), DelayedScaling(**RULE)
    part = halves(rank, world)
    found = []
    for step in range(STEPS):
        _calls.clear()
        ys = []
        for module, group in ((first, part), (second, None)):
            with te.autocast(recipe=recipe, amax_reduction_group=group):
                ys.append(module(batch(rank, step)))
        torch.autograd.backward(ys, [gradient(y, rank, step) for y in ys])
        found.append({"first": fp8_state(first), "second": fp8_state(second), "reductions": len(_calls)})
    return found


def no_communication(rank: int, world: int) -> Any:
    """A group of this rank alone; inference; a recipe without a history."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    module = make("Linear")
    counts = [r["reductions"] for r in train(module, rank, group=alone)]
    _calls.clear()
    with torch.no_grad(), te.autocast(recipe=DelayedScaling(**RULE)):
        module(batch(rank, 0))
    with te.autocast(recipe=Float8CurrentScaling()):
        module(batch(rank, 0)).sum().backward()
    return [*counts, len(_calls)]


def compiled(rank: int, world: int) -> Any:
    """Compiled code in an eager region is reduced as eager code is, from its first step on."""
    found = {}
    for inside in (False, True):
        module = make("Linear")
        traced = torch.compile(module, backend="aot_eager")
        traced.fp8 = module
        found[inside] = train(traced, rank, group=halves(rank, world), inside=inside)
    return found


def region_in_compiled_code(rank: int, world: int) -> Any:
    module, recipe = make("Linear"), DelayedScaling(**RULE)
    own = DelayedScaling(**RULE, reduce_amax=False)

    def forward(x: torch.Tensor, rule: DelayedScaling) -> torch.Tensor:
        with te.autocast(recipe=rule):
            return module(x)

    try:
        torch.compile(lambda x: forward(x, recipe), backend="aot_eager", fullgraph=True)(batch(rank, 0))
    except Exception as error:
        refused = UnsupportedError.__name__ in f"{type(error).__name__} {error}" or "reduce_amax" in str(error)
    else:
        refused = False
    torch._dynamo.reset()
    torch.compile(lambda x: forward(x, own), backend="aot_eager", fullgraph=True)(batch(rank, 0))
    return refused


def other_modules_on_a_rank(rank: int, world: int) -> Any:
    """An error on every rank, before any history has changed; in forward, and in backward alone."""
    recipe, found = DelayedScaling(**RULE), []
    modules = [make("Linear"), make("Linear", seed=1)]
    try:
        with te.autocast(recipe=recipe):
            for module in modules[: 2 if rank == 0 else 1]:
                module(batch(rank, 0))
    except ArgumentError as error:
        found.append(str(error))
    found.append(modules[0].fp8_state.amax_history_fwd[0, 0].item() == batch(rank, 0).abs().max().item())
    modules = [make("Linear"), make("Linear", seed=1)]
    with te.autocast(recipe=recipe):
        ys = [module(batch(rank, 0)) for module in modules]
    try:
        torch.autograd.backward([y.sum() for y in ys[: 2 if rank == 0 else 1]])
    except ArgumentError as error:
        found.append(str(error))
    return found


CASES: tuple[Callable[[int, int], Any], ...] = (
    default_group, subgroups, backward_inside, many_modules, groups_of_two_modules, no_communication, compiled,
    region_in_compiled_code, other_modules_on_a_rank,
)  # fmt: skip


def main() -> None:
    global device
    rank, world, folder, device = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    counted()
    torch.save({case.__name__: case(rank, world) for case in CASES}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
