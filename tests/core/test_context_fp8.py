"""FP8 attention of sequences that lie cut over ranks: codes travel, values add up, slots see every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core.layers import attention_fp8
from te_core.layers.attention_fp8 import AttentionFp8Spec
from te_core.layers.context.schedule import Context
from te_core.ops import raw
from te_core.quantize.state import Scales
from te_core.quantized import Cast, QuantizedTensor
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_core.tape import taped
from te_core.tape.taped import Taped
from tests.core.context_cases import RT, Batch, Case, LateCommunicator, Made, Ranks, unpack
from tests.core.test_context_parallel import LAYOUTS, flat
from tests.covering import covering
from tests.recordings import tapes
from tests.tolerances import DB, snr_db

RECIPES = {"delayed": DelayedScaling(fp8_dpa=True), "current": Float8CurrentScaling(fp8_dpa=True)}
CHOICES = [("p2p", 2, 1), ("p2p", 3, 1), ("p2p", 8, 1), ("all_gather", 2, 1), ("all_gather", 4, 1), ("a2a", 2, 1)]
CHOICES += [("a2a", 4, 1), ("a2a+p2p", 4, 2), ("a2a+p2p", 2, 1)]
BOUNDS = {"out": "fp8 attention", "dq": "fp8 attention dq", "dk": "fp8 attention dq", "dv": "fp8 attention dv"}
#: Slots of the module: q, k and v; the output; P. Of their gradients.
QKV, OUT, P, DQKV, DOUT, DP = 2, 3, 8, 0, 3, 5


class State:
    """A module's scaling state on one rank, with scales of a step before."""

    def __init__(self) -> None:
        forward, backward = np.ones(9, np.float32), np.ones(6, np.float32)
        forward[[QKV, OUT, P]] = 60, 60, 256
        backward[[DQKV, DOUT, DP]] = 3000, 8000, 6000
        self.forward, self.backward = RT.tensor(forward), RT.tensor(backward)
        self.amax = RT.zeros((9,), dtypes.float32), RT.zeros((6,), dtypes.float32)
        self.scales = Scales(self.forward, self.amax[0], self.backward, self.amax[1])


def spec_of(case: Case, recipe: str, context: Context | None, **changes: Any) -> AttentionFp8Spec:
    rule = RECIPES[recipe].resolve().attention
    assert rule is not None
    return AttentionFp8Spec(case.spec(context), replace(rule, **changes), dtypes.bfloat16)


def step(case: Case, batch: Batch, rank: int | None, comm: Any, state: State, functions: Any) -> dict[str, Any]:
    """One rank's forward and backward."""
    forward, backward = functions
    given = batch.inputs(rank)
    lead = 1 if case.form == "thd" else 2
    flat = [None if t is None else t.reshape(*t.shape[:lead], -1) for t in given[:3]]
    options = {"scales": state.scales} | ({} if comm is None else {"comm": comm})
    (y,), saved = forward(RT, *flat, *given[3:], **options)
    grads = [None if t is None else RT.numpy(t) for t in backward(RT, batch.gradient(rank), saved, **options)]
    y = RT.numpy(y)
    shape = (*y.shape[:lead], case.heads, case.width)
    if case.packing == "separate":
        a, b, c = (t.reshape(*t.shape[:lead], -1, case.width) for t in grads)
    else:
        a, b, c = grads
        a = a.reshape(shape) if b is not None else a
    dq, dk, dv = unpack(case, a, b, c)
    found = {"out": y.reshape(shape), "dq": dq, "dk": dk, "dv": dv}
    return {n: t.astype(np.float32) for n, t in found.items()} | {"dsink": None, "max_logit": None, "saved": saved}


def plain(case: Case, recipe: str, context: Context | None, **changes: Any) -> Any:
    spec = spec_of(case, recipe, context, **changes)
    return (
        lambda *a, **o: attention_fp8.forward(*a, spec=spec, **o),
        lambda *a, **o: attention_fp8.backward(*a, spec=spec, **o),
    )


def run(case: Case, recipe: str, batch: Batch | None = None, **changes: Any) -> tuple[Made, Ranks, list[State]]:
    batch, ranks, states = batch or Batch(case), Ranks(case), [State() for _ in range(case.size)]
    functions = plain(case, recipe, case.context, **changes)
    results = ranks.run(lambda rank, comm: step(case, batch, rank, comm, states[rank], functions))
    return batch.together(results), ranks, states


def alone(case: Case, recipe: str, batch: Batch, **changes: Any) -> Made:
    """The layer without ranks."""
    results = step(case, batch, None, None, State(), plain(case, recipe, None, **changes))
    return batch.whole_results(results)


def quality(made: Made, wanted: Made) -> dict[str, float]:
    return {name: snr_db(flat(getattr(made, name)), flat(getattr(wanted, name))) for name in BOUNDS}


def check(case: Case, recipe: str, made: Made, batch: Batch) -> None:
    """As good as FP8 is; where the figures of few tokens scatter below that, as one device is over several draws."""
    found = quality(made, batch.reference())
    if any(found[name] <= DB[bound] for name, bound in BOUNDS.items()):
        batches = [Batch(replace(case, seed=seed)) for seed in range(8)]
        pairs = [(run(case, recipe, b)[0], alone(case, recipe, b), b.reference()) for b in batches]
        for name in BOUNDS:
            less = [quality(one, wanted)[name] - quality(ranks, wanted)[name] for ranks, one, wanted in pairs]
            assert np.mean(less) < 1.0, (name, found)
    for name, side in (("out", batch.q_side), ("dq", batch.q_side), ("dk", batch.kv_side), ("dv", batch.kv_side)):
        for t, s in zip(getattr(made, name), side.sequences, strict=True):
            assert not t[s.length :].any(), f"{name} of padding"


def case_of(choice: Any, layout: Any, **options: Any) -> Case:
    (mode, size, inner), (form, mask) = choice, layout
    return Case(mode=mode, size=size, inner=inner, form=form, mask=mask, dtype="bf16", width=16, **options)


@covering(
    choice=CHOICES,
    layout=LAYOUTS,
    recipe=["delayed", "current"],
    held=[("separate", "odd"), ("kv", "full"), ("qkv", "few"), ("qkv", "odd"), ("separate", "few")],
)
def test_ranks_give_what_one_gives(choice: Any, layout: Any, recipe: str, held: Any) -> None:
    packing, lengths = held
    case = case_of(choice, layout, packing=packing, lengths=lengths, shared=1)
    batch = Batch(case)
    made, _, _ = run(case, recipe, batch)
    check(case, recipe, made, batch)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_more_ranks_than_groups(recipe: str) -> None:
    case = case_of(("a2a", 4, 1), ("bshd", "causal"), few_groups=2, shared=1, tokens=48)
    batch = Batch(case)
    check(case, recipe, run(case, recipe, batch)[0], batch)


@covering(choice=CHOICES, recipe=["delayed", "current"], mask=["causal", "no_mask"], backward=[True, False])
def test_the_error_is_that_of_one_device(choice: Any, recipe: str, mask: str, backward: bool) -> None:
    """And what is computed again gives the same bits."""
    case = case_of(choice, ("sbhd", mask), tokens=48, shared=1)
    batch = Batch(case)
    made, _, _ = run(case, recipe, batch, backward=backward)
    wanted = batch.reference()
    one = quality(alone(case, recipe, batch, backward=backward), wanted)
    for name, db in quality(made, wanted).items():
        assert db > one[name] - 2.0, (name, db, one)
    again, _, _ = run(replace(case, recompute=True), recipe, batch, backward=backward)
    for a, b in zip(made[:4], again[:4], strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("choice", CHOICES)
def test_ranks_agree_on_one_scale(choice: Any) -> None:
    """In current scaling, with keys that are large on one rank alone."""
    case = case_of(choice, ("sbhd", "causal"), tokens=48, shared=1)
    batch = Batch(case)
    for t in (batch.k[0], batch.v[0], batch.dy[0]):
        t[:3] *= 4
    made, ranks, _ = run(case, "current", batch)
    for name, db in quality(made, alone(case, "current", batch)).items():
        assert db > 14, name
    agreed = [nbytes for name, nbytes in ranks.log(0) if name == "all_reduce"]
    travels = 2 if case.context.heads > 1 else 1
    groups = sum(n > 1 for n in (case.context.heads, case.context.ring))
    assert sorted(agreed) == sorted([12, 4][:travels] * groups)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_bytes_of_codes_travel(recipe: str) -> None:
    for mode, size in (("p2p", 2), ("p2p", 4), ("all_gather", 4), ("a2a", 2)):
        case = case_of((mode, size, 1), ("bshd", "causal"), shared=1)
        _, ranks, _ = run(case, recipe)
        n = sum(2 * s.chunk for s in case.sequences("q")) * case.width
        q, kv = n * case.heads, 2 * n * case.groups
        log = [one for one in ranks.log(1) if one[0] != "all_reduce"]
        grads = kv * (2 if size == 2 else 4)
        if mode == "p2p":
            assert sorted(log) == sorted([("send_recv", kv)] * 2 * (size - 1) + [("send_recv", grads)] * (size - 1))
        elif mode == "all_gather":
            assert log == [("all_gather", kv), ("all_gather", kv), ("reduce_scatter", size * grads)]
        else:  # the output and the gradients in the activation dtype
            assert log == [("all_to_all", nbytes) for nbytes in (q + kv, 2 * q, q, 2 * (q + kv))]


@covering(choice=CHOICES, recipe=["delayed", "current"])
def test_each_call_raises_the_maxima_of_the_slots(choice: Any, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward P and the output, backward dP and the gradients; a recomputation none."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name, fields in (("forward", ("s", "out")), ("backward", ("dp", "dq", "dk", "dv"))):
        plain_op = getattr(raw, f"attention_fp8_{name}")

        def note(*a: Any, name: str = name, fields: Any = fields, plain_op: Any = plain_op, **o: Any) -> Any:
            given = [getattr(o["scales"], f) for f in fields]
            seen.append((name, tuple(0 if s is None or s.amax is None else s.amax.ptr for s in given)))
            return plain_op(*a, **o)

        monkeypatch.setattr(raw, f"attention_fp8_{name}", note)
    case = case_of(choice, ("sbhd", "causal"), shared=1)
    batch = Batch(case)
    _, _, states = run(case, recipe, batch)
    high = recipe == "current"
    forward = {(s.amax[0].ptr + 4 * P, 0 if high else s.amax[0].ptr + 4 * OUT) for s in states}
    backward = {(s.amax[1].ptr + 4 * DP, *[0 if high else s.amax[1].ptr + 4 * DQKV] * 3) for s in states}
    assert {at for name, at in seen if name == "forward"} == forward
    assert {at for name, at in seen if name == "backward"} == backward
    whole = max(float(np.abs(t.astype(np.float32)).max()) for t in (*batch.q, *batch.k, *batch.v))
    noted = [RT.numpy(s.amax[0]) for s in states]
    if not high:
        assert max(a[QKV] for a in noted) == whole
    assert all(a[P] > 0.9 for a in noted)
    seen.clear()
    _, _, states = run(replace(case, recompute=True), recipe, batch)
    calls = len([1 for name, _ in seen if name == "forward"])
    assert len([1 for name, at in seen if name == "forward" and not any(at)]) == calls // 2


@pytest.fixture
def at_once() -> Iterator[None]:
    with tapes("first"):
        yield


@covering(choice=CHOICES, layout=LAYOUTS, recipe=["delayed", "current"], packing=["qkv", "separate", "kv"])
def test_replays_give_the_same(choice: Any, layout: Any, recipe: str, packing: str, at_once: None) -> None:
    """And nothing is read or written on its way."""
    case = case_of(choice, layout, lengths="odd", packing=packing, shared=1)
    batch, spec = Batch(case), spec_of(case, recipe, case.context)
    wanted, _, _ = run(case, recipe, batch)
    functions = [
        (Taped("forward", attention_fp8.forward, spec), Taped("backward", attention_fp8.backward, spec))
        for _ in range(case.size)
    ]
    ranks, states = Ranks(case, LateCommunicator), [State() for _ in range(case.size)]
    before = taped.COUNTS.replayed
    for _ in range(2):
        results = ranks.run(lambda rank, comm: step(case, batch, rank, comm, states[rank], functions[rank]))
        made = batch.together(results)
        for a, b in zip(made[:4], wanted[:4], strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert taped.COUNTS.replayed - before == 3 * case.size


@pytest.mark.parametrize("choice", CHOICES)
def test_what_comes_and_leaves_quantized(choice: Any) -> None:
    """With a history's scale: the bytes that came travel, and the output and the gradient leave as codes."""
    case = case_of(choice, ("sbhd", "causal"), packing="qkv", shared=1)
    batch, ranks, states = Batch(case), Ranks(case), [State() for _ in range(case.size)]
    spec = replace(spec_of(case, "delayed", case.context), quantize_output=True, quantize_grad=True)
    wanted, _, _ = run(case, "delayed", batch)

    def work(rank: int, comm: Any) -> dict[str, Any]:
        a, scales = batch.inputs(rank).a, states[rank].scales
        given = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False, scale=RT.tensor(np.array([60], np.float32)))
        x = raw.quantize(RT, a.matrix(), given)
        frame = RT.empty((*a.shape[:-1], 0), dtypes.uint8)
        (y,), saved = attention_fp8.forward(RT, x, None, None, frame_q=frame, spec=spec, scales=scales, comm=comm)
        (da, _, _) = attention_fp8.backward(RT, batch.gradient(rank), saved, spec=spec, scales=scales, comm=comm)
        assert isinstance(y, QuantizedTensor) and isinstance(da, QuantizedTensor)
        y, da = (RT.numpy(raw.dequantize(RT, t, dtypes.float32)) for t in (y, da))
        dq, dk, dv = unpack(case, da.reshape(*a.shape[:-1], -1), None, None)
        out = y.reshape(*a.shape[:-1], case.heads, case.width)
        return {"out": out, "dq": dq, "dk": dk, "dv": dv, "dsink": None, "max_logit": None}

    made = batch.together(ranks.run(work))
    for name, bound in BOUNDS.items():
        assert snr_db(flat(getattr(made, name)), flat(getattr(wanted, name))) > DB[bound] + 4, name
