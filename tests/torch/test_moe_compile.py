"""Tokens to their experts and back in compiled programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from te_core.recipe import DelayedScaling
from te_torch.training import moe_operators
from tests.backends import devices
from tests.module_steps import fp8_state
from tests.moe_cases import E, H, K, T, by_index, normal, probabilities, routing, through_experts

DEVICES = devices()


def sums_and_chunks(x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, rows: int) -> torch.Tensor:
    out, row_map = te.moe_permute(x, mask, rows)
    sizes = mask.sum(0)
    out, moved = te.moe_sort_chunks_by_index_with_probs(out, out[:, 0], sizes, sizes.argsort(stable=True))
    return te.moe_unpermute(torch.sin(out) * moved[:, None], row_map) * probs.sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("function", "backend"),
    [
        (through_experts, "aot_eager"),
        (by_index, "aot_eager"),
        pytest.param(sums_and_chunks, "aot_eager", marks=pytest.mark.full),
        pytest.param(through_experts, "inductor", marks=pytest.mark.more),
        *(pytest.param(function, "inductor", marks=pytest.mark.full) for function in (by_index, sums_and_chunks)),
    ],
)
def test_compiled(function: Callable[..., torch.Tensor], backend: str, device: str) -> None:
    """One graph, forward and backward, equal to eager; other sizes too."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for tokens in (T, 50):  # the second makes a symbol of the number
        mask = routing(device, tokens)
        rows = int(mask.sum())
        results = []
        for run in (function, compiled):
            x = normal(tokens, H, device=device, dtype=torch.float32).requires_grad_()
            probs = probabilities(mask).requires_grad_()
            run(x, probs, mask, rows).backward(normal(tokens, H, device=device, seed=9))
            results.append((x.grad, probs.grad))
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [np.int64, np.array, torch.tensor])
def test_num_out_tokens_of_other_libraries(kind: Callable[[int], Any], device: str) -> None:
    """A program for all numbers that a tensor or an array may hold."""
    mask, x = routing(device), normal(T, H, device=device)
    experts = mask.nonzero()[: T * K, 1].int().view(T, K)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return te.moe_permute(x, mask, rows)[0], te.moe_permute(x, experts, rows, map_type="index")[0]

    for rows in (20, 12):
        want = te.moe_permute(x, mask, rows)[0], te.moe_permute(x, experts, rows, map_type="index")[0]
        assert all(map(torch.equal, compiled(kind(rows)), want))
    assert counter.frame_count == 1


RECIPE = DelayedScaling(amax_history_len=3)


def all_rows(x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, experts: Any) -> torch.Tensor:
    out, row_map = te.moe_permute(x, mask)
    return te.moe_unpermute(torch.tanh(out), row_map, probs)


def all_rows_through_experts(x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, experts: Any) -> torch.Tensor:
    """Two moves in a row, a GEMM for each group, and the way back: nothing on it asks how many rows there are."""
    out, row_probs, row_map = te.moe_permute_with_probs(x, probs, mask)
    counts, turn = mask.sum(0), torch.arange(E - 1, -1, -1, device=x.device)
    out = te.moe_sort_chunks_by_index(out, counts, turn)
    with te.autocast(recipe=RECIPE):
        out = experts(out, counts.flip(0))
    out = te.moe_sort_chunks_by_index(out, counts.flip(0), turn)
    return te.moe_unpermute(out * row_probs[:, None], row_map, restore_shape=x.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("function", [all_rows, all_rows_through_experts])
def test_rows_that_a_program_counts(function: Callable[..., torch.Tensor], backend: str, device: str) -> None:
    """`num_out_tokens=-1`: one program for all numbers of rows, none too."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    experts = te.GroupedLinear(E, H, H, device=device)
    others = copy.deepcopy(experts)
    for step in range(4):
        drawn = torch.rand(T, E, generator=torch.Generator().manual_seed(step))
        mask = (drawn < 0.3 * step).int().to(device)
        results = []
        for run, layer in ((function, experts), (compiled, others)):
            x = ((step + 1) * normal(T, H, device=device)).requires_grad_()
            probs = probabilities(mask).requires_grad_()
            layer.zero_grad()
            y = run(x, probs, mask, layer)
            y.backward(normal(T, H, device=device, seed=9))
            results.append((y, x.grad, probs.grad, layer.weight0.grad, *fp8_state(layer).values()))
        for eager, other in zip(*results, strict=True):
            torch.testing.assert_close(other, eager)
    assert counter.frame_count == 1 and not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("device", DEVICES)
def test_operators(device: str) -> None:
    """Schemas, shapes and derivatives of each, as torch checks operators."""
    mask = routing(device)
    x, probs = normal(T, H, device=device).requires_grad_(), probabilities(mask).requires_grad_()
    rows = int(mask.sum())
    call = torch.ops.te_runtime
    row_map, starts = moe_operators.mask_map(mask)
    pad = torch.zeros(E, dtype=torch.int64, device=device)
    moved = normal(rows, H, device=device).requires_grad_()
    ids, tests = mask[:, :K].contiguous(), ("test_schema", "test_faketensor", "test_autograd_registration")
    for operator, args in (
        (call.moe_mask_map, (mask,)),
        (call.moe_index_map, (ids, 50)),
        (call.moe_chunk_map, (torch.tensor([3, 4], device=device), torch.tensor([1, 0], device=device), 9)),
        (call.moe_permute, (x, row_map, probs, pad, starts, rows + 3, True)),
        (call.moe_permute, (x, row_map, None, None, None, rows, False)),
        (call.moe_unpermute, (moved, row_map, probs, None, T)),
        (call.moe_unpermute, (moved, row_map, None, pad, T)),
        (call.moe_permute_backward, (moved.detach(), row_map, probs.detach(), moved.detach()[:, 0].clone(), None, T)),
        (call.moe_unpermute_backward, (x.detach(), moved.detach(), row_map, probs.detach(), None)),
    ):
        torch.library.opcheck(operator.default, args, test_utils=tests)
