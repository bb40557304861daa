"""What is fused without being told: by the documented names, each where its operations follow one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_torch.ops.basic.activations import GELU, ReLU
from te_torch.ops.basic.linear import BasicLinear
from te_torch.ops.basic.norms import RMSNorm
from te_torch.ops.basic.small import AddExtraInput, Bias, ConstantScale, MakeExtraOutput
from te_torch.ops.fuser import register_backward_fusion, register_forward_fusion
from te_torch.ops.op import FusedOperation
from te_torch.ops.values import dense


class _ForwardLinear(FusedOperation):
    """A linear whose product takes along what follows it. Its operations run backward by themselves."""

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **quantizers):
        linear, epilogue = self.basic_ops[0], dict[str, Any]()
        for op, ctx, extra in [*zip(self.basic_ops, basic_op_ctxs, basic_op_extra_inputs, strict=True)][1:]:
            if isinstance(op, Bias):
                ctx.grad_input_quantizer, epilogue["bias"] = linear.get_grad_output_quantizer(), op.bias
            elif isinstance(op, ConstantScale):
                epilogue["alpha"] = op.scale
            else:
                epilogue["out"] = extra[0].detach()
        before, after = quantizers["prev_op_grad_output_quantizer"], quantizers["next_op_input_quantizer"]
        return linear._run(basic_op_ctxs[0], input_, before, after, **epilogue), [()] * len(self.basic_ops)


class ForwardLinearBiasAdd(_ForwardLinear):
    """x w^T + b, added to an extra input in its memory by the product itself."""


class ForwardLinearBiasActivation(_ForwardLinear):
    """x w^T + b in one product."""


class ForwardLinearScaleAdd(_ForwardLinear):
    """x w^T times a number, added to an extra input in its memory."""


class BackwardLinearAdd(FusedOperation):
    """The input's gradient of a linear, added to that of an extra output by the product itself."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        """The sum, in the memory of the extra output's gradient."""
        extra = basic_op_grad_extra_outputs[0][0]
        extra = None if extra is None else extra.detach()
        dx, dw = self.basic_ops[1]._back(basic_op_ctxs[1], grad_output, extra)
        return dx, [(), dw], [(), ()]


class BackwardLinearScale(FusedOperation):
    """The gradients of a linear whose output is scaled."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        """Both gradients of the scaled one of the output."""
        linear, scale = self.basic_ops
        dx, dw = linear._back(basic_op_ctxs[0], dense(grad_output) * scale.scale)
        return dx, [dw, ()], [(), ()]


class BackwardActivationBias(FusedOperation):
    """The gradient of an activation, quantized, and its sums for the bias before it, in one kernel."""

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        """The quantized gradient of the bias's input, and the bias's."""
        bias, activation = basic_op_ctxs
        x, dy = (dense(t, activation.dtype) for t in (activation.saved_tensors[0], grad_output))
        db = torch.empty(x.shape[-1:], dtype=x.dtype, device=x.device)
        return self.basic_ops[1]._gradient(dy, x, bias.grad_input_quantizer, db), [(db,), ()], [(), ()]


class BackwardAddRMSNorm(FusedOperation):
    """The gradient of an RMSNorm, added to that of an extra output in the norm's kernel."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        """The sum."""
        norm, extra = self.basic_ops[1], basic_op_grad_extra_outputs[0][0]
        dx, of_norm = norm._back(basic_op_ctxs[1], grad_output, extra)
        return dx, [(), of_norm], [(), ()]


def _fuse(register: Callable[..., None], fused: type[FusedOperation], kinds: tuple[type, ...], fits: Any) -> None:
    """Have chains fuse operations of these kinds, where `fits` says yes to them, and to the one before and a recipe."""

    def fuse(ops: list[Any], *, recipe: Any = None, **unused: Any) -> list[Any]:
        made, left, count = list[Any](), list(ops), len(kinds)
        while left:
            some = left[:count]
            found = [*map(type, some)] == [*kinds] and fits(some, made[-1] if made else None, recipe)
            made.append(fused(some) if found else left[0])
            del left[: count if found else 1]
        return made

    register(fuse)


def _whole(mode: str) -> Callable[..., bool]:
    """Of a chain with a linear, that no rank has a part of the sum, and that what is written to is there for it."""

    def fits(ops: list[Any], before: Any, recipe: Any) -> bool:
        linear = next(op for op in ops if type(op) is BasicLinear)
        in_place = [op._in_place for op in ops if hasattr(op, "_in_place")]
        return linear.tensor_parallel_mode != mode and all(in_place)

    return fits


def _half_with_bias(ops: list[Any], before: Any, recipe: Any) -> bool:
    return _whole("row")(ops, before, recipe) and ops[0].weight.dtype in (torch.float16, torch.bfloat16)


def _reads_quantized(ops: list[Any], before: Any, recipe: Any) -> bool:
    last = before.basic_ops[-1] if isinstance(before, FusedOperation) else before
    return recipe is not None and last is not None and last.get_grad_output_quantizer() is not None


def _out_of_place(ops: list[Any], before: Any, recipe: Any) -> bool:
    return not ops[0]._in_place


_fuse(register_forward_fusion, ForwardLinearBiasAdd, (BasicLinear, Bias, AddExtraInput), _whole("row"))
_fuse(register_forward_fusion, ForwardLinearBiasAdd, (BasicLinear, AddExtraInput), _whole("row"))
_fuse(register_forward_fusion, ForwardLinearBiasActivation, (BasicLinear, Bias), _half_with_bias)
_fuse(register_forward_fusion, ForwardLinearScaleAdd, (BasicLinear, ConstantScale, AddExtraInput), _whole("row"))
_fuse(register_backward_fusion, BackwardLinearAdd, (MakeExtraOutput, BasicLinear), _whole("column"))
_fuse(register_backward_fusion, BackwardLinearScale, (BasicLinear, ConstantScale), _whole("column"))
_fuse(register_backward_fusion, BackwardActivationBias, (Bias, GELU), _reads_quantized)
_fuse(register_backward_fusion, BackwardActivationBias, (Bias, ReLU), _reads_quantized)
_fuse(register_backward_fusion, BackwardAddRMSNorm, (MakeExtraOutput, RMSNorm), _out_of_place)
