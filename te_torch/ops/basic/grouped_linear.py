"""`GroupedLinear`: a linear for each group of rows. It is the module of that name, as an operation of a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from te_core.ops.gemm_grouped import takes_offsets
from te_core.recipe import Recipe
from te_torch.modules import grouped_linear as modules
from te_torch.ops.basic.linear import kaiming_init
from te_torch.ops.op import BasicOperation
from te_torch.ops.values import dense
from te_torch.runtime import FLOATS, TO_CORE, amp_dtype, default_device, outside_autocast, runtime_for


class GroupedLinear(BasicOperation, modules.GroupedLinear):  # type: ignore[misc]
    """y_i = x_i w_i^T + b_i for groups of rows x_i: how many each has is an extra input.

    With `scale_bias` a second extra input has a number for each row, by which the row's bias is multiplied.
    """

    gemms = 1  # until the module says how many

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        scale_bias: bool = False,
        **options: Any,
    ) -> None:
        self.num_groups = num_groups
        options |= {"init_method": kaiming_init, "bias": bias, "params_dtype": dtype}
        options |= {"fuse_wgrad_accumulation": accumulate_into_main_grad}
        options |= {"get_rng_state_tracker": rng_state_tracker_function}
        modules.GroupedLinear.__init__(self, num_groups, in_features, out_features, **options)
        self.scale_bias = self.return_bias = scale_bias and bias
        self.num_extra_inputs = 1 + self.scale_bias

    _weight_names = modules.GroupedLinear._weight_names
    _gemm_names = modules.GroupedLinear._gemm_names
    quantizer_roles = modules.GroupedLinear.quantizer_roles

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs=({},), **given):
        """The module's forward, whose node in autograd's graph backward runs by itself."""
        (ctx,), ((splits, *scales),), (given,) = basic_op_ctxs, basic_op_extra_inputs, basic_op_kwargs
        x = dense(input_, amp_dtype(input_.device.type) or self._tensor(self._weight_names()[0]).dtype)
        x.requires_grad_(ctx.requires_grad and ctx.input_requires_grad)
        buffers = given.get("output"), given.get("grad_input")
        with torch.set_grad_enabled(ctx.requires_grad), outside_autocast(x):
            made = modules.GroupedLinear.forward(self, x, splits, None, *buffers)
        made, biases = made if self.scale_bias else (made, None)
        # A node in Python does not own what it saved: the edge does.
        ctx.edge = get_gradient_edge(made) if ctx.requires_grad and made.requires_grad else None
        out = made.detach()
        if biases is not None:
            ctx.scales_require_grad, rows = scales[0].requires_grad, out.view(-1, out.shape[-1])
            groups = _groups_of_rows(splits, rows)
            ctx.save_for_backward(scales[0], groups, *biases)
            added = torch.stack(biases)[groups].mul_(scales[0].reshape(-1, 1))
            rows.add_(added)
        return out, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **given):
        """The gradients of the input, of all parameters, and of the scales."""
        (ctx,), n, ds = basic_op_ctxs, self.num_groups, None
        dy = dense(grad_output)
        found = ctx.edge.node.apply(dy)[1:]
        names = [*self._weight_names(), *self._bias_names]
        gradients = dict(zip(names, found[1:], strict=False))
        if self.scale_bias:
            scales, groups, *biases = ctx.saved_tensors
            rows = dy.view(-1, dy.shape[-1]).float()
            sums = rows.new_zeros(n, rows.shape[1]).index_add_(0, groups, rows * scales.reshape(-1, 1))
            gradients |= dict(zip(self._bias_names, sums.to(dy.dtype), strict=True))
            if ctx.scales_require_grad:
                ds = (rows * torch.stack(biases)[groups].float()).sum(-1).to(scales.dtype).view(scales.shape)
        if self.single_grouped_bias:
            gradients["bias"] = torch.stack([gradients.pop(name) for name in self._bias_names])
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.edge = None  # with all that it kept
        parameters = [gradients[name] for name, _ in self.named_parameters()]
        return found[0], [parameters], [(None, ds) if self.scale_bias else (None,)]


def _groups_of_rows(splits: Any, rows: torch.Tensor) -> torch.Tensor:
    """The number of the group that each row belongs to; rows behind all groups count to the last."""
    ends = torch.as_tensor(splits, device=rows.device).cumsum(0)
    number = torch.arange(rows.shape[0], device=rows.device)
    return torch.bucketize(number, ends, right=True).clamp_(max=len(ends) - 1)


def is_op_fuser_grouped_tensor_path_supported(recipe: Recipe | None, dtype: torch.dtype) -> bool:
    """Whether products of groups read the sizes of groups on the device, and the host need not know them."""
    device = default_device()
    if recipe is not None or dtype not in FLOATS or device.type != "cuda":
        return False
    return takes_offsets(runtime_for(torch.empty(0, device=device)), TO_CORE[dtype], 128, 128, 1)
