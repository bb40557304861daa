"""Matrix products: operands decoded to float32, multiplied by NumPy's BLAS, epilogue by blocks of rows.

FP8 scales are applied to the product, never to the operands, so that neither loses range. The accumulator is
float32 whatever `split_accumulator` and `tf32` say: both only ask for less on a GPU.

Cores: NumPy's BLAS (OpenBLAS) and torch's OpenMP each keep a pool of one thread per core. They take turns,
but OpenBLAS's threads go on polling for 27 ms after a product, in the way of torch's: on two cores a
1024x256x1024 product followed by a softmax and a gelu of torch takes 13.9 ms, against 5.5 ms with
OPENBLAS_THREAD_TIMEOUT=4 (16 cycles) in the environment. OpenBLAS reads it once, when NumPy is first
imported, so it is for the program to set; this project's own programs do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from te_core.backends.cpu import activation, codec
from te_core.backends.cpu.executor import F32, Executor, row_blocks, scratch
from te_core.backends.cpu.matrix import column_sums
from te_core.errors import UnsupportedError
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.gemm import GemmOperands, GemmSpec


def plan_gemm(rt: Runtime, spec: GemmSpec) -> NumpyPlan:
    """The plan of `gemm`. Block formats are not decoded here: their products are those of dequantized operands."""
    if spec.a_format is not None:
        raise UnsupportedError(
            "gemm",
            f"{spec.a_format} x {spec.b_format} on the CPU",
            "FP8 with one scale a tensor",
            "dequantize both operands to float32 (te_core.ops.gemm_quantized does)",
        )
    return NumpyPlan(spec)


@dataclass(frozen=True, slots=True)
class NumpyPlan:
    """A product by NumPy."""

    spec: GemmSpec
    family: str = "cpu"
    swizzled: bool = False

    @np.errstate(all="ignore")
    def run(self, rt: Runtime, operands: GemmOperands) -> None:
        """out = epilogue(op(a) @ op(b) * scales + bias), plus what out held."""
        spec = self.spec
        if rt.recorder is not None:
            what = f"gemm {spec.m} x {spec.n} x {spec.k} {spec.a} x {spec.b} -> {spec.out}"
            rt.recorder.add_call(self.run, (operands,), what)
            return
        a, b, out, a_scale, b_scale, bias, aux, a_sum, out_sum, _, _, turned = operands
        ex = scratch(rt)
        left, right = _operand(ex, "gemm a", a), _operand(ex, "gemm b", b)
        left, right = left.T if spec.trans_a else left, right.T if spec.trans_b else right
        if a_sum is not None:
            sums = column_sums(ex, left.T) if spec.trans_a else np.add.reduce(left, axis=1)
            codec.encode(ex, sums if a_scale is None else sums * a_scale.numpy()[0], a_sum.numpy())
        scale = None
        if a_scale is not None and b_scale is not None:
            scale = a_scale.numpy()[0] * b_scale.numpy()[0]
        target = out.numpy()
        if target.dtype == np.float32 and not spec.accumulate:
            product = _product(ex, spec, (left, right), target, turned)
            if scale is None and bias is None and spec.epilogue is None:
                return
        else:
            product = _product(ex, spec, (left, right), ex.floats("gemm product", spec.m, spec.n), turned)
        _finish(ex, spec, product, out, scale, bias, aux, out_sum)


def _operand(ex: Executor, slot: str, t: Tensor) -> F32:
    values = t.numpy()
    if values.dtype == np.float32:
        return values
    return codec.decode(ex, values, ex.floats(slot, *t.shape))


def _product(ex: Executor, spec: GemmSpec, operands: tuple[F32, F32], out: F32, turned: str | None) -> F32:
    """left right in `out`. The order in which BLAS adds depends on how operands lie, and on which one comes first."""
    left, right = operands
    if turned == "out":
        np.copyto(out, np.matmul(right.T, left.T, out=ex.floats("gemm turned", *out.shape[::-1])).T)
        return out
    if turned == "b":
        right = np.array(right, order="C" if spec.trans_b else "F")
    made: F32 = np.matmul(left, right, out=out)
    return made


def _finish(
    ex: Executor,
    spec: GemmSpec,
    product: F32,
    out: Tensor,
    scale: np.float32 | None,
    bias: Tensor | None,
    aux: Tensor | None,
    out_sum: Tensor | None,
) -> None:
    target = out.numpy()
    added = None if bias is None else bias.numpy().astype(np.float32)
    aux_out = None if aux is None else aux.numpy()
    sums = np.zeros(spec.n, np.float64)
    for block in row_blocks(spec.m, spec.n):
        v = product[block]
        if scale is not None:
            np.multiply(v, scale, out=v)
        if added is not None:
            np.add(v, added, out=v)
        if spec.epilogue == "gelu":
            if aux_out is not None:
                codec.encode(ex, v, aux_out[block])
            activation.forward(ex, "gelu", v, v)
        elif spec.epilogue == "dgelu":
            assert aux_out is not None  # the ops floor requires it
            before = codec.decode(ex, aux_out[block], ex.floats("gemm aux", *v.shape))
            np.multiply(v, activation.derivative(ex, "gelu", before, before), out=v)
        if out_sum is not None:
            sums += v.sum(axis=0)
        if spec.accumulate:
            np.add(v, codec.decode(ex, target[block], ex.floats("gemm held", *v.shape)), out=v)
        if target is not product:
            codec.encode(ex, v, target[block])
    if out_sum is not None:
        codec.encode(ex, sums.astype(np.float32), out_sum.numpy())
