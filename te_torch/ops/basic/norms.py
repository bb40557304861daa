"""Norms over the last dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from te_core.ops import raw as core
from te_core.quantized import Cast
from te_torch.base.options import check_values
from te_torch.modules.norm import check_normalized, init_norm_weight, sm_margins
from te_torch.ops.op import BasicOperation
from te_torch.ops.values import compute_dtype, delivered, dense, matrix, vector
from te_torch.runtime import amp_dtype, default_device, runtime_for, to_torch


class _Norm(BasicOperation):
    kind = ""
    _bias = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | Mapping[str, int] = 0,
    ) -> None:
        check_values(self.kind, {k: v for k, v in locals().items() if k not in ("self", "__class__")})
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self._shape, self.eps, self.zero_centered_gamma = torch.Size(shape), eps, zero_centered_gamma
        self._margins = sm_margins(sm_margin)
        place = {"device": device or default_device(), "dtype": dtype or torch.get_default_dtype()}
        self._add_parameter("weight", shape, init_norm_weight(zero_centered_gamma), **place)
        if self._bias:
            self._add_parameter("bias", shape, torch.nn.init.zeros_, **place)

    def op_forward(self, ctx: Any, input_: Any, *, next_op_input_quantizer: Any = None, **kwargs: Any) -> Any:
        """The normalized input, quantized for the next operation if it reads it so."""
        check_normalized(type(self).__name__, input_, self._shape)
        ctx.dtype = dtype = amp_dtype(input_.device.type) or self.weight.dtype
        x = dense(input_, dtype).view(-1, prod(self._shape))
        statistics: list[Any] = []

        def compute(cast: Cast | None) -> Any:
            y, q, *found = core.norm_forward(
                runtime_for(x),
                matrix(x),
                self._vector("weight", dtype),
                self._vector("bias", dtype) if self._bias else None,
                kind=self.kind,
                eps=self.eps,
                zero_centered=self.zero_centered_gamma,
                cast=cast,
                sm_margin=self._margins["forward" if ctx.requires_grad else "inference"],
            )
            statistics[:] = [to_torch(t) for t in found if t is not None]
            return y, q

        made = delivered(compute, next_op_input_quantizer, input_.shape, dtype)
        ctx.save_for_backward(x, *statistics)
        return made

    def op_backward(self, ctx: Any, grad_output: Any) -> tuple[Any, tuple[Any, ...]]:
        """The gradients of the input, the weight and the bias."""
        return self.normalize_backward(ctx, grad_output)

    def normalize_backward(self, ctx: Any, dy: Any, add: torch.Tensor | None = None) -> tuple[Any, tuple[Any, ...]]:
        """The backward; `add` is a gradient that the input's is added to."""
        x, *statistics = ctx.saved_tensors
        x, dy = dense(x, ctx.dtype), dense(dy, ctx.dtype)
        *mean, rstd = [vector(t) for t in statistics]
        dx, *rest = core.norm_backward(
            runtime_for(x),
            matrix(dy.view(x.shape)),
            matrix(x),
            self._vector("weight", ctx.dtype),
            mean[0] if mean else None,
            rstd,
            kind=self.kind,
            zero_centered=self.zero_centered_gamma,
            sm_margin=self._margins["backward"],
            add=None if add is None else matrix(dense(add, ctx.dtype).view(x.shape)),
        )
        gradients = [to_torch(t).view(self._shape) for t in rest if t is not None]
        return to_torch(dx).view(dy.shape), (*gradients,)

    def _vector(self, name: str, dtype: torch.dtype) -> Any:
        return vector(dense(getattr(self, name), dtype).view(-1))


class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the trailing dimensions."""

    kind, _bias = "LayerNorm", True


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the trailing dimensions."""

    kind = "RMSNorm"


class L2Normalization(BasicOperation):
    """x / sqrt(sum(x^2) + eps) over the last dimension."""

    def __init__(self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None) -> None:
        check_values("L2Normalization", {"eps": eps})
        super().__init__()
        self.eps = eps

    def op_forward(self, ctx: Any, input_: Any, **kwargs: Any) -> torch.Tensor:
        """The rows, each of length one."""
        x = dense(input_, compute_dtype("L2Normalization", input_))
        ctx.save_for_backward(x)
        return to_torch(core.l2_norm_forward(runtime_for(x), matrix(x), eps=self.eps)).view(x.shape)

    def op_backward(self, ctx: Any, grad_output: Any) -> tuple[torch.Tensor, tuple[()]]:
        """The gradient of the rows."""
        (x,) = ctx.saved_tensors
        dy = dense(grad_output, x.dtype)
        return to_torch(core.l2_norm_backward(runtime_for(x), matrix(dy), matrix(x), eps=self.eps)).view(x.shape), ()
