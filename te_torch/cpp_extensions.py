"""The documented product of two matrices, for programs that call it by itself, as Megatron-core's router does."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.spelling import choice_error
from te_torch.runtime import TO_CORE, check_dtype, runtime_for, to_core, to_torch
from te_torch.tensors.storage import QuantizedTensorStorage

#: Layout: which of (B, A) lies transposed.
_TURNED = {"TN": (False, True), "NN": (False, False), "NT": (True, False)}


@torch.no_grad()
def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(out, gradient of the bias, input of GELU, None) with out = alpha op(B) op(A): "TN" B A^T, "NN" B A, "NT" B^T A.

    Leading dimensions of B stay in out. `accumulate` adds to `out`, which `beta` multiplies before. Without `grad` the
    bias is added, and `gelu` applies GELU to the result. With `grad` the gradient of a bias like `bias` is summed over
    rows, of B in "NT", of out elsewhere, and `gelu` multiplies by the derivative at `gelu_in`. `quantization_params` is
    a quantizer of the result. Quantized operands are dequantized first; modules multiply them in FP8. Autograd sees
    nothing of this function.

    Raises:
        ArgumentError: An argument is not allowed, or the shapes do not fit.
        UnsupportedError: Products that overlap with communication: modules do that.
    """
    op = "general_gemm"
    if layout not in _TURNED:
        raise choice_error(op, "layout", layout, tuple(_TURNED))
    if ub is not None or extra_output is not None or bulk_overlap:
        do = "call it without ub, extra_output and bulk_overlap"
        raise UnsupportedError(op, "a product that overlaps with communication", "modules with ub_* options", do)
    if gelu and grad and gelu_in is None:
        raise ArgumentError(op, "gelu=True with grad=True and no gelu_in", "the input of GELU", "pass gelu_in")
    if accumulate and (out is None or quantization_params is not None):
        raise ArgumentError(op, "accumulate=True without a plain out", "an out in high precision", "pass out")
    if beta is not None and not accumulate:
        raise ArgumentError(op, f"beta={beta} without accumulate", "beta=None", "pass accumulate=True, or no beta")
    a, b = (t.dequantize() if isinstance(t, QuantizedTensorStorage) else t for t in (A, B))
    for t in (a, b):
        check_dtype(op, t)
    lead, rows = b.shape[:-1], b.reshape(-1, b.shape[-1])
    turned = _TURNED[layout]
    n = a.shape[0] if turned[1] else a.shape[-1]
    shape = (b.shape[-1], n) if layout == "NT" else (*lead, n)
    dtype = out.dtype if out is not None else out_dtype or a.dtype
    rt, left, right = runtime_for(rows), to_core(rows.contiguous()), to_core(a.reshape(-1, a.shape[-1]).contiguous())
    # The product itself adds to `out` where nothing is done to it before.
    in_place = accumulate and alpha == 1 and beta in (None, 1) and not gelu
    added = None if grad else bias
    options: dict[str, Any] = {"split_accumulator": use_split_accumulator, "out_dtype": TO_CORE[dtype]}
    options |= zip(("trans_a", "trans_b"), turned, strict=True)
    sums = pre = None
    if grad and bias is not None and layout == "NT":
        sums = torch.empty(b.shape[-1], dtype=bias.dtype, device=rows.device)
        options["a_sum"] = to_core(sums)
    if added is not None and alpha == 1:
        options["bias"] = to_core(added.contiguous())
    if in_place and out is not None:
        options |= {"out": to_core(out.view(-1, n)), "accumulate": True}
    found = to_torch(ops.gemm(rt, left, right, **options)).view(shape)
    if alpha != 1:
        found = found * alpha if added is None else (found * alpha + added).to(dtype)
    if accumulate and not in_place and out is not None:
        found = found + out.view(shape) * (1 if beta is None else beta)
    if gelu and not grad:
        pre = found if gelu_in is None else gelu_in.copy_(found)
        found = torch.nn.functional.gelu(found, approximate="tanh")
    elif gelu:
        found = torch.ops.aten.gelu_backward(found, gelu_in.view(shape), approximate="tanh")  # type: ignore[union-attr]
    if grad and bias is not None and sums is None:
        sums = found.reshape(-1, n).float().sum(0).to(bias.dtype)
    if quantization_params is not None:
        found = quantization_params(found)
    elif out is not None:
        found = out if in_place else out.copy_(found.view(out.shape))
    return found, sums, pre, None


__all__ = ["general_gemm"]
