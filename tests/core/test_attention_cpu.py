"""The CPU's attention against its formula, written with torch's autograd in float64: each feature once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from te_core import ops
from te_core.attention import AttentionSpec, Lengths
from te_core.ops.attention_terms import Terms
from te_core.runtime import Runtime
from te_core.tensor import from_numpy

torch = pytest.importorskip("torch")

B, H, G, SQ, SKV, D, DV = 2, 4, 2, 7, 9, 8, 6
SCALE = 0.35


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def weights(q: Any, k: Any, spec: AttentionSpec, terms: dict[str, Any], b: int, h: int) -> Any:
    """(scores, P) of one head of one sequence: q [n, d], k [m, d]."""
    n, m = q.shape[0], k.shape[0]
    s = q @ k.T * spec.scale
    if spec.softcap:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    i, j = torch.arange(n)[:, None], torch.arange(m)[None, :]
    shift = m - n if spec.bottom_right else 0
    if "bias" in terms:
        s = s + terms["bias"].expand(B, H, -1, -1)[b, h].expand(-1, m)[:n, :m]
    if "slopes" in terms:
        s = s - terms["slopes"].expand(B, H)[b, h] * (i + shift - j).abs()
    seen = torch.ones(n, m, dtype=torch.bool)
    if spec.left >= 0:
        seen &= j >= i + shift - spec.left
    if spec.right >= 0:
        seen &= j <= i + shift + spec.right
    if "mask" in terms:
        seen &= ~terms["mask"].expand(B, H, SQ, SKV)[b, h, :n, :m]
    total = torch.where(seen, s.exp(), 0.0).sum(1, keepdim=True)
    if spec.softmax != "vanilla":
        total = total + (terms["sink"][h].exp() if "sink" in terms else 1.0)
    p = torch.where(seen, s.exp(), 0.0) / torch.where(total == 0, 1.0, total)
    return torch.where(seen, s, -torch.inf), p


def attend(q: Any, k: Any, v: Any, spec: AttentionSpec, terms: dict[str, Any], lengths: Any, kept: Any) -> Any:
    """The output of q [b, sq, h, d], k, v by sequence, and the largest scores."""
    out = torch.zeros(B, SQ, H, DV, dtype=torch.float64)
    largest = torch.full((H,), -torch.inf, dtype=torch.float64)
    for b in range(B):
        n, m = lengths[b]
        for h in range(H):
            s, p = weights(q[b, :n, h], k[b, :m, h // (H // G)], spec, terms, b, h)
            largest[h] = torch.maximum(largest[h], s.max() if s.numel() else largest[h])
            if spec.dropout:
                p = p * kept[b, h, :n, :m] / (1 - spec.dropout)
            out[b, :n, h] = p @ v[b, :m, h // (H // G)]
    return out, largest


CASES: dict[str, tuple[dict[str, Any], list[tuple[int, int]] | None, str]] = {
    "plain": ({}, None, "bshd"),
    "causal": ({"right": 0}, None, "sbhd"),
    "window bottom-right": ({"left": 2, "right": 0, "bottom_right": True}, None, "bshd"),
    "two-sided window": ({"left": 1, "right": 2}, None, "sbhd"),
    "padded": ({"padded": True, "right": 0, "bottom_right": True}, [(5, 9), (7, 3)], "bshd"),
    "empty sequences": ({"padded": True}, [(0, 4), (6, 0)], "sbhd"),
    "packed": ({"padded": True, "right": 0, "bottom_right": True, "left": 3}, [(5, 9), (7, 4)], "thd"),
    "mask": ({"masked": True}, None, "bshd"),
    "bias": ({"bias": "post_scale_bias"}, None, "sbhd"),
    "alibi": ({"bias": "alibi", "bottom_right": True, "padded": True}, [(5, 9), (7, 4)], "bshd"),
    "softcap": ({"softcap": 0.7, "bias": "post_scale_bias"}, None, "bshd"),
    "sink": ({"softmax": "learnable", "right": 0, "padded": True}, [(5, 9), (7, 4)], "thd"),
    "off-by-one": ({"softmax": "off-by-one"}, None, "sbhd"),
    "dropout": ({"dropout": 0.3, "padded": True, "right": 0}, [(7, 9), (4, 5)], "thd"),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_is_its_formula(case: str, rng: np.random.Generator) -> None:
    fields, lengths, form = CASES[case]
    packed = form == "thd"
    spec = AttentionSpec(
        SCALE, form, form, max_logit=True, max_q=SQ if packed else 0, max_kv=SKV if packed else 0, **fields
    )
    rt, pairs = Runtime.cpu(), lengths or [(SQ, SKV)] * B
    full = {"q": (B, SQ, H, D), "k": (B, SKV, G, D), "v": (B, SKV, G, DV), "dy": (B, SQ, H, DV)}
    values = {name: rng.standard_normal(shape, np.float32) for name, shape in full.items()}
    terms, given = make_terms(spec, pairs, rng)

    kept = torch.tensor(_kept(spec.dropout)) if spec.dropout else None
    leaves = {n: torch.tensor(a, dtype=torch.float64, requires_grad=n != "dy") for n, a in values.items()}
    for name in ("bias", "sink"):
        if name in given:
            given[name].requires_grad_()
    expected, largest = attend(leaves["q"], leaves["k"], leaves["v"], spec, given, pairs, kept)
    (expected * leaves["dy"]).sum().backward()

    q, k, v, dy = (
        from_numpy(lay(values[n], form, [p[n in "kv"] for p in pairs], np.nan)) for n in ("q", "k", "v", "dy")
    )
    found = ops.attention_forward(rt, q, k, v, spec=spec, terms=terms)
    grads = ops.attention_backward(
        rt, dy, q, k, v, found.out, found.stats, spec=spec, terms=terms, bias_grad=terms.bias is not None
    )
    for name, got, want, side in (
        ("out", found.out, expected.detach(), 0),
        ("dq", grads.q, leaves["q"].grad, 0),
        ("dk", grads.k, leaves["k"].grad, 1),
        ("dv", grads.v, leaves["v"].grad, 1),
    ):
        want = lay(want.numpy(), form, [p[side] for p in pairs])
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(found.max_logit.numpy(), largest.detach().numpy(), rtol=2e-6, atol=2e-6)
    if "bias" in given:
        np.testing.assert_allclose(grads.bias.numpy(), given["bias"].grad.numpy(), rtol=2e-5, atol=2e-6)
    if "sink" in given:
        np.testing.assert_allclose(grads.sink.numpy(), given["sink"].grad.numpy(), rtol=2e-5, atol=2e-6)


GAP = 3  # tokens behind each packed sequence that belong to none


def lay(a: Any, form: str, lengths: list[int], between: float = 0.0) -> Any:
    """[b, s, ...] in a format; in thd with tokens between sequences, which hold 0 in all results."""
    if form == "thd":
        gap = np.full((GAP, *a.shape[2:]), between, a.dtype)
        return np.concatenate([part for b, n in enumerate(lengths) for part in (a[b, :n], gap)])
    return np.ascontiguousarray(a.swapaxes(0, 1)) if form == "sbhd" else a


def sums(lengths: list[int], gap: int = 0) -> Any:
    return from_numpy(np.cumsum([0, *[n + gap for n in lengths]]).astype(np.int32))


def make_terms(spec: AttentionSpec, pairs: list[tuple[int, int]], rng: Any) -> tuple[Terms, dict[str, Any]]:
    """The spec's terms for the core, and for the reference."""
    core: dict[str, Any] = {}
    given: dict[str, Any] = {}
    if spec.padded:
        qs, kvs = zip(*pairs, strict=True)
        core["lengths"] = Lengths(sums(qs), sums(kvs), sums(qs, GAP), sums(kvs, GAP))
    if spec.masked:
        hidden = rng.random((B, 1, SQ, SKV)) < 0.4
        hidden[0, 0, 2] = True  # a query that sees nothing
        core["mask"], given["mask"] = from_numpy(hidden), torch.tensor(hidden)
    if spec.bias == "post_scale_bias":
        bias = rng.standard_normal((1, H, 1, SKV), np.float32)
        core["bias"], given["bias"] = from_numpy(bias), torch.tensor(bias, dtype=torch.float64)
    if spec.bias == "alibi":
        slopes = rng.random((B, H), np.float32)
        core["slopes"], given["slopes"] = from_numpy(slopes), torch.tensor(slopes, dtype=torch.float64)
    if spec.softmax == "learnable":
        sink = rng.standard_normal(H, np.float32)
        core["sink"], given["sink"] = from_numpy(sink), torch.tensor(sink, dtype=torch.float64)
    if spec.dropout:
        core["rng"] = from_numpy(np.array([1234, 5], np.int64))
    return Terms(**core), given


def _kept(p: float) -> Any:
    """The mask, word by word (tests/reference/elementwise.py has the generator)."""
    from tests.reference.elementwise import keep

    return keep(B * H * SQ * SKV, p, 1234, 5, 0).reshape(B, H, SQ, SKV)


def test_a_paged_cache_is_read_through_its_table(rng: np.random.Generator) -> None:
    rt, block = Runtime.cpu(), 4
    q = rng.standard_normal((2, 3, H, D), np.float32)
    cache_k, cache_v = (rng.standard_normal((7, block, G, d), np.float32) for d in (D, DV))
    pages, lengths = np.array([[5, 1, 3], [2, 6, 0]], np.int32), [9, 6]
    spec = AttentionSpec(SCALE, "bshd", "bshd", right=0, bottom_right=True, padded=True)
    queries, keys = sums([3, 2]), sums(lengths)
    found = ops.attention_forward(
        rt,
        from_numpy(q),
        from_numpy(cache_k),
        from_numpy(cache_v),
        spec=spec,
        terms=Terms(Lengths(queries, keys), pages=from_numpy(pages)),
    )
    k, v = (cache[pages].reshape(2, 3 * block, G, -1) for cache in (cache_k, cache_v))
    plain = ops.attention_forward(rt, *map(from_numpy, (q, k, v)), spec=spec, terms=Terms(Lengths(queries, keys)))
    np.testing.assert_array_equal(found.out.numpy(), plain.out.numpy())


@pytest.mark.parametrize("tile", [200, 3200, 13000])  # some queries, one group of a sequence, two sequences
def test_tiles_and_parts_change_nothing(tile: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_core.backends.cpu import attention_scores

    rt, lengths = Runtime.cpu(), [40, 40, 40, 17, 40, 40]
    q, k, v, dy = (from_numpy(rng.random((6, 40, n, 16), np.float32) - 0.5) for n in (4, 2, 2, 4))
    spec = AttentionSpec(
        SCALE, "bshd", "bshd", left=9, right=1, padded=True, bias="post_scale_bias", dropout=0.2, max_logit=True
    )
    bias = from_numpy(rng.standard_normal((1, 4, 40, 40), np.float32))
    terms = Terms(Lengths(sums(lengths), sums(lengths)), bias=bias, rng=from_numpy(np.array([7, 0], np.int64)))

    def run() -> list[Any]:
        found = ops.attention_forward(rt, q, k, v, spec=spec, terms=terms)
        grads = ops.attention_backward(rt, dy, q, k, v, found.out, found.stats, spec=spec, terms=terms, bias_grad=True)
        return [t.numpy() for t in (found.out, found.stats, found.max_logit, *grads[:4])]

    whole = run()
    monkeypatch.setattr(attention_scores, "TILE", tile)
    for a, b in zip(whole, run(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
