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
from tests.core.covering_lists import covering_lists
from tests.reference import gemm as reference
from tests.tolerances import DB, snr_db

SIZES = [(64, 48, 32), (7, 13, 5), (1, 1, 1), (33, 65, 129), (128, 8, 17)]
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


# ---------------------------------------------------------------------------------------------- 16 and 32 bit


@covering_lists(
    pytest.mark.parametrize(("dtype", "out"), PAIRS, ids=str),
    pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES),
    pytest.mark.parametrize("size", SIZES, ids=str),
    turns=2,
)
def test_product(rt, dtype, out, trans_a, trans_b, size):
    fresh(rt)
    (a, av), (b, bv) = operands(rt, size, dtype, trans_a, trans_b)
    y = gemm(rt, a, b, trans_a=trans_a, trans_b=trans_b, out_dtype=out)
    assert y.dtype is out
    check(rt, y, reference.gemm(av, bv, trans_a=trans_a, trans_b=trans_b).out, BOUND[out])
    assert family(rt) in (None, "cublasLt(none)")


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_tf32(rt, size):
    fresh(rt)
    (a, av), (b, bv) = operands(rt, size, D.float32)
    check(rt, gemm(rt, a, b, tf32=True), reference.gemm(av, bv).out, DB["tf32"])
    assert family(rt) in (None, "cublasLt(none)")


@covering_lists(
    pytest.mark.parametrize(
        ("dtype", "bias_dtype", "out"),
        [
            (D.bfloat16, D.bfloat16, D.bfloat16),
            (D.bfloat16, D.float32, D.bfloat16),
            (D.float16, D.float16, D.float16),
            (D.bfloat16, D.float32, D.float32),
            (D.bfloat16, D.bfloat16, D.float32),
            (D.float32, D.float32, D.float32),
            (D.float16, D.float32, D.float32),
            (D.float32, D.bfloat16, D.float32),
        ],
        ids=str,
    ),
    pytest.mark.parametrize("size", SIZES, ids=str),
)
def test_bias(rt, dtype, bias_dtype, out, size):
    fresh(rt)
    (a, av), (b, bv) = operands(rt, size, dtype)
    bias, biasv = values(rt, (size[1],), bias_dtype, 3, 5.0)
    y = gemm(rt, a, b, bias=bias, out_dtype=out)
    check(rt, y, reference.gemm(av, bv, bias=biasv).out, BOUND[out])
    if bias_dtype is out:
        assert family(rt) in (None, "cublasLt(BIAS)")


@covering_lists(
    pytest.mark.parametrize(("dtype", "out"), PAIRS, ids=str),
    pytest.mark.parametrize("with_aux", [False, True]),
    pytest.mark.parametrize("with_bias", [False, True]),
    pytest.mark.parametrize("size", SIZES, ids=str),
    turns=2,
)
def test_gelu(rt, dtype, out, with_aux, with_bias, size):
    fresh(rt)
    m, n, _ = size
    (a, av), (b, bv) = operands(rt, size, dtype, trans_b=True)
    bias, biasv = values(rt, (n,), out, 3) if with_bias else (None, None)
    aux = rt.empty((m, n), out) if with_aux else None
    y = gemm(rt, a, b, trans_b=True, bias=bias, epilogue="gelu", aux=aux, out_dtype=out)
    want = reference.gemm(av, bv, trans_b=True, bias=biasv, epilogue="gelu")
    # gelu's steepest relative slope costs a little; a product in the last place of zero more.
    check(rt, y, want.out, BOUND[out] - 3)
    if aux is not None:
        check(rt, aux, want.aux, BOUND[out])
    if out is D.bfloat16 and n % 8 == 0:
        name = "GELU" + "_AUX" * with_aux + "_BIAS" * with_bias
        assert family(rt) in (None, f"cublasLt({name})")


@covering_lists(
    pytest.mark.parametrize("dtype", [D.bfloat16, D.float32]),
    pytest.mark.parametrize("with_bias", [False, True]),
    pytest.mark.parametrize("sum_dtype", [None, D.float32, D.bfloat16]),
    pytest.mark.parametrize("size", SIZES, ids=str),
    turns=2,
)
def test_dgelu(rt, dtype, with_bias, sum_dtype, size):
    fresh(rt)
    m, n, _ = size
    (a, av), (b, bv) = operands(rt, size, dtype)
    bias, biasv = values(rt, (n,), dtype, 3) if with_bias else (None, None)
    aux, auxv = values(rt, (m, n), dtype, 4)
    sums = rt.empty((n,), sum_dtype) if sum_dtype else None
    y = gemm(rt, a, b, bias=bias, epilogue="dgelu", aux=aux, out_sum=sums)
    want = reference.gemm(av, bv, bias=biasv, epilogue="dgelu", aux=auxv)
    check(rt, y, want.out, BOUND[dtype] - 3)
    if sums is not None:
        # Whether of the output before or after its rounding is the backend's choice.
        check(rt, sums, want.out_sum, min(BOUND[dtype], BOUND[sum_dtype]) - 6)
    if dtype is D.bfloat16 and n % 8 == 0 and not with_bias:
        assert family(rt) in (None, "cublasLt(DGELU)" + (" + sums.cu" if sums is not None else ""))


@covering_lists(
    pytest.mark.parametrize("sum_dtype", [D.float32, D.bfloat16]),
    pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES),
    pytest.mark.parametrize("size", SIZES, ids=str),
    turns=2,
)
def test_a_sum_while_accumulating(rt, sum_dtype, trans_a, trans_b, size):
    """The weight gradient as a layer forms it: into float32 main_grad, with the bias gradient."""
    fresh(rt)
    (a, av), (b, bv) = operands(rt, size, D.bfloat16, trans_a, trans_b)
    out, old = values(rt, size[:2], D.float32, 5)
    sums = rt.empty((size[0],), sum_dtype)
    y = gemm(rt, a, b, trans_a=trans_a, trans_b=trans_b, out=out, accumulate=True, a_sum=sums)
    assert y is out
    want = reference.gemm(av, bv, trans_a=trans_a, trans_b=trans_b)
    check(rt, y, want.out + old, DB["fp32"])
    check(rt, sums, want.a_sum, BOUND[sum_dtype] - 6)
    fused = trans_a and sum_dtype is D.float32 and size == (64, 48, 32)
    assert family(rt) in (None, "cublasLt(BGRADB)" if fused else "cublasLt(none) + sums.cu", "cublasLt(BGRADB)")


def test_a_sum_with_a_bias(rt):
    (a, av), (b, bv) = operands(rt, (24, 40, 56), D.bfloat16)
    bias, biasv = values(rt, (40,), D.bfloat16, 3)
    sums = rt.empty((24,), D.float32)
    y = gemm(rt, a, b, bias=bias, a_sum=sums)
    check(rt, y, reference.gemm(av, bv, bias=biasv).out, DB["bf16"])
    check(rt, sums, av.sum(1), DB["fp32"])


@covering_lists(
    pytest.mark.parametrize("width", [37, 264, 2048]), pytest.mark.parametrize("dtype", [D.bfloat16, D.float32])
)
def test_sums_of_many_rows(rt, width, dtype):
    """Enough rows for the two-step column sum; widths that leave a tail, and that allow wide loads or do not."""
    (a, av), (b, bv) = operands(rt, (width, 16, 5003), dtype, trans_a=True)
    bias, biasv = values(rt, (16,), dtype, 3)
    sums = rt.empty((width,), D.float32)
    y = gemm(rt, a, b, trans_a=True, bias=bias, a_sum=sums)
    check(rt, y, reference.gemm(av, bv, trans_a=True, bias=biasv).out, BOUND[dtype] - 3)
    check(rt, sums, av.sum(0), DB["fp32"])


def test_sum_of_an_unaligned_matrix(rt):
    flat, whole = values(rt, (1 + 300 * 64,), D.bfloat16, 1)
    a = Tensor(flat.ptr + 2, (300, 64), D.bfloat16, flat.device, flat)
    b, _ = values(rt, (300, 8), D.bfloat16, 2)
    bias, _ = values(rt, (8,), D.bfloat16, 3)
    sums = rt.empty((64,), D.float32)
    gemm(rt, a, b, trans_a=True, bias=bias, a_sum=sums)
    check(rt, sums, whole[1:].reshape(300, 64).sum(0), DB["fp32"])


@covering_lists(
    pytest.mark.parametrize(("dtype", "out"), PAIRS, ids=str),
    pytest.mark.parametrize("epilogue", [None, "gelu", "dgelu"]),
)
def test_accumulate(rt, dtype, out, epilogue):
    """What `out` held is added after the epilogue."""
    (a, av), (b, bv) = operands(rt, (40, 24, 72), dtype)
    target, old = values(rt, (40, 24), out, 5, 3.0)
    aux, auxv = values(rt, (40, 24), out, 4) if epilogue == "dgelu" else (None, None)
    bias, biasv = values(rt, (24,), out, 3)
    gemm(rt, a, b, out=target, accumulate=True, bias=bias, epilogue=epilogue, aux=aux)
    want = reference.gemm(av, bv, bias=biasv, epilogue=epilogue, aux=auxv).out
    check(rt, target, want + old, BOUND[out])


def test_unaligned_operands(rt):
    """16-bit operands may start anywhere, and their leading dimensions may be odd."""
    fresh(rt)
    flat, whole = values(rt, (1 + 17 * 23,), D.bfloat16, 1)
    a = Tensor(flat.ptr + 2, (17, 23), D.bfloat16, flat.device, flat)
    b, bv = values(rt, (23, 9), D.bfloat16, 2, 0.2)
    flat_bias, bias_values = values(rt, (10,), D.bfloat16, 3)
    bias = Tensor(flat_bias.ptr + 2, (9,), D.bfloat16, flat_bias.device, flat_bias)
    y = gemm(rt, a, b, bias=bias)
    check(rt, y, reference.gemm(whole[1:].reshape(17, 23), bv, bias=bias_values[1:]).out, DB["bf16"])
    assert family(rt) in (None, "cublasLt(BIAS)")


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

FP8_PAIRS = [(D.float8_e4m3, D.float8_e4m3), (D.float8_e4m3, D.float8_e5m2), (D.float8_e5m2, D.float8_e4m3)]


def fp8_operands(rt: Runtime, size, a_dtype=D.float8_e4m3, b_dtype=D.float8_e4m3):
    """A K-major pair with scales that differ, so that a swap shows."""
    m, n, k = size
    a, b = values(rt, (m, k), a_dtype, 1), values(rt, (n, k), b_dtype, 2)
    a_scale, b_scale = rt.tensor(np.array([0.125], np.float32)), rt.tensor(np.array([3.0], np.float32))
    return a, b, {"trans_b": True, "a_scale": a_scale, "b_scale": b_scale}


@covering_lists(
    pytest.mark.parametrize("size", [(64, 48, 32), (5, 16, 16), (1, 64, 256), (96, 32, 1024)], ids=str),
    pytest.mark.parametrize(("a_dtype", "b_dtype"), FP8_PAIRS, ids=str),
    pytest.mark.parametrize("out", [D.bfloat16, D.float16, D.float32]),
    pytest.mark.parametrize("split", [False, True]),
    turns=2,
)
def test_fp8(rt, size, a_dtype, b_dtype, out, split):
    fresh(rt)
    (a, av), (b, bv), scales = fp8_operands(rt, size, a_dtype, b_dtype)
    y = gemm(rt, a, b, **scales, out_dtype=out, split_accumulator=split)
    want = reference.gemm(av, bv, trans_b=True, scale=0.375).out
    check(rt, y, want, min(BOUND[out], DB["fp8 split" if split else "fp8 fast"]))
    assert family(rt) in (None, "cublasLt(none)")


@covering_lists(
    pytest.mark.parametrize(
        ("bias_dtype", "out"),
        [
            (None, D.bfloat16),
            (D.bfloat16, D.bfloat16),
            (D.float32, D.bfloat16),
            (D.float16, D.float16),
            (D.bfloat16, D.float32),
            (D.float32, D.float32),
        ],
        ids=str,
    ),
    pytest.mark.parametrize("epilogue", [None, "gelu", "gelu+aux", "dgelu"]),
)
def test_fp8_epilogues(rt, bias_dtype, out, epilogue):
    fresh(rt)
    m, n, k = 40, 48, 64
    (a, av), (b, bv), scales = fp8_operands(rt, (m, n, k))
    bias, biasv = values(rt, (n,), bias_dtype, 3, 4.0) if bias_dtype else (None, None)
    aux, auxv = values(rt, (m, n), out, 4) if epilogue in ("dgelu", "gelu+aux") else (None, None)
    kind = epilogue and epilogue.removesuffix("+aux")
    y = gemm(rt, a, b, **scales, out_dtype=out, bias=bias, epilogue=kind, aux=aux)
    want = reference.gemm(av, bv, trans_b=True, scale=0.375, bias=biasv, epilogue=kind, aux=auxv)
    bound = min(BOUND[out], DB["fp8 split"])
    check(rt, y, want.out, bound - 3)
    if epilogue == "gelu+aux":
        check(rt, aux, want.aux, bound)
    if epilogue == "dgelu":
        assert family(rt) in (None, "cublasLt(none) + epilogue.cu")
    if out is D.bfloat16 and bias_dtype is D.bfloat16 and epilogue is None:
        assert family(rt) in (None, "cublasLt(BIAS)")


@pytest.mark.parametrize("out", [D.bfloat16, D.float32])
def test_fp8_accumulates_and_sums(rt, out):
    (a, av), (b, bv), scales = fp8_operands(rt, (32, 48, 64), D.float8_e5m2)
    target, old = values(rt, (32, 48), out, 5, 3.0)
    sums = rt.empty((32,), D.float32)
    gemm(rt, a, b, **scales, out=target, accumulate=True, a_sum=sums)
    check(rt, target, reference.gemm(av, bv, trans_b=True, scale=0.375).out + old, min(BOUND[out], DB["fp8 split"]))
    check(rt, sums, av.sum(1) * 0.125, DB["fp32"])


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


def e4m3(rt, *shape):
    return rt.empty(shape, D.float8_e4m3)


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
