"""`te_torch.attention.rope`: the golden file, fused against plain torch, gradients, documented errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from te_torch.attention.rope import (
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
    split_heads,
)
from tests.backends import devices
from tests.golden import tree
from tests.reference import rope as reference

DEVICES = devices()
GOLDEN_LENGTHS = [0, 5, 16]  # of rope/thd, whose heads are the first sequence's


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_golden(device: str, fused: bool) -> None:
    golden = {k: v.to(device) for k, v in tree("functions", "rope/").items()}
    x, freqs = golden["x"], golden["freqs"]
    close = {"rtol": 0, "atol": 1e-6}  # the values are about 4: two units in the last place
    for interleaved in (False, True):
        for fmt, t in (("sbhd", x), ("bshd", x.transpose(0, 1))):
            y = apply_rotary_pos_emb(t, freqs, fmt, interleaved=interleaved, fused=fused)
            torch.testing.assert_close(y, golden[f"{fmt}/interleaved_{interleaved}"], **close)
    y = apply_rotary_pos_emb(x, golden["partial_freqs"], fused=fused)
    torch.testing.assert_close(y, golden["partial"], **close)
    cu = torch.tensor(GOLDEN_LENGTHS, dtype=torch.int32, device=device)
    y = apply_rotary_pos_emb(x[:, 0], freqs, "thd", cu_seqlens=cu, fused=fused)
    torch.testing.assert_close(y, golden["thd"], **close)


def test_angles() -> None:
    for interleaved in (False, True):
        rope = RotaryPositionEmbedding(16, rotary_percent=0.5, rotary_base=100.0, interleaved=interleaved)
        assert list(rope.state_dict()) == ["inv_freq"]
        table = rope(5, offset=3)
        assert table.shape == (5, 1, 1, 8)
        assert table.dtype == torch.float32
        for p in range(5):
            for c in range(8):
                pair = c // 2 if interleaved else c % 4
                assert float(table[p, 0, 0, c]) == pytest.approx((p + 3) * 100.0 ** (-2 * pair / 8), rel=1e-6)
    assert RotaryPositionEmbedding(9, 0.5)(3).shape[-1] == 4


def test_interpolation_needs_both_numbers() -> None:
    def last(length: int, **options: Any) -> float:
        return float(RotaryPositionEmbedding(4, **options)(length)[-1, 0, 0, 0])

    assert last(10, seq_len_interpolation_factor=2) == 9
    assert last(10, pretrained_max_position_embeddings=2) == 9
    both = {"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 8}
    assert last(10, **both) == pytest.approx(9 / 2)
    assert last(16, **both) == pytest.approx(15 / 2)
    assert last(32, **both) == pytest.approx(31 * 8 / 32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("fmt", ["sbhd", "bshd", "thd"])
def test_against_the_formula(device: str, fused: bool, fmt: str) -> None:
    """Forward and gradient with start positions, ranks of a context, partial channels and bf16."""
    generator = torch.Generator().manual_seed(1)
    shape = {"sbhd": (8, 3, 2, 24), "bshd": (3, 8, 2, 24), "thd": (16, 2, 24)}[fmt]
    cu = torch.tensor([0, 4, 4, 16], dtype=torch.int32)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.03)):
        for cp, interleaved, starts in (((1, 0), False, True), ((2, 0), True, False), ((2, 1), False, True)):
            freqs = torch.randn(64, 1, 1, 16, generator=generator)
            t, g = torch.randn(2, *shape, generator=generator).to(dtype)
            first = torch.tensor([2, 0, 5], dtype=torch.int32) if starts else None
            whole = cu * cp[0]
            given = t.clone().to(device).requires_grad_()
            y = apply_rotary_pos_emb(
                given,
                freqs.to(device),
                fmt,
                None if first is None else first.to(device),
                interleaved,
                fused,
                whole.to(device) if fmt == "thd" else None,
                *cp,
            )
            (gradient,) = torch.autograd.grad(y, given, g.to(device))
            assert y.dtype == dtype
            options = {"interleaved": interleaved, "cu_seqlens": whole, "starts": first, "cp": cp}
            for got, source, backward in ((y, t, False), (gradient, g, True)):
                expected = reference.turn(source.float().numpy(), freqs.numpy(), fmt, backward=backward, **options)
                np.testing.assert_allclose(
                    got.detach().float().cpu().numpy(), expected, rtol=0, atol=tolerance * abs(expected).max()
                )


@pytest.mark.parametrize("device", DEVICES)
def test_fused_takes_strided_heads(device: str) -> None:
    """q as a view of a packed projection: no copy, and a dense gradient."""
    packed = torch.randn(6, 2, 3, 3, 16, device=device, requires_grad=True)
    freqs = RotaryPositionEmbedding(16)(6).to(device)
    q = packed[..., 1, :]
    y = apply_rotary_pos_emb(q, freqs, fused=True)
    assert y.is_contiguous()
    torch.testing.assert_close(y, apply_rotary_pos_emb(q, freqs), rtol=0, atol=2e-6)
    y.sum().backward()
    assert (packed.grad[..., 1, :] != 0).any()
    assert (packed.grad[..., 0, :] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
def test_fused_qkv(device: str, fmt: str) -> None:
    """GQA: two query heads a group. Gradients of all three, and of one alone."""
    qkv = torch.randn(4, 4, 3, 2 * 16 + 16 + 8, device=device, requires_grad=True)
    q_freqs, k_freqs = torch.randn(2, 4, 1, 1, 16, device=device)
    q, k, v = apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, [32, 16, 8], fmt, interleaved=True)
    parts = qkv.split([32, 16, 8], dim=-1)
    expected = [
        apply_rotary_pos_emb(parts[0].reshape(4, 4, 6, 16), q_freqs, fmt, interleaved=True),
        apply_rotary_pos_emb(parts[1], k_freqs, fmt, interleaved=True),
        parts[2],
    ]
    weights = [torch.randn_like(e) for e in expected]
    for got, want in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    for used in ((0, 1, 2), (0,), (1, 2)):
        ours, theirs = (
            torch.autograd.grad(sum((o[i] * weights[i]).sum() for i in used), qkv, retain_graph=True)[0]
            for o in ((q, k, v), expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
def test_split_heads(device: str, compiled: bool) -> None:
    """Without angles a plain split; keys and values alone; the same when traced."""

    def split(*args: Any, **sizes: Any) -> Any:
        torch._dynamo.reset()  # else the second call's numbers of heads become symbols
        function = partial(split_heads, **sizes)
        return (torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function)(*args)

    packed = torch.randn(5, 2, 4 * 8 + 2 * 8 + 2 * 6, device=device, requires_grad=True)
    sizes = {"groups": 2, "head_dims": (8, 8, 6), "interleaved_groups": False}
    q, k, v = split(packed, heads=4, **sizes)
    torch.testing.assert_close(q.flatten(2), packed[..., :32], rtol=0, atol=0)
    torch.testing.assert_close(k.flatten(2), packed[..., 32:48], rtol=0, atol=0)
    torch.testing.assert_close(v.flatten(2), packed[..., 48:], rtol=0, atol=0)
    torch.autograd.backward([q, k, v], [2 * q, 3 * k, 4 * v])
    factors = torch.cat([torch.full((n,), f) for n, f in ((32, 2.0), (16, 3.0), (12, 4.0))]).to(device)
    torch.testing.assert_close(packed.grad, packed.detach() * factors, rtol=0, atol=0)
    tokens = packed.detach()[:, 0, 32:].contiguous().requires_grad_()
    cu = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    freqs = torch.randn(4, 1, 1, 8, device=device)
    k, v = split(tokens, None, freqs, heads=0, fmt="thd", cu_seqlens=cu, **sizes)
    heads = tokens[:, :16].reshape(5, 2, 8)
    torch.testing.assert_close(k, apply_rotary_pos_emb(heads, freqs, "thd", cu_seqlens=cu), rtol=0, atol=2e-6)
    torch.testing.assert_close(v.flatten(1), tokens[:, 16:], rtol=0, atol=0)


@pytest.mark.parametrize("fmt", ["sbhd", "thd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_under_torch_autocast(interleaved: bool, fmt: str) -> None:
    """As without it, also where torch's rule for mixed dtypes would refuse float16 beside bfloat16."""
    t, freqs = torch.randn(4, 2, 2, 8).half(), RotaryPositionEmbedding(6, interleaved=interleaved)(4).cpu()
    options: dict[str, Any] = {"tensor_format": fmt, "interleaved": interleaved}
    if fmt == "thd":
        t, options["cu_seqlens"] = t[:, 0], torch.tensor([0, 1, 4], dtype=torch.int32)
    else:
        options["start_positions"] = torch.tensor([0, 0], dtype=torch.int32)
    wanted = [apply_rotary_pos_emb(t, freqs, fused=fused, **options) for fused in (False, True)]
    with torch.autocast("cpu", torch.bfloat16):
        got = [apply_rotary_pos_emb(t, freqs, fused=fused, **options) for fused in (False, True)]
    assert all(a.dtype == torch.float16 and torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
