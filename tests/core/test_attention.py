"""Attention on every backend against float64: a pairwise matrix, long sequences, dropout, equal bits.

What a backend cannot do it refuses, and then te_core.attention_rules must have said so; nothing is skipped.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.attention import AttentionSpec, Lengths
from te_core.device import DeviceInfo
from te_core.errors import UnsupportedError
from te_core.ops.attention import attention_backward, attention_forward
from te_core.ops.attention_terms import Terms
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda
from tests.core import attention_cases as cases
from tests.core.attention_cases import HEADS, Case, Made, Sequences
from tests.core.inputs import poisoned
from tests.covering import covering
from tests.reference import attention as reference
from tests.reference.elementwise import keep
from tests.tolerances import DB

Array = np.ndarray[Any, Any]

PAIRS = cases.pairs()


def values_of(several: list[Case]) -> list[Case]:
    """So many of these cases that each value of a factor stands in one."""
    found: list[Case] = []
    missing = {(f.name, getattr(c, f.name)) for c in several for f in fields(c)}
    for case in several:
        own = {(f.name, getattr(case, f.name)) for f in fields(case)}
        if own & missing:
            found.append(case)
            missing -= own
    return found


SOME_PAIRS = values_of(PAIRS)


# ------------------------------------------------------------------------------------------------------ judging


def assert_close(name: str, got: Array | None, want: Array, size: float, floor: float) -> None:
    """The error is `floor` dB below `want`, or below `size` where want is what is left of larger terms."""
    assert got is not None and got.shape == want.shape, name
    assert np.isfinite(got).all(), f"{name}: {np.argwhere(~np.isfinite(got))[:3]} not finite"
    noise, signal = np.square(got - want).sum(), max(np.square(want).sum(), size)
    assert noise <= signal * 10 ** (-floor / 10), f"{name}: {10 * np.log10(signal / noise):.1f} dB of {floor}"


def run(rt: Runtime, c: Case, made: Made) -> tuple[Any, Any]:
    """Forward and backward in memory that shows what was not written."""
    rt = poisoned(rt)
    spec, terms, (q, k, v) = made.spec, made.terms, made.tensors
    y = attention_forward(rt, q, k, v, spec=spec, terms=terms)
    grads = attention_backward(
        rt,
        rt.tensor(made.dy),
        q,
        k,
        v,
        y.out,
        y.stats,
        spec=spec,
        terms=terms,
        grads=cases.gradients_like(rt, c, made),
        bias_grad=terms.bias is not None,
    )
    return y, grads


def judge(rt: Runtime, c: Case, made: Made, y: Any, grads: Any) -> None:
    """All results against the reference."""
    place, problem, operands = made.q_place, made.problem, made.canonical()
    want = reference.forward(*operands, problem)
    dy = place.canonical(made.dy)
    wanted = reference.backward(dy, *operands, problem)
    plain = reference.backward(dy, *operands, problem, centred=False)
    floor = DB[c.dtype]
    assert_zeros(rt, made, y.out, grads, want.seen)
    assert_close("out", cases.host(rt, y.out), place.native(want.out), 0.0, floor)
    judge_scores(rt, c, made, y, want)
    places = (place, made.kv_place, made.kv_place)
    for name, at in zip(("q", "k", "v"), places, strict=True):
        full = at.native(getattr(wanted, f"d{name}"))
        size = np.square(getattr(plain, f"d{name}")).sum()
        assert_close(f"d{name}", cases.host(rt, getattr(grads, name)), full, size, floor)
    assert (grads.bias is None) == (wanted.dbias is None) and (grads.sink is None) == (wanted.dsink is None)
    if wanted.dbias is not None:
        assert_close("dbias", cases.host(rt, grads.bias), wanted.dbias, np.square(plain.dbias).sum(), floor)
    if wanted.dsink is not None:
        assert grads.sink.dtype is dtypes.float32
        assert_close("dsink", cases.host(rt, grads.sink), wanted.dsink, wanted.sink_terms, floor)


def assert_zeros(rt: Runtime, made: Made, out: Tensor, grads: Any, seen: Array) -> None:
    """Exactly zero where nothing takes part: queries that see nothing, keys nobody sees, between sequences."""
    groups = made.k.shape[-2]
    rows = seen.any(axis=3)
    keys = seen.any(axis=2).reshape(len(seen), groups, -1, seen.shape[3]).any(axis=2)
    parts = (
        ("out", out, made.q_place, rows),
        ("dq", grads.q, made.q_place, rows),
        ("dk", grads.k, made.kv_place, keys),
        ("dv", grads.v, made.kv_place, keys),
    )
    for name, t, place, used in parts:
        got = cases.host(rt, t)
        inside = np.arange(place.longest) < place.lengths[:, None, None]
        used = place.native(np.broadcast_to((used & inside)[..., None], (*used.shape, got.shape[-1])))
        assert (got[~used] == 0).all(), f"{name}: {(got[~used] != 0).sum()} of {(~used).sum()} not zero"


def judge_scores(rt: Runtime, c: Case, made: Made, y: Any, want: reference.Forward) -> None:
    """The statistics of every row that sees a key, and the largest logits: float32 whatever the dtype."""
    floor = DB["fp32" if c.dtype == "fp32" else "attention scores"]
    assert y.stats.dtype is dtypes.float32
    stats = cases.host(rt, y.stats)
    lse = np.where(want.seen.any(axis=3), want.lse, 0.0)
    if made.q_place.form == "thd":
        stats = made.q_place.canonical(stats[..., None])[..., 0]
    stats = np.where(want.seen.any(axis=3), stats, 0.0)
    assert_close("stats", stats, lse, 0.0, floor)
    assert (y.max_logit is None) == (not c.max_logit)
    if c.max_logit:
        assert_close("max_logit", cases.host(rt, y.max_logit), want.max_logit, 0.0, floor)


def check_case(rt: Runtime, c: Case, sequences: Sequences | None = None) -> str | None:
    """Right, or refused for the reason (returned) that the rules give."""
    made = cases.make(rt, c, sequences=sequences)
    reason = cases.refusal(rt, c, sequences)
    if reason is not None:
        with pytest.raises(UnsupportedError) as caught:
            run(rt, c, made)
        assert reason in str(caught.value)
        return reason
    judge(rt, c, made, *run(rt, c, made))
    return None


# ------------------------------------------------------------------------------------------------------ the matrix


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[] if c in SOME_PAIRS else pytest.mark.full) for c in PAIRS]
)
def test_pairs(rt, case):
    """Every pair of values of any two factors; without `--full` every value."""
    check_case(rt, case)


PARTS = 8


@cache
def accepted() -> list[Case]:
    return cases.pairs(lambda c: cases.refusal(cuda_runtime(), c) is None)


@requires_cuda
def test_values_that_cudnn_takes():
    """Every value of a factor among the cases that the rules accept here."""
    assert_all(cuda_runtime(), values_of(accepted()))


@requires_cuda
@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_pairs_that_cudnn_takes(part):
    """Every pair among the cases that the rules accept here: above, one refused value hides the pairs beside it."""
    assert_all(cuda_runtime(), accepted()[part::PARTS])


def assert_all(rt: Runtime, several: list[Case]) -> None:
    """Each case is right, or refused as the rules say."""
    failed = {}
    for case in several:
        try:
            check_case(rt, case)
        except Exception as e:
            failed[str(case)] = f"{type(e).__name__}: {e}"
    assert not failed, f"{len(failed)} of {len(several)}:\n" + "\n".join(f"{k}\n    {v}" for k, v in failed.items())


H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 60 << 20, 140 << 30, (13, 0))
CUDNN = ((9, 11, 0), (9, 19, 0))
BASE = {"dtype": "bf16", "dims": (64, 64), "lengths": "tiles"}

#: What training code is made of.
ESSENTIAL = [
    Case(**(BASE | one))
    for one in (
        {},
        {"dtype": "fp16"},
        *({"layout": x, "mask": "padding"} for x in ("sbhd", "bshd", "thd", "thd_gaps")),
        *({"packing": x} for x in ("kv2hd", "kvh2d", "qkv3hd", "qkvh3d")),
        *({"mask": x} for x in ("causal", "padding_causal", "window_left")),
        *({"mask": x, "lengths": "cross"} for x in ("none", "padding", "causal_bottom_right")),
        {"mask": "padding_causal_bottom_right", "layout": "thd", "lengths": "cross"},
        {"mask": "causal", "shared": 2},
        {"mask": "causal", "shared": 4},
        {"bias": "1hss"},
        {"bias": "11ss"},
        {"mask": "causal", "bias": "alibi"},
        *({"mask": "causal", "dims": (d, d)} for d in (32, 96, 128)),
        {"mask": "causal", "dims": (192, 128)},
        {"mask": "causal", "deterministic": True},
        {"lengths": "odd"},
    )
]


@pytest.mark.parametrize("version", CUDNN, ids=str)
def test_what_the_rules_must_not_refuse(version):
    refused = {str(c): reason for c in ESSENTIAL if (reason := cases.ruled(H200, version, c)) is not None}
    if version < (9, 13):
        refused = {c: reason for c, reason in refused.items() if "192/128" not in reason}
    assert not refused, "\n".join(f"{k}: {v}" for k, v in refused.items())


REFUSED = [
    Case(**(BASE | one)) for one in ({"dtype": "fp32"}, {"mask": "arbitrary"}, {"dims": (264, 264)}, {"dims": (36, 36)})
]


@covering(case=REFUSED, version=CUDNN)
def test_what_the_rules_must_refuse(case, version):
    """What cuDNN has no kernels to train with."""
    assert cases.ruled(H200, version, case)


#: Others of these lie, are grouped or are as wide as one that is run.
ALIKE = {
    Case(**(BASE | one))
    for one in (
        {"layout": "bshd", "mask": "padding"},
        {"packing": "kvh2d"},
        {"packing": "qkv3hd"},
        {"mask": "causal", "shared": 4},
        {"bias": "11ss"},
        *({"mask": "causal", "dims": (d, d)} for d in (32, 96)),
    )
}
assert set(ESSENTIAL) >= ALIKE


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=pytest.mark.full if c in ALIKE else []) for c in ESSENTIAL]
)
def test_essential(rt, case):
    assert check_case(rt, case) is None


BOTTOM_RIGHT = {"causal_bottom_right": "bshd", "window_left_bottom_right": "sbhd", "padding_causal_bottom_right": "thd"}


@covering(mask=BOTTOM_RIGHT, bias=["none", "alibi", "alibi_h", "alibi_bh"], lengths=["cross", "tall"], turns=2)
def test_a_diagonal_that_ends_bottom_right(rt, mask, bias, lengths):
    """More keys than queries, and fewer: which keys are seen, and how far ALiBi finds them."""
    case = Case(mask=mask, layout=BOTTOM_RIGHT[mask], bias=bias, lengths=lengths, dims=(64, 64))
    assert check_case(rt, case) is None


@pytest.mark.full
@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize("layout", cases.FACTORS["layout"])
def test_product(rt, layout, mask):
    """All combinations of what the formula depends on, in this layout under this mask."""
    every = 1 if rt.backend.name == "cpu" else 16  # cuDNN builds a plan for each
    assert_all(rt, cases.product(layout, mask)[::every])


LONG = Sequences(515, 515, (515, 300), (515, 300))
LONG_CROSS = Sequences(260, 515, (260, 129), (515, 257))


@pytest.mark.parametrize(
    ("case", "sequences"),
    [
        (Case(dims=(64, 64), mask="causal"), LONG),
        (Case(dims=(128, 128), mask="padding_causal", layout="thd", shared=2), LONG),
        (Case(dims=(128, 128), mask="window_left", layout="sbhd", packing="qkv3hd", dtype="fp16"), LONG),
        (Case(dims=(64, 64), mask="padding_causal_bottom_right", layout="thd_gaps", shared=4), LONG_CROSS),
        (Case(dims=(192, 128), mask="padding", softmax="learnable"), LONG_CROSS),
        (Case(dims=(64, 64), bias="1hss"), LONG_CROSS),
        (Case(dims=(64, 64), mask="causal", bias="alibi"), LONG),
    ],
    ids=str,
)
def test_several_tiles(rt, case, sequences):
    """Sequences longer than a tile of any kernel, with odd ends."""
    check_case(rt, case, sequences)


@pytest.mark.parametrize(
    "case",
    [
        Case(dims=(64, 64), mask="causal", deterministic=True),
        Case(dims=(128, 128), layout="thd", deterministic=True),
        Case(dims=(64, 64), bias="1hss", deterministic=True),
        Case(softmax="learnable", deterministic=True),
    ],
    ids=str,
)
def test_deterministic(rt, case):
    """Equal bits from equal inputs, every time."""
    made = cases.make(rt, case, sequences=LONG)
    if cases.refusal(rt, case, LONG) is not None:
        check_case(rt, case, LONG)
        return
    first, *others = (
        [cases.bits(rt, t) for t in (y.out, *grads) if t is not None]
        for y, grads in (run(rt, case, made) for _ in range(4))
    )
    for again in others:
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)


def test_forward_alone(rt):
    """Without statistics: None, and the same output."""
    made = cases.make(rt, Case(mask="causal"))
    outs = [attention_forward(rt, *made.tensors, spec=made.spec, stats=stats) for stats in (True, False)]
    assert outs[1].stats is None
    np.testing.assert_array_equal(cases.bits(rt, outs[0].out), cases.bits(rt, outs[1].out))


def test_small_gradients_in_one_block(rt):
    """One block for small ones, each in a place of its own that a vector load reaches; as good as memory given."""
    made = cases.make(rt, Case("bf16", mask="causal", shared=2, lengths="cross"))
    y = attention_forward(rt, *made.tensors, spec=made.spec)
    given = tuple(rt.empty(t.shape, t.dtype) for t in made.tensors)
    calls = (rt.tensor(made.dy), *made.tensors, y.out, y.stats)
    attention_backward(rt, *calls, spec=made.spec, grads=given)
    found = attention_backward(poisoned(rt), *calls, spec=made.spec)[:3]
    assert found[0].owner is found[1].owner is found[2].owner
    for mine, other in zip(found, given, strict=True):
        assert mine.ptr % 16 == found[0].ptr % 16
        np.testing.assert_array_equal(cases.bits(rt, mine), cases.bits(rt, other))


def test_no_sequences_at_all(rt):
    """A packed batch without a token."""
    c = Case(layout="thd", mask="padding_causal")
    made = cases.make(rt, c, sequences=Sequences(4, 4, (0, 0), (0, 0)))
    y, grads = run(rt, c, made)
    assert y.out.shape == made.q.shape and [g.shape[0] for g in grads[:3]] == [0, 0, 0]


def test_largest_logits_of_nothing(rt):
    """Minus infinity, whether no key is there or no sequence has one."""
    made = cases.make(rt, Case("bf16", max_logit=True))
    none = rt.tensor(np.zeros((3, 0, HEADS, 32), cases.NUMPY["bf16"]))
    y = attention_forward(rt, made.tensors[0], none, none, spec=made.spec)
    assert (rt.numpy(y.max_logit) == -np.inf).all() and not rt.numpy(y.out).astype(np.float32).any()
    made = cases.make(rt, Case("bf16", mask="padding", max_logit=True), sequences=Sequences(4, 4, (0, 3), (0, 0)))
    y = attention_forward(rt, *made.tensors, spec=made.spec, terms=made.terms)
    assert (rt.numpy(y.max_logit) == -np.inf).all()


def running(rt: Runtime, lengths: list[int]) -> Tensor:
    """Running sums."""
    return rt.tensor(np.cumsum([0, *lengths]).astype(np.int32))


def test_a_paged_cache_is_read_through_its_table() -> None:
    rt, rng, block = Runtime.cpu(), np.random.default_rng(11), 4
    q = rng.standard_normal((2, 3, 4, 8), np.float32)
    cache_k, cache_v = (rng.standard_normal((7, block, 2, d), np.float32) for d in (8, 6))
    pages, lengths = np.array([[5, 1, 3], [2, 6, 0]], np.int32), [9, 6]
    spec = AttentionSpec(0.35, "bshd", "bshd", right=0, bottom_right=True, padded=True)
    queries, keys = running(rt, [3, 2]), running(rt, lengths)
    found = attention_forward(
        rt,
        rt.tensor(q),
        rt.tensor(cache_k),
        rt.tensor(cache_v),
        spec=spec,
        terms=Terms(Lengths(queries, keys), pages=rt.tensor(pages)),
    )
    k, v = (cache[pages].reshape(2, 3 * block, 2, -1) for cache in (cache_k, cache_v))
    plain = attention_forward(rt, *map(rt.tensor, (q, k, v)), spec=spec, terms=Terms(Lengths(queries, keys)))
    np.testing.assert_array_equal(found.out.numpy(), plain.out.numpy())


@pytest.mark.parametrize("tile", [200, 3200, 13000])  # some queries, one group of a sequence, two sequences
def test_tiles_and_parts_change_nothing(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_core.backends.cpu import attention_scores

    rt, rng, lengths = Runtime.cpu(), np.random.default_rng(11), [40, 40, 40, 17, 40, 40]
    q, k, v, dy = (rt.tensor(rng.random((6, 40, n, 16), np.float32) - 0.5) for n in (4, 2, 2, 4))
    spec = AttentionSpec(
        0.35, "bshd", "bshd", left=9, right=1, padded=True, bias="post_scale_bias", dropout=0.2, max_logit=True
    )
    bias = rt.tensor(rng.standard_normal((1, 4, 40, 40), np.float32))
    terms = Terms(
        Lengths(running(rt, lengths), running(rt, lengths)), bias=bias, rng=rt.tensor(np.array([7, 0], np.int64))
    )

    def run() -> list[Any]:
        found = attention_forward(rt, q, k, v, spec=spec, terms=terms)
        grads = attention_backward(rt, dy, q, k, v, found.out, found.stats, spec=spec, terms=terms, bias_grad=True)
        return [t.numpy() for t in (found.out, found.stats, found.max_logit, *grads[:4])]

    whole = run()
    monkeypatch.setattr(attention_scores, "TILE", tile)
    for a, b in zip(whole, run(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ dropout

RNG = (2**40 + 7, 3)


@covering(
    p=[0.1, 0.5],
    case=[
        Case("fp32"),
        Case("fp32", mask="causal", shared=2),
        Case("bf16", "thd_gaps", mask="padding_causal"),
        Case("fp32", "sbhd", bias="bhss", softmax="learnable", lengths="cross"),
        Case("fp32", softcap=2.0, lengths="tall"),
    ],
)
def test_dropout_by_the_formula(case, p):
    """The CPU's mask: word ((b h + head) sq + i) skv + j of the stream that te_core/ops/elementwise.py describes."""
    rt = Runtime.cpu()
    made = cases.make(rt, case, p=p, rng=RNG, sequences=Sequences(12, 10, (12, 5), (10, 7)))
    shape = (2, HEADS, 12, 10)
    kept = keep(int(np.prod(shape)), p, *RNG, 0).reshape(shape)
    made = made._replace(problem=replace(made.problem, keep=kept))
    judge(rt, case, made, *run(rt, case, made))


class Dropped:
    """Attention with equal weights and identities for v and dy, whose results show the mask itself."""

    n, heads, batch = 128, HEADS, 2

    def __init__(self, rt: Runtime, p: float, rng: tuple[int, int], form: str = "bshd") -> None:
        self.p, n = p, self.n
        eye = np.broadcast_to(np.eye(n)[None, :, None], (self.batch, n, self.heads, n))
        zero = np.zeros(eye.shape)
        q, k, v = (
            rt.tensor((t if form == "bshd" else t.swapaxes(0, 1)).astype(cases.NUMPY["bf16"]))
            for t in (zero, zero, eye)
        )
        spec = AttentionSpec(0.1, form, form, dropout=p)
        terms = Terms(rng=rt.tensor(np.array(rng, np.int64)))
        y = attention_forward(rt, q, k, v, spec=spec, terms=terms)
        grads = attention_backward(rt, v, q, k, v, y.out, y.stats, spec=spec, terms=terms)
        self.out, self.dv = (
            t if form == "bshd" else t.swapaxes(0, 1) for t in (cases.host(rt, y.out), cases.host(rt, grads.v))
        )

    @property
    def forward(self) -> Array:
        """What remains of the weights, times their number: [b, h, i, j]."""
        return self.out.transpose(0, 2, 1, 3) * self.n

    @property
    def backward(self) -> Array:
        return self.dv.transpose(0, 2, 3, 1) * self.n


@covering(p=[0.1, 0.25, 0.5, 0.9], form=["bshd", "sbhd"])
def test_dropout_mask(rt, p, form):
    """As many kept as p says, in each head and each column; scaled by 1 / (1 - p); the same in backward.

    cuDNN (9.19, Hopper) compares p with 8 bits, and draws rows two apart from shared words: half of an element's
    decision is that of the one two rows above (measured), so rates scatter twice as much.
    """
    cuda = rt.backend.name == "cuda"
    coarse, scatter = (1 / 256, 2) if cuda else (0, 1)
    d = Dropped(rt, p, RNG, form)
    kept = d.forward != 0
    np.testing.assert_allclose(d.forward[kept], 1 / (1 - p), rtol=2**-7)
    np.testing.assert_array_equal(d.backward != 0, kept)
    np.testing.assert_allclose(d.backward[kept], 1 / (1 - p), rtol=2**-7)
    for axes in ((0, 1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3)):
        count = np.prod([kept.shape[a] for a in axes])
        rate = kept.mean(axis=axes)
        bound = coarse + 5 * scatter * np.sqrt(p * (1 - p) / count)
        assert (np.abs(rate - (1 - p)) <= bound).all(), f"over {axes}: {rate}"


def test_dropout_draws(rt):
    """Equal for an equal (seed, offset), independent for another, and from head to head and row to row.

    (cuDNN's rows are not independent of one another, see above, nor its next offsets, which shift the mask.)
    """
    cuda = rt.backend.name == "cuda"
    first = Dropped(rt, 0.5, RNG).forward != 0
    np.testing.assert_array_equal(first, Dropped(rt, 0.5, RNG).forward != 0)
    others = [Dropped(rt, 0.5, rng).forward != 0 for rng in ((RNG[0] + 1, RNG[1]), (RNG[0], RNG[1] + 4))]
    others += [np.roll(first, 1, axis) for axis in range(4)]
    for other in others:  # of n^2 b h fair coins, half agree
        bound = (1 / 256 if cuda else 0) + 5 * (2 if cuda else 1) * 0.5 / np.sqrt(first.size)
        assert abs((first == other).mean() - 0.5) <= bound


# ------------------------------------------------------------------------------------------------------ the reference


@covering(
    p=[0.0, 0.5],
    case=[
        Case("fp32"),
        Case("fp32", mask="causal_bottom_right", lengths="cross", shared=2, dims=(40, 72)),
        Case("fp32", mask="padding", bias="111s", softmax="learnable", softcap=2.0, lengths="no keys"),
        Case("fp32", mask="window_both", bias="bhss", softmax="off-by-one", shared=4),
        Case("fp32", mask="arbitrary", bias="alibi_bh", softmax="learnable", lengths="tall"),
    ],
)
def test_reference_by_finite_differences(case, p):
    """The gradients are the slopes of sum(dy * out) along random directions."""
    made = cases.make(Runtime.cpu(), case)
    q, k, v = (t.astype(np.float64) for t in made.canonical())
    random = np.random.default_rng(3)
    problem = made.problem
    if p:
        problem = replace(problem, p=p, keep=random.random((*q.shape[:3], k.shape[2])) >= p)
    dy = made.q_place.canonical(made.dy).astype(np.float64)
    got = reference.backward(dy, q, k, v, problem)
    inputs = {"q": q, "k": k, "v": v, "bias": problem.bias, "sink": problem.sink}
    for name, x in inputs.items():
        if x is None:
            assert getattr(got, f"d{name}", None) is None
            continue
        direction = random.standard_normal(x.shape)
        totals = []
        for step in (1e-5, -1e-5):
            moved = inputs | {name: x.astype(np.float64) + step * direction}
            p2 = replace(problem, bias=moved["bias"], sink=moved["sink"])
            totals.append((dy * reference.forward(moved["q"], moved["k"], moved["v"], p2).out).sum())
        slope = (totals[0] - totals[1]) / 2e-5
        np.testing.assert_allclose((getattr(got, f"d{name}") * direction).sum(), slope, rtol=1e-6, atol=1e-5)


def test_the_pairs_are_all_there():
    """The matrix has every pair of values that tensors can have."""
    found = {(a, getattr(c, a), b, getattr(c, b)) for c in PAIRS for a in cases.FACTORS for b in cases.FACTORS}
    missing = [
        (a, x, b, y)
        for a, xs in cases.FACTORS.items()
        for b, ys in cases.FACTORS.items()
        if a < b
        for x in xs
        for y in ys
        if (a, x, b, y) not in found
    ]
    assert {(a, b) for a, _, b, _ in missing} == {
        ("lengths", "packing"),
        ("layout", "packing"),
        ("dims", "packing"),
        ("packing", "shared"),
    }, missing
    assert all(any(str(v).startswith(("qkv", "kv")) for v in (x, y)) for _, x, _, y in missing)
