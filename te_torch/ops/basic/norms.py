"""Norms over the last dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from te_core.ops import raw as core
from te_torch.base.options import check_values
from te_torch.modules.norm import check_normalized, init_norm_weight, sm_margins
from te_torch.ops.op import Own
from te_torch.ops.values import compute_dtype, core_of, delivered, dense, matrix
from te_torch.runtime import amp_dtype, default_device, runtime_for, to_torch


class _ChainNorm(Own):
    weight: Any

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
        self.kind = kind = type(self).__name__
        check_values(kind, {k: v for k, v in locals().items() if k not in ("self", "__class__", "kind")})
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self._shape, self.eps, self.zero_centered_gamma = torch.Size(shape), eps, zero_centered_gamma
        self._margins = sm_margins(sm_margin)
        place = {"device": device or default_device(), "dtype": dtype or torch.get_default_dtype()}
        self._add_parameter("weight", shape, init_norm_weight(zero_centered_gamma), **place)
        if isinstance(self, LayerNorm):
            self._add_parameter("bias", shape, torch.nn.init.zeros_, **place)

    def _run(self, ctx, input_, prev, after):
        check_normalized(type(self).__name__, input_, self._shape)
        ctx.dtype = dtype = amp_dtype(input_.device.type) or self.weight.dtype
        x = dense(input_, dtype).view(-1, prod(self._shape))
        gamma, *beta = [core_of(dense(p, dtype).view(-1)) for p in self.parameters()]
        margin, statistics = self._margins["forward" if ctx.requires_grad else "inference"], list[Any]()
        how: dict[str, Any] = {"kind": self.kind, "eps": self.eps, "zero_centered": self.zero_centered_gamma}

        def compute(cast: Any) -> Any:
            b, rt = beta[0] if beta else None, runtime_for(x)
            y, q, *found = core.norm_forward(rt, matrix(x), gamma, b, cast=cast, sm_margin=margin, **how)
            statistics[:] = [to_torch(t) for t in found if t is not None]
            return y, q

        made = delivered(compute, after, input_.shape, dtype)
        ctx.save_for_backward(x, *statistics)
        return made

    def _back(self, ctx, dy, add=None):
        """`add` is a gradient that the input's is added to."""
        x, *statistics = ctx.saved_tensors
        x, dy = dense(x, ctx.dtype), dense(dy, ctx.dtype)
        *mean, rstd = map(core_of, statistics)
        added = None if add is None else matrix(dense(add, ctx.dtype).view(x.shape))
        gamma = core_of(dense(self.weight, ctx.dtype).view(-1))
        how: dict[str, Any] = {"kind": self.kind, "zero_centered": self.zero_centered_gamma, "add": added}
        how["sm_margin"] = self._margins["backward"]
        rows = (matrix(dy.view(x.shape)), matrix(x), gamma, mean[0] if mean else None, rstd)
        dx, *rest = core.norm_backward(runtime_for(x), *rows, **how)
        return to_torch(dx).view(dy.shape), tuple([to_torch(t).view(self._shape) for t in rest if t is not None])


class LayerNorm(_ChainNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the trailing dimensions."""


class RMSNorm(_ChainNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the trailing dimensions."""


class L2Normalization(Own):
    """x / sqrt(sum(x^2) + eps) over the last dimension."""

    def __init__(
        self, *, eps: float = 1e-6, seq_length: int | None = None, micro_batch_size: int | None = None
    ) -> None:
        check_values("L2Normalization", {"eps": eps})
        super().__init__()
        self.eps = eps

    def _run(self, ctx, x, prev, after):
        x = dense(x, compute_dtype("L2Normalization", x))
        ctx.save_for_backward(x)
        return to_torch(core.l2_norm_forward(runtime_for(x), matrix(x), eps=self.eps)).view(x.shape)

    def _back(self, ctx, dy):
        (x,) = ctx.saved_tensors
        dx = core.l2_norm_backward(runtime_for(x), matrix(dense(dy, x.dtype)), matrix(x), eps=self.eps)
        return to_torch(dx).view(x.shape)
