"""What only a GPU shows of attention by cuDNN: how many plans are built, by whom, and what may be captured.

The values are tests/core/test_attention.py's business; here they only have to stay what they were.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from te_core import dtypes
from te_core.attention import AttentionSpec, Lengths
from te_core.errors import ArgumentError
from te_core.ops.attention import attention_backward, attention_forward
from te_core.ops.attention_terms import NOTHING, Terms
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import cuda_runtime, requires_cuda

pytestmark = requires_cuda

ROOT = Path(__file__).parents[2]
SPEC = AttentionSpec(0.125, "bshd", "bshd", right=0)
THD = replace(SPEC, q_format="thd", kv_format="thd", padded=True)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has built no graph, and finds none on disk."""
    from te_core.backends.cuda import cudnn

    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cudnn, "COUNTS", cudnn.Counts())
    rt = cuda_runtime()
    monkeypatch.setitem(rt.device._kept, cudnn.Graphs, cudnn.Graphs(rt.device))
    own = Runtime(rt.device, rt.stream, rt.allocator, rt.backend)
    own.plans = type(rt.plans)()
    return own, cudnn


def normal(rt: Runtime, *shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in bfloat16."""
    return rt.tensor(np.random.default_rng(seed).standard_normal(shape).astype(dtypes.bfloat16.numpy))


def batch(rt: Runtime, lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Terms]:
    """Packed sequences of these lengths."""
    cu = rt.tensor(np.cumsum([0, *lengths]).astype(np.int32))
    q, k, v = (normal(rt, sum(lengths), 4, 64, seed=seed + i) for i in range(3))
    return q, k, v, Terms(Lengths(cu, cu))


def step(rt: Runtime, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, spec: AttentionSpec, terms: Terms = NOTHING):
    """Forward and backward: everything they gave."""
    y = attention_forward(rt, q, k, v, spec=spec, terms=terms)
    return y.out, y.stats, *attention_backward(rt, dy, q, k, v, y.out, y.stats, spec=spec, terms=terms)[:3]


def bits(rt: Runtime, results) -> list[bytes]:
    return [rt.numpy(t).tobytes() for t in results]


# ---------------------------------------------------------------------------------------------- how many plans


def test_two_hundred_packed_batches_build_few_plans(fresh):
    """And each of the sampled ones is what it is alone, in a graph of its own size."""
    rt, cudnn = fresh
    draw = random.Random(0)
    whole = [normal(rt, 32 * 512, 4, 64, seed=i) for i in range(3)]
    for i in range(200):
        lengths = [draw.randint(1, 512) for _ in range(draw.randint(1, 32))]
        longest = -(-max(lengths) // 64) * 64
        q, k, v = (t.rows(0, sum(lengths)) for t in whole)
        cu = rt.tensor(np.cumsum([0, *lengths]).astype(np.int32))
        terms = Terms(Lengths(cu, cu))
        spec = replace(THD, max_q=longest, max_kv=longest)
        out = attention_forward(rt, q, k, v, spec=spec, terms=terms).out
        if i % 50 == 0:
            first = lengths[0]
            alone = [t.rows(0, first).reshape(1, first, 4, 64) for t in (q, k, v)]
            want = rt.numpy(attention_forward(rt, *alone, spec=SPEC).out).astype(np.float32)
            got = rt.numpy(out)[:first].astype(np.float32)
            assert np.abs(got - want[0]).max() <= 2.0**-6 * np.abs(want).max()
    dense = sum(1 for spec in rt.device.of(cudnn.Graphs).known if not spec.padded)
    assert cudnn.COUNTS.built - dense <= 12 and cudnn.COUNTS.loaded == 0


_CHILD = """
import numpy as np
from dataclasses import replace
from te_core.backends.cuda import cudnn
from tests.core import test_attention_cuda as t
rt = t.Runtime.cuda()
q, k, v = (t.normal(rt, 2, 256, 4, 64, seed=i) for i in range(3))
dy = t.normal(rt, 2, 256, 4, 64, seed=3)
found = t.bits(rt, t.step(rt, q, k, v, dy, replace(t.SPEC, deterministic=True)))
lengths = [100, 60, 1]
q, k, v, terms = t.batch(rt, lengths)
spec = replace(t.THD, max_q=128, max_kv=128, deterministic=True)
found += t.bits(rt, t.step(rt, q, k, v, t.normal(rt, 161, 4, 64, seed=9), spec, terms))
import hashlib
print(cudnn.COUNTS.built, cudnn.COUNTS.loaded, hashlib.sha256(b"".join(found)).hexdigest())
"""


def test_a_second_process_builds_no_plan(tmp_path):
    """It reads what the first one stored, and computes the same bits; a damaged file is built again."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "TE_CORE_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}

    def child() -> tuple[int, int, str]:
        done = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, cwd=ROOT, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "leaked" not in done.stderr
        built, loaded, digest = done.stdout.split()
        return int(built), int(loaded), digest

    built, loaded, digest = child()
    assert (built, loaded) == (4, 0)
    assert child() == (0, 4, digest)
    for place in list((tmp_path / "attention").iterdir())[:2]:
        place.write_bytes(place.read_bytes()[:-1])
    assert child() == (2, 2, digest)


def test_one_cudnn_is_mapped():
    """After the frontend is loaded, whatever else lies in the system's path."""
    from te_core import libraries
    from te_core.backends.cuda import cudnn

    cudnn.frontend()
    found = libraries.mapped()
    assert len(found["cudnn"]) == 1
    assert cudnn.frontend().version == libraries.version("cudnn")


# ---------------------------------------------------------------------------------------------- equal bits


def test_threads_share_plans(fresh):
    """Eight threads, one forward and one backward graph, each its own numbers."""
    rt, cudnn = fresh
    made, wanted = [], []
    for i in range(8):
        tensors = [normal(rt, 2, 256, 4, 64, seed=10 * i + j) for j in range(4)]
        made.append(tensors)
    spec = replace(SPEC, deterministic=True)
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        try:
            start.wait()
            q, k, v, dy = made[i]
            first = bits(rt, step(rt, q, k, v, dy, spec))
            for _ in range(50):
                if bits(rt, step(rt, q, k, v, dy, spec)) != first:
                    failures.append(f"thread {i} changed its mind")
                    return
            wanted.append((i, first))
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and len(wanted) == 8 and cudnn.COUNTS.built == 2
    for i, first in wanted:
        q, k, v, dy = made[i]
        assert bits(rt, step(rt, q, k, v, dy, spec)) == first


# ---------------------------------------------------------------------------------------------- capture


def captured(torch, run):
    """(its results in a graph, what replays the graph, what gives an eager step's results), on one stream."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()

    def eager():
        torch.cuda.synchronize()  # a step runs on another stream than what was copied for it
        with torch.cuda.stream(stream):
            found = run()
        torch.cuda.synchronize()
        return found

    eager()  # builds the plans and loads the kernels
    eager()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = run()
    return results, lambda: (graph.replay(), torch.cuda.synchronize()), eager


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"left": 31},
        {"bias": "alibi", "default_slopes": True},
        {"bias": "alibi"},
        {"softmax": "learnable"},
        {"softmax": "off-by-one"},
        {"max_logit": True},
        {"dropout": 0.2},
        {"softcap": 9.0},
    ],
    ids=str,
)
def test_a_captured_step_replays_with_new_values(changes):
    """New queries, keys, values, gradients and seeds in the old memory give what an eager step gives of them."""
    torch = pytest.importorskip("torch")
    from te_torch.runtime import runtime_for, to_core, to_torch

    spec = replace(SPEC, **changes)
    held = [torch.randn(2, 192, 4, 64, device="cuda").bfloat16() for _ in range(4)]
    slopes = torch.rand(4, device="cuda") if spec.bias == "alibi" else None
    if spec.default_slopes:
        slopes = torch.tensor([2.0 ** (-2 * i) for i in range(1, 5)], device="cuda")
    sink = torch.randn(4, device="cuda") if spec.softmax == "learnable" else None
    rng = torch.tensor([5, 0], device="cuda") if spec.dropout else None
    back_is_exact = spec.softmax != "learnable"  # the gradient of a learnable sink adds in any order
    terms = Terms(**{n: to_core(t) for n, t in (("slopes", slopes), ("sink", sink), ("rng", rng)) if t is not None})

    def run():
        rt = runtime_for(held[0])
        q, k, v, dy = map(to_core, held)
        y = attention_forward(rt, q, k, v, spec=spec, terms=terms)
        back = replace(spec, max_logit=False, deterministic=back_is_exact)
        g = attention_backward(rt, dy, q, k, v, y.out, y.stats, spec=back, terms=terms)
        return [to_torch(t) for t in (y.out, y.stats, y.max_logit, g.q, g.k, g.v, g.sink) if t is not None]

    results, replay, eager = captured(torch, run)
    for seed in range(3):
        torch.manual_seed(seed)
        for t in (*held, *(t for t in (sink,) if t is not None)):
            t.copy_(torch.randn_like(t))
        if rng is not None:
            rng.copy_(torch.tensor([seed, 64 * seed], device="cuda"))
        wanted = eager()
        replay()
        for got, want in zip(results, wanted, strict=True):
            exact = got.ndim > 1 and (back_is_exact or got is results[0])  # others are sums of all rows
            same = torch.equal(got, want) if exact else torch.allclose(got, want, rtol=1e-2, atol=1e-2)
            assert torch.isfinite(got.float()).all() and same


def test_a_captured_packed_step_replays_with_new_lengths():
    """Lengths are read on the device: other running sums in the old memory are other sequences."""
    torch = pytest.importorskip("torch")
    from te_torch.runtime import runtime_for, to_core, to_torch

    spec = replace(THD, max_q=128, max_kv=128, deterministic=True)
    held = [torch.randn(256, 4, 64, device="cuda").bfloat16() for _ in range(4)]
    cu = torch.tensor([0, 100, 160, 256], dtype=torch.int32, device="cuda")
    terms = Terms(Lengths(to_core(cu), to_core(cu)))

    def run():
        rt = runtime_for(held[0])
        q, k, v, dy = map(to_core, held)
        y = attention_forward(rt, q, k, v, spec=spec, terms=terms)
        g = attention_backward(rt, dy, q, k, v, y.out, y.stats, spec=spec, terms=terms)
        return [to_torch(t) for t in (y.out, y.stats, *g[:3])]

    results, replay, eager = captured(torch, run)
    seen = set()
    for sums in ([0, 128, 250, 256], [0, 1, 2, 120], [0, 0, 128, 256], [0, 100, 160, 256]):
        cu.copy_(torch.tensor(sums, dtype=torch.int32))
        wanted = eager()
        replay()
        assert all(torch.equal(got, want) for got, want in zip(results, wanted, strict=True))
        assert torch.isfinite(results[0].float()).all() and not results[0][sums[-1] :].any()
        seen.add(results[0].float().sum().item())
    assert len(seen) == 4


# ---------------------------------------------------------------------------------------------- odd places


def test_queries_that_see_no_key_weigh_nothing():
    """Their statistics are infinite: whatever a score is, backward's exp(score - statistic) is zero."""
    rt = cuda_runtime()
    q, dy = (normal(rt, 2, 192, 4, 64, seed=i) for i in range(2))
    k, v = (normal(rt, 2, 128, 4, 64, seed=i) for i in range(2, 4))
    out, stats, dq, _, _ = (rt.numpy(t) for t in step(rt, q, k, v, dy, replace(SPEC, bottom_right=True), NOTHING))
    assert np.isposinf(stats[:, :, :64]).all() and np.isfinite(stats[:, :, 64:]).all()
    assert not out[:, :64].any() and not dq[:, :64].any() and out[:, 64:].any()


def test_one_device():
    """All tensors lie where the runtime is."""
    rt, cpu = cuda_runtime(), Runtime.cpu()
    q, k, v, terms = batch(rt, [5, 60])
    spec = replace(THD, max_q=64, max_kv=64)
    there = cpu.tensor(rt.numpy(q))
    for call in ((q, k, there), (there, k, v)):
        with pytest.raises(ArgumentError, match="one device"):
            attention_forward(rt, *call, spec=spec, terms=terms)
    cu = cpu.tensor(np.array([0, 5, 65], np.int32))
    with pytest.raises(ArgumentError, match="one device"):
        attention_forward(rt, q, k, v, spec=spec, terms=Terms(Lengths(cu, cu)))
