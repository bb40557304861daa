"""Activations, plain and gated (the first half of the last dimension is the gate), and those scaled by row."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.ops import raw as core
from te_core.ops.activation import Clamp, is_gated
from te_torch.ops.op import BasicOperation, Own
from te_torch.ops.values import compute_dtype, core_of, delivered, dense, matrix
from te_torch.runtime import runtime_for
from te_torch.tensors.dtype import DType
from te_torch.tensors.float8 import Float8CurrentScalingQuantizer
from te_torch.values import is_number


class _Function(BasicOperation):
    """An activation of the core's, and in which layout its input comes."""

    kind = ""
    _in_core = True  # whether the core's layer of this kind is all that it does
    _clamp: Clamp | None = None
    glu_interleave_size: int | None = None

    def _value(self, x: torch.Tensor, quantizer: Any) -> Any:
        """act(x), quantized if there is a quantizer."""

        def compute(cast: Any) -> Any:
            return core.activation_forward(runtime_for(x), matrix(x), self.kind, clamp=self._clamp, cast=cast)

        shape = (*x.shape[:-1], x.shape[-1] // 2) if is_gated(self.kind) else x.shape
        return delivered(compute, quantizer, shape, x.dtype)

    def _gradient(self, dy: torch.Tensor, x: torch.Tensor, quantizer: Any, sums: torch.Tensor | None = None) -> Any:
        """dy act'(x), quantized if there is a quantizer; `sums` is set to its sums over the leading dimensions."""

        def compute(cast: Any) -> Any:
            how: Any = {"clamp": self._clamp, "cast": cast, "column_sum": None if sums is None else core_of(sums)}
            return core.activation_backward(runtime_for(x), matrix(dy), matrix(x), self.kind, **how)

        return delivered(compute, quantizer, x.shape, x.dtype)

    def _halved(self, x: torch.Tensor) -> torch.Tensor:
        """The input as (a | b), where it came in blocks of both."""
        size = self.glu_interleave_size
        if size is not None and x.shape[-1] % (2 * size):
            got = f"a last dimension of {x.shape[-1]} with glu_interleave_size={size}"
            raise ArgumentError(type(self).__name__, got, "a multiple of twice that size", "correct the size")
        return x if size is None else x.unflatten(-1, (-1, 2, size)).transpose(-3, -2).flatten(-3).contiguous()

    def _interleaved(self, dx: torch.Tensor) -> torch.Tensor:
        size = self.glu_interleave_size
        return dx if size is None else dx.unflatten(-1, (2, -1, size)).transpose(-3, -2).flatten(-3).contiguous()


class _Activation(_Function, Own):
    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def _run(self, ctx, x, prev, after):
        ctx.dtype = compute_dtype(type(self).__name__, x)
        x = dense(x, ctx.dtype)
        cached = self.cache_quantized_input and ctx.requires_grad
        quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False) if cached else None
        ctx.save_for_backward(x if quantizer is None else quantizer(x))
        ctx.prev_op_grad_output_quantizer = prev
        return self._value(self._halved(x), after)

    def _back(self, ctx, dy):
        x, dy = self._halved(dense(ctx.saved_tensors[0], ctx.dtype)), dense(dy, ctx.dtype)
        blocks = self.glu_interleave_size is not None
        return self._interleaved(self._gradient(dy, x, None if blocks else ctx.prev_op_grad_output_quantizer))


def _made(name: str, formula: str) -> Any:
    return type(name, (_Activation,), {"kind": name.lower(), "__doc__": f"{formula}.", "__module__": __name__})


GELU = _made("GELU", "0.5 x (1 + tanh(0.79788 (x + 0.044715 x^3)))")
QGELU = _made("QGELU", "x sigmoid(1.702 x)")
ReLU = _made("ReLU", "max(x, 0)")
SReLU = _made("SReLU", "max(x, 0)^2")
SiLU = _made("SiLU", "x sigmoid(x)")
GLU = _made("GLU", "sigmoid(a) b, where x = (a | b)")
GEGLU = _made("GEGLU", "gelu(a) b, where x = (a | b)")
QGEGLU = _made("QGEGLU", "qgelu(a) b, where x = (a | b)")
ReGLU = _made("ReGLU", "relu(a) b, where x = (a | b)")
SReGLU = _made("SReGLU", "srelu(a) b, where x = (a | b)")


class SwiGLU(_Activation):
    """silu(a) b, where x = (a | b), or such pairs in blocks of `glu_interleave_size`."""

    kind = "swiglu"

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size


class ClampedSwiGLU(SwiGLU):
    """a' sigmoid(alpha a') (b' + offset), where a' = min(a, limit), and b' is b between -limit and limit."""

    kind = "clamped_swiglu"

    def __init__(
        self, *, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0, **options: Any
    ) -> None:
        super().__init__(**options)
        self._clamp = _clamp(self, limit, alpha, glu_linear_offset)


def _clamp(op: Any, limit: float, alpha: float, offset: float) -> Clamp:
    if not all(map(is_number, (limit, alpha, offset))) or limit < 0:
        got = f"limit={limit!r}, alpha={alpha!r}, glu_linear_offset={offset!r}"
        raise ArgumentError(type(op).__name__, got, "finite numbers, and a limit of at least 0", "correct them")
    return Clamp(limit, alpha, offset)


class _SiTU(_Function):
    """beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2), in float32 and rounded once."""

    _in_core = False

    def __init__(self, *args: Any, beta1: float = 4.0, beta2: float = 25.0, **options: Any) -> None:
        super().__init__(*args, **options)
        if not all(is_number(beta) and beta > 0 for beta in (beta1, beta2)):
            got = f"beta1={beta1!r}, beta2={beta2!r}"
            raise ArgumentError(type(self).__name__, got, "finite numbers above 0", "correct them")
        self.beta1, self.beta2 = float(beta1), float(beta2)

    def _terms(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tanh(a / beta1), sigmoid(a), tanh(b / beta2)."""
        a, b = x.float().chunk(2, -1)
        return (a / self.beta1).tanh(), a.sigmoid(), (b / self.beta2).tanh()

    def _value(self, x, quantizer):
        ta, s, tb = self._terms(x)
        y = (self.beta1 * ta * s * self.beta2 * tb).to(x.dtype)
        return y if quantizer is None else quantizer(y)

    def _gradient(self, dy, x, quantizer, sums=None):
        (ta, s, tb), g = self._terms(x), dy.float()
        da = g * ((1 - ta * ta) * s + self.beta1 * ta * s * (1 - s)) * self.beta2 * tb
        db = g * self.beta1 * ta * s * (1 - tb * tb)
        dx = torch.cat([da, db], -1).to(x.dtype)
        return dx if quantizer is None else quantizer(dx)


class SiTUGLU(_SiTU, SwiGLU):
    """beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2), where x = (a | b)."""


class _Scaled(_Function):
    num_extra_inputs = 1
    _grouped_mlp_unit_activation_scale = False

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        if activation_recompute_in_mlp and is_gated(self.kind):
            got, allowed = "activation_recompute_in_mlp=True", "it with ScaledSReLU alone"
            raise ArgumentError(type(self).__name__, got, allowed, "leave it out")
        super().__init__()
        self.glu_interleave_size, self.activation_recompute_in_mlp = glu_interleave_size, activation_recompute_in_mlp

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **given):
        """act(x) times a scale for each row."""
        (ctx,), scales = basic_op_ctxs, basic_op_extra_inputs[0][0]
        if tuple(scales.shape) != tuple(input_.shape[:-1]):
            got = f"scales of shape {tuple(scales.shape)} for an input of {tuple(input_.shape)}"
            raise ArgumentError(
                type(self).__name__, got, f"{tuple(input_.shape[:-1])}: one a row", "correct the scales"
            )
        ctx.dtype, ctx.scales_require_grad = compute_dtype(type(self).__name__, input_), scales.requires_grad
        x = dense(input_, ctx.dtype)
        ctx.save_for_backward(x, scales)
        return self._value(self._halved(x), None) * scales.to(ctx.dtype)[..., None], [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        """The gradients of x and of the scales."""
        (ctx,) = basic_op_ctxs
        x, scales = ctx.saved_tensors
        dy, x, ds = dense(grad_output, ctx.dtype), self._halved(x), None
        dx = self._gradient(dy * scales.to(ctx.dtype)[..., None], x, None)
        if ctx.scales_require_grad:
            ds = (dy.float() * self._value(x, None).float()).sum(-1).to(scales.dtype)
        return self._interleaved(dx), [()], [(ds,)]


class ScaledSwiGLU(_Scaled):
    """silu(a) b times a scale for each row, which is an extra input."""

    kind = "swiglu"


class ScaledSiTUGLU(_SiTU, _Scaled):
    """`SiTUGLU` times a scale for each row, which is an extra input."""

    kind = "swiglu"  # in its layout


class ScaledClampedQGeGLU(_Scaled):
    """`ClampedSwiGLU` times a scale for each row, which is an extra input."""

    kind = "clamped_swiglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(glu_interleave_size, **options)
        self._clamp = _clamp(self, limit, alpha, glu_linear_offset)


class ScaledSReLU(_Scaled):
    """max(x, 0)^2 times a scale for each row, which is an extra input."""

    kind = "srelu"

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
