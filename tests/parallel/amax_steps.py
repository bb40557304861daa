"""Steps under delayed scaling, as the ranks of the amax reduction's tests take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import te_torch as te
from te_core.recipe import DelayedScaling
from tests import module_steps
from tests.module_steps import gradient_for, values
from tests.parallel.ranks import Rank

RULE = {"amax_history_len": 4}
STEPS = 4


def make(rank: Rank, kind: str, seed: int = 0) -> Any:
    return module_steps.make(kind, rank.device, seed=seed)


def fp8_state(module: Any) -> dict[str, torch.Tensor]:
    return {name: t.cpu() for name, t in module_steps.fp8_state(module).items()}


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
    """The sizes of the all-reduces inside."""
    plain, calls = dist.all_reduce, []

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].numel())
        return plain(*args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = plain


def forward(module: Any, x: torch.Tensor, group: Any = None, **rule: Any) -> torch.Tensor:
    with te.autocast(recipe=DelayedScaling(**{**RULE, **rule}), amax_reduction_group=group):
        return module(x)


def step(module: Any, x: torch.Tensor, **options: Any) -> None:
    """A region, and a backward pass after it."""
    y = forward(module, x, **options)
    y.backward(torch.ones_like(y))


def train(
    module: Any, rank: Rank, *, group: Any = None, inside: bool = False, steps: int = STEPS, **rule: Any
) -> list[dict[str, Any]]:
    """State and number of all-reduces after each step."""
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
        with te.autocast(recipe=DelayedScaling(**RULE, **RULES[rule])):
            ys = [module(batch(rank, number)) for rank in of]
        torch.autograd.backward(ys, [gradient(y, rank, number) for y, rank in zip(ys, of, strict=True)])
        found.append(fp8_state(module))
    return found


def half(rank: int, world: int) -> tuple[int, ...]:
    """The ranks of this one's half."""
    start = rank // (world // 2) * (world // 2)
    return tuple(range(start, start + world // 2))


def halves(rank: Rank) -> Any:
    """The group of this rank when the ranks are cut in two."""
    groups = [dist.new_group(half(start, rank.world)) for start in (0, rank.world // 2)]
    return groups[rank.number // (rank.world // 2)]


def error_of(action: Callable[[], Any], kind: type[Exception] = Exception) -> str:
    """The message that this ends with; empty if it does not."""
    try:
        action()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""
