"""The documented collectives: of plain tensors, of quantized ones (whose bytes travel), and of saved activations."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_torch.tensors import DType
from te_torch.training import collectives
from tests.parallel.ranks import Rank
from tests.parallel.steps import alike, by_ranks, counted, error_of, same, says, sent_to
from tests.world import region, values

ROWS, WIDTH = 128, 256
E4M3 = DType.kFloat8E4M3


def shard(rank: int, rows: int = ROWS, device: str = "cpu") -> torch.Tensor:
    """Ranks' rows, of which each rank's largest value is another."""
    return values(rows, WIDTH, seed=rank, device=device) * (rank + 1)


def whole(world: int, rows: int = ROWS, device: str = "cpu") -> torch.Tensor:
    return torch.cat([shard(r, rows, device) for r in range(world)])


# ----------------------------------------------------------------------------------------------- plain tensors


@pytest.mark.four_ranks()
@by_ranks()
def test_plain_tensors(rank: Rank) -> None:
    world, device = rank.world, rank.device
    mine, all_rows = shard(rank.number, device=device), whole(world, device=device)
    gathered, handle = collectives.gather_along_first_dim(mine, None)
    assert torch.equal(gathered, all_rows) and handle is None
    out = torch.empty_like(all_rows)
    gathered, handle = collectives.gather_along_first_dim(mine.t().contiguous().t(), None, True, output_tensor=out)
    handle.wait(timeout=timedelta(seconds=60))
    assert gathered is out and torch.equal(out, all_rows)
    total = torch.stack([shard(r, device=device) for r in range(world)]).sum(0)
    summed, handle = collectives.allreduce(mine.clone())
    assert torch.allclose(summed, total, atol=1e-5) and handle is None
    given = mine.clone()
    summed, handle = collectives.allreduce(given, None, True)
    copy.copy(handle)  # as a logger's may be
    handle.wait(timeout=timedelta(seconds=60))
    assert summed is given and torch.allclose(given, total, atol=1e-5)
    each = ROWS // world
    part, handle = collectives.reduce_scatter_along_first_dim(mine, None)
    assert torch.allclose(part, total[rank.number * each :][:each], atol=1e-5) and handle is None
    flat = collectives.split_tensor_into_1d_equal_chunks(all_rows, None)
    assert flat.numel() == ROWS * WIDTH and flat.data_ptr() != all_rows.data_ptr() or rank.number == 0
    assert flat.untyped_storage().data_ptr() == all_rows.untyped_storage().data_ptr()
    own = collectives.split_tensor_into_1d_equal_chunks(all_rows, None, new_buffer=True)
    assert own.untyped_storage().data_ptr() != all_rows.untyped_storage().data_ptr()
    assert torch.equal(collectives.gather_split_1d_tensor(own, None).view_as(all_rows), all_rows)
    summed, handle = collectives.symmetric_all_reduce(mine.clone(), None, all_reduce_type="nccl")
    assert torch.allclose(summed, total, atol=1e-5)
    alone = dist.new_group([rank.number], use_local_synchronization=True)
    assert collectives.gather_along_first_dim(mine, alone)[0] is mine is collectives.allreduce(mine, alone)[0]


@by_ranks("pair")
def test_what_is_refused(rank: Rank) -> None:
    """Before anything is sent: the ranks are free afterwards."""
    x = torch.ones(3, WIDTH)
    tries: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ArgumentError, lambda: collectives.reduce_scatter_along_first_dim(x, None)),
        (ArgumentError, lambda: collectives.allreduce(x.t())),
        (ArgumentError, lambda: collectives.split_tensor_into_1d_equal_chunks(torch.ones(3), None)),
        (ArgumentError, lambda: collectives.gather_along_first_dim(x, None, output_tensor=torch.ones(3, WIDTH))),
        (TypeError, lambda: collectives.symmetric_all_reduce(x, None, all_reduce_type="fast")),
        (UnsupportedError, lambda: collectives.symmetric_all_reduce(x, None, True, "two_shot")),
        (UnsupportedError, lambda: collectives.symmetric_all_reduce(x, None)),
        (UnsupportedError, lambda: collectives.get_symmetric_memory_tensor(8, torch.float32, "cpu", None)),
        (UnsupportedError, lambda: collectives.symm_mem_alloc((8,), torch.float32, None, "cpu")),
        (ArgumentError, lambda: collectives.symm_mem_alloc((8,), torch.float32, None, "cpu", backend="MPI")),
    ]
    said = [error_of(call, kind) for kind, call in tries]
    assert all(said)
    says(said[0], "pad the first dimension")
    says(said[6], "allreduce()")
    collectives.release_symm_mem_pool()


# ------------------------------------------------------------------------------------------- quantized tensors


def quantizers(device: str) -> dict[str, Any]:
    """By name: (a quantizer, what travels of a rank's rows in bytes a row of WIDTH, whether quantized before)."""
    scale = torch.full((1,), 8.0, device=device)
    return {
        "delayed": te.Float8Quantizer(scale, torch.zeros_like(scale), E4M3),
        "current": te.Float8CurrentScalingQuantizer(E4M3, device),
        "mxfp8": te.MXFP8Quantizer(E4M3),
        "block tiled": te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
        "block": te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    }


USAGES = ((True, True), (True, False), (False, True))


def as_wanted(made: Any, wanted: Any, usages: dict[str, bool]) -> bool:
    alike = type(made) is type(wanted) and made.get_usages() == usages and made.shape == wanted.shape
    alike &= same(made.get_data_tensors(), wanted.get_data_tensors())
    return alike and (not usages["rowwise"] or torch.equal(made.dequantize(), wanted.dequantize()))


@pytest.mark.four_ranks()
@by_ranks()
def test_bytes_travel(rank: Rank) -> None:
    """For each format and usage all bytes are those of the whole, quantized at once. What is sent is derived: a
    byte an element and copy, of a per-tensor format one copy; its scales beside it."""
    n = ROWS * WIDTH
    one_copy = {"delayed": n + 4, "current": n + 4, "mxfp8": n + n // 32, "block": n + n // 32}
    tiles = {(True, True): 2 * n + 16 + 8, (True, False): n + 16, (False, True): n + 8}  # of scales: 4 and 2
    mine, all_rows = shard(rank.number, device=rank.device), whole(rank.world, device=rank.device)
    for (name, quantizer), usage in product(quantizers(rank.device).items(), tiles):
        usages = dict(zip(("rowwise", "columnwise"), usage, strict=True))
        quantizer.set_usage(**usages)
        wanted = quantizer(all_rows)
        two = all(usage) and name not in ("delayed", "current")
        size = tiles[usage] if name == "block tiled" else (2 if two else 1) * one_copy[name]
        for wait in (False, True):
            with counted() as calls, warnings.catch_warnings():
                warnings.simplefilter("error")
                made, handle = collectives.gather_along_first_dim(mine, None, wait, quantizer)
            if wait:
                handle.wait()
            assert as_wanted(made, wanted, usages), (name, usage, wait)
            assert sum(sent_to("all_gather", calls)) == size, (name, usage, calls)


@by_ranks()
def test_corners_of_quantized_gathers(rank: Rank) -> None:
    device, quantizer, four = rank.device, te.MXFP8Quantizer(E4M3), te.NVFP4Quantizer()
    mine, gather = shard(rank.number, device=device), collectives.gather_along_first_dim
    with pytest.warns(UserWarning, match="48 rows of a rank end within a block; the values travel"):
        made, _ = gather(shard(rank.number, 48, device), None, False, quantizer)
    assert torch.equal(made.dequantize(), quantizer(whole(rank.world, 48, device)).dequantize())
    with pytest.warns(UserWarning, match="amax of its own"):
        made, _ = gather(mine, None, False, four)
    assert torch.equal(made.dequantize(), four(whole(rank.world, device=device)).dequantize())
    # Quantized before, each by its own maximum: no value of a result may be taken for right.
    made, _ = gather(te.Float8CurrentScalingQuantizer(E4M3, device)(mine), None)
    assert made.dequantize().isnan().all()
    local = four(shard(0, device=device))  # the same on all ranks, and so is its amax
    made, _ = gather(local, None)
    assert torch.equal(made.dequantize(), torch.cat([local.dequantize()] * rank.world))
    into = quantizer.make_empty((rank.world * ROWS, WIDTH), dtype=torch.float32, device=device)
    made, handle = gather(mine, None, True, quantizer, output_tensor=into)
    assert made is into and handle is None
    assert torch.equal(into.dequantize(), quantizer(whole(rank.world, device=device)).dequantize())
    with pytest.raises(ArgumentError, match="end within a block"):
        gather(quantizer(shard(rank.number, 48, device)), None)
    with pytest.raises(UnsupportedError, match="external_coalescing"):
        gather(shard(0, device=device), None, False, quantizer, None, True)


# ---------------------------------------------------------------------------- checkpoint: saved activations in parts


def _two(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(layers(x), 0.25)


def recomputed(rank: Rank, recipe: str, distribute: bool, group: Any = None, number: int = 5) -> list[Any]:
    """Output, gradients, and the bytes that were sent, in backward alone."""
    torch.manual_seed(0)
    layer = te.LayerNormMLP(WIDTH, WIDTH, device=rank.device, params_dtype=torch.float32)
    layers = torch.nn.Sequential(layer, te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.float32))
    x = values(32, WIDTH, device=rank.device, seed=number).requires_grad_()
    options = {"distribute_saved_activations": distribute, "tp_group": group, "use_reentrant": True}
    torch.manual_seed(1)
    with counted() as calls, region(recipe):
        y = te.checkpoint(_two, layers, x * 2, **options)  # no leaf: a checkpoint's first argument as in a model
        assert not sent_to("all_gather", calls)
        (y * values(*y.shape, device=rank.device)).sum().backward()
    return [[y, x.grad, [p.grad for p in layers.parameters()]], sent_to("all_gather", calls)]


@pytest.mark.parametrize("recipe", [pytest.param("plain", marks=pytest.mark.full), "delayed", "current"])
@by_ranks()
def test_a_checkpoint_keeps_a_part(rank: Rank, recipe: str) -> None:
    """Each rank sends its part once, in backward; outputs and gradients are those of a checkpoint that keeps all."""
    (found, sent), (wanted, none) = (recomputed(rank, recipe, distribute) for distribute in (True, False))
    assert same(found, wanted) and sent == [32 * WIDTH * 4 // rank.world] and none == []


@pytest.mark.more
@by_ranks("gloo_four")
def test_a_checkpoint_keeps_a_part_in_its_group(rank: Rank) -> None:
    """What tensor-parallel ranks hold alike is cut among them, not over the data-parallel copies with their inputs."""
    pairs, pair = [dist.new_group([0, 1]), dist.new_group([2, 3])], rank.number // 2
    (found, sent), (wanted, none) = (recomputed(rank, "plain", cut, pairs[pair], pair) for cut in (True, False))
    assert same(found, wanted) and sent == [32 * WIDTH * 4 // 2] and none == []
    assert not alike(found[1])


@by_ranks("gloo_ranks")
def test_what_cannot_be_in_parts(rank: Rank) -> None:
    layer = te.Linear(WIDTH, WIDTH, device=rank.device)
    odd = torch.ones(1, 3, device=rank.device)
    with pytest.raises(ArgumentError, match="a multiple of"):
        te.checkpoint(torch.sin, odd, distribute_saved_activations=True)
    with pytest.raises(ArgumentError, match="no tensor"):
        te.checkpoint(lambda x: layer(x), x=odd, distribute_saved_activations=True)
