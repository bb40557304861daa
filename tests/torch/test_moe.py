"""Tokens to their experts and back: values, gradients, the golden file; quantized, and in compiled programs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import te_torch as te
from te_core.errors import UnsupportedError
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_torch.tensors.dtype import DType
from te_torch.training import moe_operators
from tests.backends import devices, requires_cuda
from tests.covering import covering
from tests.golden import tree
from tests.moe_cases import E, H, K, T, by_index, normal, pairs, probabilities, routing, through_experts
from tests.world import fp8_state

DEVICES = devices()


# -------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("device", DEVICES)
def test_golden_mask(device: str) -> None:
    """Bit for bit, the map's used entries included."""
    golden = {k: v.to(device) for k, v in tree("functions", "moe/").items()}
    out, row_map = te.moe_permute(golden["x"], golden["routing_map"], num_out_tokens=24, map_type="mask")
    assert torch.equal(out, golden["permuted"])
    assert row_map.shape == golden["row_id_map"].shape and row_map.dtype == torch.int32
    counts, experts = golden["row_id_map"][:, -1], golden["routing_map"].shape[1]
    assert torch.equal(row_map[:, -1], counts)
    used = torch.arange(experts, device=device) < counts[:, None]
    for first in (0, experts):
        here, there = (m[:, first : first + experts][used] for m in (row_map, golden["row_id_map"]))
        assert torch.equal(here, there)
    for given in (row_map, golden["row_id_map"]):
        back = te.moe_unpermute(out, given, merging_probs=golden["probs"], restore_shape=golden["x"].shape)
        assert torch.equal(back, golden["unpermuted"])


@pytest.mark.parametrize("device", DEVICES)
def test_golden_index(device: str) -> None:
    golden = {k: v.to(device) for k, v in tree("functions", "moe_index/").items()}
    out, row_map = te.moe_permute(golden["x"], golden["indices"], num_out_tokens=24, map_type="index")
    assert torch.equal(out, golden["permuted"]) and torch.equal(row_map, golden["row_id_map"])
    back = te.moe_unpermute(out, row_map, merging_probs=golden["probs"], map_type="index")
    assert torch.equal(back, golden["unpermuted"])


@pytest.mark.parametrize("device", DEVICES)
def test_golden_chunks(device: str) -> None:
    golden = {k: v.to(device) for k, v in tree("functions", "chunks/").items()}
    assert torch.equal(te.moe_sort_chunks_by_index(golden["x"], golden["split"], golden["index"]), golden["out"])


# --------------------------------------------------------------------------- against index_select, in float64

PROBS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@covering(merging=[None, *PROBS], dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_mask_there_and_back(merging: torch.dtype | None, dtype: torch.dtype, device: str) -> None:
    """Values, and the gradients of tokens and of the merging probabilities."""
    mask = routing(device)
    token, expert = pairs(mask)
    x = normal(T, H, device=device, dtype=dtype).requires_grad_()
    probs = None if merging is None else probabilities(mask, merging).requires_grad_()
    out, row_map = te.moe_permute(x, mask, num_out_tokens=len(token))
    y = te.moe_unpermute(out * 2, row_map, merging_probs=probs, restore_shape=x.shape)
    dy = normal(T, H, device=device, dtype=dtype, seed=5)
    y.backward(dy)

    x64 = x.detach().double().requires_grad_()
    p64 = None if probs is None else probs.detach().double().requires_grad_()
    rows = x64.index_select(0, token) * 2
    rows = rows if p64 is None else rows * p64[token, expert][:, None]
    y64 = torch.zeros_like(x64).index_add_(0, token, rows)
    y64.backward(dy.double())
    assert torch.equal(out, x.detach()[token]) and y.dtype == x.grad.dtype == dtype
    step = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(y.double(), y64, rtol=step, atol=step)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=step, atol=2 * step)
    if probs is not None:
        near = max(step * 1e-3, {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(merging, 5e-6))
        assert probs.grad.dtype == merging
        torch.testing.assert_close(probs.grad.double(), p64.grad, rtol=near, atol=20 * near)
        assert not probs.grad[mask == 0].any()


@pytest.mark.parametrize("device", DEVICES)
@covering(kind=PROBS, align=[None, 1, 16])
def test_permute_with_probs(kind: torch.dtype, align: int | None, device: str) -> None:
    """Zero rows where the probability is 0, padding, and gradients through both results."""
    mask = routing(device)
    token, expert = pairs(mask)
    counts = mask.sum(0)
    x = normal(T, H, device=device).requires_grad_()
    probs = probabilities(mask, kind).requires_grad_()
    if align is None:
        out, row_probs, row_map = te.moe_permute_with_probs(x, probs, mask, num_out_tokens=len(token))
        offsets, place = None, torch.arange(len(token), device=device)
    else:
        out, row_probs, row_map, offsets, targets = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, align)
        assert targets.dtype == torch.int64 and torch.equal(targets, -(-counts // align) * align)
        assert (offsets is None) == (align == 1)
        before = (targets - counts).cumsum(0) - (targets - counts)
        assert offsets is None or torch.equal(offsets, before)
        place = torch.arange(len(token), device=device) + before[expert]
        assert len(out) == targets.sum()
    chosen = probs.detach()[token, expert]
    want, want_probs = torch.zeros_like(out), torch.zeros_like(row_probs)
    want[place] = x.detach()[token] * (chosen != 0)[:, None]
    want_probs[place] = chosen
    assert torch.equal(out, want) and torch.equal(row_probs, want_probs) and row_probs.dtype == kind

    d_rows, d_probs = normal(*out.shape, device=device, seed=3), normal(len(out), device=device, dtype=kind)
    torch.autograd.backward([out, row_probs], [d_rows, d_probs])
    want_x = torch.zeros(T, H, dtype=torch.float64, device=device)
    want_x.index_add_(0, token, d_rows[place].double() * (chosen != 0)[:, None])
    torch.testing.assert_close(x.grad.double(), want_x, rtol=2e-6, atol=2e-6)
    want_p = torch.zeros_like(probs)
    want_p[token, expert] = d_probs[place].to(torch.float32 if kind == torch.float64 else kind).to(kind)
    assert torch.equal(probs.grad, want_p)

    back = te.moe_unpermute(out, row_map, restore_shape=x.shape, pad_offsets=offsets)
    want_x.zero_().index_add_(0, token, want[place].double())
    torch.testing.assert_close(back.double(), want_x, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_each_result_alone_has_its_gradient(device: str) -> None:
    mask = routing(device)
    token, expert = pairs(mask)
    for only in (0, 1):
        x, probs = normal(T, H, device=device).requires_grad_(), probabilities(mask).requires_grad_()
        out = te.moe_permute_with_probs(x, probs, mask, len(token))
        out[only].sum().backward()
        if only == 0:
            assert not probs.grad.any() if probs.grad is not None else True
            want = ((probs != 0) & (mask != 0)).sum(1, keepdim=True).expand(T, H).float()
            assert torch.equal(x.grad, want)
        else:
            assert x.grad is None or not x.grad.any()
            assert torch.equal(probs.grad, mask.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens_need", [True, False])
@pytest.mark.parametrize("probs_need", [True, False])
def test_what_needs_no_gradient_gets_none(tokens_need: bool, probs_need: bool, device: str) -> None:
    mask = routing(device)
    x = normal(T, H, device=device).requires_grad_(tokens_need)
    probs = probabilities(mask).requires_grad_(probs_need)
    out, row_probs, row_map = te.moe_permute_with_probs(x, probs, mask)
    y = te.moe_unpermute(out * row_probs[:, None], row_map, merging_probs=probs)
    if tokens_need or probs_need:
        y.sum().backward()
    assert y.requires_grad == (tokens_need or probs_need)
    assert (x.grad is not None) == tokens_need and (probs.grad is not None) == probs_need


@pytest.mark.parametrize("device", DEVICES)
@covering(dtype=[torch.float32, torch.bfloat16], rows=[None, -1, 0, 50, T * K, T * K + 3])
def test_index_there_and_back(dtype: torch.dtype, rows: int | None, device: str) -> None:
    """Dropped copies count for nothing, rows that are left are zeros; also without weights."""
    experts = torch.randint(E, (T, K), generator=torch.Generator().manual_seed(1)).int().to(device)
    kept = T * K if rows in (None, -1, 0) else rows
    x = normal(T, H, device=device, dtype=dtype).requires_grad_()
    probs = normal(T, K, device=device).abs().requires_grad_()
    out, row_map = te.moe_permute(x, experts, rows, map_type="index")
    order = experts.reshape(-1).sort(stable=True).indices[:kept]
    want = torch.zeros(kept, H, dtype=dtype, device=device)
    want[: len(order)] = x.detach()[order // K]
    assert torch.equal(out, want)
    places = torch.full((T * K,), -1, dtype=torch.int32, device=device)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=device)
    assert torch.equal(row_map, places.view(T, K).t().reshape(-1))

    y = te.moe_unpermute(out, row_map, probs, map_type="index")
    dy = normal(T, H, device=device, dtype=dtype, seed=5)
    y.backward(dy)
    x64, p64 = x.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    weights = p64 if dtype == torch.float32 else p64 + (p64.detach().to(dtype) - p64.detach())
    terms = x64.index_select(0, order // K) * weights[order // K, order % K][:, None]
    y64 = torch.zeros_like(x64).index_add_(0, order // K, terms)
    y64.backward(dy.double())
    near = 5e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), y64, rtol=near, atol=near)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=near, atol=near)
    torch.testing.assert_close(probs.grad.double(), p64.grad, rtol=2e-5, atol=2e-4)

    leaf = out.detach().requires_grad_()
    copies = te.moe_unpermute(leaf, row_map, map_type="index")
    want = torch.zeros(T * K, H, dtype=dtype, device=device)
    want[row_map >= 0] = leaf.detach()[row_map[row_map >= 0].long()]
    assert torch.equal(copies, want)
    copies.backward(torch.ones_like(copies))
    assert torch.equal(leaf.grad[:, 0], (torch.arange(kept, device=device) < len(order)).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@covering(kind=[None, *PROBS], kinds=[(torch.int32, torch.int32), (torch.int64, torch.int16)])
def test_chunks(kind: torch.dtype | None, kinds: tuple[torch.dtype, torch.dtype], device: str) -> None:
    sizes, order = [4, 0, 9, 3], [2, 0, 3, 1]
    x = normal(20, H, device=device, dtype=torch.bfloat16).requires_grad_()
    given = (torch.tensor(v, dtype=k, device=device) for v, k in zip((sizes, order), kinds, strict=True))
    begins = [0, 4, 4, 13]
    source = [begins[c] + i for c in order for i in range(sizes[c])] + [16, 17, 18, 19]
    if kind is None:
        out = te.moe_sort_chunks_by_index(x, *given)
    else:
        probs = normal(20, device=device, dtype=kind).requires_grad_()
        out, moved = te.moe_sort_chunks_by_index_with_probs(x, probs, *given)
        assert torch.equal(moved, probs.detach()[source].float().to(kind)) and moved.shape == (20,)
        moved.backward(moved.detach())
        assert torch.equal(probs.grad, probs.detach().float().to(kind))
    assert torch.equal(out, x.detach()[source])
    out.backward(out.detach() * 2)
    assert torch.equal(x.grad, x.detach() * 2)


@pytest.mark.parametrize("device", DEVICES)
def test_num_out_tokens_of_a_mask(device: str) -> None:
    """The documented default drops nothing; more rows are zeros; fewer drop the last ones."""
    mask = routing(device)
    token, _ = pairs(mask)
    x = normal(T, H, device=device).requires_grad_()
    want = x.detach()[token]
    for given in ((), (-1,), (None,)):
        assert torch.equal(te.moe_permute(x, mask, *given)[0], want)
    assert torch.equal(te.moe_permute_with_probs(x, mask.float(), mask)[0], want)
    out, row_map = te.moe_permute(x, mask, len(token) + 9)
    assert torch.equal(out[: len(token)], want) and not out[len(token) :].any()
    rows = out.detach().requires_grad_()
    te.moe_unpermute(rows, row_map).sum().backward()
    assert torch.equal(rows.grad[:, 0], (torch.arange(len(out), device=device) < len(token)).float())
    out, row_map = te.moe_permute(x, mask, 20)
    assert torch.equal(out, want[:20])
    back = te.moe_unpermute(out, row_map)
    assert torch.equal(back, torch.zeros_like(x).index_add_(0, token[:20], want[:20]))


@pytest.mark.parametrize("device", DEVICES)
def test_num_out_tokens_of_other_libraries(device: str) -> None:
    """What counts as an integer in Python stands for one."""
    mask, x = routing(device), normal(T, H, device=device)
    probs, experts = mask.float(), mask.nonzero()[: T * K, 1].int().view(T, K)
    want = [te.moe_permute(x, mask, 20)[0], te.moe_permute(x, experts, 20, map_type="index")[0]]
    for given in (np.int64(20), np.array(20), torch.tensor(20), torch.tensor([20], device=device)):
        found = [te.moe_permute(x, mask, given)[0], te.moe_permute(x, experts, given, map_type="index")[0]]
        assert all(map(torch.equal, found, want))
        assert torch.equal(te.moe_permute_with_probs(x, probs, mask, given)[0], want[0])


@pytest.mark.parametrize("device", DEVICES)
def test_no_token_has_an_expert(device: str) -> None:
    x = normal(T, H, device=device).requires_grad_()
    out, row_map = te.moe_permute(x, torch.zeros(T, E, dtype=torch.int32, device=device))
    assert out.shape == (0, H)
    back = te.moe_unpermute(out, row_map, restore_shape=x.shape)
    assert back.shape == (T, H) and not back.any()
    back.sum().backward()
    assert not x.grad.any()


@pytest.mark.parametrize("device", DEVICES)
def test_empty_input(device: str) -> None:
    """A clone and an empty map."""
    x, mask = torch.empty(0, H, device=device), torch.empty(0, E, dtype=torch.int32, device=device)
    probs = torch.empty(0, E, device=device)
    for kind in ("mask", "index"):
        out, row_map = te.moe_permute(x, mask, 8, map_type=kind)
        assert out.shape == (0, H) and out is not x and row_map.numel() == 0
        assert te.moe_unpermute(out, row_map, restore_shape=x.shape, map_type=kind).shape == (0, H)
    out, row_probs, row_map = te.moe_permute_with_probs(x, probs, mask, 8)
    assert out.shape == (0, H) and row_probs.numel() == row_map.numel() == 0
    results = te.moe_permute_and_pad_with_probs(x, probs, mask, torch.zeros(E, dtype=torch.int32, device=device), 16)
    assert [None if t is None else tuple(t.shape) for t in results] == [(0, H), (0,), (0,), None, (E,)]
    none = torch.zeros(2, dtype=torch.int32, device=device)
    assert te.moe_sort_chunks_by_index(x, none, none).shape == (0, H)
    assert te.moe_sort_chunks_by_index_with_probs(x, probs[:, 0], none, none)[1].shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(0, H), (T, 0)], ids=["no tokens", "no features"])
def test_gradients_of_empty_input(size: tuple[int, int], device: str) -> None:
    """All that is given has a gradient: zeros, of its own shape."""
    mask = routing(device)[: size[0]]
    counts = mask.sum(dim=0)

    def given() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(size, device=device, requires_grad=True)
        return x, torch.ones(mask.shape, device=device, dtype=torch.bfloat16).requires_grad_()

    def back(*results: torch.Tensor) -> None:
        sum(t.float().sum() for t in results).backward()  # type: ignore[union-attr]

    x, probs = given()
    out, row_probs, row_map = te.moe_permute_with_probs(x, probs, mask, 8)
    back(out, row_probs)
    padded, padded_probs = given()
    back(*te.moe_permute_and_pad_with_probs(padded, padded_probs, mask, counts, 16)[:2])
    merged, weights = given()
    back(te.moe_unpermute(merged, row_map, weights, restore_shape=size))
    for t in (x, probs, padded, padded_probs, merged, weights):
        assert t.grad.shape == t.shape and not t.grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int16, torch.int64], ids=str)
def test_masks_of_other_types(kind: torch.dtype, device: str) -> None:
    mask = routing(device)
    x = normal(T, H, device=device)
    assert torch.equal(te.moe_permute(x, mask.to(kind))[0], te.moe_permute(x, mask)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_strided_tokens(device: str) -> None:
    """Columns of a wider tensor, and a mask that lies transposed."""
    mask = routing(device)
    wide = normal(T, 3 * H, device=device)
    x = wide[:, H : 2 * H].requires_grad_()
    out, row_map = te.moe_permute(x, mask.t().contiguous().t())
    assert torch.equal(out, x.detach()[pairs(mask)[0]])
    grad = normal(2 * H, T, device=device).t()[:, ::2]
    te.moe_unpermute(out, row_map).backward(grad)
    torch.testing.assert_close(x.grad, grad * mask.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------ as users use it


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", [None, "current"])
def test_a_layer_of_experts(recipe: str | None, device: str) -> None:
    """Routed, permuted, through GroupedLinear, back: each token is the weighted sum of its experts' results."""
    torch.manual_seed(0)
    tokens, experts, hidden = 64, 4, 32
    layer = te.GroupedLinear(experts, hidden, hidden, bias=False, device=device)
    x = torch.randn(tokens, hidden, device=device, requires_grad=True)
    scores = torch.randn(tokens, experts, device=device).softmax(-1)
    top = scores.topk(2, dim=-1)
    mask = torch.zeros(tokens, experts, dtype=torch.int32, device=device).scatter_(1, top.indices, 1)
    probs = (scores * mask).requires_grad_()
    rows, row_map = te.moe_permute(x, mask, num_out_tokens=2 * tokens)
    with te.autocast(enabled=recipe is not None, recipe=None if recipe is None else Float8CurrentScaling()):
        rows = layer(rows, mask.sum(0).tolist())
    y = te.moe_unpermute(rows, row_map, merging_probs=probs, restore_shape=x.shape)
    y.sum().backward()
    weights = torch.stack([getattr(layer, f"weight{e}") for e in range(experts)]).detach()
    want = torch.einsum("te,eoi,ti->to", probs.detach(), weights, x.detach())
    error = (y - want).norm() / want.norm()
    assert error < (1e-3 if recipe is None else 0.08) and x.grad is not None and probs.grad is not None


def test_meta_tensors() -> None:
    """Shapes without memory."""
    x, mask = torch.empty(T, H, device="meta"), torch.empty(T, E, dtype=torch.int32, device="meta")
    out, row_map = te.moe_permute(x, mask, 50)
    assert out.shape == (50, H) and row_map.shape == (T, 2 * E + 1) and out.is_meta
    assert te.moe_unpermute(out, row_map).shape == (T, H)


@requires_cuda
def test_captured() -> None:
    """Maps are made on the device: a replay follows a mask that has changed."""
    mask, x = routing("cuda"), normal(T, H, device="cuda").requires_grad_()
    probs = probabilities(mask).requires_grad_()
    dy = normal(T, H, device="cuda", seed=3)

    def step() -> tuple[torch.Tensor, ...]:
        y = through_experts(x, probs, mask, 200)
        return (y, *torch.autograd.grad(y, (x, probs), dy))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for shift in (1, 2):
            mask.copy_(routing("cuda").roll(shift, 0))
            probs.copy_(probabilities(mask))
            graph.replay()
            torch.cuda.synchronize()
            with torch.enable_grad():
                wanted = step()
            for got, want in zip(captured, wanted, strict=True):
                assert torch.equal(got, want)
    with pytest.raises(UnsupportedError, match="num_out_tokens"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        te.moe_permute(x, mask)


@requires_cuda
def test_nothing_waits() -> None:
    """No call of a step needs the host, but for the documented ones."""
    mask, x = routing("cuda"), normal(T, H, device="cuda").requires_grad_()
    probs = probabilities(mask).requires_grad_()
    sizes, order = torch.tensor([30, 7], device="cuda"), torch.tensor([1, 0], device="cuda")
    for _ in range(2):
        torch.cuda.set_sync_debug_mode("error" if _ else "default")
        try:
            through_experts(x, probs, mask, 200).sum().backward()
            by_index(x, probs, mask, 50).sum().backward()
            te.moe_sort_chunks_by_index(x, sizes, order).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@requires_cuda
def test_tensors_of_another_device() -> None:
    x, mask = normal(T, H, device="cuda"), routing("cuda")
    probs, (out, row_map) = probabilities(mask), te.moe_permute(x, mask)
    for call in (
        lambda: te.moe_permute(x, mask.cpu(), 50),
        lambda: te.moe_permute_with_probs(x, probs.cpu(), mask, 50),
        lambda: te.moe_unpermute(out, row_map.cpu()),
        lambda: te.moe_unpermute(out, row_map, probs.cpu()),
        lambda: te.moe_sort_chunks_by_index(x, torch.tensor([3]), torch.tensor([0])),
    ):
        with pytest.raises(ValueError, match="device"):
            call()


@pytest.mark.parametrize("device", DEVICES)
def test_warnings(device: str) -> None:
    x, mask = normal(T, H, device=device), routing(device)
    out, row_map = te.moe_permute(x, mask)
    probs = probabilities(mask)
    with pytest.warns(DeprecationWarning, match="merging_probs"):
        older = te.moe_unpermute(out, row_map, probs=probs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(older, te.moe_unpermute(out, row_map, probs))
    ids = mask[:, :K].contiguous()
    with pytest.warns(UserWarning, match="int32"):
        out, index = te.moe_permute(x, ids.long(), map_type="index")
    with pytest.warns(UserWarning, match="float32"):
        te.moe_unpermute(out, index, probs[:, :K].to(torch.bfloat16).contiguous(), map_type="index")


# ---------------------------------------------------------------------------------------------------------- quantized


def quantizers(device: str) -> dict[str, Any]:
    kind = DType.kFloat8E4M3
    scale = torch.full((1,), 4.0, device=device)
    return {
        "delayed": te.Float8Quantizer(scale, torch.zeros(1, device=device), kind, rowwise=True, columnwise=True),
        "current": te.Float8CurrentScalingQuantizer(kind, device),
        "block": te.Float8BlockQuantizer(kind, rowwise=True, columnwise=False, block_scaling_dim=1),
        "mxfp8": te.MXFP8Quantizer(kind, rowwise=True, columnwise=True),
    }


@pytest.mark.parametrize("device", DEVICES)
@covering(turns=2, name=["delayed", "current", "block", "mxfp8"], size=[(128, 256), (37, 40), (300, 130)])
def test_quantized_tokens(name: str, size: tuple[int, int], device: str) -> None:
    """The same class back, each row with its scales: permuting before dequantizing is permuting after it."""
    tokens, hidden = size
    mask = routing(device, tokens)
    token, _ = pairs(mask)
    x = (
        normal(tokens, hidden, device=device, dtype=torch.bfloat16)
        * torch.logspace(-3, 3, tokens, device=device)[:, None]
    )
    q = quantizers(device)[name](x.to(torch.bfloat16))
    values = q.dequantize()
    out, row_map = te.moe_permute(q, mask, len(token) + 5)
    assert type(out) is type(q) and out.shape == (len(token) + 5, hidden) and out.dtype == q.dtype
    found = out.dequantize()
    assert torch.equal(found[: len(token)], values[token]) and not found[len(token) :].any()
    assert out.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(te.moe_unpermute(found, row_map), te.moe_unpermute(*te.moe_permute(values, mask, len(token))))

    probs = probabilities(mask)
    out, row_probs, _, offsets, targets = te.moe_permute_and_pad_with_probs(q, probs, mask, mask.sum(0), 32)
    plain = te.moe_permute_and_pad_with_probs(values, probs, mask, mask.sum(0), 32)
    assert torch.equal(out.dequantize(), plain[0]) and torch.equal(row_probs, plain[1])
    experts = mask.argmax(1, keepdim=True).int()
    out, _ = te.moe_permute(q, experts, map_type="index")
    assert torch.equal(out.dequantize(), te.moe_permute(values, experts, map_type="index")[0])
    chunks = torch.tensor([tokens // 2, 3], device=device), torch.tensor([1, 0], device=device)
    out = te.moe_sort_chunks_by_index(q, *chunks)
    assert type(out) is type(q) and torch.equal(out.dequantize(), te.moe_sort_chunks_by_index(values, *chunks))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["delayed", "block", "mxfp8"])
def test_quantized_gradient_of_unpermute(name: str, device: str) -> None:
    """Moved as it is; the gradient of the rows has its class."""
    mask = routing(device, 128)
    x = normal(128, 256, device=device, dtype=torch.bfloat16)
    rows, row_map = te.moe_permute(x, mask)
    seen: list[Any] = []

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            seen.append(dy)
            return dy.dequantize()

    class Quantized(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            return t.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            return quantizers(device)[name](dy)

    leaf = rows.detach().requires_grad_()
    Quantized.apply(te.moe_unpermute(Gradient.apply(leaf), row_map)).backward(x)
    q = quantizers(device)[name](x)
    assert type(seen[0]) is type(q)
    assert torch.equal(leaf.grad, q.dequantize()[pairs(mask)[0]])


@pytest.mark.parametrize("device", DEVICES)
def test_quantized_tokens_give_gradients(device: str) -> None:
    mask = routing(device)
    q = quantizers(device)["block"](normal(T, H, device=device, dtype=torch.bfloat16)).requires_grad_()
    out, _ = te.moe_permute(q, mask)
    out.dequantize().sum().backward()
    assert torch.equal(q.grad[:, 0].float(), mask.sum(1).float())


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_under_a_compiler_is_refused(device: str) -> None:
    torch._dynamo.reset()
    mask = routing(device)
    q = quantizers(device)["block"](normal(T, H, device=device, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError):
        torch.compile(lambda t, m: te.moe_permute(t, m, 300)[0], fullgraph=True, backend="eager")(q, mask)


# ----------------------------------------------------------------------------------------------- in compiled programs


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
def test_num_out_tokens_of_other_libraries_in_a_program(kind: Callable[[int], Any], device: str) -> None:
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
