"""Steps under delayed scaling, as the ranks of the amax reduction's tests take them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from te_core.recipe import DelayedScaling
from tests import world as module_steps
from tests.parallel import steps
from tests.parallel.ranks import Rank
from tests.parallel.steps import sent_to
from tests.world import fp8_state, gradient_for, values

RULE = {"amax_history_len": 4}
STEPS = 4


def make(rank: Rank, kind: str = "Linear", seed: int = 0) -> Any:
    return module_steps.make(kind, rank.device, seed=seed)


def batch(number: int, step: int, device: str = "cpu") -> torch.Tensor:
    """Every rank has another largest value, and not always the same rank has the largest."""
    return values(16, 48, device=device, seed=10 * step + number) * (1 + (number + step) % 3)


def gradient(y: torch.Tensor, number: int, step: int) -> torch.Tensor:
    return gradient_for(y, seed=100 + 10 * step + number) * (1 + (2 * number + step) % 3)


def largest(history: torch.Tensor) -> torch.Tensor:
    """A rule of the user's."""
    return history.amax(0)


RULES: dict[str, Any] = {
    "max": {},
    "most_recent": {"amax_compute_algo": "most_recent", "margin": 1},
    "callable": {"amax_compute_algo": largest},
    "own rank": {"reduce_amax": False},
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of the all-reduces inside, in elements, when it is over."""
    sizes: list[int] = []
    with steps.counted() as calls:
        yield sizes
    sizes += [size // 4 for size in sent_to("all_reduce", calls)]


def region(modules: Any, x: torch.Tensor, group: Any = None, **rule: Any) -> list[torch.Tensor]:
    """One region in which each of these runs once."""
    with te.autocast(recipe=DelayedScaling(**{**RULE, **rule}), amax_reduction_group=group):
        return [module(x) for module in modules]


def forward(module: Any, x: torch.Tensor, group: Any = None, **rule: Any) -> torch.Tensor:
    return region([module], x, group, **rule)[0]


def backward(ys: list[torch.Tensor]) -> None:
    torch.autograd.backward([y.sum() for y in ys])


def train(
    module: Any, rank: Rank, *, group: Any = None, inside: bool = False, steps: int = STEPS, **rule: Any
) -> list[dict[str, Any]]:
    """State and number of all-reduces after each step; a backward is in the region, or behind it."""
    recipe, found = DelayedScaling(**RULE, **rule), []
    for number in range(steps):
        with counted() as calls:
            with te.autocast(recipe=recipe, amax_reduction_group=group):
                y = module(batch(rank.number, number, rank.device))
                if inside:
                    y.backward(gradient(y, rank.number, number))
            if not inside:
                y.backward(gradient(y, rank.number, number))
        found.append({"state": fp8_state(module), "reductions": len(calls)})
    return found


def together(of: tuple[int, ...], rule: str = "max", seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """State after each step of one process with the batches of these ranks: casts keep the largest value there."""
    module, found = module_steps.make("Linear", seed=seed), []
    for number in range(STEPS):
        with te.autocast(recipe=DelayedScaling(**RULE, **{**RULES[rule], "reduce_amax": False})):
            ys = [module(batch(rank, number)) for rank in of]
        torch.autograd.backward(ys, [gradient(y, rank, number) for y, rank in zip(ys, of, strict=True)])
        found.append(fp8_state(module))
    return found


def half(rank: Rank) -> tuple[int, ...]:
    """The ranks of this one's half."""
    start = rank.number // (rank.world // 2) * (rank.world // 2)
    return tuple(range(start, start + rank.world // 2))


def halves(rank: Rank) -> Any:
    """The group of this rank when the ranks are cut in two."""
    world = rank.world
    groups = [dist.new_group(range(start, start + world // 2)) for start in (0, world // 2)]
    return groups[rank.number // (world // 2)]
