"""Quantize and dequantize torch tensors by the core's rules: directly, or under a tracing compiler as operators.

Compilers cannot look into the core, so they see `te_runtime::quantize_pieces` and `te_runtime::dequantize_pieces`,
which take and return the buffers and run the same code on them.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch._decomp import register_decomposition

from te_core import dtypes
from te_core.ops import raw as ops
from te_core.ops.quantize import allocate
from te_core.precision import Operand, rule_of
from te_core.quantized import Cast, Format, QuantizedTensor
from te_core.tensor import Tensor
from te_torch.export.mode import exporting, not_exported
from te_torch.export.operators import held_values
from te_torch.program_names import build
from te_torch.runtime import (
    FLOATS,
    TO_CORE,
    TO_TORCH,
    check_dtype,
    refuse_dtensor,
    runtime_for,
    shape_runtime,
    to_core,
    to_core_shape,
    to_torch,
)
from te_torch.tensors.buffers import Buffers, core_of, form_key, form_of, matrix_of, of_core

_PLAIN = [f.name for f in fields(Operand) if f.init and f.name not in ("dtype", "columnwise", "custom")]


def is_real(t: torch.Tensor) -> bool:
    """Whether a tensor has memory that the core can read (not a compiler's stand-in)."""
    return type(t) is torch.Tensor or type(t) is torch.nn.Parameter


def dequantize(form: Format, shape: tuple[int, int], buffers: Buffers, dtype: torch.dtype) -> torch.Tensor:
    """The values of the matrix, in one of the activation types."""
    first = buffers.row_data if buffers.row_data is not None else buffers.col_data
    assert first is not None
    if is_real(first):
        rt = runtime_for(first)
        return to_torch(ops.dequantize(rt, core_of(form, shape, buffers), TO_CORE[dtype]))
    inner = [b for b in buffers if b is not None]
    there = "".join("0" if b is None else "1" for b in buffers)
    seen = torch.ops.te_runtime.dequantize_exported if exporting.on else torch.ops.te_runtime.dequantize_pieces
    return seen(inner, list(shape), json.dumps([*form_key(form), there]), dtype)


def values(q: QuantizedTensor, first: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of a core tensor, one of whose buffers is `first`."""
    return to_torch(ops.dequantize(runtime_for(first), q, TO_CORE[dtype]))


def quantize(
    x: torch.Tensor,
    rule: Operand,
    rowwise: bool,
    columnwise: bool,
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    rng: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
) -> Buffers:
    """A contiguous matrix [M, K] by a rule; `amax`, if given, is raised to its maximum."""
    if is_real(x):
        return of_core(_quantize(x, cast_of(rule, rowwise, columnwise, scale, amax, rng, nonfinite)))
    refuse_dtensor(x)
    key = json.dumps([build(), rule.dtype.name, *[getattr(rule, n) for n in _PLAIN]])
    inner = torch.ops.te_runtime.quantize_pieces(x, scale, rng, key, rowwise, columnwise, amax is not None)
    if amax is not None:
        amax.copy_(torch.maximum(amax, inner[-1]))
    given, count = iter(inner), 3 if rule.format.scaling == "nvfp4" else 2
    copies = [next(given) if wanted and i < count else None for wanted in (rowwise, columnwise) for i in range(3)]
    return Buffers(*copies)


def quantize_into(
    out: QuantizedTensor, x: torch.Tensor, rule: Operand, scale: Any = None, amax: Any = None, rng: Any = None
) -> None:
    """The same into the memory of another one, whose copies are written. For tensors with memory."""
    rowwise, columnwise = out.rowwise is not None, out.columnwise is not None
    _quantize(x, cast_of(rule, rowwise, columnwise, scale, amax, rng), out)


def cast_of(
    rule: Operand,
    rowwise: bool,
    columnwise: bool,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    rng: torch.Tensor | None = None,
    nonfinite: torch.Tensor | None = None,
) -> Cast:
    """How what computes a matrix quantizes it by a rule."""

    def convert(t: torch.Tensor) -> Tensor:
        return to_core_shape(t) if t.is_meta else to_core(t)

    return Cast(
        rule.format,
        rowwise=rowwise,
        columnwise=columnwise,
        epsilon=rule.epsilon,
        power_of_two=rule.power_of_two,
        scale=None if scale is None else convert(scale.reshape(1)),
        amax=None if amax is None else convert(amax.view(1)),
        transform=rule.transform and columnwise,
        stochastic=rule.stochastic,
        rng=None if rng is None else convert(rng),
        four_over_six=rule.four_over_six,
        nonfinite=None if nonfinite is None else convert(nonfinite),
    )


def _quantize(x: torch.Tensor, cast: Cast, out: QuantizedTensor | None = None) -> QuantizedTensor:
    convert = to_core_shape if x.is_meta else to_core
    return ops.quantize(runtime_for(x), convert(x), cast, out=out)


def empty(form: Format, shape: tuple[int, int], rowwise: bool, columnwise: bool, device: torch.device) -> Buffers:
    """Uninitialised buffers, but for the padding, which is zero, and scales, which are those of zeros."""
    rt = shape_runtime(device) if device.type == "meta" else runtime_for(torch.empty(0, device=device))
    buffers = of_core(allocate(rt, shape, Cast(form, rowwise=rowwise, columnwise=columnwise)))
    if device.type != "meta":
        for columnwise_copy in (False, True):
            data, scale, amax = buffers.of(columnwise_copy)
            if data is not None and (shape[0] % form.pad or shape[1] % form.pad):
                data.zero_()
            if scale is not None:
                scale.fill_(1 if scale.dtype is torch.float32 else 0)
            if amax is not None:
                amax.zero_()
    return buffers


def plain(t: torch.Tensor) -> torch.Tensor:
    """What a quantizer reads: a contiguous matrix in an activation type."""
    if t.dtype not in FLOATS:
        if t.dtype.is_complex:
            check_dtype("quantize", t)
        t = t.float()
    t = t.detach()
    return t.reshape(-1, t.shape[-1]).contiguous() if t.ndim and t.numel() else t.reshape(matrix_of(t.shape))


# ------------------------------------------------------------------------------------------- for compilers


def _form(text: str) -> tuple[Format, str]:
    *key, there = json.loads(text)
    return form_of(key), there


def _dequantize_op(inner: list[torch.Tensor], shape: list[int], text: str, dtype: torch.dtype) -> torch.Tensor:
    form, there = _form(text)
    given = iter(inner)
    buffers = Buffers(*[next(given) if h == "1" else None for h in there])
    return values(core_of(form, (shape[0], shape[1]), buffers), inner[0], dtype).clone()


def _dequantize_fake(inner: list[torch.Tensor], shape: list[int], text: str, dtype: torch.dtype) -> torch.Tensor:
    return inner[0].new_empty(shape, dtype=dtype)


def _quantize_op(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    rng: torch.Tensor | None,
    text: str,
    rowwise: bool,
    columnwise: bool,
    with_amax: bool,
    *,
    fake: bool = False,
) -> list[torch.Tensor]:
    _, name, *rest = json.loads(text)
    rule = rule_of(dtypes.dtype(name), **dict(zip(_PLAIN, rest, strict=True)))
    amax = x.new_zeros((1,), dtype=torch.float32) if with_amax else None
    if fake:
        rt = shape_runtime(x.device)
        made = allocate(rt, (x.shape[0], x.shape[1]), Cast(rule.format, rowwise=rowwise, columnwise=columnwise))
    else:
        made = _quantize(x.contiguous(), cast_of(rule, rowwise, columnwise, scale, amax, rng))
    inner = [b.clone() for b in of_core(made) if b is not None]  # results of an operator share no memory
    return inner if amax is None else [*inner, amax]


_library = torch.library.Library("te_runtime", "FRAGMENT")
# One that exporters take apart, one for compilers: where CI is set, inductor calls nothing that could be taken apart.
for _name in ("dequantize_pieces", "dequantize_exported"):
    _library.define(f"{_name}(Tensor[] inner, SymInt[] shape, str form, ScalarType dtype) -> Tensor")
    _library.impl(_name, _dequantize_op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"te_runtime::{_name}", _dequantize_fake, lib=_library)
_library.define(
    "quantize_pieces(Tensor x, Tensor? scale, Tensor? rng, str rule, bool rowwise, bool columnwise, bool with_amax)"
    " -> Tensor[]"
)
_library.impl("quantize_pieces", _quantize_op, "CompositeExplicitAutograd")
torch.library.register_fake("te_runtime::quantize_pieces", partial(_quantize_op, fake=True), lib=_library)


@register_decomposition(torch.ops.te_runtime.dequantize_exported.default)
def _dequantize_for_onnx(inner: list[torch.Tensor], shape: list[int], form: str, dtype: torch.dtype) -> torch.Tensor:
    """What torch's exporter to ONNX takes the operator apart to."""
    kind, there = _form(form)
    if kind.scaling not in ("tensor", "mxfp8") or there[0] == "0":
        got, allowed = f"a tensor held in {kind}", "per-tensor FP8 or MXFP8 with its rowwise copy, or plain tensors"
        raise not_exported(got, allowed, "load te.plain_state_dict(model) into a model of plain weights")
    rows, columns = shape
    return held_values(inner[0], inner[1], (rows, columns), TO_TORCH[kind.dtype]).to(dtype)
