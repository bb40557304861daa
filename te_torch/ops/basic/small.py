"""Operations of a line each: bias, scale, dropout, casts, shapes, extra tensors."""

from __future__ import annotations

from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.ops import raw as core
from te_torch.base.options import check_values
from te_torch.draws import random_pair
from te_torch.ops.op import BasicOperation, Own
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


class Identity(Own):
    """The input."""

    def _run(self, ctx, x, prev, after):
        return x

    def _back(self, ctx, dy):
        return dy


class Reshape(Own):
    """The input in another shape, which may hold a -1."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def _run(self, ctx, x, prev, after):
        ctx.input_shape = x.shape
        return x.reshape(self._shape)

    def _back(self, ctx, dy):
        return dy.reshape(ctx.input_shape)


class ConstantScale(Own):
    """The input times a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        if not is_number(scale):
            raise ArgumentError("ConstantScale", f"scale={scale!r}", "a finite number", "correct scale")
        self.scale = scale

    def _run(self, ctx, x, prev, after):
        return x * self.scale

    def _back(self, ctx, dy):
        return dy * self.scale


class Bias(Own):
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

    def _run(self, ctx, x, prev, after):
        ctx.grad_input_quantizer = prev
        return x + self.bias

    def _back(self, ctx, dy):
        """dy, which may come quantized by the kernel that sums it."""
        x = dense(dy)
        if dy.ndim == 1:
            return dy, (x,)
        quantizer: Any = None if is_quantized(dy) else ctx.grad_input_quantizer
        db = torch.empty(x.shape[-1], dtype=x.dtype, device=x.device)
        if (cast := cast_of(quantizer)) is None:
            core.column_sum(runtime_for(x), matrix(x), core_of(db))
            return dy if quantizer is None else quantizer(x), (db,)
        made = core.quantize(runtime_for(x), matrix(x), cast, column_sum=core_of(db))
        return from_core(made, x.shape, x.dtype, quantizer.copy()), (db,)


class Dropout(Own):
    """Each element dropped with probability p, the others divided by 1 - p; in training alone."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not is_number(p) or not 0 <= p <= 1:
            raise ArgumentError("Dropout", f"p={p!r}", "a probability", "correct p")
        self.dropout_probability = p

    def _run(self, ctx, x, prev, after):
        ctx.dropout_probability = p = self.dropout_probability if self.training else 0.0
        if not p:
            return x
        x = dense(x, compute_dtype("Dropout", x))
        pair = random_pair(x)
        ctx.save_for_backward(pair)  # by which backward draws the same mask
        return to_torch(core.bias_dropout_add(runtime_for(x), matrix(x), None, None, p=p, rng=to_core(pair))).view(
            x.shape
        )

    def _back(self, ctx, dy):
        if not (p := ctx.dropout_probability):
            return dy
        x, rng = dense(dy), to_core(ctx.saved_tensors[0])
        return to_torch(core.bias_dropout_add_backward(runtime_for(x), matrix(x), p=p, rng=rng)).view(x.shape)


class Quantize(Own):
    """The input, quantized by the recipe in force, or its gradient, or both."""

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantizes = {"forward": bool(forward), "backward": bool(backward)}

    def num_quantizers(self, mode):
        """One in each direction that is quantized."""
        return int(self._quantizes[mode])

    def _run(self, ctx, x, prev, after):
        quantizer = self.get_quantizer("forward", 0)
        ctx.quantize_backward = self.get_grad_output_quantizer() is not None
        return x if quantizer is None or is_quantized(x) else quantizer(x.detach())

    def _back(self, ctx, dy):
        plain = ctx.quantize_backward and not is_quantized(dy)
        return self.get_grad_output_quantizer()(dy) if plain else dy


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
