"""Attention of sequences that lie cut over ranks, in one process, against float64 of the whole sequences."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core.attention import Sizes
from te_core.errors import ArgumentError
from te_core.layers import attention
from te_core.layers.attention import AttentionLayerSpec, AttentionNeeds
from te_core.layers.context.schedule import Load, schedule
from te_core.layers.context.sides import attentions
from te_core.ops import raw
from te_core.ops.attention_terms import NOTHING, sizes_of
from te_core.tape import taped
from te_core.tape.taped import Taped
from tests.core.attention_cases import NUMPY
from tests.core.context_cases import LENGTHS, RT, Batch, Case, LateCommunicator, Made, Ranks, Side, run, step
from tests.covering import covering
from tests.recordings import tapes
from tests.tolerances import DB, snr_db

Array = np.ndarray[Any, Any]

SIZES = {
    "p2p": [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1)],
    "all_gather": [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1)],
    "a2a": [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1)],
    "a2a+p2p": [(4, 2), (2, 1), (2, 2), (8, 2), (8, 4), (6, 3)],
}
CHOICES = [(mode, *sizes) for mode, listed in SIZES.items() for sizes in listed]
#: One of each mode, for what does not depend on the number of ranks.
MODES = [("p2p", 3, 1), ("all_gather", 3, 1), ("a2a", 2, 1), ("a2a+p2p", 4, 2)]
LAYOUTS = [
    (form, mask)
    for form in ("sbhd", "bshd", "thd")
    for mask in ("no_mask", "causal", "padding", "padding_causal")
    if form != "thd" or "padding" in mask
]


def check(made: Made, wanted: Made, batch: Batch) -> None:
    """All results, and zeros where there is no token."""
    bound = DB[batch.case.dtype]
    for name, side in (("out", batch.q_side), ("dq", batch.q_side), ("dk", batch.kv_side), ("dv", batch.kv_side)):
        found, right = getattr(made, name), getattr(wanted, name)
        for t, s in zip(found, side.sequences, strict=True):
            assert not t[s.length :].astype(bool).any(), f"{name} of padding"
        assert snr_db(flat(found), flat(right)) > bound, name
    for name in ("dsink", "max_logit", "dbias"):
        found, right = getattr(made, name), getattr(wanted, name)
        if found is not None:
            assert snr_db(found, right) > bound, name


def flat(parts: list[Array]) -> Array:
    return np.concatenate([t.reshape(-1).astype(np.float64) for t in parts])


def judge(case: Case) -> None:
    batch = Batch(case)
    made, _ = run(case, batch)
    check(made, batch.reference(), batch)


@covering(turns=2, choice=CHOICES, layout=LAYOUTS, shared=[1, 2, 4], lengths=[*LENGTHS])
def test_ranks_give_what_one_gives(choice: Any, layout: Any, shared: int, lengths: str) -> None:
    """In padding stands NaN; some ranks have no valid token."""
    mode, size, inner = choice
    form, mask = layout
    judge(Case(mode=mode, size=size, inner=inner, form=form, mask=mask, shared=shared, lengths=lengths))


@covering(
    choice=CHOICES,
    terms=[
        (softmax, ("separate", "kv", "qkv")[n // 3], n % 2 == 0, n % 3 == 0)
        for n, softmax in enumerate(["learnable", "off-by-one", "vanilla"] * 3)
    ],
    layout=[layout for layout in LAYOUTS if layout[0] != "bshd" or layout[1] == "causal"],
)
def test_sinks_packings_and_what_is_computed_again(choice: Any, terms: Any, layout: Any) -> None:
    """Sinks are never zero. The gradient of a sink is the sum of the ranks' summands."""
    (mode, size, inner), (form, mask), (softmax, packing, recompute, max_logit) = choice, layout, terms
    case = Case(mode=mode, size=size, inner=inner, form=form, mask=mask, softmax=softmax, packing=packing)
    judge(replace(case, recompute=recompute, max_logit=max_logit, lengths="odd"))


@covering(
    choice=[c for c in CHOICES if c[0] in ("all_gather", "a2a")],
    window=[(4, 0), (1, 0), (13, 0), (100, 0)],
    layout=[layout for layout in LAYOUTS if "causal" in layout[1]],
    lengths=[*LENGTHS],
)
def test_windows(choice: Any, window: tuple[int, int], layout: Any, lengths: str) -> None:
    (mode, size, inner), (form, mask) = choice, layout
    judge(Case(mode=mode, size=size, inner=inner, form=form, mask=mask, window=window, lengths=lengths))


@covering(
    choice=[c for c in CHOICES if c[0] in ("all_gather", "a2a")],
    window=[(3, 5), (4, -1), (-1, 6), (0, 2)],
    form=["bshd", "sbhd"],
)
def test_two_sided_windows(choice: Any, window: tuple[int, int], form: str) -> None:
    mode, size, inner = choice
    judge(Case(mode=mode, size=size, inner=inner, form=form, mask="no_mask", window=window))


@covering(choice=CHOICES, layout=[layout for layout in LAYOUTS if "causal" not in layout[1]], lengths=["odd", "few"])
def test_keys_of_other_lengths(choice: Any, layout: Any, lengths: str) -> None:
    (mode, size, inner), (form, mask) = choice, layout
    judge(Case(mode=mode, size=size, inner=inner, form=form, mask=mask, cross=True, lengths=lengths))


@covering(
    choice=[("a2a", 2, 1), ("a2a", 4, 1), ("a2a", 8, 1), ("a2a+p2p", 8, 4), ("a2a+p2p", 6, 3)],
    groups=[1, 2],
    layout=LAYOUTS,
    stored=[("separate", "fp32"), ("kv", "bf16"), ("qkv", "fp32")],
)
def test_more_ranks_than_groups(choice: Any, groups: int, layout: Any, stored: Any) -> None:
    """A group goes to several ranks, and the gradients of its keys and values are the sum of theirs."""
    (mode, size, inner), (form, mask), (packing, dtype) = choice, layout, stored
    if (inner if mode == "a2a+p2p" else size) % groups:
        groups = 1
    case = Case(mode=mode, size=size, inner=inner, form=form, mask=mask, few_groups=groups, packing=packing)
    judge(replace(case, shared=1, lengths="odd", dtype=dtype))


@covering(
    size=[2, 3, 4, 8],
    layout=[layout for layout in LAYOUTS if "padding" not in layout[1]],
    bias=[(1, 1), (2, 1), (1, 4), (2, 4)],
    options=[{}, {"recompute": True}, {"cross": True}, {"softmax": "learnable"}],
)
def test_a_bias_goes_round_the_ring(size: int, layout: Any, bias: Any, options: Any) -> None:
    """Of a rank's queries and all keys; its gradient, too, is zero where nothing is seen."""
    form, mask = layout
    options = {} if "cross" in options and mask == "causal" else options
    case = Case(size=size, form=form, mask=mask, bias="post_scale_bias", bias_shape=bias, **options)
    judge(case)


@covering(choice=MODES, layout=LAYOUTS, options=[{"softcap": 2.0}, {"value_width": 16}, {"value_width": 4}])
def test_what_the_attention_inside_has(choice: Any, layout: Any, options: Any) -> None:
    """Scores that are capped, and values of another width."""
    (mode, size, inner), (form, mask) = choice, layout
    judge(Case(mode=mode, size=size, inner=inner, form=form, mask=mask, lengths="odd", **options))


@pytest.mark.parametrize("choice", [("a2a", 2, 1), ("a2a+p2p", 4, 2)])
def test_interleaved_heads_go_to_ranks_by_groups(choice: Any) -> None:
    """Without ranks their groups count as batch where no strides lead from one to the next; k and v would go to all."""
    mode, size, inner = choice
    case = Case(mode=mode, size=size, inner=inner, packing="qkv")
    batch = Batch(case)
    made, ranks = run(case, batch)
    check(made, batch.reference(), batch)
    forward, backward = table(case)
    assert sorted(ranks.log(0)) == sorted([*forward, *backward])


@pytest.mark.parametrize("size", [2, 4])
def test_slopes_of_a_ranks_heads(size: int) -> None:
    judge(Case(mode="a2a", size=size, bias="alibi", shared=2))


def test_exchanged_heads_give_the_bits_of_one_device() -> None:
    for size in (2, 4):
        for form, mask in LAYOUTS:
            case = Case(mode="a2a", size=size, form=form, mask=mask, dtype="bf16", lengths="odd")
            batch = Batch(case)
            made, alone = run(case, batch)[0], batch.alone()
            for found, wanted in zip(made[:4], alone[:4], strict=True):
                assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


# ---------------------------------------------------------------------------------------------- properties


def errors(case: Case, alone: bool) -> list[float]:
    """Of the output and the gradients, the root-mean-square error against float64."""
    batch = Batch(case)
    made, wanted = batch.alone() if alone else run(case, batch)[0], batch.reference()
    return [float(np.sqrt(np.square(flat(a) - flat(b)).mean())) for a, b in zip(made[:4], wanted[:4], strict=True)]


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("mode", ["p2p", "all_gather", "a2a"])
def test_the_error_does_not_depend_on_the_ranks(mode: str, mask: str) -> None:
    """In bf16: no more than twice that of one device."""
    for size in (2, 4, 8):
        case = Case(mode=mode, size=size, mask=mask, dtype="bf16", width=32, shared=1)
        case = replace(case, tokens=64)
        for found, one in zip(errors(case, False), errors(case, True), strict=True):
            assert found <= 2 * one, (size, found, one)


@pytest.mark.parametrize("number", [*range(10), *(pytest.param(i, marks=pytest.mark.full) for i in range(10, 200))])
def test_random_packed_sets(number: int) -> None:
    """Lengths of 0 to 300, padded as they happen to be."""
    draw = np.random.default_rng(number)
    mode, size, inner = CHOICES[draw.integers(len(CHOICES))]
    lengths = [int(n) for n in draw.integers(0, draw.choice([8, 60, 301]), draw.integers(1, 6))]
    chunks = [max(-(-n // (2 * size)), 1) + int(draw.integers(0, 2)) for n in lengths]
    mask = str(draw.choice(["padding", "padding_causal"]))
    case = Case(mode=mode, size=size, inner=inner, form="thd", mask=mask, seed=number, shared=1)
    judge(replace(case, packed=tuple(zip(chunks, lengths, strict=True))))


# ---------------------------------------------------------------------------------------------- what travels


def table(case: Case) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What each rank hands over forward and backward, as the documentation has it."""
    context, width, item = case.context, case.width, np.dtype(NUMPY[case.dtype]).itemsize
    tokens = [sum(2 * s.chunk for s in case.sequences(side)) for side in ("q", "kv")]
    q, kv = tokens[0] * case.heads * width * item, 2 * tokens[1] * case.groups * width * item
    grads = kv if context.ring == 2 else kv // item * 4
    inside = [("all_to_all", q + kv), ("all_to_all", q)], [("all_to_all", q), ("all_to_all", q + kv)]
    forward, backward = inside if context.heads > 1 else ([], [])
    if case.mode == "all_gather":
        return [("all_gather", kv)], [("all_gather", kv), ("reduce_scatter", context.ring * grads)]
    hops = context.ring - 1
    around = [("send_recv", kv)] * hops
    return [*forward, *around], [*backward, *around, *[("send_recv", grads)] * hops]


@pytest.fixture
def at_once() -> Iterator[None]:
    with tapes("first"):
        yield


@covering(
    choice=[c for c in CHOICES if c[1] > 1],
    layout=LAYOUTS,
    options=[
        {"dtype": "bf16"},
        {"max_logit": True},
        {"recompute": True, "dtype": "bf16"},
        {"softmax": "learnable", "dtype": "fp16"},
        {"packing": "qkv"},
    ],
)
def test_operations_and_bytes_are_those_of_the_table(choice: Any, layout: Any, options: Any, at_once: None) -> None:
    """Interpreted and replayed, which gives the same bits."""
    (mode, size, inner), (form, mask) = choice, layout
    case = Case(mode=mode, size=size, inner=inner, form=form, mask=mask, lengths="odd", **options)
    batch, spec = Batch(case), case.spec(case.context)
    functions = [
        (Taped("forward", attention.forward, spec), Taped("backward", attention.backward, spec)) for _ in range(size)
    ]
    ranks, before, results = Ranks(case), taped.COUNTS.replayed, []
    for turn in range(3):
        results.append(batch.together(ranks.run(lambda rank, comm: step(case, batch, rank, comm, functions[rank]))))
        forward, backward = table(case)
        wanted = [*forward, *backward]
        if case.recompute:
            wanted += [one for one in forward if one[0] != "all_to_all"]  # heads lie exchanged already
        if case.max_logit:
            wanted += [("all_reduce", 4 * case.heads)] * sum(n > 1 for n in (case.context.heads, case.context.ring))
        for rank in range(size):
            assert sorted(ranks.log(rank)) == sorted(wanted * (turn + 1))
    assert taped.COUNTS.replayed - before == 5 * size  # the ranks meet in the first forward
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            assert (a is None) == (b is None)
            assert a is None or all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_schedule_tells_what_is_handed_over() -> None:
    """The list that a module's explanation prints, in order."""
    for mode, size, inner in MODES:
        case = Case(mode=mode, size=size, inner=inner)
        _, ranks = run(case)
        load = Load(*(2 * 2 * 3 for _ in range(2)), case.heads, case.groups, case.width, case.width, 4)
        made = schedule(case.context, 0, case.core)
        found = [(t.operation, t.nbytes) for back in (False, True) for t in made.transfers(load, back)]
        assert sorted(found) == sorted(ranks.log(0)), mode
        if inner == 1:
            assert found == ranks.log(0), mode


@covering(choice=[c for c in CHOICES if c[1] in (2, 3, 4)], layout=LAYOUTS, when=["first", "never"])
def test_nothing_is_read_or_written_while_it_is_on_its_way(choice: Any, layout: Any, when: str) -> None:
    """What comes is there once it was waited for, not before; what goes is neither changed nor let go of until then."""
    (mode, size, inner), (form, mask) = choice, layout
    case = Case(mode=mode, size=size, inner=inner, form=form, mask=mask, lengths="odd")
    batch, spec = Batch(case), case.spec(case.context)
    functions = [
        (Taped("forward", attention.forward, spec), Taped("backward", attention.backward, spec)) for _ in range(size)
    ]
    ranks = Ranks(case, LateCommunicator)
    with tapes(when):
        for _ in range(2):
            made = batch.together(ranks.run(lambda rank, comm: step(case, batch, rank, comm, functions[rank])))
            check(made, batch.reference(), batch)


@pytest.mark.parametrize("mode", ["p2p", "all_gather"])
def test_a_transfer_begins_before_the_attention_beside_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is waited for behind it."""
    events: dict[int, list[str]] = {}
    ranks_of: dict[int, int] = {}

    def note(what: str) -> None:
        events.setdefault(ranks_of[threading.get_ident()], []).append(what)

    for name in ("attention_forward", "attention_backward"):
        plain = getattr(raw, name)
        monkeypatch.setattr(raw, name, lambda *a, plain=plain, **o: (note("attend"), plain(*a, **o))[1])
    case = Case(mode=mode, size=3)
    batch = Batch(case)
    ranks = Ranks(case, lambda of, rank: LateCommunicator(of, rank, note))

    def work(rank: int, comm: Any) -> dict[str, Any]:
        ranks_of[threading.get_ident()] = rank
        return step(case, batch, rank, comm)

    ranks.run(work)
    kv, grads = ["begin send_recv", "attend", "wait send_recv"], ["begin send_recv"]
    forward = [*kv, *kv, "attend"]
    backward = [*kv, "begin send_recv", "attend", *grads, "wait send_recv", "attend", "wait send_recv", *grads]
    if mode == "p2p":
        for rank in range(3):
            assert events[rank] == [*forward, *backward, "wait send_recv"]
    else:
        gathered = ["begin all_gather", "attend", "wait all_gather"]
        for rank in range(3):
            first, *others = " ".join(events[rank]).split(" ".join(gathered))
            assert first == "" and len(others) == 2
            assert others[1].endswith("attend begin reduce_scatter wait reduce_scatter")


@covering(choice=CHOICES, layout=LAYOUTS, window=[None, (4, 0), (100, 0)])
def test_a_backend_is_asked_for_all_that_runs(
    choice: Any, layout: Any, window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of attentions by which a backend is chosen is what the ranks compute."""
    (mode, size, inner), (form, mask) = choice, layout
    if window is not None and (mode not in ("a2a", "all_gather") or "causal" not in mask):
        window = None
    case = Case(mode=mode, size=size, inner=inner, form=form, mask=mask, window=window, lengths="odd")
    seen, plain = {}, raw.attention_forward

    def note(rt: Any, q: Any, k: Any, v: Any, *, spec: Any, terms: Any = NOTHING, **options: Any) -> Any:
        seen[spec, sizes_of(q, k, v, spec, terms)] = None
        return plain(rt, q, k, v, spec=spec, terms=terms, **options)

    monkeypatch.setattr(raw, "attention_forward", note)
    run(case)
    tokens = [sum(2 * s.chunk for s in case.sequences(side)) // (1 if form == "thd" else 3) for side in ("q", "kv")]
    local = Sizes(3, tokens[0], tokens[1], case.heads, case.groups, case.width, case.width)
    assert {*attentions(case.core, case.context, local)} == {*seen}


@pytest.mark.parametrize("layout", [("sbhd", "causal"), ("bshd", "no_mask"), ("thd", "padding_causal")])
def test_memory_does_not_grow_with_the_ranks(layout: Any, at_once: None) -> None:
    """In a ring two foreign K|V, two dK|dV, a partial result and its sum, however many ranks there are."""
    form, mask = layout
    peaks: dict[int, list[int]] = {}
    for size in (4, 6):
        case = Case(size=size, form=form, mask=mask, dtype="bf16", width=64, packed=((64, 2 * size * 64),))
        batch, spec = Batch(case), case.spec(case.context)
        functions = Taped("forward", attention.forward, spec), Taped("backward", attention.backward, spec)
        ranks = Ranks(case)
        taped.forget()
        for _ in range(2):
            ranks.run(lambda rank, comm: step(case, batch, rank, comm, functions))  # noqa: B023
        for what in ("forward", "backward"):
            peaks.setdefault(size, []).append(max(tape.peak for tape in taped.tapes() if tape.what == what))
    n = 128 * 64  # elements of a head's part of a rank's tokens
    q, kv = n * case.heads, 2 * n * case.groups
    small = 1 << 15  # statistics, lengths
    assert peaks[6][0] <= peaks[4][0] + small and peaks[6][1] <= peaks[4][1] + small
    assert peaks[6][0] <= 2 * q + 2 * 2 * kv + (2 + 4) * q + small  # out; foreign K|V; a partial output and the sum
    # dQ, dK and dV; foreign K|V; two dK|dV and one on its way; a partial result and the sum.
    assert peaks[6][1] <= 2 * (q + kv) + 2 * 2 * kv + 2 * 4 * kv + 2 * kv + (2 + 4) * q + small


# ---------------------------------------------------------------------------------------------- dropout


def masks(case: Case, count: int) -> tuple[list[Array], list[Array]]:
    """Of each rank [h, its queries, all keys] the dropout mask of forward, and that of backward.

    Scores are 0, so all weights of a query are alike; v and the gradient of the output are the identity.
    """
    total, h = 2 * case.size * count, case.heads
    side = Side("sbhd", case.size, [case.sequences("q")[0]._replace(chunk=count, padded=total, length=total)])
    core = replace(case.core, scale=1.0)
    needs = AttentionNeeds(True, True, True)
    spec = AttentionLayerSpec(core, h, h, 8, total, needs, recompute=case.recompute, context=case.context)
    zeros = np.zeros((2 * count, 1, h, 8), np.float32)
    eye = np.repeat(np.eye(total, dtype=np.float32)[:, None], h, axis=1)
    rng = RT.tensor(np.array([5, 9], np.int64))
    ranks = Ranks(case)

    def work(rank: int, comm: Any) -> tuple[Array, Array]:
        part = RT.tensor(side.on_rank([eye], rank))
        q, k = RT.tensor(zeros), RT.tensor(zeros)
        (out,), saved = attention.forward(RT, q, k, part, rng=rng, spec=spec, comm=comm)
        dy = RT.tensor(side.on_rank([eye], rank).reshape(2 * count, 1, -1))
        dv = attention.backward(RT, dy, None, saved, spec=spec, comm=comm)[2]
        return RT.numpy(out).reshape(2 * count, 1, h, total), RT.numpy(dv)

    results = ranks.run(work)
    forward = side.together([r[0] for r in results])[0].swapaxes(0, 1)  # [h, query, key]
    backward = side.together([r[1] for r in results])[0].transpose(1, 2, 0)  # dv [key, h, query]
    return list(forward), list(backward)


@covering(choice=MODES, mask=["causal", "no_mask"], recompute=[False, True])
def test_each_call_draws_by_itself_and_backward_the_same(choice: Any, mask: str, recompute: bool) -> None:
    mode, size, inner = choice
    p, count = 0.25, 16
    case = Case(mode=mode, size=size, inner=inner, mask=mask, dropout=p, shared=1, recompute=recompute)
    forward, backward = masks(case, count)
    total = 2 * size * count
    seen = np.tril(np.ones((total, total), bool)) if mask == "causal" else np.ones((total, total), bool)
    kept = []
    for a, b in zip(forward, backward, strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-7)
        share = a * seen.sum(1, keepdims=True) * (1 - p)
        assert np.allclose(share, np.round(share), atol=1e-4) and share.max() < 1.5
        kept.append(np.round(share).astype(bool))
        assert abs(kept[-1][seen].mean() - (1 - p)) < 4 * np.sqrt(p * (1 - p) / seen.sum())
    blocks = [
        head[i : i + count, j : j + count]
        for head in kept
        for i in range(0, total, count)
        for j in range(0, total, count)
        if mask == "no_mask" or j < i
    ]
    agreed = (1 - p) ** 2 + p**2
    for i, a in enumerate(blocks):
        for b in blocks[:i]:
            assert abs((a == b).mean() - agreed) < 6 * np.sqrt(agreed * (1 - agreed) / count**2)


# ---------------------------------------------------------------------------------------------- refusals


@covering(choice=CHOICES, mask=["padding", "padding_causal"], window=[None, (5, 0)])
def test_tokens_of_no_sequence(choice: Any, mask: str, window: Any) -> None:
    """Behind the last sequence: NaN there shows nowhere, and gives zeros."""
    mode, size, inner = choice
    window = window if mode in ("a2a", "all_gather") and "causal" in mask else None
    judge(Case(mode=mode, size=size, inner=inner, form="thd", mask=mask, lengths="odd", tail=5, window=window))


def test_ranks_compare_what_they_attend_to() -> None:
    cases = [Case(), Case(mask="no_mask")]
    batch, ranks = Batch(cases[0]), Ranks(cases[0])
    with pytest.raises(ArgumentError, match=r"context parallelism.*ranks that differ.*core right"):
        ranks.run(lambda rank, comm: step(cases[rank], batch, rank, comm))
