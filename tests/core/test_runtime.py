"""The runtime: whose memory it uses, what threads share, and the runtime that computes nothing."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import numpy as np
import pytest

from te_core import ArgumentError, Cast, Runtime, Tensor, dtypes, ops
from te_core.dtypes import DType
from te_core.plan_cache import PlanCache
from te_core.quantized import QuantizedTensor
from te_core.runtime import ByteAllocator, HostAllocator
from te_core.tensor import CPU, META, Device
from tests.core.test_tensor_dlpack import Counted
from tests.threads import ends, switching, together


class Noting:
    """An allocator that notes what is asked of it; meta tensors where it is told so."""

    def __init__(self, meta: bool = False) -> None:
        self.host, self.meta, self.asked = HostAllocator(), meta, []

    def empty(self, shape: tuple[int, ...], dtype: DType, stream: int) -> Tensor:
        self.asked.append((tuple(shape), dtype))
        return Tensor(0, tuple(shape), dtype, META, None) if self.meta else self.host.empty(shape, dtype, stream)


# --- memory ---------------------------------------------------------------------------------------


def test_one_cpu_runtime_unless_an_allocator_is_given():
    assert Runtime.cpu() is Runtime.cpu()
    mine = Runtime.cpu(HostAllocator())
    assert mine is not Runtime.cpu() and mine.plans is Runtime.cpu().plans
    assert mine.device is CPU and mine.backend.name == "cpu" and "cpu" in repr(mine)


def test_outputs_come_from_the_allocator():
    noting = Noting()
    rt = Runtime.cpu(noting)
    x = rt.tensor(np.ones((4, 32)), "bfloat16")
    cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=True)
    ops.quantize(rt, x, cast)  # the thread's scratch memory is made here
    noting.asked.clear()
    ops.quantize(rt, x, cast)
    assert noting.asked == [((2 * 16 * 32 + 16,), dtypes.uint8)]  # small: both orientations and the scale in one
    noting.asked.clear()
    wide = rt.tensor(np.ones((512, 512)), "bfloat16")
    noting.asked.clear()
    ops.quantize(rt, wide, cast)  # large: the row-wise copy apart, so that it can go before backward
    assert noting.asked == [((512 * 512 + 16,), dtypes.uint8), ((512, 512), dtypes.float8_e4m3)]


def test_scratch_comes_from_the_allocator_and_is_used_again():
    noting = Noting()
    rt = Runtime.cpu(noting)
    x = rt.tensor(np.ones((64, 64)), "bfloat16")
    noting.asked.clear()
    ops.gemm(rt, x, x)
    assert len(noting.asked) > 1  # the executor's blocks, and the result
    noting.asked.clear()
    ops.gemm(rt, x, x)
    assert noting.asked == [((64, 64), dtypes.bfloat16)]


def test_byte_allocator_frees_each_block_once_on_its_stream():
    freed: list[tuple[int, int]] = []
    sizes: list[tuple[int, int]] = []

    def alloc(nbytes: int, stream: int) -> int:
        sizes.append((nbytes, stream))
        return 4096 * len(sizes)

    allocator = ByteAllocator(CPU, alloc, lambda address, stream: freed.append((address, stream)))
    block = allocator.empty((3, 5), dtypes.bfloat16, 7)
    part = block.rows(1, 2).reshape(5)
    empty = allocator.empty((0, 5), dtypes.float32, 8)  # an address of its own, too: null would be a failure
    assert sizes == [(30, 7), (1, 8)] and (block.ptr, part.ptr, empty.ptr) == (4096, 4106, 8192)
    del block
    assert freed == []
    del part
    assert freed == [(4096, 7)]
    del empty
    assert freed == [(4096, 7), (8192, 8)]


def test_a_runtime_over_bytes_computes_and_gives_all_back():
    memory = Counted()
    rt = memory.runtime()
    x = rt.tensor(np.arange(6).reshape(2, 3), "float32")
    product = rt.numpy(ops.gemm(rt, x, x, trans_b=True))
    assert product.tolist() == [[5, 14], [14, 50]]
    del x, rt
    assert not memory.blocks and len(memory.freed) == len(set(memory.freed)) > 0


def test_host_memory_in_and_out():
    rt = Runtime.cpu()
    array = np.arange(6, dtype=np.float64).reshape(2, 3).T
    x = rt.tensor(array, "bfloat16")
    assert x.dtype is dtypes.bfloat16 and x.shape == (3, 2) and x.is_contiguous
    copied = rt.numpy(x)
    copied[...] = 9
    assert rt.numpy(x).astype(np.float64).tolist() == array.tolist()  # neither shares memory
    assert rt.tensor([[1, 2]]).dtype is dtypes.int64
    assert not rt.numpy(rt.zeros((3, 4), dtypes.float8_e5m2)).view(np.uint8).any()
    with pytest.raises(ArgumentError, match="uint8"):
        rt.empty((4,), dtypes.float4_e2m1)


# --- threads --------------------------------------------------------------------------------------


def test_workspaces_grow_and_belong_to_a_thread():
    rt = Runtime.cpu(HostAllocator())
    small = rt.workspace("a", 100)
    assert rt.workspace("a", 50) == small != rt.workspace("b", 100)
    assert ends(lambda: rt.workspace("a", 100)) not in (small, rt.workspace("b", 100))
    large = rt.workspace("a", 1 << 20)
    assert large != small and rt.workspace("a", 100) == large


def test_an_outgrown_workspace_stays():
    """A captured graph may point at it. (What the runtime holds goes with the runtime.)"""
    memory = Counted()
    rt = memory.runtime()
    small = rt.workspace("a", 100)
    large = rt.workspace("a", 1 << 20)
    assert small in memory.blocks and large in memory.blocks and not memory.freed
    del rt
    assert not memory.blocks


def test_a_zeroed_workspace_begins_as_zeros():
    rt = Runtime.cpu(HostAllocator())
    at = rt.workspace("z", 64, zeroed=True)
    ctypes.memset(at, 5, 8)
    assert rt.workspace("z", 64, zeroed=True) == at  # what its users leave behind, they find
    assert ctypes.string_at(at, 16) == b"\5" * 8 + bytes(8)


def test_a_fresh_runtime_shares_all_but_scratch_memory():
    rt = Runtime.cpu(HostAllocator())
    other = rt.fresh()
    same = [getattr(rt, name) is getattr(other, name) for name in ("device", "allocator", "backend", "plans", "stream")]
    assert all(same) and rt.workspace("a", 100) != other.workspace("a", 100)


def test_executors_belong_to_a_thread():
    rt = Runtime.cpu(HostAllocator())
    assert rt.executor() is rt.executor()
    assert ends(rt.executor) is not rt.executor()


def test_what_is_kept_is_a_devices_own():
    """Made once for each device and kind of things."""
    devices = [Device("cuda", 11), Device("cuda", 12)]
    made = []

    def numbered(device):
        made.append(device)
        return [device.index]

    assert [device.of(numbered) for device in (*devices, *devices)] == [[11], [12], [11], [12]] and made == devices
    assert devices[0].of(numbered) is devices[0].of(numbered) and devices[0].of(repr) == "cuda:11"


def test_eight_threads_one_plan_each_its_own_tensors():
    rt = Runtime.cpu()
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-4, 5, (2, 96, 80)).astype(np.float32) for _ in range(8)]
    wrong: list[int] = []

    def work(number: int) -> None:
        a, b = inputs[number]
        x, w = rt.tensor(a, "bfloat16"), rt.tensor(b, "bfloat16")
        one = rt.tensor(np.ones(1, np.float32))
        cast = Cast(dtypes.float8_e4m3, rowwise=True, columnwise=False, scale=one)
        for _ in range(25):
            plain = rt.numpy(ops.gemm(rt, x, w, trans_b=True, out_dtype=dtypes.float32))
            q, p = ops.quantize(rt, x, cast), ops.quantize(rt, w, cast)
            low = ops.gemm(
                rt,
                q.rowwise,
                p.rowwise,
                trans_b=True,
                a_scale=q.scale_inv,
                b_scale=p.scale_inv,
                out_dtype=dtypes.float32,
            )
            # Small integers are exact in every type here, and so are their products' sums.
            if not (np.array_equal(plain, a @ b.T) and np.array_equal(rt.numpy(low), a @ b.T)):
                wrong.append(number)

    together(*(partial(work, i) for i in range(8)))
    assert wrong == []


# --- plans ----------------------------------------------------------------------------------------


class Held:
    """A plan that holds something, and notes when it lets go."""

    def __init__(self, gone: list[int], number: int) -> None:
        self.gone, self.number = gone, number

    def __del__(self) -> None:
        self.gone.append(self.number)


def test_a_plan_that_is_used_stays_and_one_that_is_not_goes():
    gone: list[int] = []
    cache = PlanCache(capacity=4)
    for i in range(40):
        assert cache.get(i) is None
        assert cache.put(i, Held(gone, i)).number == i and cache.get(i).number == i
        assert cache.get(0).number == 0, "it was the first, and is used between all others"
        assert len(cache) <= 4
    assert gone == sorted(gone) and set(gone) == set(range(1, 40)) - {p.number for p in cache.values()}
    assert cache.builds == 40 and {0, 39} <= {p.number for p in cache.values()}


@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 100])
def test_what_was_used_lately_is_there(capacity):
    """Of any sequence of uses: the last half as many different plans as there is room for."""
    random = np.random.default_rng(capacity)
    cache, order = PlanCache(capacity), []
    for key in random.zipf(1.3, 4000) % 150:
        if cache.get(key) is None:
            assert key not in order[-max(1, capacity // 2) :], "it was used lately"
            cache.put(key, key)
        order = [k for k in order if k != key] + [key]
        assert len(cache) <= max(2, capacity)
    assert cache.builds > 100


def test_a_plan_that_left_the_cache_runs_on():
    """It goes when the one that runs it is done."""
    gone: list[int] = []
    cache = PlanCache(capacity=2)
    running = cache.put(0, Held(gone, 0))
    for i in range(1, 9):
        cache.put(i, Held(gone, i))
    assert cache.get(0) is None and 0 not in gone and 1 in gone
    del running
    assert gone[-1] == 0


def test_a_plan_cache_of_no_room_takes_no_keys():
    cache = PlanCache(capacity=0)
    assert cache.put(["no key"], "plan") == "plan" and cache.get(["no key"]) is None and len(cache) == 0


def test_threads_share_a_full_plan_cache():
    """Small enough to be turned over all the time: nobody gets another's plan, nothing raises."""
    cache = PlanCache(capacity=6)

    def work(seed: int) -> None:
        for key in np.random.default_rng(seed).integers(0, 12, 20_000).tolist():
            found = cache.get(key)
            if found is None:
                found = cache.put(key, ("plan", key))
            assert found == ("plan", key)

    with switching():
        together(*(partial(work, i) for i in range(6)))
    assert len(cache) <= 6


def test_a_plan_is_made_once_and_can_be_read():
    rt = Runtime.cpu()
    x = rt.tensor(np.ones((3, 7)), "float32")
    ops.gemm(rt, x, x, trans_a=True)
    builds = rt.plans.builds
    out = ops.gemm(rt, x, x, trans_a=True)
    assert rt.plans.builds == builds and out.shape == (7, 7)
    plan = rt.plans.values()[-1]
    assert plan.family == "cpu" and (plan.spec.m, plan.spec.n, plan.spec.k) == (7, 7, 3)
    assert "m=7" in repr(plan) and "cpu" in repr(plan)
    with pytest.raises(AttributeError):
        plan.family = "other"


# --- the runtime that computes nothing ------------------------------------------------------------


def described(result: Any) -> Any:
    """Shapes and dtypes of whatever an operation returns."""
    if isinstance(result, Tensor):
        return result.shape, result.dtype, result.strides
    if isinstance(result, QuantizedTensor):
        parts = (result.rowwise, result.columnwise, result.scale_inv)
        return result.shape, result.dtype, [described(p) for p in parts]
    return [described(r) for r in result] if isinstance(result, tuple) else result


M, N, K = 20, 48, 32
BF16, F32, E4M3 = dtypes.bfloat16, dtypes.float32, dtypes.float8_e4m3


def casts(rt: Runtime) -> list[Cast]:
    one = rt.zeros((1,), F32)
    return [
        Cast(E4M3, rowwise=True, columnwise=True),
        Cast(dtypes.float8_e5m2, rowwise=False, columnwise=True, scale=one, amax=one),
    ]


def gemms(rt: Runtime) -> list[Any]:
    a, b, one = rt.zeros((M, K), BF16), rt.zeros((N, K), BF16), rt.zeros((1,), F32)
    aux, qa, qb = rt.zeros((M, N), BF16), rt.zeros((M, K), E4M3), rt.zeros((N, K), E4M3)
    scales = {"a_scale": one, "b_scale": one, "trans_b": True}
    return [
        ops.gemm(rt, a, b, trans_b=True, bias=rt.zeros((N,), BF16), epilogue="gelu", aux=aux),
        ops.gemm(rt, a, b, trans_b=True, epilogue="dgelu", aux=aux, out_sum=rt.zeros((N,), F32), out_dtype=F32),
        ops.gemm(rt, a, a, trans_a=True, out=rt.zeros((K, K), F32), accumulate=True, a_sum=rt.zeros((K,), F32)),
        ops.gemm(rt, qa, qb, **scales),
        ops.gemm(rt, qa, qb, **scales, out_dtype=dtypes.float16),
    ]


def norms(rt: Runtime) -> list[Any]:
    x, g = rt.zeros((M, K), BF16), rt.zeros((K,), F32)
    found: list[Any] = []
    for kind, beta in (("LayerNorm", g), ("RMSNorm", None)):
        _, _, mean, rstd = result = ops.norm_forward(rt, x, g, beta, kind=kind, eps=1e-5, out_dtype=F32)
        found += [result, ops.norm_backward(rt, x, x, g, mean, rstd, kind=kind)]
        found += [
            ops.norm_forward(rt, x, g, beta, kind=kind, eps=1e-5, cast=c, keep=k) for c in casts(rt) for k in (0, 1)
        ]
    return found


def activations(rt: Runtime) -> list[Any]:
    x, found = rt.zeros((M, 2 * K), BF16), []
    for kind in ("gelu", "qgelu", "relu", "srelu", "silu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu"):
        dy = rt.zeros((M, K if ops.is_gated(kind) else 2 * K), BF16)
        sums = rt.zeros((2 * K,), F32)
        found += [ops.activation_forward(rt, x, kind), ops.activation_backward(rt, dy, x, kind, column_sum=sums)]
        for cast in casts(rt):
            found += [
                ops.activation_forward(rt, x, kind, cast=cast),
                ops.activation_backward(rt, dy, x, kind, cast=cast),
            ]
    return found


def quantizations(rt: Runtime) -> list[Any]:
    x = rt.zeros((M, K), BF16)
    both, delayed = casts(rt)
    q = ops.quantize(rt, x, both, column_sum=rt.zeros((K,), F32))
    return [
        q,
        ops.quantize(rt, x, delayed),
        ops.dequantize(rt, q, BF16),
        ops.transpose(rt, q.rowwise),
        ops.amax(rt, x),
        ops.amax(rt, x, out=rt.zeros((1,), F32)),
        ops.update_scales(rt, [], "max"),
    ]


def elementwise(rt: Runtime) -> list[Any]:
    x, rng = rt.zeros((M, K), BF16), rt.zeros((2,), dtypes.int64)
    return [
        ops.add(rt, x, x),
        ops.add(rt, x, x, out=x),
        ops.bias_dropout_add(rt, x, rt.zeros((K,), BF16), x, p=0.1, rng=rng),
        ops.bias_dropout_add_backward(rt, x, p=0.1, rng=rng, column_sum=rt.zeros((K,), F32)),
    ]


@pytest.mark.parametrize("group", [gemms, norms, activations, quantizations, elementwise])
def test_meta_gives_the_shapes_and_types_of_the_cpu(group):
    meta = Runtime.meta(Noting(meta=True))
    assert [described(r) for r in group(meta)] == [described(r) for r in group(Runtime.cpu())]


def test_meta_still_checks_arguments():
    meta = Runtime.meta(Noting(meta=True))
    with pytest.raises(ArgumentError, match="contraction"):
        ops.gemm(meta, meta.empty((3, 4), F32), meta.empty((3, 4), F32))
