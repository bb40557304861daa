"""Matrix products: out[M, N] = op(a)[M, K] @ op(b)[K, N], row-major, with fused epilogues.

FP8 operands are always a K-major pair: a is [M, K] and b is [N, K] (`trans_b=True`), each with a float32 [1]
dequantization scale on the device. 16- and 32-bit operands take all four transpose combinations.
"""

from __future__ import annotations

from dataclasses import dataclass

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.ops import _check
from te_core.quantized import PAD
from te_core.runtime import Runtime
from te_core.tensor import Tensor

EPILOGUES = (None, "gelu", "dgelu")


@dataclass(frozen=True, slots=True)
class GemmSpec:
    """All that a GEMM's plan depends on."""

    m: int
    n: int
    k: int
    trans_a: bool
    trans_b: bool
    a: DType
    b: DType
    out: DType
    bias: DType | None
    epilogue: str | None
    aux: DType | None
    a_sum: DType | None
    out_sum: DType | None
    accumulate: bool
    split_accumulator: bool
    tf32: bool
    alignment: int  # the largest power of two up to 256 that divides every address


def gemm(
    rt: Runtime,
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    epilogue: str | None = None,
    aux: Tensor | None = None,
    a_sum: Tensor | None = None,
    out_sum: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: DType | None = None,
    accumulate: bool = False,
    split_accumulator: bool = True,
    tf32: bool = False,
) -> Tensor:
    """out = epilogue(op(a) @ op(b) + bias), accumulated in fp32; added to what `out` held if `accumulate`.

    bias      [N], added to every row.
    epilogue  "gelu": out = gelu(v) (tanh form), and v is written to `aux` [M, N] if given;
              "dgelu": out = v * gelu'(aux).
    a_sum     [M], set to the sum of op(a) over K: the bias gradient, when a is the output gradient transposed.
    out_sum   [N], set to the column sums of out with "dgelu": the bias gradient of the layer before.
    split_accumulator  FP8 only: promote partial sums to fp32 (False is the faster, less exact mode).
    tf32      fp32 operands only: multiply in TF32.
    """
    dt = out.dtype if out is not None else (out_dtype or (a.dtype if not a.dtype.is_fp8 else dtypes.bfloat16))
    address = a.ptr | b.ptr
    for t in (out, bias, aux, a_sum, out_sum):
        if t is not None:
            address |= t.ptr
    # Everything that the checks below look at: what was checked once need not be checked again.
    key = (
        "gemm", a.shape, b.shape, a.dtype, b.dtype, dt, trans_a, trans_b, a.strides, b.strides, a.device,
        out and (out.shape, out.strides), bias and (bias.dtype, bias.shape), epilogue, aux and (aux.dtype, aux.shape),
        a_sum and (a_sum.dtype, a_sum.shape), out_sum and (out_sum.dtype, out_sum.shape), a_scale is None,
        accumulate, split_accumulator, tf32, (address & -address) & 255,
    )  # fmt: skip
    plan = rt.plans.get(key)
    if plan is None:
        spec = _spec(rt, key, a, b, (a_scale, b_scale), (bias, a_sum, out_sum), aux, out)
        plan = rt.plans.put(key, rt.backend.plan_gemm(rt, spec))
    if out is None:
        spec = plan.spec
        out = rt.empty((spec.m, spec.n), dt)
    rt.backend.gemm(rt, plan, a, b, out, a_scale, b_scale, bias, aux, a_sum, out_sum)
    return out


def _spec(
    rt: Runtime, key: tuple[object, ...], a: Tensor, b: Tensor, scales: tuple[Tensor | None, Tensor | None],
    vectors: tuple[Tensor | None, Tensor | None, Tensor | None], aux: Tensor | None, out: Tensor | None,
) -> GemmSpec:  # fmt: skip
    bias, a_sum, out_sum = vectors
    dt, trans_a, trans_b = key[5:8]
    epilogue, accumulate, split, tf32, alignment = key[13], *key[18:22]
    op = "gemm"
    _check.require(
        a.device is rt.device, op, f"a on {a.device} and a runtime of {rt.device}", "tensors of the runtime's device",
        "copy them there",
    )  # fmt: skip
    for name, t in (("a", a), ("b", b)):
        _check.matrix(op, name, t)
    _check.same_device(op, a, b, *scales, *vectors, aux, out)
    m, k = reversed(a.shape) if trans_a else a.shape
    kb, n = reversed(b.shape) if trans_b else b.shape
    flips = [" transposed" if flag else "" for flag in (trans_a, trans_b)]
    shapes = f"a {tuple(a.shape)}{flips[0]}, b {tuple(b.shape)}{flips[1]}"
    _check.require(k == kb, op, shapes, "equal contraction sizes", "check the shapes and the trans_ flags")
    _check.one_of(op, "epilogue", epilogue, EPILOGUES)
    fp8 = a.dtype.is_fp8 or b.dtype.is_fp8
    if fp8:
        _check_fp8(shapes, a, b, scales, not trans_a and bool(trans_b), (m, n, k))
    else:
        _check.require(
            a.dtype is b.dtype and a.dtype in ACTIVATION_DTYPES, op, f"a {a.dtype}, b {b.dtype}",
            "two operands of one type: float32, bfloat16 or float16 (or an FP8 pair)", "convert one of them",
        )  # fmt: skip
    outs = ACTIVATION_DTYPES if fp8 else (a.dtype, dtypes.float32)
    _check.one_of(op, "output dtype", dt, outs)
    if out is not None:
        _check.matrix(op, "out", out)
        _check.require(out.shape == (m, n), op, f"out {tuple(out.shape)}", f"({m}, {n})", "give an out of that shape")
    _check.require(not accumulate or out is not None, op, "accumulate=True without out", "an out", "pass out=")
    _check.vector(op, "bias", bias, n, ACTIVATION_DTYPES)
    _check.vector(op, "a_sum", a_sum, m, ACTIVATION_DTYPES)
    _check.vector(op, "out_sum", out_sum, n, ACTIVATION_DTYPES)
    _check.require(
        (epilogue == "dgelu") <= (aux is not None) and (aux is None) <= (epilogue != "dgelu")
        and not (aux is not None and epilogue is None),
        op, f"epilogue={epilogue!r} with aux={aux!r}", "aux with dgelu (required) or gelu (optional)", "correct aux",
    )  # fmt: skip
    if aux is not None:
        _check.matrix(op, "aux", aux)
        _check.require(aux.shape == (m, n), op, f"aux {tuple(aux.shape)}", f"({m}, {n})", "give an aux of that shape")
    _check.require(
        out_sum is None or epilogue == "dgelu", op, f"out_sum with epilogue={epilogue!r}", "out_sum with dgelu only",
        "sum the output in a separate call",
    )  # fmt: skip
    return GemmSpec(
        m, n, k, bool(trans_a), bool(trans_b), a.dtype, b.dtype, dt, bias.dtype if bias is not None else None,  # type: ignore[arg-type]
        epilogue, aux.dtype if aux is not None else None, a_sum.dtype if a_sum is not None else None,  # type: ignore[arg-type]
        out_sum.dtype if out_sum is not None else None, bool(accumulate), bool(split), bool(tf32),
        int(alignment) or 256,  # type: ignore[call-overload]
    )  # fmt: skip


def _check_fp8(
    shapes: str, a: Tensor, b: Tensor, scales: tuple[Tensor | None, Tensor | None], k_major: bool,
    sizes: tuple[int, int, int],
) -> None:  # fmt: skip
    op, (m, n, k) = "gemm (FP8)", sizes
    types = f"a {a.dtype}, b {b.dtype}"
    _check.require(
        a.dtype.is_fp8 and b.dtype.is_fp8 and not (a.dtype is b.dtype is dtypes.float8_e5m2), op, types,
        "two FP8 operands, at most one of them E5M2", "quantize both operands",
    )  # fmt: skip
    _check.require(
        k_major, op, shapes, "a [M, K] and b [N, K] with trans_b=True",
        "pass the orientation that lies along K (QuantizedTensor holds both)",
    )  # fmt: skip
    _check.require(
        n % PAD == 0 and k % PAD == 0, op, f"N={n}, K={k} (M={m})", f"N and K divisible by {PAD}",
        "quantize() pads its storage; multiply the padded tensors",
    )  # fmt: skip
    for name, scale in zip(("a_scale", "b_scale"), scales, strict=True):
        _check.require(scale is not None, op, f"{name}=None", "a float32 [1] tensor", f"pass {name}")
        _check.vector(op, name, scale, 1, (dtypes.float32,))
