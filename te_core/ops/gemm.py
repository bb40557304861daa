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
from te_core.ops.declare import operation, rules
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
    rest = bias, aux, a_sum, out_sum, a_amax, b_amax, turned
    how = dt, epilogue, bool(trans_a), bool(trans_b), bool(accumulate), bool(split_accumulator), bool(tf32)
    operands = GemmOperands(a, b, out, _stored(a_scale), _stored(b_scale), *rest)  # type: ignore[arg-type]
    asked = operands, *how, address & -address & 255 or 256, a_format, b_format
    plan = rt.plans.find(rt, _plan, asked, autotuning())
    _check.written("gemm", "a result", out, aux if epilogue == "gelu" else None, a_sum, out_sum)
    if out is None:
        out = rt.empty((plan.spec.m, plan.spec.n), dt)
    if a_scale is not None:
        a_scale, b_scale = _in_order(rt, plan, a_scale, b_scale)
    plan.run(rt, GemmOperands(a, b, out, a_scale, b_scale, *rest))  # type: ignore[arg-type]
    return out


def _plan(rt: Runtime, asked: tuple[Any, ...]) -> GemmPlan:
    """Its arguments are looked at once for all tensors that are alike."""
    op, (o, out, epilogue, trans_a, trans_b, accumulate, split, tf32, alignment, form, other) = "gemm", asked
    _check.on_device(op, rt.device, *o[:-1])
    for name, t in (("a", o.a), ("b", o.b)):
        _check.matrix(op, name, t)
    m, k = reversed(o.a.shape) if trans_a else o.a.shape
    kb, n = reversed(o.b.shape) if trans_b else o.b.shape
    flips = [" transposed" if flag else "" for flag in (trans_a, trans_b)]
    shapes = f"a {tuple(o.a.shape)}{flips[0]}, b {tuple(o.b.shape)}{flips[1]}"
    _check.require(k == kb, op, shapes, "equal contraction sizes", "check the shapes and the trans_ flags")
    if form is not None and form.scaling == "nvfp4":  # two elements a byte
        k *= 2
    bias, aux, a_sum, out_sum = map(_check.dtype, (o.bias, o.aux, o.a_sum, o.out_sum))
    a, b = (t.dtype if f is None else f.dtype for t, f in ((o.a, form), (o.b, other)))
    types = a, b, out, bias, epilogue, aux, a_sum, out_sum
    spec = GemmSpec(m, n, k, trans_a, trans_b, *types, accumulate, split, tf32, alignment, form, other)
    if form is not None or other is not None or o.a_amax is not None:
        _check_formats(f"gemm ({form.scaling if form is not None else 'tensor'})", rt, o, spec, m, n, k)
    elif a.is_fp8 or b.is_fp8:
        _check_fp8(op, rt, o, spec, n, k)
    else:
        _check_wide(op, rt, o)
    _check_results(op, rt, o, spec, m, n)
    plan: GemmPlan = rt.backend.plan_gemm(rt, spec)
    return plan


def _stored(scale: Tensor | Scales | None) -> Tensor | None:
    return scale.stored if isinstance(scale, Scales) else scale


def _in_order(rt: Runtime, plan: GemmPlan, *scales: Tensor | Scales | None) -> list[Tensor | None]:
    """The scales as the plan reads them; a tensor is in that order."""
    if not plan.swizzled:
        return [_stored(scale) for scale in scales]
    return [scale.swizzled(rt) if isinstance(scale, Scales) else scale for scale in scales]


@rules("""
    must _o.a.dtype is _o.b.dtype and _o.a.dtype in ACTIVATION_DTYPES: two operands of one type: float32, bfloat16 or
        float16 (or an FP8 pair); convert one of them
    must _o.a_scale is None and _o.b_scale is None: scales with FP8 operands; leave the scales out
""")
def _check_wide(op: str, rt: Runtime, _o: GemmOperands) -> None:
    """Operands without scales."""


@rules("""
    must _o.a.dtype.is_fp8 and _o.b.dtype.is_fp8: two FP8 operands; quantize both operands
    must not (_o.a.dtype is _o.b.dtype is dtypes.float8_e5m2): at most one of them E5M2; quantize one to E4M3
    must _s.trans_b and not _s.trans_a: a [M, K] and b [N, K] with trans_b=True; pass the orientation that lies along K
        (QuantizedTensor holds both)
    must n % PAD == 0 and k % PAD == 0: N and K divisible by {PAD}; quantize() pads its storage, so multiply the padded
        tensors
    must _o.a_scale is not None and _o.b_scale is not None: a scale of each, float32 [1]; pass a_scale and b_scale
    _o.a_scale? [1] f32
    _o.b_scale? [1] f32
""")
def _check_fp8(op: str, rt: Runtime, _o: GemmOperands, _s: GemmSpec, n: int, k: int) -> None:
    """Operands with a scale each."""


@rules("""
    must _s.epilogue in EPILOGUES: an epilogue among {EPILOGUES}
    must _o.turned in (None, "b", "out"): None, b or out
    must not _s.accumulate or _o.out is not None: an out with accumulate=True; pass out=
    must _o.a_sum is None or _s.a_format is None: a_sum with one scale a tensor; sum a before it is cast
    must _s.out in (ACTIVATION_DTYPES if _o.a.dtype.itemsize != 2 else (_o.a.dtype, dtypes.float32)): the dtype of the
        operands or float32, of FP8, FP4 and float32 operands any activation dtype; choose another output dtype
    _o.out? [m, n] act
    _o.aux? [m, n] act
    _o.bias? [n] act
    _o.a_sum? [m] act
    _o.out_sum? [n] act
    must _o.aux is not None or _s.epilogue != "dgelu": aux with dgelu (required) or gelu (optional); pass aux
    must _o.aux is None or _s.epilogue is not None: aux with dgelu or gelu; leave aux out
    must _o.out_sum is None or _s.epilogue == "dgelu": out_sum with dgelu only; sum the output in a separate call
""")
def _check_results(op: str, rt: Runtime, _o: GemmOperands, _s: GemmSpec, m: int, n: int) -> None:
    """What a product writes, and what it reads besides its operands."""


#: By scaling: M, N and K are whole multiples of these.
_STEPS = {"block": (8, PAD, PAD), "mxfp8": (32, 32, 32), "nvfp4": (PAD, PAD, 32)}


@rules("""
    must _s.a_format is not None and _s.b_format is not None: two formats; quantize both alike, or leave them out where
        there is one scale a tensor
    must _s.a_format.scaling == _s.b_format.scaling and _s.a_format.scaling in BLOCK: two formats of one scaling: block,
        mxfp8 or nvfp4; quantize both alike
    must not (_s.a_format.dtype is _s.b_format.dtype is dtypes.float8_e5m2): at most one E5M2; quantize one to E4M3
    must _s.a_format.scaling != "block" or not (_s.a_format.tiled and _s.b_format.tiled): at most one tiled operand;
        quantize one of them in 1x128 pieces
    must not (_s.a_format.row_scaled or _s.b_format.row_scaled): one amax a tensor; dequantize the operands first
    must _s.a_format.scaling == "mxfp8" or (_s.trans_b and not _s.trans_a): a [M, K] and b [N, K] with trans_b=True;
        pass the copy that lies along K (QuantizedTensor holds both)
    must not any(size % step for size, step in zip((m, n, k), _STEPS[_s.a_format.scaling])): M, N and K divisible by
        {_STEPS[_s.a_format.scaling]}; multiply whole stored copies and cut the result
""")
def _check_formats(op: str, rt: Runtime, _o: GemmOperands, _s: GemmSpec, m: int, n: int, k: int) -> None:
    """Operands with a scale for each block; K in elements."""
    operands = (("a", _o.a, _s.a_format, m, _o.a_scale, _o.a_amax), ("b", _o.b, _s.b_format, n, _o.b_scale, _o.b_amax))
    for name, t, form, rows, scale, amax in operands:
        assert form is not None
        stored = dtypes.uint8 if form.scaling == "nvfp4" else form.dtype
        _check.require(t.dtype is stored, op, f"{name} {t.dtype} as {form}", stored.name, "pass the copy's data")
        _check_scale(op, f"{name}_scale", scale, form, rows, k)
        if form.scaling == "nvfp4":
            _check.require(amax is not None, op, f"{name}_amax=None", "a float32 [1] tensor", f"pass {name}_amax")
            _check.vector(op, rt.device, f"{name}_amax", amax, 1, (dtypes.float32,))


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
