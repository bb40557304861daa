"""FSDP2: weights in high precision and weights held quantized train, in shards, as one process with the whole does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import te_torch as te
from te_core.errors import UnsupportedError
from tests.covering import covering
from tests.parallel.fsdp_steps import (
    HELD,
    KINDS,
    ROWS,
    STEPS,
    WIDTH,
    batch,
    build,
    mesh_of,
    optimizer_of,
    own,
    plain,
    shard,
    step,
    train,
)
from tests.parallel.ranks import Outcome, Rank, Ranks
from tests.parallel.steps import alike, by_ranks, counted, error_of, everyones, same, says, sent_to
from tests.recipes import rule
from tests.tolerances import snr_db

#: Recipes that scale an operand by the maxima of a rank's own rows: sharded they are no worse, but not the same.
OWN_MAXIMA = ("current", "nvfp4 nearest")
FULL = pytest.mark.full


def trained(rank: Rank, name: str | None, quantized: bool) -> dict[str, Any]:
    model = shard(build(name, quantized, rank.device), mesh_of(rank.device, rank.world))
    with counted() as calls:
        outputs = train(model, name, own(rank), rank.device)
    weight: Any = model[0].weight  # type: ignore[index]
    local = weight.to_local()
    assert all(isinstance(p, DTensor) for p in model.parameters()) and model[0].is_fsdp2  # type: ignore[index]
    assert type(local).__name__ == (HELD[name] if quantized and name else "Tensor")
    assert rank.world == 1 or sent_to("all_gather", calls) == derived_bytes(name, quantized, rank.world) * STEPS
    assert name not in ("delayed", "current") or alike(getattr(local, "_scale_inv", None))
    return {"y": outputs, "weights": [plain(p) for p in model.parameters()]}


CASES = [(None, False)] + [(name, quantized) for name in KINDS for quantized in (False, True)]


def cases(*some: tuple[str | None, bool]) -> pytest.MarkDecorator:
    """These by default, all by `--full`."""
    marked = [pytest.param(*case, marks=[] if case in some else pytest.mark.full) for case in CASES]
    return pytest.mark.parametrize(("name", "quantized"), marked)


@pytest.mark.four_ranks(name="current", quantized=True)
@pytest.mark.four_ranks(name="block", quantized=True)
@cases((None, False), ("current", False), *((name, True) for name in KINDS))
def test_shards_train_as_the_whole(ranks: Ranks, name: str | None, quantized: bool) -> None:
    """And quantized weights travel as the bytes that they are: derived, then counted."""
    found, device = ranks.run(trained, name, quantized), ranks.device
    whole = build(name, quantized, device)
    wanted = train(whole, name, range(ranks.world), device)
    ys = [torch.cat([f["y"][i] for f in found]) for i in range(STEPS)]
    if name not in OWN_MAXIMA:  # but for the order in which a product of fewer rows adds
        assert snr_db(ys[0], wanted[0]) > 45
    floor = 12 if name == "nvfp4 nearest" else 25
    assert snr_db(ys[-1], wanted[-1]) > floor and ys[0].shape == (ranks.world * ROWS, WIDTH)
    for i, p in enumerate(whole.parameters()):
        got = torch.cat([f["weights"][i] for f in found])
        assert got.shape == p.shape
        if p.ndim == 2:
            assert snr_db(got, plain(p)) > (15 if name == "nvfp4 nearest" else 28), i
    assert snr_db(ys[-1], wanted[0]) < 60, "nothing was learned"


def derived_bytes(name: str | None, quantized: bool, world: int) -> list[int]:
    """What a rank sends for one layer: its part of the weight and its scales, and of the bias."""
    n, bias = WIDTH * WIDTH // world, 2 * WIDTH // world
    blocks = WIDTH // 128
    weight = {
        "delayed": n,
        "current": n,
        "block": n + 4 * (blocks // world) * blocks,
        "mxfp8": 2 * (n + n // 32),
        "nvfp4 nearest": n // 2 + n // 16 + 4,
    }
    each = (weight[name] if quantized and name else 2 * n) + bias
    return [each] * 4  # both layers, in forward and in backward


# --------------------------------------------------------------------------------------------------------- memory


def living_bytes() -> int:
    """The memory of all tensors that there are."""
    sizes: dict[int, int] = {}
    for t in gc.get_objects():
        if type(t) in (torch.Tensor, torch.nn.Parameter):
            memory = t.untyped_storage()
            sizes[memory._cdata] = memory.nbytes()
    return sum(sizes.values())


@cases(("delayed", False), ("current", True), ("mxfp8", True))
@by_ranks()
def test_memory_is_flat(rank: Rank, name: str | None, quantized: bool) -> None:
    """After 10 steps as after 5."""
    model = shard(build(name, quantized, rank.device), mesh_of(rank.device, rank.world))
    optimizer, found = optimizer_of(model, "AdamW"), []
    for i in range(10):
        step(model, optimizer, name, batch(rank.number, i % 3, rank.device))
        if i in (4, 9):
            gc.collect()
            found.append(torch.cuda.memory_allocated() if rank.device == "cuda" else living_bytes())
    assert found[0] == found[1] > 0


# ---------------------------------------------------------------------------------------------- meshes, optimizers


@pytest.mark.four_ranks
@cases(("current", True))
@by_ranks("four")
def test_a_mesh_of_two_dimensions(rank: Rank, name: str | None, quantized: bool) -> None:
    """Two replicas of two shards each: ranks 0 and 2 hold the same shard."""
    model = shard(build(name, quantized, rank.device), mesh_of(rank.device, 2, rank.world // 2))
    outputs = everyones(train(model, name, own(rank), rank.device)[-1])
    shards = everyones([plain(p) for p in model.parameters()])
    assert same(shards[0], shards[2]) and same(shards[1], shards[3])
    wanted = train(build(name, quantized, rank.device), name, range(4), rank.device)
    assert snr_db(torch.cat(outputs), wanted[-1]) > (12 if name == "nvfp4 nearest" else 25)


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "one by one": ("AdamW", {"foreach": False}),
    "foreach": ("AdamW", {"foreach": True}),
    "fused": ("AdamW", {"fused": True}),
    "SGD": ("SGD", {"momentum": 0.9, "foreach": False}),
}


@covering(name=["delayed", "current", "block", "mxfp8"], form=OPTIMIZERS)
@by_ranks("two")
def test_optimizers(rank: Rank, name: str, form: str) -> None:
    """Of all forms the update is the same, but for what rounding between its steps changes."""
    kind, options = OPTIMIZERS[form]
    model = shard(build(name, True, rank.device), mesh_of(rank.device, rank.world))
    optimizer = optimizer_of(model, kind, **options)
    train(model, name, own(rank), rank.device, optimizer)
    assert len(optimizer.state) == 4
    if kind == "AdamW":
        alone = build(name, True, rank.device)
        train(alone, name, range(2), rank.device, optimizer_of(alone, "AdamW", foreach=False))
        found = zip(*everyones([plain(p) for p in model.parameters()]), strict=True)
        for parts, p in zip(found, alone.parameters(), strict=True):
            assert p.ndim == 1 or snr_db(torch.cat(parts), plain(p)) > 25


# -------------------------------------------------------------------------------------------------- uneven shards


def uneven(rank: Rank, name: str, width: int) -> dict[str, Any]:
    """A first layer whose rows the ranks cannot share alike."""
    model = shard(build(name, True, rank.device, width), mesh_of(rank.device, rank.world))
    return {"y": train(model, name, own(rank), rank.device), "weights": [plain(p) for p in model.parameters()]}


@pytest.mark.four_ranks(name="current", width=3)
@covering(name=["delayed", "current"], width=[48 + 1, 3])
def test_a_rank_with_fewer_rows(ranks: Ranks, name: str, width: int) -> None:
    """One scale serves any rows: the last ranks fill up, one may have none at all."""
    found = ranks.run(uneven, name, width)
    whole = build(name, True, ranks.device, width)
    wanted = train(whole, name, range(ranks.world), ranks.device)
    for i, p in enumerate(whole.parameters()):
        got = torch.cat([f["weights"][i] for f in found])
        assert got.shape == p.shape and (p.ndim == 1 or snr_db(got, plain(p)) > 25)
    ys = torch.cat([f["y"][-1] for f in found])
    assert snr_db(ys, wanted[-1]) > 20


BLOCKS = [("block", 128), ("mxfp8", 32), ("nvfp4 nearest", 16)]


def refused(outcomes: list[Outcome], rows: int, ranks: int, block: int, why: str) -> None:
    """Each rank raised our error, and none the one of a collective in which it waited for another."""
    for outcome in outcomes:
        assert outcome.how == "raised" and outcome.error == "UnsupportedError", str(outcome)
        said = outcome.text.splitlines()[-1]
        assert f"0.weight, a {type_of(block)} of {rows} rows ({rows} x {WIDTH}) over {ranks} ranks: " in said
        assert why in said and f"a multiple of {ranks * block} ({block} a block, {ranks} ranks)" in said
        assert "outside quantized_model_init" in said and "in fully_shard" in outcome.text


def type_of(block: int) -> str:
    return next(HELD[name] for name, of in BLOCKS if of == block)


@pytest.mark.four_ranks(name="mxfp8")
@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_shards_that_cut_through_a_block(gloo_ranks: Ranks, name: str, block: int) -> None:
    """All ranks say so while they cut, by the whole weight: also those whose own shards are of whole blocks."""
    ranks = gloo_ranks.world
    for rows, why in (
        (3 * block // 2 * ranks, f"shards of {3 * block // 2} rows cut through a block of {block}"),
        (block * ranks - 1, f"of the shards of {block} rows has {block - 1} and ends inside a block of {block}"),
        (3, f"shards of {-(-3 // ranks)} rows cut through a block of {block}"),
    ):
        outcomes = gloo_ranks.outcomes(uneven, name, rows)
        refused(outcomes, rows, ranks, block, why)


def uneven_on_a_mesh(rank: Rank, name: str, width: int) -> None:
    mesh = mesh_of(rank.device, 2, rank.world // 2)
    dist.barrier()  # a rank that fails at once takes its groups down: not while others still connect
    shard(build(name, True, rank.device, width), mesh)


@pytest.mark.more
@pytest.mark.parametrize(("name", "block"), [BLOCKS[1], *(pytest.param(*b, marks=FULL) for b in BLOCKS[::2])])
def test_last_shards_on_a_mesh_of_two_dimensions(ranks_of: Callable[..., Ranks], name: str, block: int) -> None:
    """What counts is the number of shards, not that of the ranks; where it divides, nothing is said."""
    four = ranks_of(4, "cpu")
    outcomes = four.outcomes(uneven_on_a_mesh, name, 2 * block - 1)
    refused(outcomes, 2 * block - 1, 2, block, "the last of")
    assert four.run(uneven_on_a_mesh, name, 2 * block) == [None] * 4


class Mesh:
    """As much of a mesh as the hooks ask for."""

    def size(self) -> int:
        return 3

    def get_group(self) -> None:
        return None


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_a_shard_of_whole_blocks_judges_the_last_one(name: str, block: int) -> None:
    """Of a weight that came to its shards by another way than `fully_shard`: at its first all-gather."""
    layer = build(name, True, "cpu", block)[0]
    weight: Any = layer.weight
    with pytest.raises(UnsupportedError, match=f"Linear.weight, .* over 3 ranks: .* a multiple of {3 * block} "):
        weight.fsdp_pre_all_gather(Mesh(), torch.Size([3 * block - 1, WIDTH]), None, layer, None)
    weight.fsdp_pre_all_gather(Mesh(), torch.Size([3 * block, WIDTH]), None, layer, None)


@pytest.mark.parametrize("name", ["current", "block"])
@by_ranks("pair")
def test_shards_of_columns_are_refused(rank: Rank, name: str) -> None:
    with te.quantized_model_init(recipe=rule(name)):
        layer = te.Linear(WIDTH, WIDTH, bias=False, device=rank.device, params_dtype=torch.bfloat16)
    mesh, columns = mesh_of(rank.device, rank.world), lambda p: Shard(1)
    said = error_of(lambda: fully_shard(layer, mesh=mesh, shard_placement_fn=columns), UnsupportedError)
    says(said, "cut along their first dimension", "Linear.weight", "shard_placement_fn")


def test_one_rank(ranks_of: Callable[..., Ranks]) -> None:
    """A mesh of one rank, where torch takes one buffer of a parameter."""
    alone = ranks_of(1, "cpu")
    for name in ("current", "mxfp8"):  # one tensor that travels, and several
        (found,) = alone.run(trained, name, True)
        wanted = train(build(name, True, "cpu"), name, range(1), "cpu")
        assert all(snr_db(a, b) > 30 for a, b in zip(found["y"], wanted, strict=True)), name


# ------------------------------------------------------------------------------------- what is made once, and when not


@pytest.mark.parametrize(("options", "numbers"), [({"fused": True}, [2]), ({"foreach": False}, [1] * 4)])
@by_ranks("two")
def test_shards_agree_in_one_message(rank: Rank, options: dict[str, Any], numbers: list[int]) -> None:
    """Of all weights that one operator changes; and by themselves where each is changed by its own."""
    model = shard(build("current", True, rank.device), mesh_of(rank.device, rank.world))
    optimizer = optimizer_of(model, "AdamW", **options)
    step(model, optimizer, "current", batch(rank.number, 0, rank.device))
    layers: Any = model
    for layer in layers:
        layer.weight.grad = torch.zeros_like(layer.weight)
    with counted() as calls:
        optimizer.step()
    assert sent_to("all_reduce", calls) == [4 * number for number in numbers]
    assert alike([layer.weight.to_local()._scale_inv for layer in layers])


@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8"])
def test_bytes_that_arrive_elsewhere(name: str) -> None:
    """What FSDP2 hands over, in the memory of before and in another one."""
    weight = build(name, True, "cpu")[0].weight.detach()  # type: ignore[operator]
    sent, metadata = weight.fsdp_pre_all_gather(None, None, None, None, None)  # type: ignore[operator]
    again, same = weight.fsdp_pre_all_gather(None, None, None, None, None)  # type: ignore[operator]
    assert same is metadata and all(a is b for a, b in zip(sent, again, strict=True))
    came = tuple(t.clone() for t in sent)
    whole, _ = weight.fsdp_post_all_gather(came, metadata, torch.bfloat16)  # type: ignore[operator]
    whole.to_core()  # a GEMM reads it
    for memory in (came, came, tuple(t.clone() for t in sent), came):
        with torch.no_grad():
            weight.mul_(-1)
        for to, t in zip(memory, weight.fsdp_pre_all_gather(None, None, None, None, None)[0], strict=True):  # type: ignore[operator]
            to.copy_(t)
        weight.fsdp_post_all_gather(memory, metadata, torch.bfloat16, out=whole)  # type: ignore[operator]
        assert torch.equal(plain(whole), plain(weight))
        assert whole.to_core().rowwise.ptr == memory[0].data_ptr()
