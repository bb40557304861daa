"""Parts of sequences and wholes over several ranks: values and gradients, dense and packed, in one group and in two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_torch as te
from tests.parallel.ranks import Rank
from tests.parallel.steps import by_ranks
from tests.reference.context import of_rank, places_of_rank


def drawn(*shape: int, seed: int, device: Any) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@by_ranks()
def test_there_and_back(rank: Rank) -> None:
    """This rank's part is right, and all parts make the whole again; of numbers, bytes, truth values and FP8, too."""
    group, world = dist.group.WORLD, rank.world
    sums = torch.tensor([0, 2 * world, 2 * world, 8 * world], device=rank.device)
    for dim, padded in ((0, None), (1, None), (-2, None), (0, sums), (1, sums)):
        shape = [3, 5]
        shape.insert(dim % 3, 8 * world)
        whole = drawn(*shape, seed=dim, device=rank.device)
        index = of_rank(8 * world, world, rank.number)
        if padded is not None:
            index = places_of_rank(padded.tolist(), world, rank.number)
        for x in (whole, whole.bfloat16(), (whole * 50).to(torch.int64), whole > 0, whole.to(torch.float8_e4m3fn)):
            part = te.context_part(x.view(torch.uint8) if x.element_size() == 1 else x, group, dim, padded).view(
                x.dtype
            )
            want = x.view(torch.uint8) if x.element_size() == 1 else x
            assert torch.equal(part.view(want.dtype), want.index_select(dim, torch.tensor(index, device=rank.device)))
            again = te.context_whole(part.view(want.dtype), group, dim, padded)
            assert again.dtype is want.dtype and torch.equal(again, want)


@pytest.mark.parametrize("packed", [False, True])
@by_ranks()
def test_gradients(rank: Rank, packed: bool) -> None:
    """A part gives its own gradient, zeros elsewhere; a whole gives the sum over all ranks' losses."""
    group, world = dist.group.WORLD, rank.world
    ends = [0, 2 * world, 6 * world]
    sums = torch.tensor(ends, device=rank.device) if packed else None
    x = drawn(6 * world, 2, seed=0, device=rank.device).requires_grad_()
    part = te.context_part(x, group, 0, sums)
    leaf = part.detach().requires_grad_()
    whole = te.context_whole(leaf, group, 0, sums)
    (whole * drawn(6 * world, 2, seed=10 + rank.number, device=rank.device)).sum().backward()
    (part * drawn(6, 2, seed=20 + rank.number, device=rank.device)).sum().backward()
    own = places_of_rank(ends, world, rank.number) if packed else of_rank(6 * world, world, rank.number)
    want = torch.zeros(6 * world, 2)
    want[own] = drawn(6, 2, seed=20 + rank.number, device="cpu")
    summed = torch.stack([drawn(6 * world, 2, seed=10 + r, device="cpu") for r in range(world)]).sum(0)
    assert x.grad is not None and torch.equal(x.grad.cpu(), want) and leaf.grad is not None
    torch.testing.assert_close(leaf.grad.cpu(), summed[own])


@pytest.mark.more
@by_ranks("gloo_four")
def test_in_two_groups(rank: Rank) -> None:
    """[a2a, p2p]: the rank is p2p rank * a2a size + a2a rank, as in attention."""
    inner = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank.number // 2]
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank.number % 2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("p2p", "a2a"))
    whole = drawn(16, 3, seed=1, device=rank.device).requires_grad_()
    for groups in ([inner, outer], [mesh["a2a"], mesh["p2p"]]):
        part = te.context_part(whole, groups, 0)
        assert torch.equal(part, whole[of_rank(16, 4, rank.number)])
        leaf = part.detach().requires_grad_()
        again = te.context_whole(leaf, groups, 0)
        assert torch.equal(again, whole)
        (again * torch.arange(16, device=rank.device)[:, None]).sum().backward()
        want = 4.0 * torch.tensor(of_rank(16, 4, rank.number), device=rank.device)[:, None].expand(4, 3)
        assert leaf.grad is not None and torch.equal(leaf.grad, want)
    ids = torch.arange(16)
    got, _, _ = te.get_batch_on_this_cp_rank(torch.tensor([0, 8, 16]), ids, None, None, cp_group=[inner, outer])
    assert got is not None and got.tolist() == places_of_rank([0, 8, 16], 4, rank.number)


@by_ranks("pair")
def test_refusals(rank: Rank) -> None:
    x, group = torch.zeros(6, 2), dist.group.WORLD
    alone = [dist.new_group([0]), dist.new_group([1])]
    for call, said in (
        (lambda: te.context_part(x, group, 0), "a length that 4"),
        (lambda: te.context_whole(torch.zeros(3), group, 0), "a length that 2"),
        (lambda: te.context_part(x, group, 2), "seq_dim=2"),
        (lambda: te.context_part(x, [group, None], 0), "a list of two"),
        (lambda: te.context_part(x, alone[1 - rank.number], 0), "not in"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    assert te.context_part(x, alone[rank.number], 0) is x
