"""FSDP2 before the first step: weights that get their memory or their values after `fully_shard`, another compute type,
and checkpoints that are written meanwhile."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import te_torch as te
from te_core.errors import UnsupportedError
from tests.covering import covering
from tests.parallel.fsdp_steps import HELD, KINDS, ROWS, WIDTH, batch, build, mesh_of, own, plain, shard, train
from tests.parallel.ranks import Rank, Ranks
from tests.parallel.steps import alike, by_ranks, error_of, everyones, same, says
from tests.recipes import region, rule
from tests.world import values


def uneven_values(rows: int, seed: int, columns: int = WIDTH) -> torch.Tensor:
    """Weights whose shards have maxima far from each other's."""
    made = 0.05 * values(rows, columns, dtype=torch.float32, seed=seed)
    made[: rows // 2] *= 0.3
    return made.bfloat16()


def write(model: torch.nn.Module, rank: Rank, how: str) -> None:
    """Give both layers' weights values, before anybody has gathered one."""
    layers: Any = list(model.children())
    wanted = {f"{i}.weight": uneven_values(layer.out_features, i, layer.in_features) for i, layer in enumerate(layers)}
    wanted |= {f"{i}.bias": torch.zeros(layer.out_features).bfloat16() for i, layer in enumerate(layers)}
    with torch.no_grad():
        if how == "state dict":
            full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            # What rank 0 has is what all get.
            set_model_state_dict(model, wanted if rank.number == 0 else {}, options=full)
            return
        for name, p in model.named_parameters():
            if how == "whole":
                p.copy_(wanted[name].to(p.device))
            else:
                part: Any = p
                mine = wanted[name].chunk(rank.world)
                local = part.to_local()
                rows = mine[rank.number] if rank.number < len(mine) else wanted[name][:0]
                local.copy_(rows.to(local.device))


@pytest.mark.four_ranks(name="delayed", how="state dict")
@covering(name=[kind for kind in KINDS if kind != "nvfp4 nearest"], how=["state dict", "shards"])
@by_ranks()
def test_values_before_the_first_forward(rank: Rank, name: str, how: str) -> None:
    """What is written to shards is quantized as the whole would be, with one scale where the whole has one."""
    model, whole = build(name, True, rank.device), build(name, True, rank.device)
    shard(model, mesh_of(rank.device, rank.world))
    write(model, rank, how)
    write(whole, rank, "whole")
    with torch.no_grad(), region(name):
        x = batch(0, 0, rank.device)
        y, wanted = model(x), whole(x)
    assert torch.equal(y, wanted) and y.abs().max() > 0
    first: Any = model[0].weight  # type: ignore[index]
    assert name not in ("delayed", "current") or alike(first.to_local()._scale_inv)
    weights = [plain(p) for p in model.parameters()]
    assert same(weights, [plain(w).chunk(rank.world)[rank.number] for w in whole.parameters()])
    # The greatest value is there as it was written, not clipped to what the layer began with.
    top = max(everyones(weights[0].abs().amax()))
    assert 0.99 < top / uneven_values(WIDTH, 0, WIDTH).abs().amax() < 1.01


# ------------------------------------------------------------------------------------------------- the meta device


def later(rank: Rank, name: str, empty: bool, rows: int) -> dict[str, Any]:
    """Sharded on the meta device; memory, initial values and quantization come afterwards."""
    with te.quantized_model_init(recipe=rule(name)):
        options: dict[str, Any] = {"device": "meta", "params_dtype": torch.bfloat16}
        model = torch.nn.Sequential(te.Linear(WIDTH, rows, **options), te.Linear(rows, WIDTH, **options))
    shard(model, mesh_of(rank.device, rank.world))
    if empty:
        model.to_empty(device=rank.device)
    torch.manual_seed(rank.number)  # on the CPU all ranks draw alike, and shards with one maximum agree by themselves
    for layer in model:
        layer.reset_parameters()  # type: ignore[operator]
    first: Any = model[0].weight
    made = {"class": type(first.to_local()).__name__, "initial": plain(first), "placed": str(first.placements)}
    made["scale"] = getattr(first.to_local(), "_scale_inv", torch.ones(1)).clone().cpu()
    write(model, rank, "shards")
    made["y"] = train(model, name, own(rank), rank.device)
    made["weights"] = [plain(p) for p in model.parameters()]
    return made


def at_once(rank: Rank, name: str, rows: int) -> dict[str, Any]:
    """The same, made with memory. Delayed scaling starts from the initial values: those are another model's."""
    model = build(name, True, rank.device, rows)
    shard(model, mesh_of(rank.device, rank.world))
    write(model, rank, "shards")
    ys = train(model, name, own(rank), rank.device)
    return {"y": ys, "weights": [plain(p) for p in model.parameters()]}


@pytest.mark.four_ranks(name="delayed", empty=True)
@covering(name=KINDS, empty=[True, False])
def test_memory_after_sharding(ranks: Ranks, name: str, empty: bool) -> None:
    """As torch's recipe for large models has it: meta device, `fully_shard`, `to_empty`, `reset_parameters`."""
    found, wanted = ranks.run(later, name, empty, WIDTH), ranks.run(at_once, name, WIDTH)
    for f, w in zip(found, wanted, strict=True):
        assert f["class"] == HELD[name] and "Shard" in f["placed"]
        assert 0 < f["initial"].abs().max() < 1
        if name in ("delayed", "current"):
            assert torch.equal(f["scale"], found[0]["scale"])
        if name != "delayed":
            assert all(torch.equal(a, b) for a, b in zip(f["y"], w["y"], strict=True))
            assert all(torch.equal(a, b) for a, b in zip(f["weights"], w["weights"], strict=True))
        assert f["y"][-1].shape == (ROWS, WIDTH) and not torch.equal(f["y"][0], f["y"][-1])


@pytest.mark.four_ranks(name="current", rows=3)
@covering(name=["delayed", "current"], rows=[48 + 1, 3])
def test_memory_after_an_uneven_cut(ranks: Ranks, name: str, rows: int) -> None:
    """A rank with fewer rows than the others, or with none."""
    found, wanted = ranks.run(later, name, True, rows), ranks.run(at_once, name, rows)
    for f, w in zip(found, wanted, strict=True):
        assert torch.equal(f["scale"], found[0]["scale"])
        assert name == "delayed" or all(torch.equal(a, b) for a, b in zip(f["y"], w["y"], strict=True))


@by_ranks("two")
def test_weights_that_stayed_plain(rank: Rank) -> None:
    """Without `reset_parameters`, as many programs have it: what a layer says in its first two forwards."""
    with te.quantized_model_init(recipe=rule("current")):
        layer = te.Linear(WIDTH, WIDTH, device="meta", params_dtype=torch.bfloat16)
    fully_shard(layer, mesh=mesh_of(rank.device, rank.world))
    layer.to_empty(device=rank.device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(2):
            with te.autocast(recipe=rule("current")):
                layer(batch(rank.number, i, rank.device))
    (said,) = [str(w.message) for w in caught if "reset_parameters" in str(w.message)]
    says(said, "weight was made on the meta device", "torch.bfloat16")


@by_ranks("pair")
def test_blocks_are_counted_there_too(rank: Rank) -> None:
    with te.quantized_model_init(recipe=rule("block")):
        layer = te.Linear(WIDTH, 192, device="meta", params_dtype=torch.bfloat16)
    fully_shard(layer, mesh=mesh_of(rank.device, rank.world))
    layer.to_empty(device=rank.device)
    said = error_of(layer.reset_parameters, UnsupportedError)
    says(said, "cut through a block of 128", "Linear.weight", "a multiple of 256")


# ------------------------------------------------------------------------------------- another type, and meanwhile


@pytest.mark.parametrize(  # not delayed, whose scale is of the initial values
    "name", ["current", "mxfp8", *(pytest.param(name, marks=pytest.mark.full) for name in ("block", "nvfp4 nearest"))]
)
@by_ranks()
def test_a_policy_of_mixed_precision(rank: Rank, name: str) -> None:
    """`param_dtype` is what layers compute in, whatever type the quantized weights stand for: those of nominal float32
    under a policy of bfloat16, and weights of bfloat16 without one."""
    made = []
    for nominal, policy in ((torch.float32, torch.bfloat16), (torch.bfloat16, None)):
        with te.quantized_model_init(recipe=rule(name)):
            layer = te.Linear(WIDTH, WIDTH, bias=False, device=rank.device, params_dtype=nominal)
        with torch.no_grad():
            layer.weight.copy_(uneven_values(WIDTH, 0).to(rank.device))
        fully_shard(layer, mesh=mesh_of(rank.device, rank.world), mp_policy=MixedPrecisionPolicy(param_dtype=policy))
        for _ in range(2):  # the second one finds the gathered weight there
            with region(name):
                y = layer(batch(0, 0, rank.device))
            y.float().square().mean().backward()
        grad = layer.weight.grad.to_local()
        made.append((y, grad.float()))
        assert layer.weight.dtype is nominal and grad.dtype is nominal and y.dtype is torch.bfloat16
    assert same(*made)


@pytest.mark.parametrize(
    "name",
    [
        "delayed",
        "mxfp8",
        *(pytest.param(n, marks=pytest.mark.full) for n in (None, "current", "block", "nvfp4 nearest")),
    ],
)
@by_ranks("two")
def test_an_asynchronous_checkpoint(rank: Rank, tmp_path: Path, name: str | None) -> None:
    """Torch copies the shards aside with all that they hold, and writes while training goes on."""
    folder = str(tmp_path / "saved")
    model = build(name, name is not None, rank.device)
    shard(model, mesh_of(rank.device, rank.world))
    train(model, name, own(rank), rank.device)
    group = dist.new_group(backend="gloo")
    dcp.async_save(model.state_dict(), checkpoint_id=folder, process_group=group).result()  # type: ignore[union-attr]
    before = [plain(p) for p in model.parameters()]
    other = build(name, name is not None, rank.device, seed=1)
    shard(other, mesh_of(rank.device, rank.world))
    if name is not None:
        te.prepare_state(other, rule(name))  # type: ignore[arg-type]
    found = other.state_dict()
    dcp.load(found, checkpoint_id=folder)
    other.load_state_dict(found)
    with torch.no_grad(), region(name) if name else nullcontext():
        x = batch(0, 0, rank.device)
        assert torch.equal(model(x), other(x))
    assert same(before, [plain(p) for p in other.parameters()])
