"""What a rank of an attention over ranks launches on a GPU, counted without one: no call copies its tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

from te_core import dtypes
from te_core.attention import AttentionSpec
from te_core.layers import attention, attention_fp8
from te_core.layers.attention import AttentionInputs, AttentionLayerSpec, AttentionNeeds
from te_core.layers.attention_fp8 import AttentionFp8Spec
from te_core.layers.context.schedule import Context
from te_core.recipe import DelayedScaling
from te_core.tape.taped import Taped
from tests.core.fake_cuda import Machine, Make
from tests.core.tape_cases import BF16, Maker
from tests.core.test_parallel_launches import Done
from tests.covering import covering
from tests.recordings import tapes

HEADS, GROUPS, D, TOKENS, BATCH = 8, 4, 64, 256, 2
ALL = AttentionNeeds(True, True, True)


class Silent:
    """One rank of a group, whose collectives are events of the machine."""

    met = True

    def __init__(self, machine: Machine, rank: int, size: int) -> None:
        self.machine, self.rank, self.size = machine, rank, size

    def __getattr__(self, name: str) -> Any:
        if name not in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"):
            raise AttributeError(name)

        def begin(*_: Any) -> Done:
            self.machine.note(name, None, {}, 0)
            return Done()

        return begin


def launched(machine: Machine, core: AttentionSpec, context: Context, rank: int, **options: Any) -> Counter[str]:
    """What a forward and a backward on a rank give the GPU to do."""
    rt = machine.runtime()
    tensor, form, fp8 = Maker(rt), core.q_format, options.pop("fp8", False)
    d = 128 if fp8 else D
    packing, when = options.pop("packing", "separate"), options.pop("tapes", "never")
    layer = AttentionLayerSpec(core, HEADS, GROUPS, d, d, ALL, packing, context=context, **options)
    lead = {"sbhd": (TOKENS, BATCH), "bshd": (BATCH, TOKENS), "thd": (TOKENS * BATCH,)}[form]
    widths = [(HEADS, d), (GROUPS, d), (GROUPS, d)] if packing == "separate" else [((HEADS + 2 * GROUPS) * d,)]
    given: list[Any] = [tensor(*lead, *width) for width in widths]
    lengths = [tensor(BATCH + 1, dtype=dtypes.int32) for _ in range(4 if form == "thd" else 2)] if core.padded else []
    names = dict(zip(("cu_q", "cu_kv", "cu_q_padded", "cu_kv_padded"), lengths, strict=False))
    inputs = AttentionInputs(*given, *[None] * (3 - len(given)), **names)
    outer, inner = divmod(rank, context.heads)
    sizes = (inner, context.heads), (outer, context.ring)
    comms = tuple(Silent(machine, at, size) for at, size in sizes if size > 1)
    module: Any = attention
    spec: Any = layer
    more: dict[str, Any] = {}
    if fp8:
        rule = DelayedScaling(fp8_dpa=True).resolve().attention
        assert rule is not None
        module, spec, more = attention_fp8, AttentionFp8Spec(layer, rule, BF16), {"scales": tensor.scales(3)}
        flat = [t.reshape(*lead, t.size // (TOKENS * BATCH)) for t in given]
        inputs = AttentionInputs(*flat, *[None] * (3 - len(flat)), **names)
    dy = tensor(*lead, HEADS * d)
    forward, backward = (Taped(name, getattr(module, name), spec) for name in ("forward", "backward"))
    with machine.noting() as events, tapes(when):
        _, saved = forward(rt, *inputs, comm=comms, **more)
        backward(rt, dy, *([] if fp8 else [None]), saved, comm=comms, **more)
    assert not machine.faults
    return Counter(e.what[0] if e.kind == "launch" else e.kind for e in events)


def spec_of(form: str, mask: str, window: int = -1) -> AttentionSpec:
    longest = TOKENS if form == "thd" else 0
    right, padded = 0 if "causal" in mask else -1, "padding" in mask
    return AttentionSpec(D**-0.5, form, form, window, right, padded=padded, max_q=longest, max_kv=longest)


#: Forward and backward of one rank under a causal mask. Of two ranks the first merges halves, the second whole outputs,
#: and has no gradient for the first rank's second chunk.
COSTS: dict[tuple[str, int, int, int], dict[str, int]] = {
    ("p2p", 2, 1, 0): {
        "cudnn": 4,
        "send_recv": 3,
        "context_rows": 4,  # k and v into one piece, twice
        "attention_merge": 1,
        "context_sum": 4,  # the second chunk's statistics, dQ, dK and dV
    },
    ("p2p", 2, 1, 1): {
        "cudnn": 4,
        "send_recv": 3,
        "context_rows": 4,
        "attention_merge": 1,
        "context_sum": 3,
        "fill": 1,
    },
    ("p2p", 4, 1, 2): {
        "cudnn": 8,
        "send_recv": 9,
        "context_rows": 4,
        "attention_merge": 4,  # the second is the first chunk's last, and not the second's
        "context_sum": 12,
        "fill": 1,
    },
    ("all_gather", 4, 1, 2): {
        "cudnn": 6,
        "all_gather": 2,
        "reduce_scatter": 1,
        "context_rows": 10,
        "attention_merge": 3,
        "context_sum": 8,
        "fill": 2,
    },
    ("a2a", 2, 1, 1): {"cudnn": 2, "all_to_all": 4, "context_rows": 16},
    ("a2a+p2p", 4, 2, 3): {
        "cudnn": 4,
        "all_to_all": 4,
        "send_recv": 3,
        "context_rows": 20,
        "attention_merge": 1,
        "context_sum": 3,
        "fill": 1,
    },
}


@covering(case=[*COSTS], form=["sbhd", "bshd"], packing=["separate", "qkv"])
def test_what_ranks_launch(make: Make, case: Any, form: str, packing: str) -> None:
    """Halves of rows that lie apart, and parts of a projection, cost no more than dense ones."""
    mode, size, inner, rank = case
    found = launched(make(), spec_of(form, "causal"), Context(mode, size, inner), rank, packing=packing)
    assert found == Counter(COSTS[case])


@covering(case=[*COSTS], packing=["qkv", "separate"])
def test_packed_sequences_cost_lengths_and_no_copies(make: Make, case: Any, packing: str) -> None:
    """Chunks are found by lengths and places; all calls work on whole tensors, so nothing is split or filled."""
    mode, size, inner, rank = case
    found = launched(make(), spec_of("thd", "padding_causal"), Context(mode, size, inner), rank, packing=packing)
    calls, ring = COSTS[case]["cudnn"], size // (inner if mode != "a2a" else size)
    assert found["cudnn"] == found["attention_lengths"] == found["attention_rows"] == calls
    assert found["context_lengths"] == (4 if ring > 1 else 0) and found["context_mark"] == 1
    assert found["attention_merge"] == calls // 2 - 1
    for name in ("context_rows", "send_recv", "all_gather", "all_to_all", "reduce_scatter"):
        assert found[name] == COSTS[case].get(name, 0), name
    if mode != "all_gather":
        assert found["fill"] == 0 and found["context_sum"] == {1: 0, 2: 3, 4: 8}[ring]


@covering(case=[case for case in COSTS if case[0] != "a2a"], form=["bshd", "sbhd"], recompute=[False, True])
def test_codes_are_attended_to_where_they_are(make: Make, case: Any, form: str, recompute: bool) -> None:
    """In FP8: one run for each call, and one dequantization of each partial result."""
    mode, size, inner, rank = case
    context, wanted = Context(mode, size, inner), COSTS[case]
    found = launched(make(), spec_of(form, "causal"), context, rank, fp8=True, recompute=recompute)
    calls = wanted["cudnn"] // 2
    assert found["cudnn"] == calls * (3 if recompute else 2)
    assert found["dequantize"] == calls * (1 + recompute) + 3 * calls
    for name in ("all_gather", "reduce_scatter"):
        assert found[name] == wanted.get(name, 0) + (recompute and name == "all_gather" and mode == "all_gather")


def test_windows_need_no_diagonal_of_their_own(make: Make) -> None:
    """By bands that begin top-left in dense formats: FP8 has no other diagonal. One call for each chunk."""
    for form in ("sbhd", "bshd"):
        found = launched(make(), spec_of(form, "causal", window=100), Context("all_gather", 4), 2)
        assert found["cudnn"] == 4 and not found["attention_merge"]
    found = launched(make(), spec_of("bshd", "causal", window=100), Context("all_gather", 4), 1, fp8=True)
    assert found["cudnn"] == 4
