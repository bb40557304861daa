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
    """What carries out a call."""

    dtype: DType  # of all results

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, terms: Terms, out: Tensor | None
    ) -> Attended:
        """The output, into `out` if that is given, and its statistics."""
        ...

    def backward(
        self,
        parts: Three,
        given: tuple[Tensor, Tensor],
        stats: Tensor,
        *,
        spec: AttentionSpec,
        terms: Terms,
        grads: Three,
    ) -> Terms:
        """The gradients of `parts` (q, k, v) go into `grads`; those of bias and sink. `given`: dy and the output."""
        ...


class Plain:
    """In the activation dtype."""

    __slots__ = ("bias_grad", "dtype", "rt")

    def __init__(self, rt: Runtime, dtype: DType, bias_grad: bool = False) -> None:
        self.rt, self.dtype, self.bias_grad = rt, dtype, bias_grad

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, terms: Terms, out: Tensor | None
    ) -> Attended:
        """See `Products`."""
        return ops.attention_forward(self.rt, q, k, v, spec=spec, terms=terms, out=out)

    def backward(
        self,
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
            self.rt, dy, *parts, out, stats, spec=spec, terms=terms, grads=grads, bias_grad=self.bias_grad
        )
        return Terms(bias=found.bias, sink=found.sink)


class Fp8:
    """On codes."""

    __slots__ = ("back", "dtype", "form", "grad", "rt", "scales")

    def __init__(
        self,
        rt: Runtime,
        dtype: DType,
        form: Format,
        scales: ForwardScales | None,
        back: BackwardScales | None = None,
        grad: Format | None = None,
    ) -> None:
        """`form` and `grad`: the formats of outputs and of gradients, where these are written as codes."""
        self.rt, self.dtype, self.form, self.scales, self.back, self.grad = rt, dtype, form, scales, back, grad

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, terms: Terms, out: Tensor | None
    ) -> Attended:
        """See `Products`."""
        rt, shape, scales = self.rt, (*q.shape[:-1], v.shape[-1]), self.scales
        assert scales is not None
        if scales.out is None:
            out = out or rt.empty(shape, self.dtype)
            return ops.attention_fp8_forward(rt, q, k, v, spec=spec, terms=terms, scales=scales, out=out)
        room = _room(rt, shape, self.form, scales.out.inverse)
        codes = _codes(room, shape)
        stats = ops.attention_fp8_forward(rt, q, k, v, spec=spec, terms=terms, scales=scales, out=codes).stats
        return Attended(_values(rt, room, shape, self.dtype, out), stats, None)

    def backward(
        self,
        parts: Three,
        given: tuple[Tensor, Tensor],
        stats: Tensor,
        *,
        spec: AttentionSpec,
        terms: Terms,
        grads: Three,
    ) -> Terms:
        """See `Products`."""
        rt, scales, (dy, out) = self.rt, self.back, given
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
