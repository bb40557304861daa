"""The documented functions on lists of tensors. `chunk_size` is taken and changes nothing: blocks have their own size.

Tensors of one list may be of several types: each sort takes a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import increment_version

from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops import raw as ops
from te_core.ops.optimizer import LIMITS, AdamRule, AdamTensors, SgdRule, SgdTensors
from te_core.tensor import Tensor
from te_torch.optimizers.parts import core, local
from te_torch.runtime import runtime_for, to_torch
from te_torch.tensors.scales import scale_of

Lists = Sequence[Sequence[torch.Tensor]]


def _sorts(operation: str, lists: Lists, allowed: tuple[int, ...]) -> Iterator[tuple[Any, list[tuple[Tensor, ...]]]]:
    """(a runtime, the core's tensors of each parameter) of each sort; what is written counts as changed."""
    if len(lists) not in allowed or len({len(some) for some in lists}) > 1:
        got = f"{len(lists)} lists of {[len(some) for some in lists]} tensors"
        raise ArgumentError(
            operation, got, f"{' or '.join(map(str, allowed))} lists of one length", "correct the lists"
        )
    found: dict[Any, list[tuple[torch.Tensor, ...]]] = {}
    for one in zip(*lists, strict=True):
        found.setdefault((one[0].device, *[t.dtype for t in one]), []).append(one)
    for some in found.values():
        yield runtime_for(some[0][0]), [tuple([core(t.detach()) for t in one]) for one in some]
        increment_version([t for one in some for t in one[1:]])


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float) -> None:
    """dst = src * scale of [src, dst]; the flag becomes 1 where a source is not finite."""
    flag = core(noop_flag.reshape(1))
    for rt, some in _sorts("multi_tensor_scale", tensor_lists, (2,)):
        ops.scale_many(rt, [src for src, _ in some], [dst for _, dst in some], float(scale), flag=flag)


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: Lists, scale: torch.Tensor
) -> None:
    """dst = src * scale of [src, dst] by a scale on the device; the flag becomes 1 where a source is not finite."""
    flag, factor = core(is_infinite.reshape(1)), core(scale.detach().reshape(1))
    for rt, some in _sorts("multi_tensor_scale_tensor", tensor_lists, (2,)):
        ops.scale_many(rt, [src for src, _ in some], [dst for _, dst in some], factor, flag=flag)


def _norms(tensors: Sequence[torch.Tensor], inv_scale: torch.Tensor | None, per_tensor: bool) -> Any:
    if not tensors:
        return torch.zeros(1), torch.empty(0)
    order = sorted(range(len(tensors)), key=lambda i: str(tensors[i].dtype))
    lists: dict[torch.dtype, list[Tensor]] = {}
    for i in order:
        lists.setdefault(tensors[i].dtype, []).append(core(tensors[i].detach()))
    scale = None if inv_scale is None else core(inv_scale.detach().reshape(1))
    norm, each = map(to_torch, ops.norm_many(runtime_for(tensors[0]), [*lists.values()], scale=scale, each=per_tensor))
    if per_tensor and len(lists) > 1:
        each = torch.empty_like(each).index_copy_(0, torch.tensor(order, device=each.device), each)
    return norm, each


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of all tensors of the list, float32 [1]; that of each with `per_tensor`, else an empty tensor)."""
    return _norms(tensor_lists[0], None, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, inv_scale: torch.Tensor, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of all tensors times inv_scale, float32 [1]; that of each with `per_tensor`, else an empty tensor)."""
    return _norms(tensor_lists[0], inv_scale, per_tensor)


def _adam(operation: str, lists: Lists, allowed: tuple[int, ...], rule: AdamRule) -> None:
    for rt, some in _sorts(operation, lists, allowed):
        kinds = {t.dtype for t in some[0]}
        if kinds & set(LIMITS) and some[0][2].dtype in LIMITS:
            got, do = f"moments in {some[0][2].dtype}", "use FusedAdam, which keeps their scales"
            raise UnsupportedError(operation, got, "moments in float32 or bfloat16", do)
        ops.adam(rt, [AdamTensors(*one) for one in some], rule)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of Adam of [g, p, m, v] or [g, p, m, v, master]; mode 0: weight decay in the gradient, 1: AdamW."""
    rule = AdamRule(lr, beta1, beta2, eps, weight_decay, step, mode == 1, bool(bias_correction))
    _adam("multi_tensor_adam", tensor_lists, (4, 5), rule)


def multi_tensor_adam_param_remainder(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *numbers: Any, **named: Any
) -> None:
    """A step of Adam of [g, p, m, v, int16 remainder] with p in bfloat16."""
    multi_tensor_adam(chunk_size, noop_flag, tensor_lists, *numbers, **named)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """A step of Adam with lr and step on the device, skipped where the flag is 1; inv_scale multiplies gradients."""
    on_device = [core(t.detach().reshape(1)) for t in (lr, step, inv_scale, noop_flag)]
    rule = AdamRule(on_device[0], beta1, beta2, eps, weight_decay, on_device[1], mode == 1, bool(bias_correction))
    _adam(
        "multi_tensor_adam_capturable", tensor_lists, (4, 5), replace(rule, grad_scale=on_device[2], skip=on_device[3])
    )


#: The documented name of the same with masters, [g, p, m, v, master].
multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """A step of SGD of [g, p, momentum], or with a copy of p in its own type behind them."""
    rule = SgdRule(lr, momentum, dampening, wd, nesterov, first_run, wd_after_momentum, scale)
    if not momentum:  # the buffers are not looked at
        tensor_lists = [*tensor_lists[:2], *tensor_lists[3:]]
    for rt, some in _sorts("multi_tensor_sgd", tensor_lists, (3, 4) if momentum else (2, 3)):
        whole: Any = some if momentum else [(*one[:2], None, *one[2:]) for one in some]
        ops.sgd(rt, [SgdTensors(*one) for one in whole], rule)


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, max_fp8: float, force_pow_2_scales: bool, eps: float
) -> None:
    """scale and scale_inv of [amax, scale, scale_inv], by the rule of current scaling."""
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        found = scale_of(amax.reshape(1), max_fp8, force_pow_2_scales, eps)
        scale.copy_(found.reshape(scale.shape))
        scale_inv.copy_((1.0 / found).reshape(scale_inv.shape))


class MultiTensorApply:
    """Calls one of these functions: DTensors are taken as what this process holds of them, empty tensors left out."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Lists, *args: Any) -> Any:
        """op(chunk_size, noop_flag_buffer, tensor_lists, *args); None where nothing is left."""
        if len({len(some) for some in tensor_lists}) > 1:
            got = f"lists of {[len(some) for some in tensor_lists]} tensors"
            raise UnsupportedError("MultiTensorApply", got, "lists of one length", "correct the lists")
        kept = [one for one in zip(*[map(local, some) for some in tensor_lists], strict=True) if one[0].numel()]
        if not kept:
            return None
        return op(self.chunk_size, noop_flag_buffer, [list(some) for some in zip(*kept, strict=True)], *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
