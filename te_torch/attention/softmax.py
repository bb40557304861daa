"""Fused softmax of attention scores: for the unfused attention backend, as a module, and as `te_softmax` operators.

All are one launch of our kernel each way, which computes causal masks, windows and lengths instead of reading them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.layers import softmax as core
from te_core.ops import raw as ops
from te_core.ops.softmax import Band, band_of
from te_torch.attention import env
from te_torch.attention.masks import check_beside
from te_torch.calls import made_of_constants
from te_torch.function import Call, apply, of_table, register
from te_torch.runtime import check_dtype, runtime_for, to_core, to_torch

_HALVES = (torch.float16, torch.bfloat16)
SOFTMAX = of_table("softmax", core.SoftmaxSaved)


def fused_softmax(
    scores: torch.Tensor,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: str | None = None,
    left: int = -1,
    right: int = -1,
    bottom_right: bool = True,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """The probabilities of scores [b, h, sq, sk], in their dtype; differentiable in scores and sink.

    `causal` is None, "top_left" or "bottom_right"; without it a window (left, right) lies about the diagonal that
    `bottom_right` says. mask: broadcastable to the scores, True where hidden. sink: float32 [h]. A row that sees
    nothing is zeros. `te_core.ops.softmax` has the rules.
    """
    check_dtype("fused_softmax", scores)
    grad = torch.is_grad_enabled()
    learnt = grad and sink is not None and sink.requires_grad
    needs = grad and (scores.requires_grad or learnt)
    band = band_of(causal, left, right, bottom_right)
    call = _call(float(scale), band.left, band.right, band.bottom_right, learnt, needs)
    sink = None if sink is None else sink.reshape(-1).float()
    (y,) = apply(call, None, False, scores, _mask_of(scores, mask), cu_seqlens_q, cu_seqlens_kv, sink)
    return y


@made_of_constants
def _call(scale: float, left: int, right: int, bottom_right: bool, learnt: bool, needs: bool) -> Call:
    return register(SOFTMAX, core.SoftmaxSpec(scale, Band(left, right, bottom_right), learnt), needs)


def _mask_of(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask of four dimensions whose rows are as long as the scores'."""
    if mask is None:
        return None
    check_beside("fused_softmax", scores, mask=mask)
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    return mask if mask.shape[-1] == scores.shape[-1] else mask.expand(*mask.shape[:-1], scores.shape[-1])


# ------------------------------------------------------------------------------------------------- module


class FusedScaleMaskSoftmax(torch.nn.Module):
    """softmax(scale * scores, masked): fused where the documented conditions hold, else plain torch in float32."""

    def __init__(self, mask_func: Callable[..., torch.Tensor], softmax_in_fp32: bool = True) -> None:
        super().__init__()
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32

    def forward(
        self, inp: torch.Tensor, mask: torch.Tensor | None, attn_mask_type: str, scale: float | None = None
    ) -> torch.Tensor:
        """The probabilities of scores [b, np, sq, sk], in the input's dtype."""
        if self._is_fused(inp, mask, attn_mask_type):
            causal = "top_left" if "causal" in attn_mask_type else None
            return fused_softmax(inp, scale=1.0 if scale is None else scale, mask=mask, causal=causal)
        x = inp.float() if inp.dtype in _HALVES and self.softmax_in_fp32 else inp
        if scale is not None:
            x = x * scale
        if "causal" in attn_mask_type:
            sq, sk = inp.shape[2:]
            shift = sk - sq if "bottom_right" in attn_mask_type else 0
            behind = torch.ones(sq, sk, dtype=torch.bool, device=inp.device).triu(1 + shift)
            mask = behind if mask is None else torch.logical_or(mask, behind)
        if mask is not None:
            x = self.mask_func(x, mask)
        return torch.softmax(x, dim=-1).to(inp.dtype)

    def _is_fused(self, inp: torch.Tensor, mask: torch.Tensor | None, attn_mask_type: str) -> bool:
        b, heads, sq, sk = inp.shape
        fits = 16 < sk < 16384 and sk % 8 == 0 and sq > 1 and sq % 4 == 0 and b * heads % 4 == 0
        if not (fits and inp.dtype in _HALVES and env.now().fused_softmax):
            return False
        if "causal" in attn_mask_type and ("bottom_right" in attn_mask_type or sq != sk):
            return False
        return mask is None or (mask.ndim == 4 and mask.shape[0] in (1, b) and tuple(mask.shape[1:]) == (1, sq, sk))


# ---------------------------------------------------------------------------------------------- operators

#: Name of the pair: whether it takes a mask, the causal mask it has of its own, dimensions of the scores.
_OPERATORS: dict[str, tuple[bool, str | None, int]] = {
    "scaled_softmax": (False, None, 4),
    "scaled_masked_softmax": (True, None, 4),
    "scaled_upper_triang_masked_softmax": (False, "top_left", 3),
    "scaled_aligned_causal_masked_softmax": (False, "bottom_right", 4),
}
_library = torch.library.Library("te_softmax", "FRAGMENT")


def _define(name: str, masked: bool, causal: str | None, dims: int) -> None:
    """The operators `name`_fwd(x, [mask,] scale) and `name`_bwd(dy, y, scale): functional, with fake kernels."""
    band = band_of(causal)

    def scores_of(operation: str, t: torch.Tensor) -> torch.Tensor:
        check_dtype(operation, t)
        if t.ndim != dims:
            raise ArgumentError(operation, f"shape {tuple(t.shape)}", f"{dims} dimensions", "correct the scores")
        return t.contiguous().reshape(t.shape if dims == 4 else (t.shape[0], 1, *t.shape[1:]))

    def forward(x: torch.Tensor, *mask_and_scale: Any) -> torch.Tensor:
        scores = scores_of(f"te_softmax::{name}_fwd", x)
        mask = _mask_of(scores, mask_and_scale[0]) if masked else None
        hidden = None if mask is None else to_core(mask.contiguous())
        y, _ = ops.softmax_forward(
            runtime_for(scores), to_core(scores), scale=mask_and_scale[-1], band=band, mask=hidden
        )
        return to_torch(y).view(x.shape)

    def backward(dy: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
        operation = f"te_softmax::{name}_bwd"
        gradient, weights = scores_of(operation, dy), scores_of(operation, y)
        dx, _ = ops.softmax_backward(runtime_for(gradient), to_core(gradient), to_core(weights), scale=scale, band=band)
        return to_torch(dx).view(dy.shape)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.scale = inputs[-1]

    def gradient_of(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        dx = getattr(torch.ops.te_softmax, f"{name}_bwd")(dy, *ctx.saved_tensors, ctx.scale)
        return (dx, *[None] * (1 + masked))

    _library.define(f"{name}_fwd(Tensor x, {'Tensor mask, ' if masked else ''}float scale) -> Tensor")
    _library.define(f"{name}_bwd(Tensor dy, Tensor y, float scale) -> Tensor")
    for half, function in (("fwd", forward), ("bwd", backward)):
        _library.impl(f"{name}_{half}", function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"te_softmax::{name}_{half}", lambda x, *_: x.new_empty(x.shape), lib=_library)
    torch.library.register_autograd(f"te_softmax::{name}_fwd", gradient_of, setup_context=keep, lib=_library)


for _name, _operator in _OPERATORS.items():
    _define(_name, *_operator)
