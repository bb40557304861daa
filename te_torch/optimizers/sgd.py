"""`FusedSGD`: SGD with momentum in one launch for a group of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.ops import raw as ops
from te_core.ops.optimizer import SgdRule, SgdTensors
from te_torch.optimizers.parts import FusedOptimizer, changed, core, gradient, like, local, number, refuse_quantized
from te_torch.runtime import runtime_for

_NAME, _BUFFER = "FusedSGD", "momentum_buffer"


class FusedSGD(FusedOptimizer):
    """SGD; the momentum buffer begins as the first gradient, and has the parameter's type.

    `wd_after_momentum` adds weight decay behind the momentum. `materialize_master_grads` is taken and changes nothing:
    gradients are read as they are.
    """

    _KEPT = ("materialize_master_grads", "set_grad_none", "wd_after_momentum")

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        self.wd_after_momentum, self.materialize_master_grads = wd_after_momentum, materialize_master_grads
        self._note_set_grad_none(set_grad_none)
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults)

    def _check_group(self, operation: str, group: dict[str, Any]) -> None:
        super()._check_group(operation, {**group, "lr": number(group["lr"])})
        if group["nesterov"] and (not group["momentum"] or group["dampening"] != 0):
            got = f"nesterov with momentum={group['momentum']}, dampening={group['dampening']}"
            raise ArgumentError(operation, got, "nesterov with momentum and without dampening", "correct them")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = self._loss(closure)
        # What torch's GradScaler says in attributes, of gradients in float16.
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if overflow is not None and overflow.item():
            return loss
        factor = 1.0 if scale is None else 1.0 / scale.item()
        work = [(group, self._lists(group)) for group in self.param_groups]
        for group, lists in work:
            for (_, first, *_), some in lists.items():
                rule = SgdRule(
                    number(group["lr"]),
                    group["momentum"],
                    group["dampening"],
                    group["weight_decay"],
                    group["nesterov"],
                    first_run=first,
                    decay_last=self.wd_after_momentum,
                    grad_scale=factor,
                )
                ops.sgd(runtime_for(some[0][1].param.owner), [tensors for _, tensors in some], rule)
                for p, tensors in some:
                    changed(p, tensors.param.owner)
        return loss

    def _lists(self, group: dict[str, Any]) -> dict[Any, list[tuple[Any, SgdTensors]]]:
        """The parameters that one launch updates, by what they have in common."""
        lists: dict[Any, list[tuple[Any, SgdTensors]]] = {}
        for p in group["params"]:
            grad = gradient(f"{_NAME}.step", p)
            if grad is None or not grad.numel():
                continue
            refuse_quantized(f"{_NAME}.step", p, "plain parameters", "use FusedAdam(master_weights=True)")
            (buffer,), first = self.get_momentums([p]) if group["momentum"] else ((None,), False)
            mine = local(p).detach().contiguous()
            tensors = SgdTensors(core(grad), core(mine), None if buffer is None else core(local(buffer)))
            key = (mine.device, first, *[None if t is None else t.dtype for t in tensors])
            lists.setdefault(key, []).append((p, tensors))
        return lists

    def get_momentums(self, params: Iterable[Any]) -> tuple[list[Any], bool]:
        """(the momentum buffers of some parameters, whether they were made now)."""
        found, first = [], False
        for p in params:
            state = self.state[p]
            if state.get(_BUFFER) is None:
                state[_BUFFER] = like(p, torch.zeros_like(local(p), memory_format=torch.contiguous_format))
                first = True
            found.append(state[_BUFFER])
        return found, first
