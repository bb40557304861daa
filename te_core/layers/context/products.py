"""How the calls of a schedule are computed: in the activation dtype, or in FP8 with partial results given back in it.

In FP8 each call reads codes, which foreign ones are too: their scales are those of all ranks. A partial result that
cuDNN writes as codes is dequantized at once, so that sums are formed of values, in float32. Maxima are raised by each
call, so that their slots see all of them.
"""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

from te_core.attention import AttentionSpec
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


class Products(Protocol):
    """What carries out a call, on the stream of the runtime that it is given."""

    dtype: DType  # of all results

    def forward(
        self, rt: Runtime, parts: Three, *, spec: AttentionSpec, terms: Terms, out: Tensor | None, stats: bool | Tensor
    ) -> Attended:
        """The output and its statistics, each into its memory if that is given."""

    def backward(
        self,
        rt: Runtime,
        parts: Three,
        given: tuple[Tensor, Tensor],
        stats: Tensor,
        *,
        spec: AttentionSpec,
        terms: Terms,
        grads: Three,
    ) -> Terms:
        """The gradients of `parts` (q, k, v) go into `grads`; those of bias and sink. `given`: dy and the output."""


class Plain:
    """In the activation dtype."""

    __slots__ = ("bias_grad", "dtype")

    def __init__(self, dtype: DType, bias_grad: bool = False) -> None:
        self.dtype, self.bias_grad = dtype, bias_grad

    def forward(
        self, rt: Runtime, parts: Three, *, spec: AttentionSpec, terms: Terms, out: Tensor | None, stats: bool | Tensor
    ) -> Attended:
        """See `Products`."""
        return ops.attention_forward(rt, *parts, spec=spec, terms=terms, out=out, stats=stats)

    def backward(
        self,
        rt: Runtime,
        parts: Three,
        given: tuple[Tensor, Tensor],
        stats: Tensor,
        *,
        spec: AttentionSpec,
        terms: Terms,
        grads: Three,
    ) -> Terms:
        """See `Products`."""
        dy, out = given
        found = ops.attention_backward(
            rt, dy, *parts, out, stats, spec=spec, terms=terms, grads=grads, bias_grad=self.bias_grad
        )
        return Terms(bias=found.bias, sink=found.sink)


class Fp8:
    """On codes."""

    __slots__ = ("back", "dtype", "form", "grad", "scales")

    def __init__(
        self,
        dtype: DType,
        form: Format,
        scales: ForwardScales | None,
        back: BackwardScales | None = None,
        grad: Format | None = None,
    ) -> None:
        """`form` and `grad`: the formats of outputs and of gradients, where these are written as codes."""
        self.dtype, self.form, self.scales, self.back, self.grad = dtype, form, scales, back, grad

    def forward(
        self, rt: Runtime, parts: Three, *, spec: AttentionSpec, terms: Terms, out: Tensor | None, stats: bool | Tensor
    ) -> Attended:
        """See `Products`."""
        shape, scales = (*parts[0].shape[:-1], parts[2].shape[-1]), self.scales
        assert scales is not None
        options: dict[str, Any] = {"spec": spec, "terms": terms, "scales": scales, "stats": stats}
        if scales.out is None:
            out = out or rt.empty(shape, self.dtype)
            return ops.attention_fp8_forward(rt, *parts, out=out, **options)
        room = _room(rt, shape, self.form, scales.out.inverse)
        codes = _codes(room, shape)
        found = ops.attention_fp8_forward(rt, *parts, out=codes, **options).stats
        return Attended(_values(rt, room, shape, self.dtype, out), found, None)

    def backward(
        self,
        rt: Runtime,
        parts: Three,
        given: tuple[Tensor, Tensor],
        stats: Tensor,
        *,
        spec: AttentionSpec,
        terms: Terms,
        grads: Three,
    ) -> Terms:
        """See `Products`."""
        scales, (dy, out) = self.back, given
        assert scales is not None
        options: dict[str, Any] = {"spec": spec, "terms": terms, "scales": scales}
        if scales.dq is None or scales.dk is None or scales.dv is None or self.grad is None:
            ops.attention_fp8_backward(rt, dy, *parts, out, stats, grad_dtype=self.dtype, grads=grads, **options)
            return NOTHING
        scaled = scales.dq, scales.dk, scales.dv
        rooms = [_room(rt, t.shape, self.grad, s.inverse) for t, s in zip(parts, scaled, strict=True)]
        codes = [_codes(room, t.shape) for room, t in zip(rooms, parts, strict=True)]
        made = codes[0], codes[1], codes[2]
        ops.attention_fp8_backward(rt, dy, *parts, out, stats, grad_dtype=made[0].dtype, grads=made, **options)
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
