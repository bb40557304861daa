"""`BasicLinear`, y = x w^T, whole or spread over ranks; `Linear`: with a bias, and what sums over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.precision import Precision
from te_torch.base.options import check_values
from te_torch.forks import fork_of
from te_torch.function import main_gradient, stand_in_gradient
from te_torch.ops.basic.collectives import AllReduce, ReduceScatter
from te_torch.ops.basic.small import Bias, local_size
from te_torch.ops.op import FusedOperation, Own
from te_torch.ops.values import dense, product, quantized, without_rows
from te_torch.runtime import amp_dtype, check_input, default_device
from te_torch.training.collectives import (
    allreduce,
    gather_along_first_dim,
    get_distributed_world_size,
    reduce_scatter_along_first_dim,
)

kaiming_init = partial(torch.nn.init.kaiming_uniform_, a=sqrt(5))


class BasicLinear(Own):
    """y = x w^T, in the precision of the active `autocast` region."""

    weight: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        operation = type(self).__name__
        check_values(operation, {"in_features": in_features, "out_features": out_features, "dtype": dtype})
        super().__init__()
        if tensor_parallel_mode not in (None, "column", "row"):
            raise ArgumentError(
                operation, f"tensor_parallel_mode={tensor_parallel_mode!r}", "None, 'column' or 'row'", "correct it"
            )
        ranks = 1 if tensor_parallel_mode is None else get_distributed_world_size(tensor_parallel_group)
        self.tensor_parallel_mode = mode = None if ranks == 1 else tensor_parallel_mode
        self.tensor_parallel_group, self.tensor_parallel_size = tensor_parallel_group, ranks
        self.sequence_parallel = bool(sequence_parallel) and ranks > 1
        self.in_features, self.out_features = in_features, out_features
        self.local_in_features = local_size(operation, "in_features", in_features, ranks if mode == "row" else 1)
        self.local_out_features = local_size(operation, "out_features", out_features, ranks if mode == "column" else 1)
        self._fork = fork_of(rng_state_tracker_function, None)
        self.fuse_wgrad_accumulation = self._special = bool(accumulate_into_main_grad)
        self._userbuffers_options = userbuffers_options
        shape = self.local_out_features, self.local_in_features
        place = {"device": device or default_device(), "dtype": dtype or torch.get_default_dtype()}
        self._add_parameter("weight", shape, kaiming_init, **place)
        if mode is not None:
            self._mark_parallel(0 if mode == "column" else 1, "weight")
        self._quantize_parameters()

    def num_quantizers(self, mode: str) -> int:
        """Input and weight; the output's gradient."""
        return 2 if mode == "forward" else 1

    def _weight_names(self) -> tuple[str, ...]:
        return ("weight",)

    def get_input_quantizer(self):
        """That of the input, unless it travels first."""
        return None if self._travels("column") else super().get_input_quantizer()

    def get_grad_output_quantizer(self):
        """That of the output's gradient, unless it travels first."""
        return None if self._travels("row") else super().get_grad_output_quantizer()

    def pre_fuser_forward(self, *, requires_grad):
        """Say which copies quantizers make."""
        x, w = (self.get_quantizer("forward", i) for i in range(2))
        grad, trains = self.get_quantizer("backward", 0), requires_grad and self.weight.requires_grad
        if x is not None:
            x.set_usage(rowwise=True, columnwise=trains)
            w.set_usage(rowwise=True, columnwise=requires_grad)
        if grad is not None:
            grad.set_usage(rowwise=True, columnwise=trains)

    def _run(self, ctx, x, prev, after, *, bias=None, alpha=None, out=None):
        """x w^T. A fused operation has it do more: add a bias, add the result (times alpha) to `out`."""
        check_input(type(self).__name__, x, self.local_in_features)
        inputs, weights = (self.get_quantizer("forward", i) for i in range(2))
        override = None if ctx.precision is None else ctx.precision.backward
        ctx.with_quantized_compute = inputs is not None and override is None
        ctx.input_quantizer, ctx.weight_quantizer = inputs, weights
        ctx.grad_output_quantizer = self.get_quantizer("backward", 0)
        ctx.grad_input_quantizer = None if override is not None else prev
        ctx.dtype = dtype = amp_dtype(x.device.type) or self.weight.dtype
        ctx.weight_requires_grad = trains = ctx.requires_grad and self.weight.requires_grad
        ctx.input_requires_grad = before = ctx.requires_grad and ctx.input_requires_grad
        came, w, row = x, self.weight, self.tensor_parallel_mode == "row"
        gathers, whole = self._travels("column"), override is None
        if gathers:
            came = dense(x, dtype)
            x, _ = gather_along_first_dim(came, self.tensor_parallel_group)
        if inputs is None:
            x, w = dense(x, dtype), dense(w, dtype)
        else:
            x = quantized(x, inputs, dtype, trains and whole and not gathers)
            w = quantized(w, weights, dtype, before and whole)
        direct = out is not None and alpha is None and not row and out.is_contiguous() and out.dtype == dtype
        made: Any = out if direct else torch.empty((*x.shape[:-1], w.shape[0]), dtype=dtype, device=w.device)
        added = None if bias is None else dense(bias, dtype)
        product("fprop", x, w, made, bias=added, accumulate=direct, precision=ctx.precision)
        if row:
            made, _ = self._summed(made)
        if out is not None and not direct:
            made = out.add_(made, alpha=1.0 if alpha is None else alpha)
        if override == "high_precision":
            x, w = came, self.weight
        elif whole:
            x, w = came if gathers else without_rows(x, came), without_rows(w, self.weight) if before else None
        ctx.save_for_backward(x if trains else None, w if before else None)
        return made if after is None or row else after(made)

    def _back(self, ctx, dy, grad_input=None):
        """dy w, added to `grad_input` if given, and dy^T x."""
        (x, w), dtype, group = ctx.saved_tensors, ctx.dtype, self.tensor_parallel_group
        with_quantizers, trains = ctx.with_quantized_compute, ctx.weight_requires_grad
        column, dx, dw, pending = self.tensor_parallel_mode == "column", None, None, None
        if self._travels("row"):
            dy, _ = gather_along_first_dim(dense(dy, dtype), group)
        read = with_quantizers and ctx.grad_output_quantizer is not None
        dy = quantized(dy, ctx.grad_output_quantizer, dtype, trains) if read else dense(dy, dtype)
        if ctx.input_requires_grad:
            w = w if with_quantizers else dense(w, dtype)
            direct = grad_input is not None and not column and grad_input.is_contiguous() and grad_input.dtype == dtype
            dx = grad_input if direct else torch.empty((*dy.shape[:-1], w.shape[1]), dtype=dtype, device=dy.device)
            product("dgrad", dy, w, dx, accumulate=direct, precision=ctx.precision)
            if column:
                dx, pending = self._summed(dx, async_op=True)
        if trains:
            if self._travels("column"):
                x, _ = gather_along_first_dim(x, group)
                x = quantized(x, ctx.input_quantizer, dtype, True) if with_quantizers else x
            dw = self._weight_gradient(dy, x if with_quantizers else dense(x, dtype), dtype, ctx.precision)
        if pending is not None:
            pending.wait()
        if grad_input is not None and dx is not None and dx is not grad_input:
            dx = grad_input.add_(dx)
        if ctx.grad_input_quantizer is not None and dx is not None and not column:
            dx = ctx.grad_input_quantizer(dx)
        return dx, (dw,)

    def _summed(self, t: Any, async_op: bool = False) -> tuple[Any, Any]:
        sums = reduce_scatter_along_first_dim if self.sequence_parallel else allreduce
        return sums(t, self.tensor_parallel_group, async_op)

    def _weight_gradient(self, dy: Any, x: Any, dtype: torch.dtype, precision: Precision | None) -> torch.Tensor | None:
        """dy^T x, or what autograd gets where that goes into `main_grad`."""
        weight = self.weight
        if self.fuse_wgrad_accumulation:
            main, accumulate = main_gradient("accumulate_into_main_grad", weight)
            product("wgrad", dy, x, main, accumulate=accumulate, precision=precision)
            return stand_in_gradient(weight)
        wide = torch.float32 if weight.dtype is torch.float32 else dtype
        dw = torch.empty((dy.shape[-1], x.shape[-1]), dtype=wide, device=dy.device)
        product("wgrad", dy, x, dw, precision=precision)
        return dw

    def _travels(self, mode: str) -> bool:
        """Whether ranks gather the input of this mode's product: forward's ("column"), or backward's ("row")."""
        return self.sequence_parallel and self.tensor_parallel_mode == mode


class Linear(FusedOperation):
    """y = x w^T + b: `BasicLinear`, `Bias`, and, where the columns of w are spread over ranks, the sum over them.

    Example:
        y = te.ops.Linear(64, 128, device="cpu")(torch.randn(32, 64))  # [32, 128]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        check_values("Linear", {"in_features": in_features, "out_features": out_features, "dtype": dtype})
        group, ranks = tensor_parallel_group, get_distributed_world_size(tensor_parallel_group)
        row = tensor_parallel_mode == "row" and ranks > 1
        options: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "rng_state_tracker_function": rng_state_tracker_function,
            "accumulate_into_main_grad": accumulate_into_main_grad,
        }
        if row:  # what sums over ranks stands behind the bias
            in_local = local_size("Linear", "in_features", in_features, ranks)
            linear = BasicLinear(in_local, out_features, **options)
            linear._mark_parallel(1, "weight")
        else:
            options |= {"tensor_parallel_mode": tensor_parallel_mode, "tensor_parallel_group": group}
            linear = BasicLinear(in_features, out_features, sequence_parallel=sequence_parallel, **options)
        ops: list[Any] = [linear]
        if bias:
            spread = linear.tensor_parallel_mode == "column"
            ops.append(
                Bias(out_features, device=device, dtype=dtype, tensor_parallel=spread, tensor_parallel_group=group)
            )
        if row:
            ops.append(ReduceScatter(group) if sequence_parallel else AllReduce(group))
        super().__init__(ops)
        self._has_bias, self.in_features, self.out_features = bias, in_features, out_features

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight of its `BasicLinear`."""
        return self.basic_ops[0].weight

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """That of its `Bias`; None without one."""
        return self.basic_ops[1].bias if self._has_bias else None

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Set `weight` or `bias` in the operation that has it."""
        if name not in ("weight", "bias"):
            super().register_parameter(name, param)
        elif name == "weight" or self._has_bias:
            setattr(self.basic_ops[name == "bias"], name, param)
        elif param is not None:
            raise ArgumentError("Linear", "a bias, for an operation made with bias=False", "None", "leave it out")
