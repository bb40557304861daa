"""Quantized tokens to their experts and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_torch as te
from te_torch.tensors.dtype import DType
from tests.backends import devices
from tests.covering import covering
from tests.moe_cases import H, T, normal, pairs, probabilities, routing

DEVICES = devices()


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
def test_what_cannot_be_moved_or_added(device: str) -> None:
    mask = routing(device, 128)
    x = normal(128, 256, device=device, dtype=torch.bfloat16)
    tiled = te.Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=2)(x)
    with pytest.raises(ValueError, match="Unsupported FP8 recipe"):
        te.moe_permute(tiled, mask, 500)
    with pytest.raises(ValueError, match="Unsupported FP8 recipe"):
        te.moe_permute(te.NVFP4Quantizer()(x), mask, 500)
    column = te.MXFP8Quantizer(DType.kFloat8E4M3, rowwise=False, columnwise=True)(x)
    with pytest.raises(ValueError, match="rowwise"):
        te.moe_permute(column, mask, 500)
    q = quantizers(device)["block"](x)
    out, row_map = te.moe_permute(q, mask)
    with pytest.raises(AssertionError, match="dequantize"):
        te.moe_unpermute(out, row_map)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_under_a_compiler_is_refused(device: str) -> None:
    torch._dynamo.reset()
    mask = routing(device)
    q = quantizers(device)["block"](normal(T, H, device=device, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError):
        torch.compile(lambda t, m: te.moe_permute(t, m, 300)[0], fullgraph=True, backend="eager")(q, mask)
