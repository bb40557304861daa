"""Data of context parallelism in one process, one token at a time: padding, positions, this rank's tokens, orders."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import te_torch as te
from te_torch.parallel.context import data
from tests.backends import on_devices
from tests.reference.context import of_rank, places_of_rank, valid

SIZES = (1, 2, 3, 4)


def batch(size: int, seed: int) -> tuple[list[int], list[int]]:
    """Running sums of lengths, and of lengths padded to multiples of 2 * size; lengths of 0 and 1 among them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 30, int(rng.integers(1, 7)))
    lengths[rng.random(len(lengths)) < 0.3] = rng.integers(0, 2)
    padded = -(-lengths // (2 * size)) * 2 * size
    return [0, *np.cumsum(lengths).tolist()], [0, *np.cumsum(padded).tolist()]


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Be a rank of a group that is not there: as_rank(rank, size)."""

    def be(rank: int, size: int) -> None:
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)

    return be


# --------------------------------------------------------------------------------------------------- padding


@on_devices
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("leading", [False, True])
def test_padding(device: str, dtype: torch.dtype, leading: bool) -> None:
    for seed in range(10):
        cu, padded = batch(2, seed)
        ids = torch.arange(1, cu[-1] + 1, device=device)
        labels = (100 + ids).to(torch.int32)
        sums = torch.tensor(cu, dtype=dtype, device=device)
        given = [t[None] if leading else t for t in (ids, labels)]
        got = te.pad_thd_sequences_for_cp(*given, sums, 4, padding_token_id=-1, padding_label_id=-2)
        want: tuple[list[int], list[int]] = [], []
        for i in range(len(cu) - 1):
            gap = padded[i + 1] - padded[i] - (cu[i + 1] - cu[i])
            for out, values, fill in zip(want, (ids, labels), (-1, -2), strict=True):
                out += values[cu[i] : cu[i + 1]].tolist() + [fill] * gap
        assert [t.tolist() for t in got] == [*want, padded]
        assert [t.dtype for t in got] == [ids.dtype, labels.dtype, dtype] and got[0].device == ids.device
        positions = te.generate_positional_ids_for_cp(sums, 4)
        assert positions.tolist() == [p for a, b in zip(padded, padded[1:], strict=False) for p in range(b - a)]
        assert positions.dtype is torch.int64
        assert te.generate_positional_ids_for_cp(sums, 4, torch.int16).dtype is torch.int16


def test_padding_has_defaults() -> None:
    cu = torch.tensor([0, 1, 3])
    ids, labels, padded = te.pad_thd_sequences_for_cp(torch.tensor([7, 8, 9]), torch.tensor([4, 5, 6]), cu, 2)
    assert ids.tolist() == [7, 0, 8, 9] and labels.tolist() == [4, -100, 5, 6] and padded.tolist() == [0, 2, 4]


# ------------------------------------------------------------------------------------------ this rank's tokens


@on_devices
def test_indices_of_a_rank(device: str) -> None:
    """Tokens behind the last sequence are dealt out, so that all ranks together hold each token once."""
    for size in SIZES:
        for seed in range(8):
            padded = batch(size, seed)[1]
            tail = size * (seed % 3)
            sums, total = torch.tensor(padded, dtype=torch.int32, device=device), padded[-1] + tail
            found = [te.thd_get_partitioned_indices(sums, total, size, rank) for rank in range(size)]
            for rank, index in enumerate(found):
                want = places_of_rank(padded, size, rank)
                behind = [padded[-1] + rank * tail // size + i for i in range(tail // size)]
                assert index.tolist() == want + behind
                assert index.dtype is torch.int32 and index.device == sums.device
            assert sorted(torch.cat(found).tolist()) == list(range(total))


def test_indices_on_a_gpu_wait_for_nothing() -> None:
    """What a length that does not divide leaves over is left out, and no index lies outside."""
    sums = torch.tensor([0, 7, 9, 30], device="meta", dtype=torch.int64)
    assert te.thd_get_partitioned_indices(sums, 32, 2, 1).shape == (16,)  # a device without values


@pytest.mark.parametrize("size", SIZES)
def test_a_batch_of_a_rank(as_rank: Any, size: int) -> None:
    """The dimension of the tokens is found; nothing stays nothing; one rank has what was given."""
    padded = [0, 2 * size, 2 * size, 6 * size]
    total = padded[-1]
    ids, labels = torch.arange(total)[None], torch.arange(total)[:, None].expand(total, 3)
    positions = torch.arange(100, 100 + total)
    for rank in range(size):
        as_rank(rank, size)
        got = te.get_batch_on_this_cp_rank(torch.tensor(padded), ids, labels, positions)
        index = places_of_rank(padded, size, rank)
        assert got[0].tolist() == [index] and got[1].tolist() == [[i] * 3 for i in index]
        assert got[2].tolist() == [100 + i for i in index]
        assert te.get_batch_on_this_cp_rank(torch.tensor(padded), None, None, None) == (None, None, None)
        if size == 1:
            assert all(a is b for a, b in zip(got, (ids, labels, positions), strict=True))


def test_tokens_along_both_dimensions_are_along_the_second(as_rank: Any) -> None:
    as_rank(0, 2)
    square = torch.arange(16).reshape(4, 4)
    got, _, _ = te.get_batch_on_this_cp_rank(torch.tensor([0, 4]), square, None, None)
    assert torch.equal(got, square[:, [0, 3]])


@on_devices
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("halves", [(True, True), (True, False), (False, True), (False, False)])
def test_running_sums_of_a_rank(device: str, size: int, halves: tuple[bool, bool]) -> None:
    for seed in range(8):
        cu, padded = batch(size, seed)
        local = torch.tensor([n // size for n in padded], dtype=torch.int32, device=device)
        sums = torch.tensor(cu, dtype=torch.int32, device=device)
        for rank in range(size):
            got = te.get_cu_seqlens_on_cp_rank(sums, local, size, rank, *halves)
            chunks = [c for c, taken in zip((rank, 2 * size - 1 - rank), halves, strict=True) if taken]
            want = [0]
            for i in range(len(cu) - 1):
                n, whole = cu[i + 1] - cu[i], padded[i + 1] - padded[i]
                want.append(want[-1] + sum(valid(n, whole, size, (c, c + 1)) for c in chunks))
            assert got.tolist() == want and got.dtype is sums.dtype


# ------------------------------------------------------------------------------------------------------ orders


@on_devices
def test_orders(device: str) -> None:
    """By rank and back, along any dimension, with gradients."""
    for size in SIZES:
        padded = batch(size, size)[1]
        total, sums = padded[-1], torch.tensor(padded, device=device)
        order = [place for rank in range(size) for place in places_of_rank(padded, size, rank)]
        for dim in (0, 1, -1):
            shape = [2, 3]
            shape.insert(dim if dim >= 0 else 2, total)
            x = torch.randn(shape, device=device, requires_grad=True)
            by_rank = te.thd_sequence_order_to_cp_rank_order(x, sums, size, dim)
            assert torch.equal(by_rank, x.index_select(dim, torch.tensor(order, device=device)))
            back = te.thd_cp_rank_order_to_sequence_order(by_rank, sums, size, seq_dim=dim)
            assert torch.equal(back, x)
            weights = torch.randn_like(x)
            (back * weights).sum().backward()
            assert torch.equal(x.grad, weights)


def test_parts_in_one_process(as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks r and 2 * cp - 1 - r of a dimension; the gradient is the part's, zeros elsewhere."""
    monkeypatch.setattr(data, "group_of", lambda operation, given, name: given)
    for size in SIZES:
        x = torch.randn(2, 6 * size, 3, requires_grad=True)
        for rank in range(size):
            as_rank(rank, size)
            part = te.context_part(x, "group", -2)
            index = of_rank(6 * size, size, rank)
            assert torch.equal(part, x[:, index])
            x.grad = None
            part.sum().backward()
            want = torch.zeros_like(x)
            want[:, index] = 1
            assert torch.equal(x.grad, want)
            sums = torch.tensor([0, 2 * size, 6 * size])
            packed = te.context_part(x, "group", 1, sums)
            assert torch.equal(packed, x[:, places_of_rank(sums.tolist(), size, rank)])
    assert te.context_part(x, None, 1) is x and te.context_whole(x, None, 1) is x


# ---------------------------------------------------------------------------------------------------- refusals


def test_refusals(as_rank: Any) -> None:
    as_rank(1, 2)
    with pytest.raises(ValueError, match="position_ids_padded of shape"):
        te.get_batch_on_this_cp_rank(torch.tensor([0, 4, 8]), None, None, torch.zeros(1, 1, 8))


def test_under_the_documented_name() -> None:
    """All but the functions that attention itself stands for, in a process that has the alias."""
    program = """
import te_torch.compat
import te_torch as te
from transformer_engine.pytorch.attention.dot_product_attention import context_parallel
from te_torch.parallel.context.data import DOCUMENTED
assert all(getattr(context_parallel, name) is getattr(te, name) for name in DOCUMENTED)
try:
    context_parallel.attn_forward_func_with_cp
except AttributeError as error:
    assert "set_context_parallel_group" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True)
