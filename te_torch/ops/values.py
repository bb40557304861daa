"""What operations compute with: tensors as the core reads them, products of them, results that come quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_core.ops import raw as core
from te_core.ops.quantize import dense_columns
from te_core.precision import Precision
from te_core.quantize.operands import with_columnwise
from te_core.quantized import Cast, QuantizedTensor
from te_core.tensor import Tensor
from te_torch.runtime import amp_dtype, check_dtype, runtime_for, to_core, to_core_shape, to_torch
from te_torch.tensors import run
from te_torch.tensors.base import Quantizer
from te_torch.tensors.hybrid import HybridQuantizedTensorStorage, HybridQuantizer
from te_torch.tensors.storage import QuantizedTensorStorage
from te_torch.tensors.wrap import from_core

#: By product: whether a is read along its columns, and b. fprop x w^T, dgrad dy w, wgrad dy^T x.
_COLUMNS = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}


def compute_dtype(operation: str, t: torch.Tensor) -> torch.dtype:
    """What is computed in: torch.autocast's type, or that of the tensor."""
    check_dtype(operation, t)
    return amp_dtype(t.device.type) or t.dtype


def is_quantized(t: Any) -> bool:
    """Whether a tensor, or what stands for one between operations, is quantized."""
    return hasattr(t, "_quantizer")


def dense(t: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of a tensor, plain and contiguous."""
    values: torch.Tensor = t.dequantize() if is_quantized(t) else t
    return values.detach().to(dtype or values.dtype).contiguous()


def core_of(t: torch.Tensor) -> Tensor:
    """A dense tensor as the core reads it."""
    return to_core_shape(t) if t.is_meta else to_core(t)


def matrix(t: torch.Tensor) -> Tensor:
    """The same with leading dimensions as one."""
    return core_of(t.reshape(-1, t.shape[-1]) if t.ndim else t.reshape(1, 1))


def quantized(t: Any, quantizer: Any, dtype: torch.dtype, columnwise: bool) -> Any:
    """A tensor as this quantizer makes it: itself if it came so, with the copies that are read."""
    if not is_quantized(t):
        return quantizer(t.detach().to(dtype).contiguous())
    if isinstance(t, HybridQuantizedTensorStorage):
        fits = isinstance(quantizer, HybridQuantizer) and all(t.get_usages().values())
    else:
        rule = quantizer.operand if type(quantizer).operand is not Quantizer.operand else None
        there, form = t.get_usages(), t._format
        turns = form.scaling == "tensor" or (form.scaling == "block" and form.tiled)  # one copy tells the other
        fits = rule is not None and form is rule.format and there["rowwise"]
        fits = fits and (there["columnwise"] or turns or not columnwise)
    return t if fits else quantizer(t.dequantize())


def without_rows(t: Any, came: Any) -> Any:
    """A quantized tensor as backward reads it: without the rowwise copy, unless it came with it."""
    if t is not came and isinstance(t, QuantizedTensorStorage) and t.get_usages()["columnwise"]:
        t.update_usage(rowwise_usage=False)
    return t


def _operand(t: Any, columnwise: bool) -> Tensor | QuantizedTensor:
    if isinstance(t, HybridQuantizedTensorStorage):
        t = t.columnwise_sub_storage if columnwise else t.rowwise_sub_storage
    if not isinstance(t, QuantizedTensorStorage):
        return matrix(dense(t))
    found: Tensor | QuantizedTensor = t.to_core()
    if isinstance(found, QuantizedTensor) and columnwise and found.columnwise is None:
        found = with_columnwise(runtime_for(t.flatten_inner()[0]), found)
    return found


def product(
    gemm: str,
    a: Any,
    b: Any,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    precision: Precision | None = None,
) -> None:
    """One of the three products of a linear, in dense memory; added to what is there if `accumulate`."""
    a_columns, b_columns = _COLUMNS[gemm]
    left, right = _operand(a, a_columns), _operand(b, b_columns)
    rt, result = runtime_for(out), matrix(out)
    how: dict[str, Any] = {"bias": None if bias is None else core_of(bias), "accumulate": accumulate}
    if isinstance(left, QuantizedTensor) and isinstance(right, QuantizedTensor):
        how |= {"split_accumulator": gemm != "fprop"} if precision is None else precision.of_product(gemm)
        core.gemm_quantized(rt, left, right, result, a_columnwise=a_columns, b_columnwise=b_columns, **how)
        return
    dtype = next(t.dtype for t in (left, right) if isinstance(t, Tensor))
    x, y = dense_columns(rt, left, dtype, a_columns), dense_columns(rt, right, dtype, b_columns)
    core.gemm(rt, x, y, trans_a=a_columns, trans_b=not b_columns, out=result, **how)


def cast_of(quantizer: Any) -> Cast | None:
    """How a kernel delivers its result as this quantizer would make it; None where only the quantizer can."""
    lasting: Any = None if quantizer is None else quantizer._lasting()
    rule = None if lasting is None else quantizer.operand
    if rule is None or rule.columnwise is not None:
        return None
    scale, amax = lasting or (None, None)
    copies = quantizer.rowwise_usage, quantizer.columnwise_usage
    return run.cast_of(rule, *copies, scale, amax, nonfinite=quantizer.nonfinite)


def delivered(compute: Callable[..., tuple[Any, Any]], quantizer: Any, shape: Any, dtype: torch.dtype) -> Any:
    """What `compute`, given a cast or None, makes, as a tensor of this shape: quantized, if there is a quantizer."""
    cast = cast_of(quantizer)
    values, made = compute(cast)
    if cast is not None:
        return from_core(made, shape, dtype, quantizer.copy())
    plain = to_torch(values).view(shape)
    return plain if quantizer is None else quantizer(plain)
