"""How the calls of a schedule are computed: in the activation dtype, or in FP8 with partial results given back in it.

In FP8 each call reads codes, which foreign ones are too: their scales are those of all ranks. A partial result that
cuDNN writes as codes is dequantized at once, so that sums are formed of values, in float32. Maxima are raised by each
call, so that their slots see all of them.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from te_core.dtypes import DType
from te_core.ops import raw as ops
from te_core.ops.attention import Attended
from te_core.ops.attention_fp8 import BackwardScales, ForwardScales
from te_core.ops.attention_terms import NOTHING, Terms
from te_core.ops.quantize import allocate
from te_core.quantized import Cast, Copy, Format, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

Three = tuple[Tensor, Tensor, Tensor]


class Products:
    """What carries out a call, on the stream of the runtime that it is given: in the dtype of all results.

    `of_call`: the call's `spec` and `terms`, forward also `stats`: whether there are statistics, or their memory.
    """

    __slots__ = ("bias_grad", "dtype")

    def __init__(self, dtype: DType, bias_grad: bool = False) -> None:
        self.dtype, self.bias_grad = dtype, bias_grad

    def forward(self, rt: Runtime, parts: Three, *, out: Tensor | None, **of_call: Any) -> Attended:
        """The output and its statistics, each into its memory if that is given."""
        return ops.attention_forward(rt, *parts, out=out, **of_call)

    def backward(
        self, rt: Runtime, parts: Three, given: tuple[Tensor, Tensor], stats: Tensor, *, grads: Three, **of_call: Any
    ) -> Terms:
        """The gradients of `parts` (q, k, v) go into `grads`; those of bias and sink. `given`: dy and the output."""
        dy, out = given
        found = ops.attention_backward(rt, dy, *parts, out, stats, grads=grads, bias_grad=self.bias_grad, **of_call)
        return Terms(bias=found.bias, sink=found.sink)


class Fp8(Products):
    """On codes."""

    __slots__ = ("back", "form", "grad", "scales")

    def __init__(
        self,
        dtype: DType,
        form: Format,
        scales: ForwardScales | None,
        back: BackwardScales | None = None,
        grad: Format | None = None,
    ) -> None:
        """`form` and `grad`: the formats of outputs and of gradients, where these are written as codes."""
        super().__init__(dtype)
        self.form, self.scales, self.back, self.grad = form, scales, back, grad

    def forward(self, rt: Runtime, parts: Three, *, out: Tensor | None, **of_call: Any) -> Attended:
        """See `Products`."""
        shape, scales = (*parts[0].shape[:-1], parts[2].shape[-1]), self.scales
        assert scales is not None
        if scales.out is None:
            out = out or rt.empty(shape, self.dtype)
            return ops.attention_fp8_forward(rt, *parts, out=out, scales=scales, **of_call)
        room = _room(rt, shape, self.form, scales.out.inverse)
        codes = _codes(room, shape)
        found = ops.attention_fp8_forward(rt, *parts, out=codes, scales=scales, **of_call).stats
        return Attended(_values(rt, room, shape, self.dtype, out), found, None)

    def backward(
        self, rt: Runtime, parts: Three, given: tuple[Tensor, Tensor], stats: Tensor, *, grads: Three, **of_call: Any
    ) -> Terms:
        """See `Products`."""
        scales, (dy, out) = self.back, given
        assert scales is not None
        run = partial(ops.attention_fp8_backward, rt, dy, *parts, out, stats, scales=scales, **of_call)
        if scales.dq is None or scales.dk is None or scales.dv is None or self.grad is None:
            run(grad_dtype=self.dtype, grads=grads)
            return NOTHING
        scaled = scales.dq, scales.dk, scales.dv
        rooms = [_room(rt, t.shape, self.grad, s.inverse) for t, s in zip(parts, scaled, strict=True)]
        q, k, v = (_codes(room, t.shape) for room, t in zip(rooms, parts, strict=True))
        run(grad_dtype=q.dtype, grads=(q, k, v))
        for room, grad in zip(rooms, grads, strict=True):
            _values(rt, room, grad.shape, self.dtype, grad)
        return NOTHING


def _room(rt: Runtime, shape: tuple[int, ...], form: Format, inverse: Tensor) -> QuantizedTensor:
    """Memory for codes under a scale that is known, a matrix of tokens."""
    size = prod(shape[:-2]), shape[-2] * shape[-1]
    made = allocate(rt, size, Cast(form, rowwise=True, columnwise=False))
    assert made.rowwise is not None
    return QuantizedTensor(made.format, size, Copy(made.rowwise, inverse, None), None)


def _codes(room: QuantizedTensor, shape: tuple[int, ...]) -> Tensor:
    data = room.rowwise
    assert data is not None
    return Tensor(data.ptr, shape, data.dtype, data.device, data)


def _values(rt: Runtime, room: QuantizedTensor, shape: tuple[int, ...], dtype: DType, out: Tensor | None) -> Tensor:
    """The values of codes, in `out` if that is given."""
    made = ops.dequantize(rt, room, dtype).reshape(*shape)
    if out is None:
        return made
    ops.context_sum(rt, made, None, out=out)
    return out
