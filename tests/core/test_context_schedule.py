"""What ranks attend to, as data: each pair that the mask lets be seen is computed once, by one rank; nothing runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from te_core.attention import AttentionSpec
from te_core.layers.context.schedule import MODES, Call, Context, Load, Schedule, schedule

Array = np.ndarray[Any, Any]
CHUNK = 3
WINDOWS = [(2, 0), (7, 0), (0, 0), (100, 0), (4, 5), (3, -1), (-1, 4)]


def contexts(most: int = 16) -> list[Context]:
    """All modes over all numbers of ranks, those of two groups in all their factors."""
    found = [Context(mode, size) for mode in MODES[:3] for size in range(1, most + 1)]
    pairs = [(a, b) for a in range(1, most + 1) for b in range(1, most + 1) if a * b <= most]
    return found + [Context("a2a+p2p", a * b, a) for a, b in pairs]


def spec(causal: bool, window: tuple[int, int] = (-1, -1)) -> AttentionSpec:
    return AttentionSpec(1.0, left=window[0], right=0 if causal else window[1])


def tokens(chunks: tuple[int, ...], chunk: int) -> Array:
    return np.concatenate([np.arange(c * chunk, (c + 1) * chunk) for c in chunks])


def pairs(call: Call, chunk: int, total: int) -> tuple[Array, Array]:
    """(queries, keys) that a call computes, as an attention of its tensors does: by their places in them."""
    queries = tokens(call.queries, chunk)
    if call.mask == "band":
        first, stop = call.keys[0] * chunk, (call.keys[-1] + 1) * chunk
        first = 0 if call.before < 0 else max(0, first - call.before)
        stop = total if call.behind < 0 else min(total, stop + call.behind)
        keys = np.arange(first, stop)
        behind = keys[None, :] - queries[:, None]
        seen = np.ones(behind.shape, bool)
        if call.before >= 0:
            seen &= behind >= -call.before
        if call.behind >= 0:
            seen &= behind <= call.behind
    else:
        keys = tokens(call.keys, chunk)
        seen = np.ones((len(queries), len(keys)), bool)
        if call.mask == "causal":
            seen = np.arange(len(keys))[None, :] <= np.arange(len(queries))[:, None]
    i, j = np.nonzero(seen)
    return queries[i], keys[j]


def computed(made: Schedule, length: int, total: int) -> Array:
    """[tokens, tokens]: how often a rank computes each pair."""
    count = np.zeros((total, total), int)
    chunk = total // (2 * made.context.ring)
    for step in made.steps:
        for call in step.calls:
            i, j = pairs(call, chunk, total)
            valid = (i < length) & (j < length)
            np.add.at(count, (i[valid], j[valid]), 1)
    return count


def visible(causal: bool, window: tuple[int, int], length: int, total: int) -> Array:
    behind = np.arange(total)[None, :] - np.arange(total)[:, None]
    seen = np.ones((total, total), bool)
    if window[0] >= 0:
        seen &= behind >= -window[0]
    if causal or window[1] >= 0:
        seen &= behind <= (0 if causal else window[1])
    inside = np.arange(total) < length
    return seen & inside[:, None] & inside[None, :]


def judge(context: Context, causal: bool, window: tuple[int, int], length: int) -> list[int]:
    """The pairs of each rank; each is computed once for each head."""
    total = 2 * context.size * CHUNK
    ranks = [computed(schedule(context, r, spec(causal, window)), length, total) for r in range(context.size)]
    wanted = visible(causal, window, length, total)
    for head in range(context.heads):
        assert np.array_equal(sum(ranks[head :: context.heads]), wanted), (context, head)
    return [int(count.sum()) for count in ranks]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_each_visible_pair_is_computed_once(mode: str, causal: bool) -> None:
    """And all ranks have the same work."""
    for context in contexts():
        if context.mode == mode:
            total = 2 * context.size * CHUNK
            work = judge(context, causal, (-1, -1), total)
            assert len(set(work)) == 1, (context, work)
            for length in {0, 1, CHUNK, total // 2 + 2, total - 1} if context.size <= 8 else {total // 2 + 2}:
                judge(context, causal, (-1, -1), length)


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_are_covered(window: tuple[int, int]) -> None:
    for context in contexts():
        if context.ring == 1 or context.mode == "all_gather":
            total = 2 * context.size * CHUNK
            for length in (total, total // 2 + 2) if context.size <= 8 else (total - 1,):
                judge(context, False, window, length)


def test_a_rank_asks_for_the_keys_of_the_ranks_before_it() -> None:
    for size in range(2, 17):
        for rank in range(size):
            steps = schedule(Context("p2p", size), rank, spec(True)).steps
            assert [step.source for step in steps] == [(rank - i) % size for i in range(size)]
            assert all(len(step.calls) == 1 for step in steps)


def test_calls_are_few_and_need_no_other_diagonal() -> None:
    """Behind a rank's own tokens nothing is masked; of gathered keys come two calls at most, without a mask three."""
    for context in contexts():
        for causal in (True, False):
            for rank in range(context.size):
                first, *others = schedule(context, rank, spec(causal)).steps
                assert [call.mask for call in first.calls] == ["causal" if causal else "full"]
                assert all(call.mask == "full" for step in others for call in step.calls)
                assert all(len(step.calls) <= (1 if step.source is not None else 2 if causal else 3) for step in others)
                assert all(step.source is not None or _contiguous(call.keys) for step in others for call in step.calls)


def _contiguous(chunks: tuple[int, ...]) -> bool:
    return chunks == tuple(range(chunks[0], chunks[0] + len(chunks)))


#: Elements of q, of k and v, of the output.
LOAD = Load(48, 32, 16, 8, 64, 32)
Q, KV, OUT = 48 * 16 * 64, 32 * 8 * (64 + 32), 48 * 16 * 32


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_bytes_are_those_of_the_table(size: int, itemsize: int) -> None:
    load, grad = LOAD._replace(itemsize=itemsize), itemsize if size == 2 else 4
    k = KV * itemsize

    def found(mode: str, backward: bool, inner: int = 1, load: Load = load) -> Counter[tuple[str, int]]:
        made = schedule(Context(mode, size * (inner if mode == "a2a+p2p" else 1), inner), 0, spec(True))
        return Counter((t.operation, t.nbytes) for t in made.transfers(load, backward))

    around = Counter({("send_recv", k): size - 1}), Counter({("send_recv", KV * grad): size - 1})
    assert found("p2p", False) == around[0]
    assert found("p2p", True) == around[0] + around[1]
    gathered = Counter({("all_gather", k): 1})
    assert found("all_gather", False) == gathered
    assert found("all_gather", True) == gathered + Counter({("reduce_scatter", size * KV * grad): 1})
    inside = [Counter([("all_to_all", (Q + KV) * itemsize)]), Counter([("all_to_all", OUT * itemsize)])]
    if size != 3:
        assert found("a2a", False) == found("a2a", True) == inside[0] + inside[1]
    assert found("a2a+p2p", False, 2) == inside[0] + inside[1] + around[0]
    assert found("a2a+p2p", True, 2) == inside[0] + inside[1] + around[0] + around[1]


def test_groups_that_go_to_several_ranks_count_for_each() -> None:
    made = schedule(Context("a2a", 16), 3, spec(False))
    assert [t.nbytes for t in made.transfers(LOAD)] == [(Q + 2 * KV) * 2, OUT * 2]


def test_a_schedule_is_explained() -> None:
    said = schedule(Context("p2p", 4), 1, spec(True)).explain(LOAD)
    assert f"step 0: keys of rank 1; meanwhile send_recv of k and v: {2 * KV} bytes" in said
    assert "step 3: keys of rank 2\n" in said and "queries 1 and 6 x keys 0, full" in said
    assert "queries 6 x keys 3-4, full" in said
    assert f"backward: 3 x send_recv of k and v: {2 * KV} bytes, 3 x send_recv of the gradients of k and v" in said
    said = schedule(Context("all_gather", 3), 2, spec(False, (5, 2))).explain(LOAD)
    assert "queries 3 x keys 3, 5 before and 2 behind each query" in said
    said = schedule(Context("a2a+p2p", 4, 2), 3, spec(True)).explain(LOAD)
    assert "1 of 2 parts of the heads, in chunks of 2 chunks" in said
    assert f"before: all_to_all of q, k and v: {2 * (Q + KV)} bytes" in said
    assert f"behind: all_to_all of the output: {2 * OUT} bytes" in said
