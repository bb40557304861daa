"""FusedAdam on shards of FSDP2: as on the whole, with states that are sharded, saved and clipped as the parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from te_core.errors import ArgumentError
from te_torch import optimizers as opt
from te_torch.optimizers.parts import GradientError
from tests.parallel.fsdp_steps import batch, build, mesh_of, plain, shard
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.steps import alike, error_of, says
from tests.recipes import region
from tests.tolerances import snr_db

MOST = 0.05  # the norm that gradients are clipped to


def options_of(name: str | None) -> dict[str, Any]:
    if name is None:
        return {"master_weights": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}
    return {"master_weights": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def train(model: Any, optimizer: Any, name: str | None, ranks: range, device: str, steps: int = 3) -> list[float]:
    """The norms of the gradients."""
    norms = []
    for i in range(steps):
        with region(name):
            y = model(torch.cat([batch(r, i, device) for r in ranks]))
        y.float().square().mean().backward()
        norm, factor = opt.clip_by_norm(model.parameters(), MOST)
        optimizer.step(grad_scale=factor)
        optimizer.zero_grad()
        norms.append(float(norm))
    return norms


def trained(rank: Rank, name: str | None) -> dict[str, Any]:
    model = shard(build(name, name is not None, rank.device), mesh_of(rank.device, rank.world))
    optimizer = opt.FusedAdam(model.parameters(), lr=1e-3, **options_of(name))
    norms = train(model, optimizer, name, range(rank.number, rank.number + 1), rank.device)
    saved = optimizer.state_dict()
    spread = all(isinstance(t, DTensor) and t.shape == p.shape for p, s in optimizer.state.items() for t in s.values())
    again = opt.FusedAdam(model.parameters(), lr=7.0, **options_of(name))
    again.load_state_dict(copy.deepcopy(saved))
    back = again.state_dict()["state"]
    kept = all(
        torch.allclose(plain(t), plain(back[i][n]), rtol=1e-2) for i, s in saved["state"].items() for n, t in s.items()
    )
    weight: Any = model[0].weight  # type: ignore[index]
    plainly = {**saved, "state": {0: {"exp_avg": plain(saved["state"][0]["exp_avg"])}}}
    says(error_of(lambda: again.load_state_dict(plainly), ArgumentError), "sharded as it is")
    shadow = torch.nn.Parameter(weight.detach())
    shadow.decoupled_grad = torch.zeros(weight.to_local().shape)  # type: ignore[attr-defined]
    step = opt.FusedAdam([shadow], use_decoupled_grad=True, **options_of(name)).step
    says(error_of(step, GradientError), "DTensor")
    assert spread and kept and alike(norms) and alike(getattr(weight.to_local(), "_scale_inv", None))
    masters = [plain(s["master_param"]) for s in optimizer.state.values()]
    return {"norms": norms, "weights": [plain(p) for p in model.parameters()], "masters": masters}


@pytest.mark.parametrize("name", [None, "delayed", "current", "block"])
def test_shards_are_stepped_as_the_whole(ranks: Ranks, name: str | None) -> None:
    found = ranks.run(trained, name)
    whole = build(name, name is not None, ranks.device)
    optimizer = opt.FusedAdam(whole.parameters(), lr=1e-3, **options_of(name))
    norms = train(whole, optimizer, name, range(ranks.world), ranks.device)
    assert found[0]["norms"] == pytest.approx(norms, rel=0.05) and norms[0] > MOST
    for i, p in enumerate(whole.parameters()):
        if p.ndim == 2:
            master = optimizer.state[p]["master_param"]
            assert snr_db(torch.cat([f["masters"][i] for f in found]), plain(master)) > 28, i
            assert snr_db(torch.cat([f["weights"][i] for f in found]), plain(p)) > 28, i
