"""Streams and captures, without CUDA: what is made for each thread, what for each stream, and what for each capture."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

from te_core import dtypes
from te_core.attention import AttentionSpec
from te_core.backends.cuda import executor
from te_core.ops import attention_fp8 as fp8
from te_core.ops.attention import attention_forward
from te_core.runtime import Runtime
from tests.core.fake_cudnn import tensor
from tests.threads import ends, together

SPEC = AttentionSpec(0.125, "bshd", "bshd")


def attend(rt, dtype=dtypes.bfloat16):
    q, k, v = (tensor(rt, (2, 256, 8, 64), dtype) for _ in range(3))
    return attention_forward(rt, q, k, v, spec=SPEC)


def attend_fp8(rt):
    q, k, v = (tensor(rt, (2, 256, 8, 128), dtypes.float8_e4m3) for _ in range(3))
    one = iter([tensor(rt, (1,), dtypes.float32) for _ in range(8)])
    s, out = (fp8.Scaled(next(one), next(one), tensor(rt, (1,), dtypes.float32)) for _ in range(2))
    scales = fp8.ForwardScales(next(one), next(one), next(one), s, out)
    return fp8.attention_fp8_forward(rt, q, k, v, spec=replace(SPEC, left=7, right=0), scales=scales)


def on_stream(rt, stream):
    """Another runtime of the same device."""
    return Runtime(rt.device, stream, rt.allocator, rt.backend)


def test_one_handle_serves_the_streams_of_a_thread(fake):
    """It is set to the stream of each run; a new stream makes nothing."""
    rt, calls = fake
    attend(rt)
    attend(rt)
    before = len(calls.made_in_relaxed)
    other = on_stream(rt, 9)
    other.plans = rt.plans
    attend(other)
    attend(rt)
    assert calls.streams == [5, 9, 5]
    assert {run.handle for run in calls.runs} == {77} and len(calls.made_in_relaxed) == before
    assert other.executor() is rt.executor() is rt.fresh().executor()


def test_what_is_made_once_is_made_where_a_capture_allows_it(fake):
    rt, calls = fake
    attend(rt)
    assert calls.made_in_relaxed == [("handle", True), ("graph", True)] and not calls.relaxed


def test_threads_have_handles_of_their_own_and_leave_them(fake):
    """Two at a time never share one; a thread that starts later takes over what an ended one has left."""
    rt, calls = fake
    both = threading.Barrier(2)
    seen = []

    def work(wait=True):
        attend(rt)
        seen.append(calls.runs[-1].handle if not wait else rt.executor().attention.raw)
        if wait:
            both.wait()

    together(work, work)
    assert sorted(seen) == [77, 78] and all(relaxed for _, relaxed in calls.made_in_relaxed)
    gc.collect()
    for _ in range(5):
        ends(lambda: work(False))
        gc.collect()
    assert set(seen) == {77, 78} and len(rt.device.of(executor._Executors).left) == 2


def test_scratch_memory_stays_with_its_stream_and_its_capture(fake):
    """Two streams, and a capture, at once: none may write where another one does."""
    rt, calls = fake
    places = []
    for each in (rt, on_stream(rt, 9), rt.fresh()):
        attend(each)
        attend_fp8(each)
        places.append({calls.runs[-2].workspace, calls.runs[-1].workspace, calls.runs[-1].at["s_amax"]})
        assert calls.zeroed[-1].ptr == calls.runs[-1].at["s_amax"]  # its own maxima begin as zeros
    assert not (places[0] & places[1] or places[0] & places[2] or places[1] & places[2])
    assert len(calls.zeroed) == 3
    attend_fp8(rt)
    assert calls.runs[-1].at["s_amax"] in places[0] and len(calls.zeroed) == 3
