"""Operations of a line each: bias, scale, dropout, casts, shapes, extra tensors."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.ops import raw as core
from te_torch.base.options import check_values
from te_torch.draws import random_pair
from te_torch.ops.op import BasicOperation
from te_torch.ops.values import cast_of, compute_dtype, core_of, dense, is_quantized, matrix
from te_torch.runtime import default_device, runtime_for, to_core, to_torch
from te_torch.tensors.wrap import from_core
from te_torch.training.collectives import get_distributed_world_size
from te_torch.values import is_number, is_size


def local_size(operation: str, name: str, size: int, ranks: int) -> int:
    """A rank's part of a size."""
    if not is_size(size) or size % ranks:
        allowed = f"a size above 0{f' that {ranks} ranks divide' * (ranks > 1)}"
        raise ArgumentError(operation, f"{name}={size!r}", allowed, f"correct {name}")
    return size // ranks


class Identity(BasicOperation):
    """The input."""

    def op_forward(self, ctx, input_, **given):
        """The input itself."""
        return input_

    def op_backward(self, ctx, grad_output):
        """The gradient itself."""
        return grad_output, ()


class Reshape(BasicOperation):
    """The input in another shape, which may hold a -1."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def op_forward(self, ctx, input_, **given):
        """The input in this shape."""
        ctx.input_shape = input_.shape
        return input_.reshape(self._shape)

    def op_backward(self, ctx, grad_output):
        """The gradient in the input's shape."""
        return grad_output.reshape(ctx.input_shape), ()


class ConstantScale(BasicOperation):
    """The input times a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        if not is_number(scale):
            raise ArgumentError("ConstantScale", f"scale={scale!r}", "a finite number", "correct scale")
        self.scale = scale

    def op_forward(self, ctx, input_, **given):
        """x * scale."""
        return input_ * self.scale

    def op_backward(self, ctx, grad_output):
        """dy * scale."""
        return grad_output * self.scale, ()


class Bias(BasicOperation):
    """x + b over the last dimension."""

    bias: Any

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        check_values("Bias", {"dtype": dtype})
        super().__init__()
        ranks = get_distributed_world_size(tensor_parallel_group) if tensor_parallel else 1
        self.size, self.local_size, self.tensor_parallel = size, local_size("Bias", "size", size, ranks), ranks > 1
        place = {"device": device or default_device(), "dtype": dtype or torch.get_default_dtype()}
        self._add_parameter("bias", (self.local_size,), torch.nn.init.zeros_, **place)
        if self.tensor_parallel:
            self._mark_parallel(0, "bias")

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer=None, **given):
        """x + b."""
        ctx.grad_input_quantizer = prev_op_grad_output_quantizer
        return input_ + self.bias

    def op_backward(self, ctx, grad_output):
        """(dy, its sum over the leading dimensions), where dy may come quantized by the same kernel."""
        if grad_output.ndim == 1:
            return grad_output, (dense(grad_output),)
        quantizer: Any = None if is_quantized(grad_output) else ctx.grad_input_quantizer
        dy = dense(grad_output)
        db = torch.empty(dy.shape[-1], dtype=dy.dtype, device=dy.device)
        if (cast := cast_of(quantizer)) is None:
            core.column_sum(runtime_for(dy), matrix(dy), core_of(db))
            return grad_output if quantizer is None else quantizer(dy), (db,)
        made = core.quantize(runtime_for(dy), matrix(dy), cast, column_sum=core_of(db))
        return from_core(made, dy.shape, dy.dtype, quantizer.copy()), (db,)


class Dropout(BasicOperation):
    """Each element dropped with probability p, the others divided by 1 - p; in training alone."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not is_number(p) or not 0 <= p <= 1:
            raise ArgumentError("Dropout", f"p={p!r}", "a probability", "correct p")
        self.dropout_probability = p

    def op_forward(self, ctx, input_, **given):
        """dropout(x)."""
        ctx.dropout_probability = p = self.dropout_probability if self.training else 0.0
        if not p:
            return input_
        x = dense(input_, compute_dtype("Dropout", input_))
        pair = random_pair(x)
        ctx.save_for_backward(pair)  # by which backward draws the same mask
        made = core.bias_dropout_add(runtime_for(x), matrix(x), None, None, p=p, rng=to_core(pair))
        return to_torch(made).view(x.shape)

    def op_backward(self, ctx, grad_output):
        """The gradient of what was kept."""
        if not ctx.dropout_probability:
            return grad_output, ()
        dy, (pair,) = dense(grad_output), ctx.saved_tensors
        made = core.bias_dropout_add_backward(runtime_for(dy), matrix(dy), p=ctx.dropout_probability, rng=to_core(pair))
        return to_torch(made).view(dy.shape), ()


class Quantize(BasicOperation):
    """The input, quantized by the recipe in force, or its gradient, or both."""

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantizes = {"forward": bool(forward), "backward": bool(backward)}

    def num_quantizers(self, mode: str) -> int:
        """One in each direction that is quantized."""
        return int(self._quantizes[mode])

    def op_forward(self, ctx, input_, **given):
        """The input, quantized unless it is already."""
        quantizer = self.get_quantizer("forward", 0) if self._quantizes["forward"] else None
        ctx.quantize_backward = self.get_grad_output_quantizer() is not None
        return input_ if quantizer is None or is_quantized(input_) else quantizer(input_.detach())

    def op_backward(self, ctx, grad_output):
        """The gradient, quantized unless it is already."""
        if ctx.quantize_backward and not is_quantized(grad_output):
            grad_output = self.get_grad_output_quantizer()(grad_output)
        return grad_output, ()


class _WithExtra(BasicOperation):
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = in_place


class AddExtraInput(_WithExtra):
    """The input plus an extra input; in place, the sum is written into the extra one."""

    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **given):
        """x + extra."""
        extra = basic_op_extra_inputs[0][0]
        return extra.detach().add_(input_) if self._in_place else extra + input_, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        """dy for both."""
        return grad_output, [()], [(grad_output,)]


class MakeExtraOutput(_WithExtra):
    """The input, which is an extra output, too; in place, gradients are added up in that of the extra one."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, **given):
        """The input, twice."""
        return input_, [(input_,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        """The sum of both gradients."""
        extra = basic_op_grad_extra_outputs[0][0]
        if extra is None:
            return grad_output, [()], [()]
        return extra.detach().add_(grad_output) if self._in_place else grad_output + extra, [()], [()]
