"""The documented collectives: of plain tensors, of quantized ones (whose bytes travel), and of saved activations."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_torch as te
from te_core.errors import ArgumentError, UnsupportedError
from te_torch.exchange import ALL_GATHER
from te_torch.tensors import DType
from te_torch.training import collectives
from tests.module_steps import region, values
from tests.parallel.ranks import Rank, Ranks

ROWS, WIDTH = 128, 256
E4M3 = DType.kFloat8E4M3


def shard(rank: int, rows: int = ROWS, device: str = "cpu") -> torch.Tensor:
    """Ranks' rows, of which each rank's largest value is another."""
    return values(rows, WIDTH, seed=rank, device=device) * (rank + 1)


def whole(world: int, rows: int = ROWS, device: str = "cpu") -> torch.Tensor:
    return torch.cat([shard(r, rows, device) for r in range(world)])


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that this rank sends in all-gathers."""
    sent: list[int] = []
    gather = getattr(dist, ALL_GATHER)

    def noting(out: torch.Tensor, inp: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(inp.numel() * inp.element_size())
        return gather(out, inp, *args, **kwargs)

    with mock.patch.object(dist, ALL_GATHER, noting):
        yield sent


# ----------------------------------------------------------------------------------------------- plain tensors


def plain(rank: Rank) -> dict[str, Any]:
    world, device = rank.world, rank.device
    mine, all_rows = shard(rank.number, device=device), whole(world, device=device)
    found: dict[str, Any] = {}
    gathered, handle = collectives.gather_along_first_dim(mine, None)
    found["gather"] = torch.equal(gathered, all_rows) and handle is None
    out = torch.empty_like(all_rows)
    gathered, handle = collectives.gather_along_first_dim(mine.t().contiguous().t(), None, True, output_tensor=out)
    handle.wait(timeout=timedelta(seconds=60))
    found["gather into"] = gathered is out and torch.equal(out, all_rows)
    total = sum(shard(r, device=device) for r in range(world))
    summed, handle = collectives.allreduce(mine.clone())
    found["allreduce"] = torch.allclose(summed, total, atol=1e-5) and handle is None
    given = mine.clone()
    summed, handle = collectives.allreduce(given, None, True)
    copy.copy(handle)  # as a logger's may be
    handle.wait(timeout=timedelta(seconds=60))
    found["in place"] = summed is given and torch.allclose(given, total, atol=1e-5)
    each = ROWS // world
    part, handle = collectives.reduce_scatter_along_first_dim(mine, None)
    wanted = total[rank.number * each : (rank.number + 1) * each]
    found["reduce scatter"] = torch.allclose(part, wanted, atol=1e-5) and handle is None
    flat = collectives.split_tensor_into_1d_equal_chunks(all_rows, None)
    found["split"] = flat.numel() == ROWS * WIDTH and flat.data_ptr() != all_rows.data_ptr() or rank.number == 0
    found["view"] = flat.untyped_storage().data_ptr() == all_rows.untyped_storage().data_ptr()
    own = collectives.split_tensor_into_1d_equal_chunks(all_rows, None, new_buffer=True)
    found["new buffer"] = own.untyped_storage().data_ptr() != all_rows.untyped_storage().data_ptr()
    found["joined"] = torch.equal(collectives.gather_split_1d_tensor(own, None).view_as(all_rows), all_rows)
    summed, handle = collectives.symmetric_all_reduce(mine.clone(), None, all_reduce_type="nccl")
    found["symmetric nccl"] = torch.allclose(summed, total, atol=1e-5)
    alone = dist.new_group([rank.number], use_local_synchronization=True)
    found["one rank"] = collectives.gather_along_first_dim(mine, alone)[0] is mine
    found["one rank sums"] = collectives.allreduce(mine, alone)[0] is mine
    return found


@pytest.mark.four_ranks()
def test_plain_tensors(ranks: Ranks) -> None:
    for found in ranks.run(plain):
        assert all(found.values()), found


def wrong(rank: Rank) -> list[str]:
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
    said = []
    for kind, call in tries:
        with pytest.raises(kind) as error:
            call()
        said.append(str(error.value))
    collectives.release_symm_mem_pool()
    return said


def test_what_is_refused(pair: Ranks) -> None:
    """Before anything is sent: the ranks are free afterwards."""
    first, second = pair.run(wrong)
    assert first == second and "pad the first dimension" in first[0] and "allreduce()" in first[6]


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


def gathered(rank: Rank) -> dict[Any, Any]:
    """For each format and usage: whether all bytes are those of the whole, quantized at once, and the bytes sent."""
    mine, all_rows = shard(rank.number, device=rank.device), whole(rank.world, device=rank.device)
    found: dict[Any, Any] = {}
    for name, quantizer in quantizers(rank.device).items():
        for rowwise, columnwise in USAGES:
            quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
            wanted = quantizer(all_rows)
            for wait in (False, True):
                with counted() as sent, warnings.catch_warnings():
                    warnings.simplefilter("error")
                    made, handle = collectives.gather_along_first_dim(mine, None, wait, quantizer)
                if wait:
                    handle.wait()
                usages = {"rowwise": rowwise, "columnwise": columnwise}
                found[name, rowwise, columnwise, wait] = (same(made, wanted, usages), sum(sent))
    return found


def same(made: Any, wanted: Any, usages: dict[str, bool]) -> bool:
    pairs = list(zip(made.get_data_tensors(), wanted.get_data_tensors(), strict=True))
    alike = type(made) is type(wanted) and made.get_usages() == usages and made.shape == wanted.shape
    alike &= all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
    return bool(alike and (not usages["rowwise"] or torch.equal(made.dequantize(), wanted.dequantize())))


@pytest.mark.four_ranks()
def test_bytes_travel(ranks: Ranks) -> None:
    """Derived: a byte an element and copy, of a per-tensor format one copy; its scales beside it."""
    n = ROWS * WIDTH
    one_copy = {"delayed": n + 4, "current": n + 4, "mxfp8": n + n // 32, "block": n + n // 32}
    tiles = {(True, True): 2 * n + 16 + 8, (True, False): n + 16, (False, True): n + 8}  # of scales: 4 and 2
    for found in ranks.run(gathered):
        for (name, rowwise, columnwise, wait), (alike, sent) in found.items():
            assert alike, (name, rowwise, columnwise, wait)
            both = rowwise and columnwise and name not in ("delayed", "current")
            wanted = tiles[rowwise, columnwise] if name == "block tiled" else (2 if both else 1) * one_copy[name]
            assert sent == wanted, (name, rowwise, columnwise, sent)


def corners(rank: Rank) -> dict[str, Any]:
    found: dict[str, Any] = {}
    device = rank.device
    quantizer = te.MXFP8Quantizer(E4M3)
    with pytest.warns(UserWarning, match="48 rows of a rank end within a block; the values travel"):
        made, _ = collectives.gather_along_first_dim(shard(rank.number, 48, device), None, False, quantizer)
    wanted = quantizer(whole(rank.world, 48, device))
    found["uneven"] = torch.equal(made.dequantize(), wanted.dequantize())
    four = te.NVFP4Quantizer()
    with pytest.warns(UserWarning, match="amax of its own"):
        made, _ = collectives.gather_along_first_dim(shard(rank.number, device=device), None, False, four)
    found["nvfp4"] = torch.equal(made.dequantize(), four(whole(rank.world, device=device)).dequantize())
    # Quantized before, each by its own maximum: no value of a result may be taken for right.
    own = te.Float8CurrentScalingQuantizer(E4M3, device)(shard(rank.number, device=device))
    made, _ = collectives.gather_along_first_dim(own, None)
    found["other scales"] = bool(made.dequantize().isnan().all())
    local = four(shard(0, device=device))  # the same on all ranks, and so is its amax
    made, _ = collectives.gather_along_first_dim(local, None)
    again = torch.cat([local.dequantize()] * rank.world)
    found["nvfp4 bytes"] = torch.equal(made.dequantize(), again)
    into = quantizer.make_empty((rank.world * ROWS, WIDTH), dtype=torch.float32, device=device)
    made, handle = collectives.gather_along_first_dim(
        shard(rank.number, device=device), None, True, quantizer, output_tensor=into
    )
    wanted = quantizer(whole(rank.world, device=device))
    found["into"] = made is into and handle is None and torch.equal(into.dequantize(), wanted.dequantize())
    with pytest.raises(ArgumentError, match="end within a block"):
        collectives.gather_along_first_dim(quantizer(shard(rank.number, 48, device)), None)
    with pytest.raises(UnsupportedError, match="external_coalescing"):
        collectives.gather_along_first_dim(shard(0, device=device), None, False, quantizer, None, True)
    return found


def test_corners_of_quantized_gathers(ranks: Ranks) -> None:
    for found in ranks.run(corners):
        assert all(found.values()), found


# ---------------------------------------------------------------------------- checkpoint: saved activations in parts


def recomputed(rank: Rank, recipe: str, distribute: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = te.LayerNormMLP(WIDTH, WIDTH, device=rank.device, params_dtype=torch.float32)
    layers = torch.nn.Sequential(layer, te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.float32))
    x = values(32, WIDTH, device=rank.device, seed=5).requires_grad_()
    kept: list[int] = []
    torch.manual_seed(1)
    with counted() as sent, region(recipe):
        inner = x * 2  # no leaf: a checkpoint's first argument as in a model
        y = te.checkpoint(
            _two, layers, inner, distribute_saved_activations=distribute, tp_group=None, use_reentrant=True
        )
        kept += sent
        (y * values(*y.shape, device=rank.device)).sum().backward()
    return {
        "y": y.detach().cpu(),
        "dx": x.grad.cpu(),  # type: ignore[union-attr]
        "grads": [p.grad.cpu() for p in layers.parameters()],
        "sent": sent,
        "before backward": kept,
    }


def _two(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(layers(x), 0.25)


@pytest.mark.parametrize("recipe", [pytest.param("plain", marks=pytest.mark.full), "delayed", "current"])
def test_a_checkpoint_keeps_a_part(ranks: Ranks, recipe: str) -> None:
    """Each rank sends its part once, in backward; outputs and gradients are those of a checkpoint that keeps all."""
    parts, wholes = ranks.run(recomputed, recipe, True), ranks.run(recomputed, recipe, False)
    for part, one in zip(parts, wholes, strict=True):
        assert torch.equal(part["y"], one["y"]) and torch.equal(part["dx"], one["dx"])
        assert all(torch.equal(a, b) for a, b in zip(part["grads"], one["grads"], strict=True))
        assert part["sent"] == [32 * WIDTH * 4 // ranks.world] and part["before backward"] == [] == one["sent"]


def recomputed_in_pairs(rank: Rank, distribute: bool) -> dict[str, Any]:
    """Of two groups of two ranks, each of which has an input of its own."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = rank.number // 2
    layer = te.Linear(WIDTH, WIDTH, device=rank.device, params_dtype=torch.float32, init_method=torch.nn.init.eye_)
    x = values(32, WIDTH, device=rank.device, seed=number).requires_grad_()
    torch.manual_seed(1)
    with counted() as sent:
        y = te.checkpoint(
            _two, layer, x * 2, distribute_saved_activations=distribute, tp_group=pairs[number], use_reentrant=True
        )
        (y * y).sum().backward()
    return {"dx": x.grad.cpu(), "dw": layer.weight.grad.cpu(), "sent": sent}  # type: ignore[union-attr]


@pytest.mark.more
def test_a_checkpoint_keeps_a_part_in_its_group(ranks_of: Callable[[int, str], Ranks]) -> None:
    """What tensor-parallel ranks hold alike is cut among them, not over the data-parallel copies."""
    four = ranks_of(4, "cpu")
    parts, wholes = four.run(recomputed_in_pairs, True), four.run(recomputed_in_pairs, False)
    for part, one in zip(parts, wholes, strict=True):
        assert torch.equal(part["dx"], one["dx"]) and torch.equal(part["dw"], one["dw"])
        assert part["sent"] == [32 * WIDTH * 4 // 2] and one["sent"] == []
    assert not torch.equal(parts[0]["dx"], parts[2]["dx"])


def refused(rank: Rank) -> None:
    layer = te.Linear(WIDTH, WIDTH, device=rank.device)
    odd = torch.ones(1, 3, device=rank.device)
    with pytest.raises(ArgumentError, match="a multiple of"):
        te.checkpoint(torch.sin, odd, distribute_saved_activations=True)
    with pytest.raises(ArgumentError, match="no tensor"):
        te.checkpoint(lambda x: layer(x), x=odd, distribute_saved_activations=True)


def test_what_cannot_be_in_parts(gloo_ranks: Ranks) -> None:
    gloo_ranks.run(refused)
