"""The attention layer: packed projections give what separate tensors give, recomputation what was kept gives."""

from __future__ import annotations

import numpy as np
import pytest

from te_core import dtypes
from te_core.attention import AttentionSpec
from te_core.layers import attention as layer
from te_core.layers.attention import AttentionLayerSpec, AttentionNeeds
from te_core.runtime import Runtime
from tests.core.covering_lists import covering_lists

LEAD = {"sbhd": (9, 2), "bshd": (2, 9), "thd": (18,)}
D, DV = 32, 64


def packed(parts: list[np.ndarray], packing: str, interleaved: bool) -> list[np.ndarray | None]:
    """q, k and v as a projection with this packing would leave them."""
    q, k, v = parts
    lead, (h, g) = q.shape[:-2], (q.shape[-2], k.shape[-2])
    if packing == "separate":
        return [q, k, v]
    flat = [t.reshape(*lead, g, -1) for t in parts] if interleaved else [t.reshape(*lead, -1) for t in parts]
    if packing == "kv":
        return [q, np.concatenate(flat[1:], -1).reshape(*lead, -1), None]
    assert h % g == 0
    return [np.concatenate(flat, -1).reshape(*lead, -1), None, None]


def step(rt: Runtime, fmt: str, heads: tuple[int, int], packing: str, interleaved: bool, **options: object) -> list:
    """The output and the gradients of q, k, v, each alone, of one forward and backward."""
    h, g = heads
    random = np.random.default_rng(0)
    lead = LEAD[fmt]
    make = lambda *shape: random.standard_normal((*lead, *shape)).astype(np.float32)  # noqa: E731
    parts, dy = [make(h, D), make(g, D), make(g, DV)], make(h * DV)
    bf16 = dtypes.bfloat16.numpy
    recompute = bool(options.pop("recompute", False))
    core = AttentionSpec(0.2, fmt, fmt, right=0, padded=fmt == "thd", max_q=16, max_kv=16, **options)  # type: ignore[arg-type]
    spec = AttentionLayerSpec(core, h, g, D, DV, AttentionNeeds(True, True, True), packing, interleaved, recompute)
    inputs = [None if t is None else rt.tensor(t.astype(bf16)) for t in packed(parts, packing, interleaved)]
    cu = rt.tensor(np.array([0, 5, 18], np.int32)) if fmt == "thd" else None
    rng = rt.tensor(np.array([7, 3], np.int64)) if core.dropout else None
    outputs, saved = layer.forward(rt, *inputs, cu_q=cu, cu_kv=cu, rng=rng, spec=spec)  # type: ignore[misc]
    found = layer.backward(rt, rt.tensor(dy.astype(bf16)), None, saved, spec=spec)
    expected = packed([np.zeros_like(p) for p in parts], packing, interleaved)
    for given, grad in zip(expected, found, strict=False):
        assert given is None and grad is None or grad.shape == given.shape  # type: ignore[union-attr]
    marks = packed([np.full_like(p, i) for i, p in enumerate(parts)], packing, interleaved)
    values = [rt.numpy(g_).astype(np.float32) for g_ in found[:3] if g_ is not None]
    grads = []
    for i, part in enumerate(parts):  # which elements of the packed gradient belong to q, k and v
        chosen = [v_[m == i] for v_, m in zip(values, [m for m in marks if m is not None], strict=True)]
        grads.append(np.concatenate(chosen).reshape(part.shape))
    return [rt.numpy(outputs[0]).astype(np.float32), *grads]


@covering_lists(
    pytest.mark.parametrize(("packing", "interleaved"), [("kv", False), ("qkv", False), ("kv", True), ("qkv", True)]),
    pytest.mark.parametrize("fmt", LEAD),
    pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1)]),  # strides reach groups that are joined in sbhd alone
    turns=2,
)
def test_packed_equals_separate(rt: Runtime, fmt: str, heads: tuple[int, int], packing: str, interleaved: bool) -> None:
    for value, expected in zip(
        step(rt, fmt, heads, packing, interleaved), step(rt, fmt, heads, "separate", False), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=2e-2, atol=2e-2)  # another plan may add in another order


@pytest.mark.parametrize("fmt", LEAD)
def test_recomputed_equals_kept(rt: Runtime, fmt: str) -> None:
    kept = step(rt, fmt, (4, 2), "qkv", True, dropout=0.3, deterministic=True)
    again = step(rt, fmt, (4, 2), "qkv", True, dropout=0.3, deterministic=True, recompute=True)
    for value, expected in zip(again, kept, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_interleaved_groups_of_sbhd_are_reached_without_a_copy() -> None:
    needs = AttentionNeeds(True, True, True)
    spec = AttentionLayerSpec(AttentionSpec(1.0), 4, 2, D, D, needs, "qkv", True)
    assert spec.joined and not spec.copies
    spec = AttentionLayerSpec(AttentionSpec(1.0, "bshd", "bshd"), 4, 2, D, D, needs, "qkv", True)
    assert spec.copies and not spec.joined
