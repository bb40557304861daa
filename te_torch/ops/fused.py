"""What is fused without being told: by the documented names, each where its operations follow one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_core.recipe import Recipe
from te_torch.ops.basic.activations import GELU, ReLU
from te_torch.ops.basic.linear import BasicLinear
from te_torch.ops.basic.norms import RMSNorm
from te_torch.ops.basic.small import AddExtraInput, Bias, ConstantScale, MakeExtraOutput
from te_torch.ops.fuser import Fusion, register_backward_fusion, register_forward_fusion
from te_torch.ops.op import FusedOperation
from te_torch.ops.values import dense

#: Of the operations from a place on, and the one before: how many are fused there; 0: none.
Match = Callable[[list[Any], Any, Recipe | None], int]


def _fusion(fused: type[FusedOperation], match: Match) -> Fusion:
    """A function for the registry, which fuses wherever this matches."""

    def fuse(ops: list[Any], *, recipe: Recipe | None = None, **unused: Any) -> list[Any]:
        made: list[Any] = []
        left = list(ops)
        while left:
            count = match(left, made[-1] if made else None, recipe)
            made.append(fused(left[:count]) if count else left[0])
            del left[: count or 1]
        return made

    return fuse


def _kinds(ops: list[Any], *kinds: type) -> bool:
    return len(ops) >= len(kinds) and all(type(op) is kind for op, kind in zip(ops, kinds, strict=False))


def _adds(op: Any) -> bool:
    return type(op) is AddExtraInput and op._in_place


class ForwardLinearBiasAdd(FusedOperation):
    """x w^T + b, added to an extra input in its memory by the product itself."""

    def fuser_forward(
        self,
        basic_op_ctxs: Any,
        input_: Any,
        *,
        basic_op_extra_inputs: Any,
        prev_op_grad_output_quantizer: Any,
        **kwargs: Any,
    ) -> Any:
        """The sum, in the extra input's memory."""
        linear, *rest = self.basic_ops
        bias = _noted_bias(rest[0], basic_op_ctxs[1], linear) if len(rest) == 2 else None
        out = basic_op_extra_inputs[-1][0].detach()
        made = linear.multiply(basic_op_ctxs[0], input_, prev_op_grad_output_quantizer, None, bias=bias, out=out)
        return made, [()] * len(self.basic_ops)


def _noted_bias(bias: Any, ctx: Any, linear: Any) -> torch.Tensor:
    """The bias that the linear adds for its operation, whose backward runs by itself."""
    bias.note(ctx, linear.get_grad_output_quantizer())
    return bias.bias  # type: ignore[no-any-return]


def _linear_bias_add(ops: list[Any], before: Any, recipe: Recipe | None) -> int:
    if not _kinds(ops, BasicLinear) or ops[0].tensor_parallel_mode == "row":
        return 0
    count = 2 if _kinds(ops[1:], Bias) else 1
    return count + 1 if len(ops) > count and _adds(ops[count]) else 0


class ForwardLinearBiasActivation(FusedOperation):
    """x w^T + b in one product."""

    def fuser_forward(
        self,
        basic_op_ctxs: Any,
        input_: Any,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> Any:
        """The product with its bias."""
        linear, bias = self.basic_ops
        added = _noted_bias(bias, basic_op_ctxs[1], linear)
        before, after = prev_op_grad_output_quantizer, next_op_input_quantizer
        return linear.multiply(basic_op_ctxs[0], input_, before, after, bias=added), [(), ()]


def _linear_bias(ops: list[Any], before: Any, recipe: Recipe | None) -> int:
    fits = _kinds(ops, BasicLinear, Bias) and ops[0].tensor_parallel_mode != "row"
    return 2 if fits and ops[0].weight.dtype in (torch.float16, torch.bfloat16) else 0


class ForwardLinearScaleAdd(FusedOperation):
    """x w^T times a number, added to an extra input in its memory."""

    def fuser_forward(
        self,
        basic_op_ctxs: Any,
        input_: Any,
        *,
        basic_op_extra_inputs: Any,
        prev_op_grad_output_quantizer: Any,
        **kwargs: Any,
    ) -> Any:
        """The sum, in the extra input's memory."""
        linear, scale, _ = self.basic_ops
        out = basic_op_extra_inputs[2][0].detach()
        before = prev_op_grad_output_quantizer
        return linear.multiply(basic_op_ctxs[0], input_, before, None, alpha=scale.scale, out=out), [(), (), ()]


def _linear_scale_add(ops: list[Any], before: Any, recipe: Recipe | None) -> int:
    fits = _kinds(ops, BasicLinear, ConstantScale, AddExtraInput) and _adds(ops[2])
    return 3 if fits and ops[0].tensor_parallel_mode != "row" else 0


class BackwardLinearAdd(FusedOperation):
    """The input's gradient of a linear, added to that of an extra output by the product itself."""

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        """The sum, in the memory of the extra output's gradient."""
        extra = basic_op_grad_extra_outputs[0][0]
        sum_in = None if extra is None else extra.detach()
        dx, dw = self.basic_ops[1].multiply_backward(basic_op_ctxs[1], grad_output, sum_in)
        return dx, [(), dw], [(), ()]


def _linear_add(ops: list[Any], before: Any, recipe: Recipe | None) -> int:
    fits = _kinds(ops, MakeExtraOutput, BasicLinear) and ops[0]._in_place
    return 2 if fits and ops[1].tensor_parallel_mode != "column" else 0


class BackwardLinearScale(FusedOperation):
    """The gradients of a linear whose output is scaled."""

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        """Both gradients of the scaled one of the output."""
        linear, scale = self.basic_ops
        dx, dw = linear.multiply_backward(basic_op_ctxs[0], dense(grad_output) * scale.scale)
        return dx, [dw, ()], [(), ()]


def _linear_scale(ops: list[Any], before: Any, recipe: Recipe | None) -> int:
    return 2 if _kinds(ops, BasicLinear, ConstantScale) and ops[0].tensor_parallel_mode != "column" else 0


class BackwardActivationBias(FusedOperation):
    """The gradient of an activation, quantized, and its sums for the bias before it, in one kernel."""

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **kwargs: Any) -> Any:
        """The quantized gradient of the bias's input, and the bias's."""
        activation, ((kept,), dtype) = self.basic_ops[1], (basic_op_ctxs[1].saved_tensors, basic_op_ctxs[1].dtype)
        x, dy = dense(kept, dtype), dense(grad_output, dtype)
        db = torch.empty(x.shape[-1:], dtype=dtype, device=x.device)
        dx = activation.gradient(dy, x, basic_op_ctxs[0].grad_input_quantizer, db)
        return dx, [(db,), ()], [(), ()]


def _activation_bias(ops: list[Any], before: Any, recipe: Recipe | None) -> int:
    if recipe is None or getattr(recipe, "backward_override", None) is not None or before is None:
        return 0
    fits = _kinds(ops, Bias, GELU) or _kinds(ops, Bias, ReLU)
    return 2 if fits and before.get_grad_output_quantizer() is not None else 0


class BackwardAddRMSNorm(FusedOperation):
    """The gradient of an RMSNorm, added to that of an extra output in the norm's kernel."""

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        """The sum."""
        norm = self.basic_ops[1]
        dx, of_norm = norm.normalize_backward(basic_op_ctxs[1], grad_output, basic_op_grad_extra_outputs[0][0])
        return dx, [(), of_norm], [(), ()]


def _add_rms_norm(ops: list[Any], before: Any, recipe: Recipe | None) -> int:
    return 2 if _kinds(ops, MakeExtraOutput, RMSNorm) and not ops[0]._in_place else 0


register_forward_fusion(_fusion(ForwardLinearBiasAdd, _linear_bias_add))
register_forward_fusion(_fusion(ForwardLinearBiasActivation, _linear_bias))
register_forward_fusion(_fusion(ForwardLinearScaleAdd, _linear_scale_add))
register_backward_fusion(_fusion(BackwardLinearAdd, _linear_add))
register_backward_fusion(_fusion(BackwardLinearScale, _linear_scale))
register_backward_fusion(_fusion(BackwardActivationBias, _activation_bias))
register_backward_fusion(_fusion(BackwardAddRMSNorm, _add_rms_norm))
