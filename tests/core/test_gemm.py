"""Every line of te_core.ops.gemm's contract, against float64 of the operands as stored."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from te_core import dtypes as D
from te_core.errors import ArgumentError
from te_core.ops.gemm import GemmOperands, gemm
from te_core.runtime import Runtime
from te_core.tensor import Tensor
from tests.backends import requires_cuda
from tests.covering import covering
from tests.reference import gemm as reference
from tests.tolerances import DB, snr_db

#: The last one of several blocks of rows on the CPU.
SIZES = [(64, 48, 32), (7, 13, 5), (1, 1, 1), (33, 65, 129), (128, 8, 17), (101, 700, 40)]
TRANSPOSES = list(itertools.product((False, True), repeat=2))
BOUND = {D.bfloat16: DB["bf16"], D.float16: DB["fp16"], D.float32: DB["fp32"]}
PAIRS = [
    (D.bfloat16, D.bfloat16),
    (D.bfloat16, D.float32),
    (D.float16, D.float16),
    (D.float16, D.float32),
    (D.float32, D.float32),
]


def values(rt: Runtime, shape: tuple[int, ...], dtype: D.DType, seed: int, scale: float = 1.0):
    """A random tensor, and the values that it holds."""
    array = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32).astype(dtype.numpy)
    return rt.tensor(array), array.astype(np.float64)


def operands(rt: Runtime, size, dtype, trans_a=False, trans_b=False):
    """a and b of a product that has values near one."""
    m, n, k = size
    a = values(rt, (k, m) if trans_a else (m, k), dtype, 1)
    b = values(rt, (n, k) if trans_b else (k, n), dtype, 2, k**-0.5)
    return a, b


def family(rt: Runtime) -> str | None:
    """The kernels of the plan used last (CUDA names them; the CPU has one)."""
    return rt.plans.values()[-1].family if rt.backend.name == "cuda" else None


def check(rt: Runtime, got: Tensor, want: np.ndarray, bound: float) -> None:
    assert got.shape == want.shape
    assert snr_db(rt.numpy(got).astype(np.float64), want) >= bound


def fresh(rt: Runtime) -> None:
    """Forget the plans, so that the last plan is the test's own."""
    for key in list(rt.plans._plans):
        del rt.plans._plans[key]


FP8_PAIRS = [(D.float8_e4m3, D.float8_e4m3), (D.float8_e4m3, D.float8_e5m2), (D.float8_e5m2, D.float8_e4m3)]


def fp8_operands(rt: Runtime, size, a_dtype=D.float8_e4m3, b_dtype=D.float8_e4m3):
    """A K-major pair with scales that differ, so that a swap shows."""
    m, n, k = size
    a, b = values(rt, (m, k), a_dtype, 1), values(rt, (n, k), b_dtype, 2)
    a_scale, b_scale = rt.tensor(np.array([0.125], np.float32)), rt.tensor(np.array([3.0], np.float32))
    return a, b, {"trans_b": True, "a_scale": a_scale, "b_scale": b_scale}


def multiply(
    rt, size, dtype, out, *, trans=(False, False), bias=None, epilogue=None, aux=False, out_sum=None, a_sum=None,
    old=False, bound=None, wants=None, scale=1.0, **more,
):  # fmt: skip
    """A product with what is asked for beside it, all of its results against float64. `dtype`: of both operands, or an
    FP8 pair; `bias`, `out_sum`, `a_sum`: types; `old`: what `out` held is added; `wants`: the kernels of CUDA's plan.
    """
    fresh(rt)
    if isinstance(dtype, tuple):
        (a, av), (b, bv), scales = fp8_operands(rt, size, *dtype)
        options, trans, factor = scales, (False, True), 0.375
        bound = min(BOUND[out], bound or DB["fp8 split"])
    else:
        (a, av), (b, bv) = operands(rt, size, dtype, *trans)
        options, factor = {"trans_a": trans[0], "trans_b": trans[1]}, 1.0
        bound = bound or BOUND[out]
    m, n, _ = size
    added, biasv = values(rt, (n,), bias, 3, scale) if bias else (None, None)
    given = auxv = None
    if epilogue == "dgelu":
        given, auxv = values(rt, (m, n), out, 4)
    elif aux:
        given = rt.empty((m, n), out)
    target, before = values(rt, (m, n), out, 5, 3.0) if old else (None, 0.0)
    rows, columns = (rt.empty((k,), t) if t else None for k, t in ((m, a_sum), (n, out_sum)))
    options |= {"bias": added, "epilogue": epilogue, "aux": given, "a_sum": rows, "out_sum": columns, **more}
    options |= {"out": target, "accumulate": True} if old else {"out_dtype": out}
    y = gemm(rt, a, b, **options)
    assert y.dtype is out and (target is None or y is target)
    how = {"trans_a": trans[0], "trans_b": trans[1], "bias": biasv, "epilogue": epilogue, "aux": auxv}
    want = reference.gemm(av, bv, **how) if factor == 1 else reference.gemm(av, bv, **how, scale=factor)
    # gelu's steepest relative slope costs a little; a product in the last place of zero more.
    check(rt, y, want.out + before, bound - 3 * (epilogue is not None))
    if aux:
        check(rt, given, want.aux, bound)
    if rows is not None:
        check(rt, rows, want.a_sum if factor == 1 else av.sum(1) * 0.125, BOUND[a_sum] - 6)
    if columns is not None:  # of the output before or after its rounding is the backend's choice
        check(rt, columns, want.out_sum, min(BOUND[out], BOUND[out_sum]) - 6)
    assert wants is None or family(rt) in (None, *wants), family(rt)


# ---------------------------------------------------------------------------------------------- 16 and 32 bit


@covering(pair=PAIRS, trans=TRANSPOSES, size=SIZES, turns=2)
def test_product(rt, pair, trans, size):
    multiply(rt, size, *pair, trans=trans, wants=["cublasLt(none)"])


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_tf32(rt, size):
    multiply(rt, size, D.float32, D.float32, tf32=True, bound=DB["tf32"], wants=["cublasLt(none)"])


@covering(
    types=[
        (D.bfloat16, D.bfloat16, D.bfloat16),
        (D.bfloat16, D.float32, D.bfloat16),
        (D.float16, D.float16, D.float16),
        (D.bfloat16, D.float32, D.float32),
        (D.bfloat16, D.bfloat16, D.float32),
        (D.float32, D.float32, D.float32),
        (D.float16, D.float32, D.float32),
        (D.float32, D.bfloat16, D.float32),
    ],
    size=SIZES,
)
def test_bias(rt, types, size):
    dtype, bias, out = types
    multiply(rt, size, dtype, out, bias=bias, scale=5.0, wants=["cublasLt(BIAS)"] if bias is out else None)


@covering(pair=PAIRS, aux=[False, True], bias=[False, True], size=SIZES, turns=2)
def test_gelu(rt, pair, aux, bias, size):
    fused = pair[1] is D.bfloat16 and size[1] % 8 == 0
    wants = [f"cublasLt(GELU{'_AUX' * aux}{'_BIAS' * bias})"] if fused else None
    more = {"bias": pair[1] if bias else None, "epilogue": "gelu", "aux": aux}
    multiply(rt, size, *pair, trans=(False, True), wants=wants, **more)


@covering(dtype=[D.bfloat16, D.float32], bias=[False, True], sums=[None, D.float32, D.bfloat16], size=SIZES, turns=2)
def test_dgelu(rt, dtype, bias, sums, size):
    fused = dtype is D.bfloat16 and size[1] % 8 == 0 and not bias
    wants = ["cublasLt(DGELU)" + (" + sums.cu" if sums else "")] if fused else None
    multiply(rt, size, dtype, dtype, bias=dtype if bias else None, epilogue="dgelu", out_sum=sums, wants=wants)


@covering(sums=[D.float32, D.bfloat16], trans=TRANSPOSES, size=SIZES, turns=2)
def test_a_sum_while_accumulating(rt, sums, trans, size):
    """The weight gradient as a layer forms it: into float32 main_grad, with the bias gradient."""
    fused = trans[0] and sums is D.float32 and size == (64, 48, 32)
    wants = ["cublasLt(BGRADB)" if fused else "cublasLt(none) + sums.cu", "cublasLt(BGRADB)"]
    multiply(rt, size, D.bfloat16, D.float32, trans=trans, a_sum=sums, old=True, wants=wants)


def test_a_sum_with_a_bias(rt):
    multiply(rt, (24, 40, 56), D.bfloat16, D.bfloat16, bias=D.bfloat16, a_sum=D.float32)


@covering(width=[37, 264, 2048], dtype=[D.bfloat16, D.float32])
def test_sums_of_many_rows(rt, width, dtype):
    """Enough rows for the two-step column sum; widths that leave a tail, and that allow wide loads or do not."""
    bound = BOUND[dtype] - 3
    multiply(rt, (width, 16, 5003), dtype, dtype, trans=(True, False), bias=dtype, a_sum=D.float32, bound=bound)


def test_unaligned_operands(rt):
    """16-bit operands may start anywhere, and their leading dimensions may be odd; their sums, too."""
    fresh(rt)
    flat, whole = values(rt, (1 + 300 * 23,), D.bfloat16, 1)
    a = Tensor(flat.ptr + 2, (300, 23), D.bfloat16, flat.device, flat)
    b, bv = values(rt, (300, 9), D.bfloat16, 2, 0.06)
    flat_bias, bias_values = values(rt, (10,), D.bfloat16, 3)
    bias = Tensor(flat_bias.ptr + 2, (9,), D.bfloat16, flat_bias.device, flat_bias)
    av, sums = whole[1:].reshape(300, 23), rt.empty((23,), D.float32)
    y = gemm(rt, a, b, trans_a=True, bias=bias)
    check(rt, y, reference.gemm(av, bv, trans_a=True, bias=bias_values[1:]).out, DB["bf16"])
    assert family(rt) in (None, "cublasLt(BIAS)")
    gemm(rt, a, b, trans_a=True, bias=bias, a_sum=sums)
    check(rt, sums, av.sum(0), DB["fp32"])


@covering(pair=PAIRS, epilogue=[None, "gelu", "dgelu"])
def test_accumulate(rt, pair, epilogue):
    """What `out` held is added after the epilogue."""
    multiply(rt, (40, 24, 72), *pair, bias=pair[1], epilogue=epilogue, old=True)


@pytest.mark.parametrize("dtype", [D.bfloat16, D.float32])
def test_empty_sizes(rt, dtype):
    """No rows, no columns: nothing but empty outputs and zero sums. No contraction: the epilogue of zero."""
    b, _ = values(rt, (8, 16), dtype, 2)
    sums = rt.tensor(np.full(16, 7, np.float32))
    aux = rt.empty((0, 16), dtype)
    y = gemm(rt, rt.empty((0, 8), dtype), b, epilogue="dgelu", aux=aux, out_sum=sums)
    assert y.shape == (0, 16)
    assert not rt.numpy(sums).any()
    a, av = values(rt, (8, 4), dtype, 1)
    sums = rt.empty((4,), D.float32)
    assert gemm(rt, a, rt.empty((8, 0), dtype), trans_a=True, a_sum=sums).shape == (4, 0)
    check(rt, sums, av.sum(0), DB["fp32"])
    bias, biasv = values(rt, (16,), dtype, 3)
    y = gemm(rt, rt.empty((4, 0), dtype), rt.empty((0, 16), dtype), bias=bias, epilogue="gelu")
    check(rt, y, np.tile(reference.gelu(biasv), (4, 1)), BOUND[dtype])


# ---------------------------------------------------------------------------------------------- FP8


@covering(
    size=[(64, 48, 32), (5, 16, 16), (1, 64, 256), (96, 32, 1024)],
    pair=FP8_PAIRS,
    out=[D.bfloat16, D.float16, D.float32],
    split=[False, True],
    turns=2,
)
def test_fp8(rt, size, pair, out, split):
    bound = DB["fp8 split" if split else "fp8 fast"]
    multiply(rt, size, pair, out, split_accumulator=split, bound=bound, wants=["cublasLt(none)"])


@covering(
    types=[
        (None, D.bfloat16),
        (D.bfloat16, D.bfloat16),
        (D.float32, D.bfloat16),
        (D.float16, D.float16),
        (D.bfloat16, D.float32),
        (D.float32, D.float32),
    ],
    epilogue=[None, "gelu", "gelu+aux", "dgelu"],
)
def test_fp8_epilogues(rt, types, epilogue):
    bias, out = types
    wants = ["cublasLt(none) + epilogue.cu"] if epilogue == "dgelu" else None
    if types == (D.bfloat16, D.bfloat16) and epilogue is None:
        wants = ["cublasLt(BIAS)"]
    more = {"bias": bias, "scale": 4.0, "aux": epilogue == "gelu+aux"}
    kind = epilogue and epilogue.removesuffix("+aux")
    multiply(rt, (40, 48, 64), FP8_PAIRS[0], out, epilogue=kind, bound=DB["fp8 split"] - 3, wants=wants, **more)


@pytest.mark.parametrize("out", [D.bfloat16, D.float32])
def test_fp8_accumulates_and_sums(rt, out):
    multiply(rt, (32, 48, 64), FP8_PAIRS[2], out, a_sum=D.float32, old=True)


# ---------------------------------------------------------------------------------------------- plans and errors


def test_one_plan_for_equal_calls(rt):
    (a, _), (b, _) = operands(rt, (56, 72, 88), D.bfloat16)
    out = rt.empty((56, 72), D.bfloat16)
    gemm(rt, a, b, out=out)
    built = rt.plans.builds
    for _ in range(3):
        gemm(rt, a, b, out=out)
    assert rt.plans.builds == built


def bf16(rt, *shape):
    return rt.empty(shape, D.bfloat16)


@requires_cuda
def test_a_plan_says_what_it_could_not_fuse():
    rt = Runtime.cuda()
    fresh(rt)
    (a, _), (b, _), scales = fp8_operands(rt, (16, 16, 16))
    gemm(rt, a, b, **scales, bias=rt.empty((16,), D.float32))
    text = rt.plans.values()[-1].explain()
    assert "cublasLt(none) + epilogue.cu" in text
    assert "takes a bias of bfloat16, not float32" in text


@requires_cuda
def test_unaligned_fp8_is_refused():
    rt = Runtime.cuda()
    flat = rt.empty((16 * 16 + 16,), D.float8_e4m3)
    a = Tensor(flat.ptr + 8, (16, 16), D.float8_e4m3, flat.device, flat)
    _, (b, _), scales = fp8_operands(rt, (16, 16, 16))
    with pytest.raises(ArgumentError, match="16"):
        gemm(rt, a, b, **scales)


@requires_cuda
def test_tensors_of_another_device_are_refused():
    a, b = bf16(Runtime.cpu(), 4, 8), bf16(Runtime.cpu(), 8, 4)
    with pytest.raises(ArgumentError, match="device"):
        gemm(Runtime.cuda(), a, b)


@requires_cuda
def test_tuned_choice_is_kept(tmp_path, monkeypatch):
    from te_core.backends.cuda import gemm as cuda_gemm
    from te_core.backends.cuda import gemm_tune

    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gemm_tune, "_store", None)
    rt = Runtime.cuda()
    (a, av), (b, bv), scales = fp8_operands(rt, (256, 512, 1024))
    gemm(rt, a, b, **scales)
    spec = rt.plans.values()[-1].spec
    tuned = cuda_gemm.tune(rt, spec)
    assert tuned.source.startswith("timing")
    assert gemm_tune.store_path().exists()
    monkeypatch.setattr(gemm_tune, "_store", None)  # another process
    again = cuda_gemm.plan_gemm(rt, spec)
    assert again.source == "an earlier timing"
    assert bytes(again.algorithm) == bytes(tuned.algorithm)
    out = rt.empty((256, 512), D.bfloat16)
    again.run(rt, GemmOperands(a, b, out, scales["a_scale"], scales["b_scale"]))
    check(rt, out, reference.gemm(av, bv, trans_b=True, scale=0.375).out, DB["bf16"])


@requires_cuda
@pytest.mark.parametrize("fp8", [False, True])
def test_ragged_sizes_share_an_algorithm(fp8):
    """Batches of varying length: one query of the heuristic serves the sizes nearby, and every result is right."""
    rt = Runtime.cuda()
    sources = set()
    for rows in (1010, 1000, 990, 984, 1008, 1001, 999):
        if fp8:
            (a, av), (b, bv), scales = fp8_operands(rt, (rows, 256, 512))
            y = gemm(rt, a, b, **scales)
            want = reference.gemm(av, bv, trans_b=True, scale=0.375).out
        else:
            (a, av), (b, bv) = operands(rt, (256, 512, rows), D.bfloat16, trans_a=True)
            y = gemm(rt, a, b, trans_a=True, out_dtype=D.float32)
            want = reference.gemm(av, bv, trans_a=True).out
        check(rt, y, want, DB["bf16"])
        sources.add(rt.plans.values()[-1].source)
    assert "cuBLASLt's heuristic for a size nearby" in sources


@requires_cuda
def test_graph_capture_replays_with_new_values():
    """Fused and unfused products record no allocation and no synchronisation beyond the stream's own."""
    torch = pytest.importorskip("torch")
    rt = Runtime.cuda(0, stream := torch.cuda.Stream().cuda_stream)
    (a, _), (b, bv) = operands(rt, (32, 40, 48), D.bfloat16)
    bias, biasv = values(rt, (40,), D.float32, 3)
    fused, unfused = bf16(rt, 32, 40), rt.empty((32, 40), D.float32)
    external = torch.cuda.ExternalStream(stream)

    def run():
        gemm(rt, a, b, out=fused)
        gemm(rt, a, b, out=unfused, bias=bias, epilogue="gelu")

    run()
    rt.numpy(fused)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=external):
        run()
    _, fresh_values = values(rt, (32, 48), D.bfloat16, 9)
    rt.backend.copy_from_host(rt, fresh_values.astype(D.bfloat16.numpy), a)
    with torch.cuda.stream(external):
        graph.replay()
    check(rt, fused, reference.gemm(fresh_values, bv).out, DB["bf16"])
    want = reference.gemm(fresh_values, bv, bias=biasv, epilogue="gelu").out
    check(rt, unfused, want, DB["fp32"] - 10)
