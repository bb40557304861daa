"""DistributedDataParallel: of every module and recipe gradients are those of the whole batch, and FP8 state agrees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from tests.covering import covering
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.steps import replicated, same
from tests.recipes import KINDS, region
from tests.tolerances import snr_db
from tests.world import values

WIDTH, ROWS, STEPS = 128, 32, 3
BF16 = {"params_dtype": torch.bfloat16}
MODULES: dict[str, Any] = {
    "Linear": lambda **kw: te.Linear(WIDTH, WIDTH, **BF16, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(WIDTH, WIDTH, **BF16, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(WIDTH, WIDTH, **BF16, **kw),
    "GroupedLinear": lambda **kw: te.GroupedLinear(2, WIDTH, WIDTH, **BF16, **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(WIDTH, 2, attention_dropout=0.0, **BF16, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        WIDTH, WIDTH, 2, hidden_dropout=0.0, attention_dropout=0.0, **BF16, **kw
    ),
}
RECIPES = (None, *KINDS[:-1], "nvfp4 nearest")


def made(kind: str, device: str) -> Any:
    torch.manual_seed(0)
    return MODULES[kind](device=device)


def batch(kind: str, ranks: range, step: int, device: str) -> torch.Tensor:
    """Rows of these ranks: as tokens of each rank's own sequence where a module attends."""
    shape = (ROWS, 1, WIDTH) if kind in ("MultiheadAttention", "TransformerLayer") else (ROWS, WIDTH)
    parts = [values(*shape, dtype=torch.bfloat16, seed=10 * step + r, device=device) for r in ranks]
    return torch.cat(parts, dim=1 if len(shape) == 3 else 0)


def trained(kind: str, module: Any, name: str | None, ranks: range, device: str) -> dict[str, Any]:
    """Gradients of the last step, and FP8 state."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    for i in range(STEPS):
        optimizer.zero_grad()
        x = batch(kind, ranks, i, device)
        options = {}
        if kind == "GroupedLinear":
            # Each rank gives its first half to the first group: of the whole batch, whose rows are sorted so.
            halves = [half for r in range(len(ranks)) for half in x[r * ROWS : (r + 1) * ROWS].chunk(2)]
            x, options = torch.cat(halves[::2] + halves[1::2]), {"m_splits": [len(x) // 2] * 2}
        with region(name):
            y = module(x, **options)
        y.float().square().mean().backward()
        optimizer.step()
    grads = {n.removeprefix("module."): p.grad.float().cpu() for n, p in module.named_parameters()}
    state = {n.removeprefix("module."): b.cpu() for n, b in module.named_buffers() if "scale" in n}
    return {"grads": grads, "state": state}


def on_a_rank(rank: Rank, kind: str, name: str | None) -> dict[str, Any]:
    module = replicated(made(kind, rank.device), rank)
    return trained(kind, module, name, range(rank.number, rank.number + 1), rank.device)


@pytest.mark.four_ranks(kind="LayerNormLinear", name="delayed")
@covering(kind=MODULES, name=RECIPES)
def test_gradients_are_those_of_the_whole_batch(ranks: Ranks, kind: str, name: str | None) -> None:
    found = ranks.run(on_a_rank, kind, name)
    wanted = trained(kind, made(kind, ranks.device), name, range(ranks.world), ranks.device)
    for f in found[1:]:
        assert same(f, found[0])
    assert (name == "delayed") == bool(found[0]["state"])
    floor = {None: 30, "nvfp4 nearest": 5}.get(name, 15)
    for n, grad in wanted["grads"].items():
        if float(grad.norm()) > 1e-6:  # of a key's bias nothing comes but rounding
            assert snr_db(found[0]["grads"][n], grad) > floor or n.endswith("bias"), n
