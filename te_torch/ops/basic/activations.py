"""Activations, plain and gated (the first half of the last dimension is the gate), and those scaled by row."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.ops import raw as core
from te_core.ops.activation import Clamp, is_gated
from te_core.quantized import Cast
from te_torch.ops.op import BasicOperation
from te_torch.ops.values import compute_dtype, delivered, dense, matrix, vector
from te_torch.runtime import runtime_for, to_torch
from te_torch.tensors.dtype import DType
from te_torch.tensors.float8 import Float8CurrentScalingQuantizer
from te_torch.values import is_number


class _Function(BasicOperation):
    """What all of them share: the function, and its layout."""

    kind = ""
    _clamp: Clamp | None = None
    glu_interleave_size: int | None = None

    def __init_subclass__(cls, kind: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.kind = kind or cls.kind

    def _compute(self, x: torch.Tensor, quantizer: Any) -> Any:
        """act(x), quantized if there is a quantizer."""

        def compute(cast: Cast | None) -> Any:
            return core.activation_forward(runtime_for(x), matrix(x), self.kind, clamp=self._clamp, cast=cast)

        shape = (*x.shape[:-1], x.shape[-1] // 2) if is_gated(self.kind) else x.shape
        return delivered(compute, quantizer, shape, x.dtype)

    def gradient(self, dy: torch.Tensor, x: torch.Tensor, quantizer: Any, sums: torch.Tensor | None = None) -> Any:
        """dy act'(x), quantized if there is a quantizer; `sums` is set to its sums over the leading dimensions."""

        def compute(cast: Cast | None) -> Any:
            total, rt = None if sums is None else vector(sums), runtime_for(x)
            return core.activation_backward(
                rt, matrix(dy), matrix(x), self.kind, clamp=self._clamp, cast=cast, column_sum=total
            )

        return delivered(compute, quantizer, x.shape, x.dtype)

    def _halved(self, x: torch.Tensor) -> torch.Tensor:
        """The input as (a | b), where it came in blocks of both."""
        size = self.glu_interleave_size
        if size is None:
            return x
        if x.shape[-1] % (2 * size):
            got = f"a last dimension of {x.shape[-1]} with glu_interleave_size={size}"
            raise ArgumentError(type(self).__name__, got, "a multiple of twice that size", "correct the size")
        return x.unflatten(-1, (-1, 2, size)).transpose(-3, -2).flatten(-3).contiguous()

    def _interleaved(self, dx: torch.Tensor) -> torch.Tensor:
        size = self.glu_interleave_size
        return dx if size is None else dx.unflatten(-1, (2, -1, size)).transpose(-3, -2).flatten(-3).contiguous()


class _Activation(_Function):
    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input

    def op_forward(
        self,
        ctx: Any,
        input_: Any,
        *,
        prev_op_grad_output_quantizer: Any = None,
        next_op_input_quantizer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """act(x), quantized for the next operation if it reads it so."""
        ctx.dtype = dtype = compute_dtype(type(self).__name__, input_)
        x = dense(input_, dtype)
        kept: Any = x
        if self.cache_quantized_input and ctx.requires_grad:
            kept = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, x.device, columnwise=False)(x)
        ctx.save_for_backward(kept)
        ctx.prev_op_grad_output_quantizer = prev_op_grad_output_quantizer
        return self._compute(self._halved(x), next_op_input_quantizer)

    def op_backward(self, ctx: Any, grad_output: Any) -> tuple[Any, tuple[()]]:
        """dy act'(x), quantized for the operation before if it reads it so."""
        (kept,) = ctx.saved_tensors
        x, dy = self._halved(dense(kept, ctx.dtype)), dense(grad_output, ctx.dtype)
        if self.glu_interleave_size is None:
            return self.gradient(dy, x, ctx.prev_op_grad_output_quantizer), ()
        return self._interleaved(self.gradient(dy, x, None)), ()


class GELU(_Activation, kind="gelu"):
    """0.5 x (1 + tanh(0.79788 (x + 0.044715 x^3)))."""


class QGELU(_Activation, kind="qgelu"):
    """x sigmoid(1.702 x)."""


class ReLU(_Activation, kind="relu"):
    """max(x, 0)."""


class SReLU(_Activation, kind="srelu"):
    """max(x, 0)^2."""


class SiLU(_Activation, kind="silu"):
    """x sigmoid(x)."""


class GLU(_Activation, kind="glu"):
    """sigmoid(a) b, where x = (a | b)."""


class GEGLU(_Activation, kind="geglu"):
    """gelu(a) b, where x = (a | b)."""


class QGEGLU(_Activation, kind="qgeglu"):
    """qgelu(a) b, where x = (a | b)."""


class ReGLU(_Activation, kind="reglu"):
    """relu(a) b, where x = (a | b)."""


class SReGLU(_Activation, kind="sreglu"):
    """srelu(a) b, where x = (a | b)."""


class SwiGLU(_Activation, kind="swiglu"):
    """silu(a) b, where x = (a | b), or such pairs in blocks of `glu_interleave_size`."""

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size


class ClampedSwiGLU(_Activation, kind="clamped_swiglu"):
    """a' sigmoid(alpha a') (b' + offset), where a' = min(a, limit), and b' is b between -limit and limit."""

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self._clamp, self.glu_interleave_size = _clamp(self, limit, alpha, glu_linear_offset), glu_interleave_size


def _clamp(op: Any, limit: float, alpha: float, offset: float) -> Clamp:
    if not all(map(is_number, (limit, alpha, offset))) or limit < 0:
        got = f"limit={limit!r}, alpha={alpha!r}, glu_linear_offset={offset!r}"
        raise ArgumentError(type(op).__name__, got, "finite numbers, and a limit of at least 0", "correct them")
    return Clamp(limit, alpha, offset)


class _SiTU(_Function):
    """beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2), in float32 and rounded once."""

    beta1 = beta2 = 0.0

    def _betas(self, beta1: float, beta2: float) -> None:
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not is_number(beta) or beta <= 0:
                raise ArgumentError(type(self).__name__, f"{name}={beta!r}", "a finite number above 0", f"correct {name}")
        self.beta1, self.beta2 = float(beta1), float(beta2)

    def _terms(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tanh(a / beta1), sigmoid(a), tanh(b / beta2)."""
        a, b = x.float().chunk(2, -1)
        return (a / self.beta1).tanh(), a.sigmoid(), (b / self.beta2).tanh()

    def _compute(self, x: torch.Tensor, quantizer: Any) -> Any:
        ta, s, tb = self._terms(x)
        y = (self.beta1 * ta * s * self.beta2 * tb).to(x.dtype)
        return y if quantizer is None else quantizer(y)

    def gradient(self, dy: torch.Tensor, x: torch.Tensor, quantizer: Any, sums: torch.Tensor | None = None) -> Any:
        ta, s, tb = self._terms(x)
        g = dy.float()
        da = g * ((1 - ta * ta) * s + self.beta1 * ta * s * (1 - s)) * self.beta2 * tb
        db = g * self.beta1 * ta * s * (1 - tb * tb)
        dx = torch.cat([da, db], -1).to(x.dtype)
        return dx if quantizer is None else quantizer(dx)


class SiTUGLU(_SiTU, _Activation):
    """beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2), where x = (a | b)."""

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self._betas(beta1, beta2)
        self.glu_interleave_size = glu_interleave_size


class _Scaled(_Function):
    num_extra_inputs = 1
    _recomputes = False  # whether the constructor takes activation_recompute_in_mlp
    _grouped_mlp_unit_activation_scale = False

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        if activation_recompute_in_mlp and not self._recomputes:
            raise ArgumentError(
                type(self).__name__, "activation_recompute_in_mlp=True", "it with ScaledSReLU alone", "leave it out"
            )
        super().__init__()
        self.glu_interleave_size, self.activation_recompute_in_mlp = glu_interleave_size, activation_recompute_in_mlp

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, **kwargs: Any) -> Any:
        """act(x) times a scale for each row."""
        (ctx,), scales = basic_op_ctxs, basic_op_extra_inputs[0][0]
        if tuple(scales.shape) != tuple(input_.shape[:-1]):
            got = f"scales of shape {tuple(scales.shape)} for an input of {tuple(input_.shape)}"
            raise ArgumentError(type(self).__name__, got, f"{tuple(input_.shape[:-1])}: one a row", "correct the scales")
        ctx.dtype = compute_dtype(type(self).__name__, input_)
        x = dense(input_, ctx.dtype)
        ctx.scales_require_grad = scales.requires_grad
        ctx.save_for_backward(x, scales)
        return self._compute(self._halved(x), None) * scales.to(ctx.dtype)[..., None], [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        """The gradients of x and of the scales."""
        (ctx,) = basic_op_ctxs
        x, scales = ctx.saved_tensors
        dy, halved = dense(grad_output, ctx.dtype), self._halved(x)
        dx = self.gradient(dy * scales.to(ctx.dtype)[..., None], halved, None)
        ds = None
        if ctx.scales_require_grad:
            ds = (dy.float() * self._compute(halved, None).float()).sum(-1).to(scales.dtype)
        return self._interleaved(dx), [()], [(ds,)]


class ScaledSwiGLU(_Scaled, kind="swiglu"):
    """silu(a) b times a scale for each row, which is an extra input."""


class ScaledSiTUGLU(_SiTU, _Scaled):
    """`SiTUGLU` times a scale for each row, which is an extra input."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self._betas(beta1, beta2)


class ScaledClampedQGeGLU(_Scaled, kind="clamped_swiglu"):
    """`ClampedSwiGLU` times a scale for each row, which is an extra input."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self._clamp = _clamp(self, limit, alpha, glu_linear_offset)


class ScaledSReLU(_Scaled, kind="srelu"):
    """max(x, 0)^2 times a scale for each row, which is an extra input."""

    _recomputes = True

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(activation_recompute_in_mlp=activation_recompute_in_mlp)
