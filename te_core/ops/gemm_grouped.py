"""Products of groups of rows, each with a matrix of its own (experts).

The rows of all groups lie in one tensor, one group after the other; `offsets` says where each begins: running sums,
int32 [groups + 1], in device memory, where a kernel can read what the host never knew. What runs today is a loop of
`gemm` or `gemm_quantized`. It needs the numbers on the host: `sizes`, where the caller has them; else it waits for
the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from te_core import dtypes
from te_core.dtypes import ACTIVATION_DTYPES
from te_core.errors import ArgumentError
from te_core.ops import _check
from te_core.ops.declare import operation
from te_core.ops.gemm import gemm
from te_core.ops.gemm_quantized import gemm_quantized
from te_core.ops.quantize import dense_columns
from te_core.ops.quantize_grouped import bounds_of
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import META, Tensor

Rows = Tensor | Sequence[Tensor | QuantizedTensor]  # of all groups, or of each; `quantize_grouped` gives the latter


@operation(
    """
    out: Where the result is written.
    offsets: Running sums of the rows of the groups, int32 on the device. None where `sizes` says it.
    sizes: Rows of each group, numbers of the host. None where `offsets` says it.
    bias: Vectors [N], one for each group. None adds none.
""",
    runs="",
)
def gemm_grouped(
    rt: Runtime,
    a: Rows,
    b: Rows,
    out: Tensor | Sequence[Tensor],
    offsets: Tensor | None = None,
    *,
    sizes: Sequence[int] | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Sequence[Tensor | None] | None = None,
    accumulate: bool = False,
    split_accumulator: bool = True,
    emulate: bool = False,
    strict: bool = False,
) -> None:
    """out_i = op(a_i) @ op(b_i) + bias_i for each group i, bit for bit as `gemm` or `gemm_quantized` computes it alone.

    Without `trans_a` the rows of a [T, K] are the groups', b is a matrix for each group, and out is [T, N]. With it a
    [T, M] and b [T, N] both hold rows of the groups, which the product contracts, and out is a matrix [M, N] for each
    group; that of an empty group is zero. Quantized operands are read by the copy along the contraction; one that meets
    a plain one is dequantized. The last four are as `gemm_quantized` and `gemm` have them. One of `offsets` and `sizes`
    has to be given.
    """
    op = "gemm_grouped"
    matrices = out if trans_a else b
    if isinstance(out, Tensor) is trans_a or isinstance(matrices, Tensor) or (trans_a and bias is not None):
        raise ArgumentError(
            op,
            f"trans_a={trans_a} with {'one tensor' if isinstance(out, Tensor) else 'several tensors'} as out",
            "without trans_a one out and several b, with trans_a several outs and no bias",
            "correct the operands",
        )
    groups = len(matrices)
    sizes = _sizes(op, rt, groups, offsets, sizes)
    rows = sum(sizes)
    for t in (a, b, out, matrices if bias is None else bias):
        if t.shape[0] != rows if isinstance(t, Tensor) else len(t) != groups:
            has = f"{t.shape[0]} rows" if isinstance(t, Tensor) else f"{len(t)} parts"
            raise ArgumentError(
                op,
                f"an operand of {has} for {groups} groups of {list(sizes)} rows",
                "tensors with the rows of all groups, and a part of everything else for each group",
                "correct the sizes or the operands",
            )
    bounds = bounds_of(sizes)
    for i, (start, stop) in enumerate(bounds):
        result = out.rows(start, stop) if isinstance(out, Tensor) else out[i]
        left = a.rows(start, stop) if isinstance(a, Tensor) else a[i]
        right = b.rows(start, stop) if isinstance(b, Tensor) else b[i]
        for x in (left, right) if trans_a else (left,):  # of quantized ones storage has more rows
            if x.shape[0] != stop - start:
                raise ArgumentError(
                    op,
                    f"{x!r} of group {i}, which has {stop - start} rows",
                    "operands with as many rows as the sizes say",
                    "correct the sizes or the operands",
                )
        if start == stop:
            if trans_a:
                _check.result(op, rt.device, "out", result, (left.shape[1], right.shape[1]), ACTIVATION_DTYPES)
            if trans_a and not accumulate:
                rt.backend.zero(rt, result)
            continue
        added = None if bias is None else bias[i]
        if isinstance(left, QuantizedTensor) and isinstance(right, QuantizedTensor):
            gemm_quantized(
                rt,
                left,
                right,
                result,
                a_columnwise=trans_a,
                b_columnwise=not trans_b,
                bias=added,
                accumulate=accumulate,
                split_accumulator=split_accumulator,
                emulate=emulate,
                strict=strict,
            )
        else:
            x, y = left, right
            if isinstance(x, QuantizedTensor):
                x = dense_columns(rt, x, y.dtype, trans_a)
            if isinstance(y, QuantizedTensor):
                y = dense_columns(rt, y, x.dtype, not trans_b)
            gemm(rt, x, y, trans_a=trans_a, trans_b=trans_b, bias=added, out=result, accumulate=accumulate)


def _sizes(op: str, rt: Runtime, groups: int, offsets: Tensor | None, sizes: Sequence[int] | None) -> Sequence[int]:
    """The rows of each group, on the host."""
    if offsets is not None:
        _check.vector(op, rt.device, "offsets", offsets, groups + 1, (dtypes.int32,))
    if sizes is None:
        _check.require(
            offsets is not None and offsets.device is not META,
            op,
            "neither sizes nor offsets with values",
            "one of them",
            "say where the groups begin",
        )
        ends = rt.numpy(offsets).tolist()  # type: ignore[arg-type]
        sizes = [stop - start for start, stop in zip(ends, ends[1:], strict=False)]
        _check.require(ends[0] == 0, op, f"offsets {ends}", "running sums that begin with 0", "correct the offsets")
    if len(sizes) != groups or min(sizes, default=0) < 0:
        got, allowed = f"sizes {list(sizes)} of {groups} groups", "a count of rows, 0 or more, for each"
        raise ArgumentError(op, got, allowed, "correct the sizes or the offsets")
    return sizes
