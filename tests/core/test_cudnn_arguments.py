"""What attention on cuDNN looks at before it hands addresses over, without cuDNN; and what outlives a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from te_core import dtypes
from te_core.attention import AttentionSpec
from te_core.backends.cuda import cudnn
from te_core.errors import ArgumentError, UnsupportedError
from te_core.layers import attention as layer
from te_core.layers.attention import AttentionLayerSpec, AttentionNeeds
from te_core.ops import attention_fp8 as fp8
from te_core.ops.attention import attention_backward, attention_forward
from tests.core import fake_cudnn
from tests.core.fake_cudnn import tensor

BF16, F32 = dtypes.bfloat16, dtypes.float32
SPEC = AttentionSpec(0.125, "bshd", "bshd")


def qkv(rt, sq=256, d=64, dtype=BF16):
    return tuple(tensor(rt, (2, s, 8, d), dtype) for s in (sq, 256, 256))


def test_fp8_looks_at_all_that_it_is_given(fake):
    """With a plan of these shapes there, too."""
    rt, _ = fake
    q, k, v = qkv(rt, d=128, dtype=dtypes.float8_e4m3)
    one, pair = tensor(rt, (1,), F32), fp8.Scaled(*(tensor(rt, (1,), F32) for _ in range(2)))
    scales, back = fp8.ForwardScales(one, one, one, pair, pair), fp8.BackwardScales(*[one] * 5, *[pair] * 5)
    y = fp8.attention_fp8_forward(rt, q, k, v, spec=SPEC, scales=scales)
    dy, odd = (tensor(rt, q.shape, dtypes.float8_e5m2) for _ in range(2))
    given = {"dy": dy, "out": y.out, "stats": y.stats, "grads": tuple(tensor(rt, q.shape, dy.dtype) for _ in range(3))}

    def backward(**changes):
        now = given | changes
        return fp8.attention_fp8_backward(
            rt, now["dy"], q, k, v, now["out"], now["stats"], spec=SPEC, scales=back, grads=now["grads"]
        )

    backward()
    odd.ptr += 1
    wide = tuple(2 * n for n in q.row_major_strides())
    longer = tensor(rt, (2, 257, 8, 128), dy.dtype, (257 * 1024, 1024, 128, 1))
    for name, wrong in (
        ("dy", odd),
        ("dy", tensor(rt, q.shape, dy.dtype, wide)),
        ("result|out", tensor(rt, q.shape, q.dtype, wide)),
        ("stats", tensor(rt, (2, 8, 255), F32)),
        ("result", longer),
    ):
        changed = {"grads": (longer, *given["grads"][1:])} if name == "result" else {name.split("|")[-1]: wrong}
        with pytest.raises(ArgumentError, match=name):
            backward(**changed)
    with pytest.raises(ArgumentError, match="result|out"):
        fp8.attention_fp8_forward(rt, q, k, v, spec=SPEC, scales=scales, out=tensor(rt, q.shape, q.dtype, wide))
    rt.plans._plans.clear()
    with pytest.raises(ArgumentError, match=r"scales\.q"):
        fp8.attention_fp8_forward(rt, q, k, v, spec=SPEC, scales=scales._replace(q=tensor(rt, (2,), F32)))


def test_odd_addresses_of_results_are_refused(fake):
    """Those that a plan has not seen, too: graphs and attention_rows.cu write 16 bytes at a time."""
    rt, _ = fake
    q, k, v = qkv(rt)
    y, dy = attention_forward(rt, q, k, v, spec=SPEC), tensor(rt, q.shape, BF16)
    attention_backward(rt, dy, q, k, v, y.out, y.stats, spec=SPEC)
    odd = tensor(rt, q.shape, BF16)
    odd.ptr += 8
    with pytest.raises(ArgumentError, match="multiple of 16 bytes"):
        attention_forward(rt, q, k, v, spec=SPEC, out=odd)
    with pytest.raises(ArgumentError, match="correct out"):  # and not cuDNN's or a layout's error
        attention_forward(rt, q, k, v, spec=SPEC, out=tensor(rt, q.shape[:2], BF16))
    for given in ((odd, y.out), (dy, odd)):
        with pytest.raises(ArgumentError, match="multiple of 16 bytes"):
            attention_backward(rt, given[0], q, k, v, given[1], y.stats, spec=SPEC)
    attention_backward(rt, dy, q, k, v, y.out, y.stats, spec=SPEC, grads=(q, k, v))
    with pytest.raises(UnsupportedError, match="16 bytes"):
        attention_backward(rt, dy, q, k, v, y.out, y.stats, spec=SPEC, grads=(q, odd, v))


def test_a_layers_gradient_may_begin_anywhere(fake, monkeypatch):
    """That of a part of a concatenation: it is copied."""
    rt, calls = fake
    add = lambda rt, a, b, out: calls.launches.append(("add", (a, out)))  # noqa: E731
    monkeypatch.setattr(rt.backend, "add", add, raising=False)
    q, k, v = qkv(rt)
    spec = AttentionLayerSpec(SPEC, 8, 8, 64, 64, AttentionNeeds(True, True, True))
    (out,), saved = layer.forward(rt, q, k, v, spec=spec)
    dy = tensor(rt, out.shape, BF16)
    layer.backward(rt, dy, None, saved, spec=spec)
    assert calls.runs[-1].at["dy"] == dy.ptr and not calls.args("add")
    dy.ptr += 2
    layer.backward(rt, dy, None, saved, spec=spec)
    ((given, copy),) = calls.args("add")
    assert given is dy and calls.runs[-1].at["dy"] == copy.ptr


def test_the_numbers_of_a_softcap_outlive_their_plan(fake):
    """A captured CUDA graph reads them; another plan of the same numbers reads the same."""
    rt, calls = fake
    for sq in (256, 384):
        rt.plans._plans.clear()
        attention_forward(rt, *qkv(rt, sq=sq), spec=replace(SPEC, softcap=31.0))
    first, second = (run.at["cap"] for run in calls.runs)
    assert first == second and len(calls.constants) == 1
    assert np.frombuffer(calls.constants[0], np.float32)[0] == 31.0


def test_a_plan_that_cannot_be_kept_runs(fake, monkeypatch, tmp_path):
    rt, calls = fake

    def refuse(self, as_bytes):
        raise cudnn.frontend().module.cudnnGraphNotSupportedError("this engine has no serialization")

    monkeypatch.setattr(fake_cudnn.Built, "serialize", refuse)
    attention_forward(rt, *qkv(rt), spec=SPEC)
    assert len(calls.runs) == 1 and not list(tmp_path.rglob("*.plan"))
