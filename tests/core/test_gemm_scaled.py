"""Products of operands with a scale for each block, against float64 of the stored values; float32 into 16 bits.

The stored copies are made here, of random data and random scales, so that every block's scale matters. What only
Blackwell multiplies is checked as far as its descriptors, through bindings that record what they are told.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from te_core import dtypes as D
from te_core.backends.cuda import cublaslt as lt_
from te_core.backends.cuda import gemm as cuda_gemm
from te_core.backends.cuda import gemm_run, gemm_tune
from te_core.errors import UnsupportedError
from te_core.kernels import loader
from te_core.ops.gemm import gemm
from te_core.plan_cache import PlanCache
from te_core.quantized import Format
from te_core.runtime import HostAllocator, Runtime
from te_core.tensor import CPU, Tensor
from tests.backends import capability, cuda_runtime, needs_device, requires_cuda
from tests.core.test_gemm import BOUND, check, family, fresh, multiply, operands, values
from tests.covering import covering
from tests.reference import gemm as reference
from tests.tolerances import DB

requires_blocks = needs_device(capability()[0] == 9, "sm_90")

PIECES, TILES = Format(D.float8_e4m3, "block"), Format(D.float8_e4m3, "block", True)
GRADIENT = Format(D.float8_e5m2, "block")
PAIRS = {"1Dx2D": (PIECES, TILES), "1Dx1D": (PIECES, PIECES), "2Dx1D": (TILES, PIECES), "e5m2": (GRADIENT, TILES)}
LENGTHS = [16, 128, 144, 640, 1040, 4096]  # 640 and 1040 have no multiple of four blocks


def up(n: int, step: int) -> int:
    return -(-n // step) * step


def stored(form: Format, rows: int, k: int, seed: int):
    """A stored block copy of a matrix [rows, k]: (data, scales), and what they stand for."""
    rng = np.random.default_rng(seed)
    high, wide = up(rows, 16), up(k, 16)
    data = np.zeros((high, wide), form.dtype.numpy)
    data[:rows, :k] = (rng.standard_normal((rows, k)) * 40).astype(form.dtype.numpy)
    blocks = -(-wide // 128)
    if form.tiled:
        # Nobody fills the places that only make the leading dimension a multiple of four.
        scales = np.full((-(-high // 128), up(blocks, 4)), np.nan, np.float32)
        scales[:, :blocks] = rng.uniform(0.5, 2, (scales.shape[0], blocks)) * 2.0 ** rng.integers(-10, -2, blocks)
        each = scales[:, :blocks].repeat(128, 0)[:high]
    else:
        scales = (rng.uniform(0.5, 2, (blocks, high)) * 2.0 ** rng.integers(-10, -2, (blocks, 1))).astype(np.float32)
        each = scales.T
    meant = data.astype(np.float64) * each.astype(np.float64).repeat(128, 1)[:, :wide]
    return (data, scales), meant[:rows, :k]


def block_product(rt: Runtime, pair, size, **options):
    """(y, what it should be without epilogue), both of the real shape; y comes whole, padding included."""
    m, n, k = size
    (a_form, b_form), (a, av), (b, bv) = pair, stored(pair[0], m, k, 1), stored(pair[1], n, k, 2)
    y = gemm(
        rt,
        rt.tensor(a[0]),
        rt.tensor(b[0]),
        trans_b=True,
        a_scale=rt.tensor(a[1]),
        b_scale=rt.tensor(b[1]),
        a_format=a_form,
        b_format=b_form,
        **options,
    )
    assert y.shape == (up(m, 16), up(n, 16))
    return y, av @ bv.T


def close(rt: Runtime, y: Tensor, want: np.ndarray, bound: float) -> None:
    """The real part of a padded result is what it should be."""
    full = rt.numpy(y)
    check(rt, rt.tensor(np.ascontiguousarray(full[: want.shape[0], : want.shape[1]])), want, bound)


# ---------------------------------------------------------------------------------------------- blocks, on Hopper


@dataclass(frozen=True)
class Blocks:
    """A product of blocks with what is asked for beside it, and the kernels that CUDA takes."""

    size: tuple[int, int, int] = (128, 256, 640)
    out: D.DType = D.bfloat16
    bias: D.DType | None = None
    epilogue: str | None = None
    old: bool = False  # what `out` held is added
    wants: str | None = None


BLOCKS = [
    *(
        Blocks((256, 384, k), out, wants="cublasLt(none)")
        for k in LENGTHS
        for out in (D.bfloat16, D.float16, D.float32)
    ),
    # Any matrix enters by its padded copy; rows and columns of zeros come out as zeros.
    *(Blocks(size, D.float32) for size in ((1, 1, 1), (37, 40, 200), (130, 16, 1000), (5, 271, 129), (1021, 517, 391))),
    Blocks(old=True),
    Blocks(out=D.float32, old=True, wants="cublasLt(none)"),  # the weight gradient's own way
    Blocks(bias=D.bfloat16),
    Blocks(out=D.float16, bias=D.float16),
    *(Blocks(out=out, bias=D.float32, wants="cublasLt(none) + epilogue.cu") for out in (D.bfloat16, D.float32)),
    *(Blocks(epilogue=epilogue) for epilogue in ("gelu", "dgelu")),
]


@requires_blocks
@covering(case=BLOCKS, pair=PAIRS)
def test_block_product(case, pair):
    rt, (m, n, _) = cuda_runtime(), case.size
    fresh(rt)
    bias, biasv = values(rt, (n,), case.bias, 3, 30.0) if case.bias else (None, 0.0)
    aux, auxv = values(rt, (m, n), D.bfloat16, 4) if case.epilogue else (None, None)
    target, old = values(rt, (m, n), case.out, 5, 30.0) if case.old else (None, 0.0)
    options = {"out": target, "accumulate": True} if case.old else {"out_dtype": case.out}
    y, want = block_product(rt, PAIRS[pair], case.size, bias=bias, epilogue=case.epilogue, aux=aux, **options)
    if case.epilogue:
        want = reference.gelu(want) if case.epilogue == "gelu" else want * reference.gelu_slope(auxv)
    assert target is None or y is target
    close(rt, y, want + biasv + old, min(BOUND[case.out], DB["fp8 split"]) - 3 * (case.epilogue is not None))
    full = rt.numpy(y)
    assert case.bias or not (full[m:].any() or full[:, n:].any())
    assert case.wants in (None, family(rt))


@requires_blocks
def test_block_empty_sizes():
    rt = cuda_runtime()
    for size in ((0, 32, 64), (32, 0, 64)):
        y, want = block_product(rt, PAIRS["1Dx1D"], size)
        assert rt.numpy(y).shape == want.shape
    bias, biasv = values(rt, (32,), D.bfloat16, 3)
    y, _ = block_product(rt, PAIRS["1Dx1D"], (16, 32, 0), bias=bias)
    close(rt, y, np.tile(biasv, (16, 1)), DB["bf16"])


@requires_blocks
def test_block_plans_explain_their_scales():
    rt = cuda_runtime()
    fresh(rt)
    block_product(rt, PAIRS["1Dx2D"], (128, 256, 640))
    assert "scales of float8_e4m3 1x128 x float8_e4m3 128x128" in rt.plans.values()[-1].explain()


@requires_blocks
@pytest.mark.parametrize("pair", PAIRS)
def test_block_algorithms_are_timed(pair, tmp_path, monkeypatch):
    """The tuner makes scales of the right shapes, and what it chose still gives the right result."""
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gemm_tune, "_store", None)
    rt = cuda_runtime()
    fresh(rt)
    size = 256, 384, 640
    block_product(rt, PAIRS[pair], size, out_dtype=D.float32)
    tuned = cuda_gemm.tune(rt, rt.plans.values()[-1].spec)
    assert tuned.source.startswith("timing")
    fresh(rt)
    y, want = block_product(rt, PAIRS[pair], size, out_dtype=D.float32)
    close(rt, y, want, DB["fp8 split"])
    assert rt.plans.values()[-1].source == "an earlier timing"


@requires_cuda
@needs_device(capability()[0] < 10, "a GPU older than sm_100")
def test_what_only_blackwell_multiplies_is_refused():
    rt = cuda_runtime()
    with pytest.raises(UnsupportedError, match="needs compute capability 10.0"):
        call(rt, "mxfp8")


# ---------------------------------------------------------------------------------------------- arguments, anywhere


class Spy:
    """A backend that keeps the spec it is to plan, and computes nothing."""

    name = "spy"

    def __init__(self) -> None:
        self.spec = self.ran = None

    def executors(self, rt):
        return threading.local()

    def plan_gemm(self, rt, spec):
        self.spec = spec
        return SimpleNamespace(spec=spec, swizzled=True, run=self.run)

    def run(self, rt, operands):
        self.ran = operands


@pytest.fixture
def spy() -> Runtime:
    rt = Runtime(CPU, 0, HostAllocator(), Spy())
    rt.plans = PlanCache(capacity=0)
    return rt


#: M, N and K that differ, so that swapped sizes show.
M, N, K = 96, 160, 320


def call(rt: Runtime, scaling: str, **changed):
    """A product of this scaling; `changed` replaces arguments."""
    scale = lambda rows, step: rt.empty((up(rows, 128), up(K // step, 4)), D.uint8)  # noqa: E731
    one = rt.empty((1,), D.float32)
    fp8, fp4 = Format(D.float8_e4m3, scaling), Format(D.float4_e2m1, "nvfp4")
    made = {
        "block": lambda: {
            "a": rt.empty((M, K), D.float8_e4m3),
            "b": rt.empty((N, K), D.float8_e4m3),
            "a_format": fp8,
            "b_format": TILES,
            "a_scale": rt.empty((3, M), D.float32),
            "b_scale": rt.empty((2, 4), D.float32),
        },
        "mxfp8": lambda: {
            "a": rt.empty((M, K), D.float8_e4m3),
            "b": rt.empty((N, K), D.float8_e4m3),
            "a_format": fp8,
            "b_format": fp8,
            "a_scale": scale(M, 32),
            "b_scale": scale(N, 32),
        },
        "nvfp4": lambda: {
            "a": rt.empty((M, K // 2), D.uint8),
            "b": rt.empty((N, K // 2), D.uint8),
            "a_format": fp4,
            "b_format": Format(D.float4_e2m1, "nvfp4", True, bound=256),
            "a_scale": scale(M, 16),
            "b_scale": scale(N, 16),
            "a_amax": one,
            "b_amax": one,
        },
    }[scaling]()
    arguments = {"trans_b": True, **made, **changed}
    return gemm(rt, arguments.pop("a"), arguments.pop("b"), **arguments)


@pytest.mark.parametrize("scaling", ["block", "mxfp8", "nvfp4"])
def test_specs(spy, scaling):
    y = call(spy, scaling)
    spec = spy.backend.spec
    assert (y.shape, y.dtype) == ((M, N), D.bfloat16)
    assert (spec.m, spec.n, spec.k) == (M, N, K)
    assert spec.a_format.scaling == spec.b_format.scaling == scaling
    assert spec.a is spec.b is (D.float4_e2m1 if scaling == "nvfp4" else D.float8_e4m3)


def test_mxfp8_in_every_transposition(spy):
    for trans_a, trans_b in ((False, False), (True, False), (True, True)):
        a = spy.empty((K, M) if trans_a else (M, K), D.float8_e4m3)
        b = spy.empty((N, K) if trans_b else (K, N), D.float8_e4m3)
        assert call(spy, "mxfp8", a=a, b=b, trans_a=trans_a, trans_b=trans_b).shape == (M, N)


# ---------------------------------------------------------------------------------------------- descriptors, anywhere


class Recorder:
    """cuBLASLt's functions as the backend calls them: keeps what it is told."""

    def __init__(self) -> None:
        self.values: dict[int, int] = {}
        self.layouts: list[tuple[int, ...]] = []
        self.ran: tuple[int, ...] = ()
        self.alive = 0

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        self.alive += 1
        return 1

    def matmul_desc_destroy(self, desc: int) -> None:
        self.alive -= 1

    matrix_layout_destroy = matmul_desc_destroy

    def matrix_layout_create(self, *layout: int) -> int:
        self.alive += 1
        self.layouts.append(layout)
        return len(self.layouts)

    def matmul_desc_set_attribute(self, desc: int, attribute: int, at: int, nbytes: int) -> None:
        self.values[attribute] = int.from_bytes(ctypes.string_at(at, nbytes), "little")

    def matmul(self, *args: int) -> None:
        self.ran = args


def prepared(spy: Runtime, scaling: str, **changed):
    """(what was told to cuBLASLt, the descriptors) of the first route of a product."""
    call(spy, scaling, **changed)
    spec = spy.backend.spec
    route = next(cuda_gemm._routes(spec, cuda_gemm._fused_epilogue(spec)))
    recorder = Recorder()
    cache = SimpleNamespace(lt=recorder, handle=7)
    return recorder, gemm_run.Prepared(cache, spec, route)


FP8, FP4, BF16 = lt_.DATA_TYPES[D.float8_e4m3], 33, lt_.DATA_TYPES[D.bfloat16]


@pytest.mark.parametrize(
    ("scaling", "modes", "dtype"), [("block", (5, 4), FP8), ("mxfp8", (2, 2), FP8), ("nvfp4", (1, 1), FP4)]
)
def test_descriptors(spy, scaling, modes, dtype):
    """cuBLASLt's A is our b and its B our a: scale modes, types and sizes in its own order, sizes in elements."""
    lt, _ = prepared(spy, scaling)
    assert (lt.values[31], lt.values[32]) == modes
    assert (lt.values[lt_.TRANSA], lt.values[lt_.TRANSB]) == (1, 0)
    assert lt.layouts == [(dtype, K, N, K), (dtype, K, M, K), (BF16, N, M, N)]
    assert not lt.values.get(lt_.FAST_ACCUM)
    assert lt.values.get(lt_.POINTER_MODE, 0) == (scaling == "nvfp4")
    assert {17, 18} <= set(lt.values)


def test_fast_accumulation_is_per_tensor_only(spy):
    lt, _ = prepared(spy, "block", split_accumulator=False)
    assert not lt.values.get(lt_.FAST_ACCUM)


def test_mxfp8_columnwise_descriptors(spy):
    """A weight gradient: both operands lie across the contraction."""
    a, b = spy.empty((K, M), D.float8_e4m3), spy.empty((K, N), D.float8_e4m3)
    lt, _ = prepared(spy, "mxfp8", a=a, b=b, trans_a=True, trans_b=False)
    assert (lt.values[lt_.TRANSA], lt.values[lt_.TRANSB]) == (0, 1)
    assert lt.layouts[:2] == [(FP8, N, K, N), (FP8, M, K, M)]


def test_scale_pointers_follow_their_operands(spy):
    lt, made = prepared(spy, "block")
    a_scale, b_scale = 0x1000, 0x2000
    made.run(SimpleNamespace(stream=5), 1, 2, 3, 0, [b_scale, a_scale], 0x3000)
    assert (lt.values[17], lt.values[18]) == (b_scale, a_scale)
    handle, _, alpha, a, _, b, _, beta, c, _, d, _, _, scratch, *_ = lt.ran
    assert (handle, a, b, c, d, scratch) == (7, 2, 1, 3, 3, 0x3000)
    floats = [ctypes.c_float.from_address(at).value for at in (alpha, beta)]
    assert floats == [1.0, 0.0]


def test_nvfp4_reads_alpha_and_beta_where_they_are_made(spy, monkeypatch):
    """A run has a kernel make alpha and beta of the maxima, and cuBLASLt read them there."""
    lt, made = prepared(spy, "nvfp4", out=spy.empty((M, N), D.float32), accumulate=True)
    spec, launched = spy.backend.spec, []
    route = next(cuda_gemm._routes(spec, cuda_gemm._fused_epilogue(spec)))
    plan = gemm_run.LtPlan(spec, route, make_alpha=lambda rt, *args: launched.append(args))
    monkeypatch.setattr(gemm_run, "cache_of", lambda rt: SimpleNamespace(get=lambda plan: made))
    maxima = [SimpleNamespace(ptr=0x100), SimpleNamespace(ptr=0x200)]
    at = gemm_run._make_alpha(spy, plan, *maxima)
    assert at == spy.workspace("gemm alpha", 8)
    assert launched == [(1, 1, *maxima, at, pytest.approx(1 / (36 * 448 * 256)), 1.0)]
    made.run(SimpleNamespace(stream=5), 1, 2, 3, at, [4, 5], 0)
    assert (lt.ran[2], lt.ran[7]) == (at, at + 4)


def test_descriptors_are_freed(spy):
    lt, made = prepared(spy, "nvfp4")
    del made
    gc.collect()
    assert lt.alive == 0


def test_what_the_product_refuses_has_another_way(spy):
    """cuBLASLt need not write every type from every format: the product in float32, then a kernel."""
    call(spy, "nvfp4", out_dtype=D.float16)
    routes = list(cuda_gemm._routes(spy.backend.spec, cuda_gemm._fused_epilogue(spy.backend.spec)))
    assert [(r.out, r.unfused) for r in routes] == [(D.float16, False), (D.float32, True)]


@requires_cuda
def test_alpha_kernel():
    rt = cuda_runtime()
    a, b, pair = rt.tensor(np.float32([3e30])), rt.tensor(np.float32([2e10])), rt.empty((2,), D.float32)
    factor = 1 / (36 * 448 * 448)
    loader.get(rt, "gemm_alpha", args=cuda_gemm._ALPHA_ARGS)(rt, 1, 1, a.ptr, b.ptr, pair.ptr, factor, 1.0)
    np.testing.assert_allclose(rt.numpy(pair), [3e30 * factor * 2e10, 1.0], rtol=3e-7)


# ---------------------------------------------------------------------------------------------- float32 into 16 bits


@covering(size=[(64, 48, 32), (7, 13, 5), (33, 65, 129)], trans=[False, True], out=[D.bfloat16, D.float16])
def test_float32_operands_round_once(rt, size, trans, out):
    """The product is float32's own, rounded at the store."""
    (a, av), (b, bv) = operands(rt, size, D.float32, trans, trans)
    full = gemm(rt, a, b, trans_a=trans, trans_b=trans)
    fresh(rt)
    y = gemm(rt, a, b, trans_a=trans, trans_b=trans, out_dtype=out)
    check(rt, y, reference.gemm(av, bv, trans_a=trans, trans_b=trans).out, BOUND[out])
    assert (rt.numpy(y) == rt.numpy(full).astype(out.numpy)).all()
    assert family(rt) in (None, "cublasLt(none) + epilogue.cu")


@pytest.mark.parametrize("out", [D.bfloat16, D.float16], ids=str)
def test_float32_operands_with_everything(rt, out):
    more = {"epilogue": "gelu", "a_sum": D.float32, "old": True, "bound": BOUND[out] + 3}
    multiply(rt, (40, 24, 72), D.float32, out, trans=(True, False), bias=D.bfloat16, **more)
