"""Every backend has the functions that operations declare, with the same arguments; what a backend says of itself."""

from __future__ import annotations

import ctypes
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from te_core import dtypes, libraries, ops
from te_core.backend import FILES
from te_core.backends.cpu import backend as cpu
from te_core.backends.cuda import backend as cuda
from te_core.backends.meta import backend as meta
from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops.declare import OPERATIONS
from te_core.ops.gemm import GemmOperands, GemmSpec
from te_core.quantized import Cast, Format
from te_core.runtime import ByteAllocator, HostAllocator, Runtime
from te_core.tensor import CPU, META, cuda_device
from tests.backends import requires_cuda
from tests.core import fake_cudnn

DECLARED = sorted(FILES)


@pytest.mark.parametrize("name", DECLARED)
def test_backends_have_a_function_alike(name: str) -> None:
    """Of one name, in files of one name, with arguments of the same names."""
    ours = [cpu, cuda, meta]
    assert [backend.name for backend in ours] == ["cpu", "cuda", "meta"]
    of_cpu, of_cuda, of_meta = (getattr(backend, name) for backend in ours)
    assert list(inspect.signature(of_cpu).parameters) == list(inspect.signature(of_cuda).parameters)
    assert callable(of_meta)


def test_operations_name_the_functions_that_they_call() -> None:
    """No more, and no fewer: those on `rt.backend` in its function, or in a plan's that it is found by."""
    assert len(OPERATIONS) > 60
    called: dict[str, set[str]] = {}
    for one in OPERATIONS.values():
        path = Path(inspect.getfile(one.body))
        called[path.name] = set(re.findall(r"rt\.backend\.(\w+)", path.read_text())) - {"zero"}
    for file, names in called.items():
        here = [one for one in OPERATIONS.values() if Path(inspect.getfile(one.body)).name == file]
        declared = {name for one in here for name in one.runs}
        formats = {name for name in declared if "quantize" in name and file == "quantize.py"}  # by the cast's format
        assert declared - formats == names - formats, file


def test_a_function_that_nobody_declares() -> None:
    for backend in (cpu, cuda, meta):
        with pytest.raises(AttributeError, match="no operation declares"):
            backend.nothing_of_the_kind  # noqa: B018


def test_a_shape_has_no_values() -> None:
    rt = Runtime.meta(HostAllocator())
    with pytest.raises(UnsupportedError, match="copy_to_host"):
        rt.numpy(ops.amax(rt, rt.empty((2, 2), dtypes.float32)))


# ----------------------------------------------------------------------------------------------- plans of products


class Product:
    """A kernel of somebody else's, which reads scales as it likes."""

    def __init__(self, spec: GemmSpec, swizzled: bool) -> None:
        self.spec, self.swizzled, self.ran = spec, swizzled, []

    def run(self, rt: Runtime, operands: GemmOperands) -> None:
        self.ran.append(operands)


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4"])
def test_scales_come_in_the_order_that_a_plan_wants(
    monkeypatch: pytest.MonkeyPatch, scaling: str, columnwise: bool, swizzled: bool
) -> None:
    """And swizzled ones are made once for each copy, however often it is multiplied, and anew when it is."""
    module = import_module("te_core.ops.gemm_quantized")
    rt = Runtime.cpu(HostAllocator()).fresh()
    rt.plans = type(rt.plans)()
    plans: list[Product] = []
    made: list[Any] = []
    monkeypatch.setattr(cpu, "plan_gemm", lambda rt, spec: plans.append(Product(spec, swizzled)) or plans[-1])
    swizzle = cpu.swizzle_scales
    monkeypatch.setattr(cpu, "swizzle_scales", lambda rt, *given: made.append(given) or swizzle(rt, *given))
    monkeypatch.setattr(module, "gemm_route", lambda *pair: module.Route("native", ""))
    dtype = dtypes.float8_e4m3 if scaling == "mxfp8" else dtypes.float4_e2m1
    cast = Cast(Format(dtype, scaling), rowwise=True, columnwise=True)
    rng = np.random.default_rng(0)
    values = [rt.tensor(rng.standard_normal((64, 96)).astype(np.float32)) for _ in range(2)]
    a, b = (ops.quantize(rt, v, cast) for v in values)
    out = rt.empty((96, 96) if columnwise else (64, 64), dtypes.float32)
    for _ in range(3):
        ops.gemm_quantized(rt, a, b, out, a_columnwise=columnwise, b_columnwise=columnwise)
    (plan,) = plans
    stored = [q.columnwise_scale if columnwise else q.rowwise_scale for q in (a, b)]
    transposed = columnwise and scaling == "mxfp8"
    want = [ops.swizzle_scales(rt, s, transposed=transposed) if swizzled else s for s in stored]
    assert len(made) == 2 * (2 if swizzled else 0)  # by the products, and just now
    for operands in plan.ran:
        for got, scale in zip(operands[3:5], want, strict=True):
            assert np.array_equal(rt.numpy(got), rt.numpy(scale))
    before = len(made)
    ops.quantize(rt, values[1], cast, out=a)
    ops.gemm_quantized(rt, a, b, out, a_columnwise=columnwise, b_columnwise=columnwise)
    assert len(made) == before + swizzled and len(plan.ran) == 4
    again = b.columnwise_scale if columnwise else b.rowwise_scale
    want = ops.swizzle_scales(rt, again, transposed=transposed) if swizzled else again
    assert np.array_equal(rt.numpy(plan.ran[-1].a_scale), rt.numpy(want))


# ------------------------------------------------------------------------------------------------- several streams


def test_the_host_has_one_stream() -> None:
    rt = Runtime.cpu()
    assert rt.side() is rt
    rt.wait(rt.side())
    rt.record(rt.tensor([1.0]))
    with pytest.raises(ArgumentError, match=r"Runtime\.wait"):
        rt.wait(Runtime(META, 0, HostAllocator(), rt.backend))


def test_streams_beside_a_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """One for each name, ordered by events; its memory, and that of others, is recorded with the allocator."""
    from te_core import libraries

    rt, _ = fake_cudnn.runtime(monkeypatch, tmp_path)
    driver, orders, streams = libraries.driver(), [], iter(range(100, 110))
    driver.create_stream = lambda: next(streams)
    driver.order_streams = lambda *given: orders.append(given)
    recorded: list[Any] = []
    rt.allocator.record_stream = lambda t, stream: recorded.append((t, stream))
    rt.allocator.beside = lambda stream: rt.allocator
    side = rt.side()
    assert rt.side() is side and side.stream == 100 and side.device is rt.device
    assert rt.side("other").stream == 101 and rt.fresh().side().stream == 100, "streams are kept, scratch memory is not"
    assert rt.fresh().side() is not side and side.joins and not rt.apart().side().joins
    index = fake_cudnn.INDEX
    side.wait(rt)
    rt.wait(side)
    rt.wait(rt)
    assert orders == [(index, 5, 100), (index, 100, 5)]
    x = rt.empty((4,), dtypes.float32)
    side.record(x, x.reshape(2, 2))
    assert [stream for _, stream in recorded] == [100, 100]
    del rt.allocator.record_stream, rt.allocator.beside
    with pytest.raises(ArgumentError, match="without record_stream"):
        side.record(x)
    with pytest.raises(ArgumentError, match="without beside"):
        rt.side("third")


def test_blocks_wait_for_the_streams_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_core.backends.cuda import memory

    events: list[tuple[Any, ...]] = []
    capturing: list[int] = []

    class Driver:
        def primary_context(self, index: int) -> int:
            return 0

        def allocate(self, index: int, nbytes: int, stream: int) -> int:
            return 1 << 20

        def captured_alike(self, *given: Any) -> bool:
            return not capturing

        def order_streams(self, *given: int) -> None:
            events.append(("order", *given))

        def free(self, index: int, address: int, stream: int, others: tuple[int, ...]) -> None:
            events.extend(("order", index, other, stream) for other in others)
            events.append(("free", address, stream))

    monkeypatch.setattr(libraries, "driver", lambda: made)
    made = Driver()
    place = cuda_device(fake_cudnn.INDEX)
    pool = memory.PoolAllocator(place)
    taken = ByteAllocator(place, lambda n, stream: 1 << 20, lambda *given: events.append(("free", *given)))
    for allocator in (pool, taken):
        assert allocator.beside(9) is allocator
        x = allocator.empty((4, 4), dtypes.float32, 5)
        for stream in (5, 9, 9):
            allocator.record_stream(x.rows(1, 3), stream)
        events.clear()
        del x
        assert [e[0] for e in events] == ["order", "free"] and events[0][1:] == (fake_cudnn.INDEX, 9, 5)
    x = taken.empty((4, 4), dtypes.float32, 5)
    taken.record_stream(x, 9)
    capturing.append(5)
    events.clear()
    del x  # the one stream would be drawn into the other's graph
    assert not events
    capturing.clear()
    taken.empty((4, 4), dtypes.float32, 5)
    assert [e[0] for e in events] == ["order", "free", "free"]
    on_host = ByteAllocator(CPU, lambda n, stream: 1 << 20, lambda *given: None)
    x = on_host.empty((4,), dtypes.float32, 0)
    on_host.record_stream(x, 3)
    events.clear()
    del x
    assert not events


@requires_cuda
@pytest.mark.parametrize("kind", ["pool", "torch"])
def test_two_streams_compute_one_after_the_other(kind: str) -> None:
    """Sums that need each other's results, on large tensors: without the waits one reads what is not there yet."""
    if kind == "torch":
        torch = pytest.importorskip("torch")
        from te_torch.runtime import runtime_for

        rt = runtime_for(torch.empty(1, device="cuda"))
    else:
        rt = Runtime.cuda()
    side = rt.side()
    assert side is not rt and side.stream not in (0, rt.stream)
    n = 1 << 24
    x = rt.zeros((1, n), dtypes.float32)
    one = rt.tensor(np.ones((1, n), np.float32))
    for _ in range(20):
        x = ops.add(rt, x, one)
        side.wait(rt)
        side.record(x, one)
        y = ops.add(side, x, one)
        rt.wait(side)
        rt.record(y)
        x = ops.add(rt, y, one)
        del y
    assert (rt.numpy(x) == 60.0).all()


@requires_cuda
@pytest.mark.parametrize("kind", ["pool", "torch"])
def test_memory_that_another_stream_reads_is_not_given_away(kind: str) -> None:
    if kind == "torch":
        torch = pytest.importorskip("torch")
        from te_torch.runtime import runtime_for

        rt = runtime_for(torch.empty(1, device="cuda"))
    else:
        rt = Runtime.cuda()
    side, n = rt.side(), 1 << 24
    busy, one = rt.zeros((1, n), dtypes.float32), rt.tensor(np.ones((1, n), np.float32))
    for _ in range(5):
        x = ops.add(rt, one, one)
        side.wait(rt)
        for _ in range(20):  # so that it reads x late
            busy = ops.add(side, busy, one, out=busy)
        side.record(x)
        y = ops.add(side, x, one)
        del x
        ops.add(rt, ops.add(rt, one, one), ops.add(rt, one, one))  # takes what is free
        rt.wait(side)
        assert (rt.numpy(y) == 3.0).all()
        del y


@requires_cuda
@pytest.mark.parametrize("where", ["default", "captured", "other"])
def test_pool_memory_comes_and_goes_during_a_capture(where: str) -> None:
    """The memory of runtimes that have nothing to do with the graph: the capture stays whole, and nothing is lost."""
    torch = pytest.importorskip("torch")
    captured, other = torch.cuda.Stream(), torch.cuda.Stream()
    stream = {"default": 0, "captured": captured.cuda_stream, "other": other.cuda_stream}[where]
    rt, side = Runtime.cuda(stream=stream), Runtime.cuda(stream=other.cuda_stream)
    x = torch.ones(4, device="cuda")
    held = [rt.empty((1 << 20,), dtypes.float32) for _ in range(3)]
    shared = rt.empty((1 << 20,), dtypes.float32)
    side.record(shared)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    before = _used_by_pool()
    with torch.cuda.graph(graph, stream=captured):
        y = x + 1
        held.clear()
        del shared
        side.empty((1 << 20,), dtypes.float32)
        z = y + 1
    for _ in range(2):
        graph.replay()
    one = rt.empty((1,), dtypes.float32)  # an allocation after the capture gives back what the capture refused
    torch.cuda.synchronize()
    assert z.tolist() == [3.0] * 4 and _used_by_pool() <= before - 4 * (4 << 20) + 512
    del one


def _used_by_pool() -> int:
    value = ctypes.c_uint64(0)
    pool = ctypes.c_void_p(libraries.driver().pool(0))
    status = ctypes.CDLL("libcuda.so.1").cuMemPoolGetAttribute(pool, 7, ctypes.byref(value))  # USED_MEM_CURRENT
    assert status == 0
    return value.value
