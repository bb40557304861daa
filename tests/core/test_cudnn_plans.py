"""What cuDNN is asked for, without cuDNN: graphs and their sizes, which address goes where, what lies on disk."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from te_core import dtypes, libraries
from te_core.attention import AttentionSpec, Lengths
from te_core.backends.cuda import attention_graph, cudnn
from te_core.errors import LibraryError, UnsupportedError
from te_core.ops import attention_fp8 as fp8
from te_core.ops.attention import attention_backward, attention_forward
from te_core.ops.attention_terms import Terms
from tests.core import fake_cudnn
from tests.core.fake_cudnn import tensor
from tests.threads import together

BF16, F32, I32, I64 = dtypes.bfloat16, dtypes.float32, dtypes.int32, dtypes.int64
SPEC = AttentionSpec(0.125, "bshd", "bshd")
THD = replace(SPEC, q_format="thd", kv_format="thd", padded=True, max_q=256, max_kv=256)


def qkv(rt, b=2, sq=256, skv=256, h=8, g=8, d=64, dv=64, dtype=BF16):
    return tensor(rt, (b, sq, h, d), dtype), tensor(rt, (b, skv, g, d), dtype), tensor(rt, (b, skv, g, dv), dtype)


def packed(rt, t=600, h=8, g=8, d=64, batch=3, gaps=False):
    q, k, v = (tensor(rt, (t, n, d), BF16) for n in (h, g, g))
    cu = [tensor(rt, (batch + 1,), I32) for _ in range(4 if gaps else 2)]
    return q, k, v, Terms(Lengths(*cu))


def both(rt, q, k, v, spec, terms, **options):
    """Forward and backward; what they gave."""
    y = attention_forward(rt, q, k, v, spec=spec, terms=terms)
    dy = tensor(rt, y.out.shape, q.dtype)
    return (
        y,
        dy,
        attention_backward(
            rt, dy, q, k, v, y.out, y.stats, spec=replace(spec, max_logit=False), terms=terms, **options
        ),
    )


def where(run):
    """The graph's tensors by name: (dim, stride)."""
    return {
        attention_graph.OPERANDS[uid - 1]: (tuple(p.known["dim"]), tuple(p.known["stride"]))
        for uid, p in run.graph.parts.items()
    }


# ---------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize("raw", [True, False])
def test_every_address_reaches_its_tensor(fake, monkeypatch, raw):
    """With all that can be given at once, by the array of addresses and by the dictionary."""
    if not raw:
        monkeypatch.delattr(fake_cudnn.Built, "_execute_with_raw_ptrs")
    rt, calls = fake
    q, k, v = qkv(rt, g=2, dv=128)
    bias, sink, rng = tensor(rt, (1, 8, 256, 256), BF16), tensor(rt, (8,), F32), tensor(rt, (2,), I64)
    cu = tensor(rt, (3,), I32), tensor(rt, (3,), I32)
    spec = replace(SPEC, bias="post_scale_bias", softmax="learnable", dropout=0.1, padded=True)
    terms = Terms(Lengths(*cu), bias=bias, sink=sink, rng=rng)
    y, dy, grads = both(rt, q, k, v, spec, terms, bias_grad=True)
    forward, backward = calls.runs
    given = {"q": q, "k": k, "v": v, "out": y.out, "stats": y.stats, "bias": bias, "sink": sink, "seed": rng}
    lengths = {"len_q", "len_kv"}
    assert {n: forward.at[n] for n in given} == {n: t.ptr for n, t in given.items()}
    assert forward.at["offset"] == rng.ptr + 8 and set(forward.at) == {*given, "offset", *lengths}
    given |= {"dy": dy, "dq": grads.q, "dk": grads.k, "dv": grads.v, "dbias": grads.bias, "dsink": grads.sink}
    assert {n: backward.at[n] for n in given} == {n: t.ptr for n, t in given.items()}
    assert backward.at["offset"] == rng.ptr + 8 and set(backward.at) == {*given, "offset", *lengths}
    for run, launch in zip(calls.runs, calls.args("attention_lengths"), strict=True):
        assert launch[:4] == (cu[0].ptr, cu[1].ptr, 0, 0) and run.handle == 77
        assert (run.at["len_q"], run.at["len_kv"]) == launch[8:10]
    assert calls.zeroed == [grads.bias]


def test_the_graph_has_the_tensors_layouts(fake):
    """sbhd queries, keys and values that are parts of one projection, and gradients into such a one."""
    rt, calls = fake
    b, s, h, d = 2, 256, 4, 64
    row = 3 * h * d
    q, k, v = (tensor(rt, (b, s, h, d), BF16, (s * row, row, d, 1)) for _ in range(3))
    grads = tuple(tensor(rt, (b, s, h, d), BF16, (s * row, row, 3 * d, 1)) for _ in range(3))
    both(rt, q, k, v, SPEC, Terms(), grads=grads)
    for run in calls.runs:
        found = where(run)
        assert found["q"] == found["k"] == found["v"] == ((b, h, s, d), (s * row, d, row, 1))
        assert found["out"] == ((b, h, s, d), (s * h * d, d, h * d, 1))
        assert found["stats"] == ((b, h, s, 1), (h * s, s, 1, 1))
    assert found["dq"] == found["dk"] == found["dv"] == ((b, h, s, d), (s * row, 3 * d, row, 1))
    q = tensor(rt, (s, b, h, d), BF16)
    attention_forward(rt, q, *qkv(rt, b, s, s, h, h)[1:], spec=replace(SPEC, q_format="sbhd"))
    found = where(calls.runs[-1])
    assert found["q"][1] == found["out"][1] == (h * d, d, b * h * d, 1) and found["k"][1] == (s * h * d, d, h * d, 1)


def test_single_rows_have_strides_that_mean_something(fake):
    """torch leaves anything in the stride of a dimension of one; it neither refuses nor makes another graph."""
    rt, calls = fake
    for odd in (1, 7, 64, 999_999):
        q, k, v = (tensor(rt, (1, 256, 8, 64), BF16, (odd, 512, 64, 1)) for _ in range(3))
        attention_forward(rt, q, k, v, spec=SPEC)
    assert len(calls.graphs) == 1 and where(calls.runs[0])["q"][1] == (256 * 512, 64, 512, 1)


def test_bands_in_cudnns_words(fake):
    """cuDNN counts the diagonal in the left bound; equal corners are top-left."""
    rt, calls = fake
    for changes, size, wanted in (
        ({"right": 0}, {}, ("top left", None, 0)),
        ({"left": 5, "right": 3}, {}, ("top left", 6, 3)),
        ({"left": 0}, {}, ("top left", 1, None)),
        ({"bottom_right": True}, {"sq": 128}, (None, None, None)),
        ({"right": 0, "bottom_right": True}, {}, ("top left", None, 0)),
        ({"left": 5, "right": 0, "bottom_right": True}, {"sq": 128}, ("bottom right", 6, 0)),
    ):
        attention_forward(rt, *qkv(rt, **size), spec=replace(SPEC, **changes))
        options = calls.runs[-1].graph.options
        found = [
            options.get(n) for n in ("diagonal_alignment", "diagonal_band_left_bound", "diagonal_band_right_bound")
        ]
        assert tuple(found) == wanted, changes
        assert options["attn_scale"] == 0.125 and options["generate_stats"] is True


def test_off_by_one_has_a_sink_of_zeros(fake):
    """Its place is written in the launch of the lengths; a learnable one is the caller's."""
    rt, calls = fake
    both(rt, *qkv(rt), replace(SPEC, softmax="off-by-one"), Terms())
    for run, launch in zip(calls.runs, calls.args("attention_lengths"), strict=True):
        assert run.at["sink"] == launch[10] and launch[11] == 8 and "dsink" not in run.at
        assert "len_q" not in run.at and "use_padding_mask" not in run.graph.options
    assert not calls.args("attention_rows")


def test_largest_logits_take_the_statistics_place(fake):
    """cuDNN writes maxima there; sums go to scratch memory, and a kernel makes both results."""
    rt, calls = fake
    q, k, v = qkv(rt)
    y = attention_forward(rt, q, k, v, spec=replace(SPEC, max_logit=True, right=0))
    run, (launch,) = calls.runs[0], calls.args("attention_logits")
    assert run.graph.options["generate_stats"] is False and run.at["stats"] == y.stats.ptr
    assert launch[:4] == (y.stats.ptr, run.at["sum_exp"], y.max_logit.ptr, 2 * 256) and run.at["sum_exp"] != y.stats.ptr
    assert launch[4:7] == (8 * 256, 1, 256) and launch[-7:] == (2, 256, 256, -1, 0, 0, 0)
    y = attention_forward(rt, q, k, v, spec=replace(SPEC, max_logit=True, right=0), stats=False)
    run, launch = calls.runs[1], calls.args("attention_logits")[1]
    assert y.stats is None and run.at["stats"] == launch[0] and launch[0] != launch[1]


# ---------------------------------------------------------------------------------------------- lengths


def offsets_written(launch):
    """Where attention_lengths.cu writes each array of offsets, and of which side and stride."""
    base, pitch, strides = launch[12], launch[13], launch[14:]
    asked = [(number < 4, stride) for number, stride in enumerate(strides) if stride]
    return {base + 8 * pitch * number: side_and_stride for number, side_and_stride in enumerate(asked)}


@pytest.mark.parametrize("gaps", [False, True])
def test_packed_tensors_have_offsets_of_their_strides(fake, gaps):
    """Each in elements of its own token stride, in arrays that begin at 16 bytes and do not overlap."""
    rt, calls = fake
    h, g, d, t = 8, 2, 64, 600
    row = (h + 2 * g) * d
    q = tensor(rt, (t, h, d), BF16, (row, d, 1))
    k, v = (tensor(rt, (t, g, d), BF16, (row, d, 1)) for _ in range(2))
    terms = packed(rt, gaps=gaps)[3]
    with pytest.raises(UnsupportedError, match="token to the next"):  # whose kernel would write wrong gradients
        both(rt, q, k, v, THD, terms)
    calls.runs.clear()
    calls.launches.clear()
    grads = tuple(tensor(rt, t.shape, BF16, t.strides) for t in (q, k, v))
    both(rt, q, k, v, THD, terms, grads=grads)
    steps = dict.fromkeys(("q", "k", "v", "dq", "dk", "dv"), row) | {"out": h * d, "stats": h, "dy": h * d}
    for run, launch, names in zip(
        calls.runs, calls.args("attention_lengths"), (("q", "k", "v", "out", "stats"), tuple(steps)), strict=True
    ):
        written = offsets_written(launch)
        slots, pitch = launch[5], launch[13]
        assert slots == 8 and launch[4] == 3 and pitch >= slots + 1 and all(at % 16 == 0 for at in written)
        for name in names:
            queries = name in ("q", "out", "stats", "dy", "dq")
            assert written[run.at[f"{name}_at"]] == (queries, steps[name]), name
        assert launch[:4] == tuple(0 if c is None else c.ptr for c in terms.lengths)
        assert launch[8] + 4 * slots <= launch[9] and launch[9] + 4 * slots <= launch[10] <= launch[12]
        found = where(run)
        assert found["q"] == ((8, h, 256, d), (256 * row, d, row, 1)) and found["stats"][0] == (8, h, 256, 1)
        assert found["q_at"][0] == (9, 1, 1, 1) and found["len_q"][0] == (8, 1, 1, 1)
    assert run.graph.options["max_total_seq_len_q"] == run.graph.options["max_total_seq_len_kv"] == 1024


def test_rows_are_told_their_places(fake):
    """attention_rows.cu gets strides in 16-byte pieces, of queries and of keys."""
    rt, calls = fake
    q, k, v, terms = packed(rt, h=8, g=2)
    y, _, grads = both(rt, q, k, v, replace(THD, right=0, bottom_right=True), terms)
    forward, backward = calls.args("attention_rows")
    fixed = (3, 256, 256, -1, 0, 1, 1, 1)
    assert forward[4:14] == (*fixed, 600, 0) and backward[4:14] == (*fixed, 600, 600)
    assert forward[14:18] == (y.out.ptr, 0, 64, 8) and forward[-4:] == (y.stats.ptr, 0, 8, 1)
    assert backward[14:26] == (grads.q.ptr, 0, 64, 8, grads.k.ptr, 0, 16, 8, grads.v.ptr, 0, 16, 8)
    assert backward[26:31] == (8, 2, 8, 8, 8) and backward[31] == 0


def test_two_hundred_packed_batches_make_few_graphs(fake):
    """Sequences and the longest length are rounded up, so another batch is seldom another graph."""
    rt, calls = fake
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.randint(1, 512) for _ in range(draw.randint(1, 32))]
        longest = -(-max(lengths) // 64) * 64
        q, k, v, terms = packed(rt, t=sum(lengths), batch=len(lengths))
        attention_forward(rt, q, k, v, spec=replace(THD, max_q=longest, max_kv=longest), terms=terms)
    assert rt.plans.builds > 100 and len(calls.graphs) == cudnn.COUNTS.built <= 12


def test_a_bias_fixes_the_sizes(fake):
    """A packed graph with a bias has the bias's sizes: it cannot be read as another shape."""
    rt, calls = fake
    q, k, v, terms = packed(rt)
    spec = replace(THD, max_q=200, max_kv=150, bias="post_scale_bias")
    attention_forward(rt, q, k, v, spec=spec, terms=terms._replace(bias=tensor(rt, (3, 8, 200, 150), BF16)))
    found = where(calls.runs[0])
    assert found["q"][0] == (3, 8, 200, 64) and found["k"][0] == (3, 8, 150, 64)
    assert found["bias"] == ((3, 8, 200, 150), (8 * 200 * 150, 200 * 150, 150, 1))


@pytest.mark.parametrize(("sq", "skv", "full"), [(256, 256, False), (256, 200, True), (100, 128, True), (1, 128, True)])
def test_backward_of_broken_tiles_gets_lengths(fake, sq, skv, full):
    """cuDNN scores the keys that its last tile lacks as 0; full lengths make it mask them."""
    rt, calls = fake
    both(rt, *qkv(rt, sq=sq, skv=skv), SPEC, Terms())
    forward, backward = calls.runs
    assert "len_q" not in forward.at and ("len_q" in backward.at) == full
    launches = calls.args("attention_lengths")
    assert [launch[:8] for launch in launches] == [(0, 0, 0, 0, 2, 2, sq, skv)] * full


@pytest.mark.parametrize("changes", [{"right": 0, "bottom_right": True}, {"left": 9, "right": 0}])
def test_queries_without_keys_get_lengths_and_zeros(fake, changes):
    rt, calls = fake
    attention_forward(rt, *qkv(rt, sq=256, skv=128), spec=replace(SPEC, **changes))
    assert calls.runs[0].graph.options["use_padding_mask"] is True
    (rows,) = calls.args("attention_rows")
    assert rows[4:12] == (2, 256, 128, changes.get("left", -1), 0, int("bottom_right" in changes), 0, 0)


def test_nothing_to_attend_to(fake):
    """No keys: zeros by the kernel of rows, and no graph."""
    rt, calls = fake
    y, _, grads = both(rt, *qkv(rt, skv=0), SPEC, Terms())
    assert not calls.runs and not calls.graphs
    forward, backward = calls.args("attention_rows")
    assert forward[14] == y.out.ptr and backward[14] == grads.q.ptr and forward[5:7] == (256, 0)
    y = attention_forward(rt, *qkv(rt, skv=0), spec=replace(SPEC, max_logit=True))
    assert calls.args("attention_logits")[0][:4] == (0, 0, y.max_logit.ptr, 0) and not calls.runs


# ---------------------------------------------------------------------------------------------- what is added


def test_alibi_of_cudnn_or_of_ours(fake):
    """cuDNN's own slopes with a causal diagonal; anything else as a float32 bias, which may carry the band."""
    rt, calls = fake
    slopes = tensor(rt, (8,), F32)
    own = replace(SPEC, bias="alibi", default_slopes=True, right=0)

    def ask(spec, slopes=slopes, **size):
        calls.launches.clear()
        attention_forward(rt, *qkv(rt, **size), spec=spec, terms=Terms(slopes=slopes))
        return calls.runs[-1], calls.args("attention_bias")

    run, launches = ask(own)
    assert run.graph.options["use_alibi_mask"] is True and "bias" not in run.at and not launches
    for spec, size, bound in (
        (replace(own, default_slopes=False), {}, 0),
        (replace(own, right=-1), {}, None),
        (replace(own, left=4), {}, 0),
        (replace(own, bottom_right=True), {"sq": 128}, None),
    ):
        run, (launch,) = ask(spec, **size)
        sq = size.get("sq", 256)
        assert launch[:4] == (slopes.ptr, run.at["bias"], 0, 256) and launch[6:9] == (2, sq, 256)
        assert where(run)["bias"][0] == (1, 8, sq, 256)
        assert run.graph.options.get("diagonal_band_right_bound") == bound
        assert "use_alibi_mask" not in run.graph.options
    each = tensor(rt, (2, 8), F32)
    run, (launch,) = ask(replace(own, default_slopes=False), slopes=each)
    assert launch[2] == 1 and where(run)["bias"][0] == (2, 8, 256, 256)


def test_deterministic_and_gradients_are_asked_for(fake):
    rt, calls = fake
    bias = tensor(rt, (1, 8, 256, 256), BF16)
    spec = replace(SPEC, bias="post_scale_bias", deterministic=True)
    both(rt, *qkv(rt), spec, Terms(bias=bias), bias_grad=False)
    options = calls.runs[1].graph.options
    assert options["use_deterministic_algorithm"] is True and "dBias" not in options and not calls.zeroed


def test_paged_caches(fake):
    """Both tables are the caller's; the graph knows blocks, not sequences."""
    rt, calls = fake
    q = tensor(rt, (3, 4, 8, 64), BF16)
    k, v = (tensor(rt, (12, 64, 2, 64), BF16) for _ in range(2))
    pages = tensor(rt, (3, 4), I32)
    terms = Terms(Lengths(tensor(rt, (4,), I32), tensor(rt, (4,), I32)), pages=pages)
    attention_forward(rt, q, k, v, spec=replace(SPEC, padded=True), terms=terms, stats=False)
    run = calls.runs[0]
    assert run.at["k_pages"] == run.at["v_pages"] == pages.ptr and "stats" not in run.at
    assert run.graph.options["paged_attention_max_seq_len_kv"] == 256
    assert where(run)["k"] == ((12, 2, 64, 64), (64 * 2 * 64, 64, 2 * 64, 1))
    assert where(run)["k_pages"][0] == (3, 1, 4, 1)


# ---------------------------------------------------------------------------------------------- FP8


def test_fp8_scales_and_maxima(fake):
    """Each scale at its tensor; the maxima go to scratch memory, from where the given are raised."""
    rt, calls = fake
    q, k, v = qkv(rt, d=128, dv=128, dtype=dtypes.float8_e4m3)
    one = iter([tensor(rt, (1,), F32) for _ in range(40)])
    s = fp8.Scaled(next(one), next(one), next(one))
    out = fp8.Scaled(next(one), next(one), None)
    scales = fp8.ForwardScales(next(one), next(one), next(one), s, out)
    y = fp8.attention_fp8_forward(rt, q, k, v, spec=replace(SPEC, left=7, right=0), scales=scales)
    run, places = calls.runs[0], calls.zeroed[0].ptr
    wanted = {
        "q_inverse": scales.q,
        "k_inverse": scales.k,
        "v_inverse": scales.v,
        "s_scale": s.scale,
        "s_inverse": s.inverse,
        "out_scale": out.scale,
        "out": y.out,
        "stats": y.stats,
    }
    assert {n: run.at[n] for n in wanted} == {n: t.ptr for n, t in wanted.items()}
    assert (run.at["s_amax"], run.at["out_amax"]) == (places, places + 16)
    assert calls.args("attention_amax") == [(places, s.amax.ptr, 0, 0, 0, 1.0)]
    assert (run.graph.options["left_bound"], run.graph.options["right_bound"]) == (8, 0)
    dq, dk, dv, dp = (fp8.Scaled(next(one), next(one), next(one)) for _ in range(4))
    back = fp8.BackwardScales(
        next(one), next(one), next(one), next(one), next(one), fp8.Scaled(next(one), next(one)), dp, dq, dk, dv
    )
    dy = tensor(rt, y.out.shape, dtypes.float8_e5m2)
    grads = fp8.attention_fp8_backward(rt, dy, q, k, v, y.out, y.stats, spec=SPEC, scales=back)
    run = calls.runs[1]
    wanted = {
        "q_inverse": back.q,
        "k_inverse": back.k,
        "v_inverse": back.v,
        "out_inverse": back.out,
        "dy_inverse": back.dy,
        "s_scale": back.s.scale,
        "s_inverse": back.s.inverse,
        "dp_scale": dp.scale,
        "dp_inverse": dp.inverse,
        "dq_scale": dq.scale,
        "dk_scale": dk.scale,
        "dv_scale": dv.scale,
        "dy": dy,
        "dq": grads[0],
        "dk": grads[1],
        "dv": grads[2],
    }
    assert {n: run.at[n] for n in wanted} == {n: t.ptr for n, t in wanted.items()}
    order = ["dq_amax", "dk_amax", "dv_amax", "dp_amax"]
    assert [run.at[n] for n in order] == [places + 16 * i for i in range(4)] and len(calls.zeroed) == 1
    assert calls.args("attention_amax")[1] == (places, *(x.amax.ptr for x in (dq, dk, dv, dp)), 0.0)
    by_name = {f"descale_{theirs}": f"{ours}_inverse" for theirs, ours in (("q", "q"), ("o", "out"), ("s", "s"))}
    by_name |= {"descale_dO": "dy_inverse", "descale_dP": "dp_inverse", "scale_s": "s_scale", "dO": "dy", "o": "out"}
    by_name |= {f"scale_d{name}": f"d{name.lower()}_scale" for name in "QKVP"}
    for option, name in by_name.items():
        assert run.graph.options[option].known["name"] == name
    assert run.graph.parts[attention_graph.UIDS["dq"]].known["data_type"] == "FP8_E5M2"
    assert run.graph.parts[attention_graph.UIDS["out"]].known["data_type"] == "FP8_E4M3"


# ---------------------------------------------------------------------------------------------- plans and graphs


def test_a_plan_is_found_again(fake):
    rt, calls = fake
    q, k, v = qkv(rt)
    for _ in range(3):
        attention_forward(rt, q, k, v, spec=SPEC)
    assert rt.plans.builds == 1 and len(calls.graphs) == 1 and len(calls.runs) == 3


def test_other_plans_share_a_graph(fake):
    """Token counts and what never enters a graph make other plans, not other graphs."""
    rt, calls = fake
    for t, batch in ((600, 3), (700, 4), (512, 8)):
        q, k, v, terms = packed(rt, t=t, batch=batch)
        both(rt, q, k, v, THD, terms)
    assert rt.plans.builds == 6 and len(calls.graphs) == 2
    attention_forward(rt, *qkv(rt), spec=replace(SPEC, max_q=7))
    attention_forward(rt, *qkv(rt), spec=replace(SPEC, max_q=9, deterministic=True))
    assert rt.plans.builds == 8 and len(calls.graphs) == 3


@pytest.mark.parametrize(
    "changes",
    [{"scale": 0.2}, {"right": 0}, {"left": 3}, {"dropout": 0.1}, {"softcap": 9.0}, {"softmax": "off-by-one"}],
)
def test_what_a_graph_depends_on(fake, changes):
    rt, calls = fake
    rng = tensor(rt, (2,), I64)
    for spec in (SPEC, replace(SPEC, **changes)):
        attention_forward(rt, *qkv(rt), spec=spec, terms=Terms(rng=rng if spec.dropout else None))
    assert len(calls.graphs) == 2


def test_threads_build_a_graph_once(fake, monkeypatch):
    rt, calls = fake
    spec = attention_graph.GraphSpec  # the class only: any hashable will do as a spec
    build = lambda: cudnn.graph(rt, ("one", spec), ("q",), lambda made: made.validate)  # noqa: E731
    found = together(*[build] * 8)
    assert len(set(map(id, found))) == 1 and cudnn.COUNTS.built == 1 and len(calls.graphs) == 1


def test_big_workspaces_go_back(fake, monkeypatch):
    """A small one is the runtime's; a big one is asked of the allocator in each call."""
    rt, calls = fake
    q, k, v = qkv(rt)
    for needs, kept in ((cudnn.KEPT_WORKSPACE, True), (cudnn.KEPT_WORKSPACE + 1, False)):
        monkeypatch.setattr(fake_cudnn.Built, "needs", needs)
        rt.device.of(cudnn.Graphs).known.clear()
        rt.plans._plans.clear()
        attention_forward(rt, q, k, v, spec=SPEC)
        before = len(rt.allocator.asked)
        attention_forward(rt, q, k, v, spec=SPEC)
        asked = rt.allocator.asked[before:]
        assert (needs in asked) != kept and (calls.runs[-1].workspace == calls.runs[-2].workspace) == kept


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"softcap": 9.0, "left": 3, "right": 0}, "both"),
        ({"left": 3, "max_logit": True, "softmax": "off-by-one"}, "sink"),
    ],
)
def test_refusals_carry_the_rules_reason(fake, changes, words):
    rt, calls = fake
    with pytest.raises(UnsupportedError, match=words):
        attention_forward(rt, *qkv(rt), spec=replace(SPEC, **changes))
    assert not calls.graphs and not rt.plans.builds


def test_odd_addresses_are_refused(fake):
    rt, calls = fake
    q, k, v = qkv(rt)
    q.ptr += 2
    with pytest.raises(UnsupportedError, match="16 bytes"):
        attention_forward(rt, q, k, v, spec=SPEC)


def test_what_cudnn_refuses_says_so(fake, monkeypatch):
    rt, _ = fake

    def refuse(self):
        raise RuntimeError("[cudnn_frontend] Error: head_dim is odd\nand more")

    monkeypatch.setattr(fake_cudnn.Built, "check_support", refuse, raising=False)
    with pytest.raises(UnsupportedError, match="cuDNN 9.19.0 refuses: head_dim is odd"):
        attention_forward(rt, *qkv(rt), spec=SPEC)
    assert cudnn.COUNTS == cudnn.Counts()


# ---------------------------------------------------------------------------------------------- the disk


def again(rt):
    """A call as the first of another process."""
    rt.device.of(cudnn.Graphs).known.clear()
    rt.plans._plans.clear()
    attention_forward(rt, *qkv(rt), spec=SPEC)
    return cudnn.COUNTS.built, cudnn.COUNTS.loaded


def test_another_process_reads_the_plan(fake, tmp_path):
    rt, calls = fake
    assert again(rt) == (1, 0) and again(rt) == (1, 1)
    assert len(list((tmp_path / "attention").iterdir())) == 1
    assert calls.runs[0].at.keys() == calls.runs[1].at.keys()


@pytest.mark.parametrize("damage", ["torn", "empty", "foreign", "unsupported"])
def test_bad_files_are_written_anew(fake, tmp_path, damage):
    rt, calls = fake
    again(rt)
    (place,) = (tmp_path / "attention").iterdir()
    if damage in ("foreign", "unsupported"):
        refused = cudnn.frontend().module.cudnnGraphNotSupportedError
        calls.refuse_stored = (RuntimeError if damage == "foreign" else refused)("a plan of another version")
    else:
        place.write_bytes(b"" if damage == "empty" else place.read_bytes()[:-3])
    assert again(rt) == (2, 0)
    calls.refuse_stored = None
    assert again(rt) == (2, 1)


def test_what_a_stored_plan_depends_on(fake):
    target = cudnn.Target("NVIDIA H200", 132, 1)
    keys = {
        cudnn.disk_key(target, "a"),
        cudnn.disk_key(target, "b"),
        cudnn.disk_key(replace(target, name="H100"), "a"),
        cudnn.disk_key(replace(target, multiprocessors=114), "a"),
    }
    fe = cudnn._frontend
    for changed in (replace(fe, version=(9, 20, 0)), replace(fe, frontend="1.33.0")):
        cudnn._frontend = changed
        keys.add(cudnn.disk_key(target, "a"))
    cudnn._frontend = fe
    assert len(keys) == 6 and cudnn.disk_key(replace(target, handle=2), "a") in keys
    assert b"_Maker" in cudnn._source(attention_graph.GraphSpec.__module__) and cudnn._source("builtins") == b""


def test_a_read_only_folder_is_no_error(fake, monkeypatch, tmp_path):
    rt, _ = fake
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(blocked))
    assert again(rt) == (1, 0) and again(rt) == (2, 0)


# ---------------------------------------------------------------------------------------------- the frontend


def imported(monkeypatch, number=91900):
    """The frontend over a module that is already there."""
    fake = fake_cudnn.frontend(fake_cudnn.Calls()).module
    fake.backend_version, fake.__version__ = lambda: number, "1.32.0"
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(cudnn, "_frontend", None)
    monkeypatch.setattr(libraries, "version", lambda name: (9, 19, 0))
    monkeypatch.setattr(libraries, "file", lambda name: f"/somewhere/{name}/lib.so")
    return cudnn.frontend()


def test_the_frontend_is_shown_our_library(monkeypatch):
    """The folder while it is imported, and afterwards what was there; the CUDA runtime for good."""
    seen = []
    monkeypatch.setenv("LD_LIBRARY_PATH", "/old")
    monkeypatch.setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", "noted, so that what the import sets is undone")
    monkeypatch.delenv("CUDNN_FRONTEND_CUDART_LIB_NAME")
    with cudnn._shown_folder(cudnn.Path("/somewhere/cudnn")):
        seen.append(cudnn.os.environ["LD_LIBRARY_PATH"])
    assert seen == ["/somewhere/cudnn"] and cudnn.os.environ["LD_LIBRARY_PATH"] == "/old"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert imported(monkeypatch).version == (9, 19, 0)
    assert "LD_LIBRARY_PATH" not in cudnn.os.environ
    assert cudnn.os.environ["CUDNN_FRONTEND_CUDART_LIB_NAME"] == "/somewhere/cudart/lib.so"


def test_two_cudnns_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", "mine")
    with pytest.raises(LibraryError, match="one cuDNN"):
        imported(monkeypatch, 91400)


def test_an_old_frontend_is_an_error(monkeypatch):
    monkeypatch.setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", "mine")
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(_pybind_module=SimpleNamespace()))
    monkeypatch.setattr(cudnn, "_frontend", None)
    monkeypatch.setattr(libraries, "version", lambda name: (9, 19, 0))
    monkeypatch.setattr(libraries, "file", lambda name: f"/somewhere/{name}/lib.so")
    with pytest.raises(LibraryError, match=r"1\.28 or newer"):
        cudnn.frontend()
