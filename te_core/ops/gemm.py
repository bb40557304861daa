"""Matrix products: out[M, N] = op(a)[M, K] @ op(b)[K, N], row-major, with fused epilogues.

FP8 operands are always a K-major pair: a is [M, K] and b is [N, K] (`trans_b=True`), each with a float32 [1]
dequantization scale on the device. 16- and 32-bit operands take all four transpose combinations.

With `a_format` and `b_format` the scales are those of a finer format (`te_core.quantized`), and a, b whole stored
copies of it, their padding included: fewer rows of `a` would leave its scales' memory behind. The contraction is the
side that the copy was quantized along:

    block   a [M, K], b [N, K], trans_b=True. M whole 8s, N and K whole 16s. Scales float32, of 1x128 pieces
            [ceil(K / 128), M or N], of 128x128 tiles [ceil(M or N / 128), ceil(K / 128) up to a multiple of 4].
            Not two tiled operands.
    mxfp8   all transpositions: a rowwise copy lies along K, a columnwise one across it. All sizes whole 32s. Scales
            uint8 in cuBLASLt's swizzled order, [M or N up to 128s, K / 32 up to 4s]
    nvfp4   a [M, K / 2], b [N, K / 2] uint8, trans_b=True. M and N whole 16s, K whole 32s. Scales uint8, swizzled,
            [M or N up to 128s, K / 16 up to 4s], and `a_amax`, `b_amax` float32 [1], read on the device
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Protocol

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.env import autotuning
from te_core.ops import _check
from te_core.ops.declare import operation
from te_core.ops.swizzle import Scales
from te_core.quantized import BLOCK, PAD, Format, up
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
    a_format: Format | None = None  # None: one scale a tensor, or none
    b_format: Format | None = None


class GemmOperands(NamedTuple):
    """What a product reads and writes, each None where the spec does not ask for it."""

    a: Tensor
    b: Tensor
    out: Tensor
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    bias: Tensor | None = None
    aux: Tensor | None = None
    a_sum: Tensor | None = None
    out_sum: Tensor | None = None
    a_amax: Tensor | None = None
    b_amax: Tensor | None = None
    turned: str | None = None  # as `gemm` has it


class GemmPlan(Protocol):
    """How a product is computed, by whatever kernel. Immutable, and shared by threads."""

    @property
    def spec(self) -> GemmSpec:
        """What is computed."""

    @property
    def swizzled(self) -> bool:
        """Whether it reads scales of mxfp8 and nvfp4 in cuBLASLt's order, and not as `quantize` leaves them."""

    def run(self, rt: Runtime, operands: GemmOperands) -> None:
        """Compute it on the runtime's stream."""


@operation(
    """
    a_scale: Scale by which a's values are multiplied. None where it has none.
    b_scale: Scale by which b's values are multiplied. None where it has none.
    epilogue: "gelu" or "dgelu". None does nothing.
    aux: Values before "gelu", which are written, or which "dgelu" reads. None writes none.
    a_sum: Vector [M] that is set to the sum of a over K. None computes none.
    out_sum: Vector [N] that is set to column sums of the result, with "dgelu". None computes none.
    tf32: Whether float32 operands are multiplied in TF32.
    a_format: Format of a, where it has a scale for each block. None where it has none.
    b_format: Format of b, where it has a scale for each block. None where it has none.
    a_amax: Largest absolute value of a, for nvfp4. None elsewhere.
    b_amax: Largest absolute value of b, for nvfp4. None elsewhere.
    turned: "b" or "out", which says how the product relates to another one that has the same bits. None relates to
        none.
""",
    runs="plan_gemm",
)
def gemm(
    rt: Runtime,
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    a_scale: Tensor | Scales | None = None,
    b_scale: Tensor | Scales | None = None,
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
    a_format: Format | None = None,
    b_format: Format | None = None,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    turned: str | None = None,
) -> Tensor:
    """out = epilogue(op(a) @ op(b) + bias), accumulated in fp32; added to what `out` held if `accumulate`.

    bias      [N], added to every row.
    epilogue  "gelu": out = gelu(v) (tanh form), and v is written to `aux` [M, N] if given;
              "dgelu": out = v * gelu'(aux).
    a_sum     [M], set to the sum of op(a) over K: the bias gradient, when a is the output gradient transposed.
    out_sum   [N], set to the column sums of out with "dgelu": the bias gradient of the layer before.
    split_accumulator  FP8 only: promote partial sums to fp32 (False is the faster, less exact mode).
    tf32      fp32 operands only: multiply in TF32.
    a_format, b_format  the formats of operands with a scale for each block; a_amax, b_amax  those of nvfp4. Scales of
              these that are `Scales` come in the order that the plan wants.
    turned    "b": b lies transposed to the b of another call; "out": out is the transpose of another call's, whose a
              and b are exchanged. A CPU adds in the order of that call, so that both get the same bits. A GPU does not.

    out is of the operands' dtype or float32; of float32, FP8 and FP4 operands it may be any activation dtype.
    """
    dt = out.dtype if out is not None else (out_dtype or (a.dtype if a.dtype in ACTIVATION_DTYPES else dtypes.bfloat16))
    address = reduce(or_, [t.ptr for t in (a, b, out, bias, aux, a_sum, out_sum) if t])
    asked = _Asked(
        (a, b),
        (_stored(a_scale), _stored(b_scale), a_amax, b_amax),
        (bias, a_sum, out_sum),
        aux,
        out,
        dt,
        epilogue,
        (bool(trans_a), bool(trans_b)),
        (bool(accumulate), bool(split_accumulator), bool(tf32)),
        address & -address & 255 or 256,
        (a_format, b_format),
        turned,
    )
    plan = rt.plans.find(rt, _plan, asked, autotuning())
    _check.written("gemm", "a result", out, aux if epilogue == "gelu" else None, a_sum, out_sum)
    if out is None:
        out = rt.empty((plan.spec.m, plan.spec.n), dt)
    if a_scale is not None:
        a_scale, b_scale = _in_order(rt, plan, a_scale, b_scale)
    # Scales are tensors by now.
    operands: Any = a, b, out, a_scale, b_scale, bias, aux, a_sum, out_sum, a_amax, b_amax, turned
    plan.run(rt, GemmOperands(*operands))
    return out


class _Asked(NamedTuple):
    """What the plan of a product is made of: of tensors only what their memory is like."""

    operands: tuple[Tensor, Tensor]
    scales: tuple[Tensor | None, ...]  # of a and b, and the amax of each
    vectors: tuple[Tensor | None, Tensor | None, Tensor | None]  # bias, a_sum, out_sum
    aux: Tensor | None
    out: Tensor | None
    dtype: DType
    epilogue: str | None
    transposed: tuple[bool, bool]
    flags: tuple[bool, bool, bool]  # accumulate, split_accumulator, tf32
    alignment: int
    formats: tuple[Format | None, Format | None]
    turned: str | None


def _plan(rt: Runtime, asked: _Asked) -> GemmPlan:
    """Its arguments are looked at once for all tensors that are alike."""
    op, (a, _), (bias, a_sum, out_sum), dt = "gemm", asked.operands, asked.vectors, asked.dtype
    _check.on_device(op, rt.device, *asked.operands, *asked.scales, *asked.vectors, asked.aux, asked.out)
    types, (m, n, k) = _check_operands(asked.operands, asked.scales, asked.formats, *asked.transposed)
    outs = ACTIVATION_DTYPES if types[0].bits <= 8 or a.dtype is dtypes.float32 else (a.dtype, dtypes.float32)
    _check.one_of(op, "output dtype", dt, outs)
    _check.one_of(op, "turned", asked.turned, (None, "b", "out"))
    got, do = "accumulate=True without out", "pass out="
    _check.require(not asked.flags[0] or asked.out is not None, op, got, "an out", do)
    got, do = f"a_sum with {asked.formats[0]}", "sum a before it is cast"
    _check.require(a_sum is None or asked.formats[0] is None, op, got, "a_sum with one scale a tensor", do)
    _check_results((m, n), asked.out, asked.vectors, asked.epilogue, asked.aux)
    spec = GemmSpec(
        *(m, n, k),
        *asked.transposed,
        *types,
        dt,
        _check.dtype(bias),
        asked.epilogue,
        _check.dtype(asked.aux),
        _check.dtype(a_sum),
        _check.dtype(out_sum),
        *asked.flags,
        asked.alignment,
        *asked.formats,
    )
    plan: GemmPlan = rt.backend.plan_gemm(rt, spec)
    return plan


def _stored(scale: Tensor | Scales | None) -> Tensor | None:
    return scale.stored if isinstance(scale, Scales) else scale


def _in_order(rt: Runtime, plan: GemmPlan, *scales: Tensor | Scales | None) -> list[Tensor | None]:
    """The scales as the plan reads them; a tensor is in that order."""
    if not plan.swizzled:
        return [_stored(scale) for scale in scales]
    return [scale.swizzled(rt) if isinstance(scale, Scales) else scale for scale in scales]


def _check_operands(
    operands: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, ...],
    formats: tuple[Format | None, Format | None],
    trans_a: bool,
    trans_b: bool,
) -> tuple[tuple[DType, DType], tuple[int, int, int]]:
    """The element types of what is multiplied and (M, N, K) in elements, if it can be."""
    op, (a, b) = "gemm", operands
    for name, t in (("a", a), ("b", b)):
        _check.matrix(op, name, t)
    m, k = reversed(a.shape) if trans_a else a.shape
    kb, n = reversed(b.shape) if trans_b else b.shape
    flips = [" transposed" if flag else "" for flag in (trans_a, trans_b)]
    shapes = f"a {tuple(a.shape)}{flips[0]}, b {tuple(b.shape)}{flips[1]}"
    _check.require(k == kb, op, shapes, "equal contraction sizes", "check the shapes and the trans_ flags")
    if formats != (None, None) or scales[2] is not None:
        types, k = _check_formats(shapes, operands, scales, formats, trans_a, trans_b, (m, n, k))
        return types, (m, n, k)
    if a.dtype.is_fp8 or b.dtype.is_fp8:
        _check_fp8(shapes, a, b, scales[:2], not trans_a and trans_b, (m, n, k))
    else:
        _check.require(
            a.dtype is b.dtype and a.dtype in ACTIVATION_DTYPES,
            op,
            f"a {a.dtype}, b {b.dtype}",
            "two operands of one type: float32, bfloat16 or float16 (or an FP8 pair)",
            "convert one of them",
        )
        got = f"scales with {a.dtype} operands"
        _check.require(scales[:2] == (None, None), op, got, "scales with FP8 operands", "leave the scales out")
    return (a.dtype, b.dtype), (m, n, k)


def _check_results(
    shape: tuple[int, int],
    out: Tensor | None,
    vectors: tuple[Tensor | None, Tensor | None, Tensor | None],
    epilogue: object,
    aux: Tensor | None,
) -> None:
    """What a product writes, and what it reads besides its operands."""
    op, (m, n), (bias, a_sum, out_sum) = "gemm", shape, vectors
    _check.one_of(op, "epilogue", epilogue, EPILOGUES)
    for name, t in (("out", out), ("aux", aux)):
        if t is not None:
            _check.sized(op, name, t, shape, ACTIVATION_DTYPES)
    _check.vector(op, "bias", bias, n, ACTIVATION_DTYPES)
    _check.vector(op, "a_sum", a_sum, m, ACTIVATION_DTYPES)
    _check.vector(op, "out_sum", out_sum, n, ACTIVATION_DTYPES)
    _check.require(
        (epilogue == "dgelu") <= (aux is not None)
        and (aux is None) <= (epilogue != "dgelu")
        and not (aux is not None and epilogue is None),
        op,
        f"epilogue={epilogue!r} with aux={aux!r}",
        "aux with dgelu (required) or gelu (optional)",
        "correct aux",
    )
    _check.require(
        out_sum is None or epilogue == "dgelu",
        op,
        f"out_sum with epilogue={epilogue!r}",
        "out_sum with dgelu only",
        "sum the output in a separate call",
    )


def _check_fp8(
    shapes: str, a: Tensor, b: Tensor, scales: tuple[Tensor | None, ...], k_major: bool, sizes: tuple[int, int, int]
) -> None:
    op, (m, n, k) = "gemm (FP8)", sizes
    types = f"a {a.dtype}, b {b.dtype}"
    _check.require(
        a.dtype.is_fp8 and b.dtype.is_fp8 and not (a.dtype is b.dtype is dtypes.float8_e5m2),
        op,
        types,
        "two FP8 operands, at most one of them E5M2",
        "quantize both operands",
    )
    _check.require(
        k_major,
        op,
        shapes,
        "a [M, K] and b [N, K] with trans_b=True",
        "pass the orientation that lies along K (QuantizedTensor holds both)",
    )
    _check.require(
        n % PAD == 0 and k % PAD == 0,
        op,
        f"N={n}, K={k} (M={m})",
        f"N and K divisible by {PAD}",
        "quantize() pads its storage; multiply the padded tensors",
    )
    for name, scale in zip(("a_scale", "b_scale"), scales, strict=True):
        _check.require(scale is not None, op, f"{name}=None", "a float32 [1] tensor", f"pass {name}")
        _check.vector(op, name, scale, 1, (dtypes.float32,))


#: By scaling: M, N and K are whole multiples of these.
_STEPS = {"block": (8, PAD, PAD), "mxfp8": (32, 32, 32), "nvfp4": (PAD, PAD, 32)}


def _check_formats(
    shapes: str,
    operands: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, ...],
    formats: tuple[Format | None, Format | None],
    trans_a: bool,
    trans_b: bool,
    sizes: tuple[int, int, int],
) -> tuple[tuple[DType, DType], int]:
    """The checks of formats with a scale for each block; the element types, and K in elements."""
    form, other = formats
    scaling = form.scaling if form is not None else "tensor"
    op, (m, n, k) = f"gemm ({scaling})", sizes
    _check.require(
        form is not None and other is not None and form.scaling == other.scaling and scaling in BLOCK,
        op,
        f"a_format {form}, b_format {other}",
        "two formats of one scaling: block, mxfp8 or nvfp4",
        "quantize both alike; leave the formats out where there is one scale a tensor",
    )
    assert form is not None and other is not None
    pair = f"{form} x {other}"
    _check.require(
        not (form.dtype is other.dtype is dtypes.float8_e5m2), op, pair, "at most one E5M2", "quantize one to E4M3"
    )
    _check.require(
        scaling != "block" or not (form.tiled and other.tiled),
        op,
        pair,
        "at most one tiled operand",
        "quantize one of them in 1x128 pieces",
    )
    _check.require(
        not (form.row_scaled or other.row_scaled), op, pair, "one amax a tensor", "dequantize the operands first"
    )
    if scaling == "nvfp4":
        k *= 2
    _check.require(
        scaling == "mxfp8" or (not trans_a and trans_b),
        op,
        shapes,
        "a [M, K] and b [N, K] with trans_b=True",
        "pass the copy that lies along K (QuantizedTensor holds both)",
    )
    steps = _STEPS[scaling]
    _check.require(
        not any(size % step for size, step in zip((m, n, k), steps, strict=True)),
        op,
        f"M={m}, N={n}, K={k}",
        "M, N and K divisible by {}, {} and {}".format(*steps),
        "multiply whole stored copies and cut the result",
    )
    for name, t, part, rows, scale, amax in zip(
        "ab", operands, (form, other), (m, n), scales[:2], scales[2:], strict=True
    ):
        stored = dtypes.uint8 if scaling == "nvfp4" else part.dtype
        _check.require(t.dtype is stored, op, f"{name} {t.dtype} as {part}", stored.name, "pass the copy's data")
        _check_scale(op, f"{name}_scale", scale, part, rows, k)
        if scaling == "nvfp4":
            _check.require(amax is not None, op, f"{name}_amax=None", "a float32 [1] tensor", f"pass {name}_amax")
            _check.vector(op, f"{name}_amax", amax, 1, (dtypes.float32,))
    return (form.dtype, other.dtype), k


def _check_scale(op: str, name: str, scale: Tensor | None, form: Format, rows: int, k: int) -> None:
    """`scale` belongs to a whole copy of so many rows: its memory has no leading dimension of its own."""
    blocks = -(-k // BLOCK[form.scaling])
    if form.scaling == "block":
        want = (-(-rows // 128), up(blocks, 4)) if form.tiled else (blocks, rows)
        ok = scale is not None and scale.shape == want and scale.dtype is dtypes.float32
        allowed = f"float32 {want}"
    else:
        count = up(rows, 128) * up(blocks, 4)
        ok = scale is not None and scale.size == count and scale.dtype is dtypes.uint8
        allowed = f"{count} bytes, swizzled"
    _check.require(
        ok and scale is not None and scale.is_contiguous and scale.ptr % 16 == 0,
        op,
        f"{name} = {scale!r}",
        f"dense {allowed}, at an address divisible by 16",
        "pass the scales of the whole stored copy",
    )
