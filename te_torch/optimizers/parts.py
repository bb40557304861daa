"""What the optimizers share: the part of a parameter that this process holds, its gradient, the documented options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from te_core.errors import ArgumentError, UnsupportedError
from te_core.ops.optimizer import check_numbers
from te_core.tensor import Tensor
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import FLOATS, deprecated, in_place, is_dtensor, to_core
from te_torch.values import check_flags

_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "dampening")


class GradientError(ArgumentError, AssertionError):
    """A gradient that is not spread as its parameter is. Also the documented AssertionError."""


def local(t: Any) -> Any:
    """The part of a tensor that lies in this process."""
    return t.to_local() if is_dtensor(t) else t


def like(p: Any, part: torch.Tensor) -> Any:
    """A tensor of this process, spread as the parameter is."""
    if not is_dtensor(p):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def core(t: torch.Tensor) -> Tensor:
    """The core's view of a dense tensor."""
    return to_core(t) if t.is_neg() or not t.is_contiguous() else in_place(t)


def gradient(operation: str, p: Any, name: str = "grad") -> torch.Tensor | None:
    """The parameter's gradient in this process, dense; None where it has none."""
    grad = getattr(p, name, None)
    if grad is None:
        return None
    if not isinstance(grad, torch.Tensor):
        allowed = f"a tensor, as a parameter's {name}"
        raise ArgumentError(operation, f"a {type(grad).__name__}", allowed, f"correct what is assigned to {name}")
    if type(grad) is torch.Tensor and type(p) is torch.nn.Parameter and grad.layout is torch.strided:
        if grad.shape == p.shape and grad.device == p.device and grad.dtype in FLOATS:
            return grad.contiguous()
    if grad.is_sparse:
        raise UnsupportedError(operation, "a sparse gradient", "dense gradients", "use torch.optim.SparseAdam for it")
    if is_dtensor(p) != is_dtensor(grad):
        got = f"{name} of type {type(grad).__name__} of a parameter of type {type(p).__name__}"
        raise GradientError(
            operation, got, "both plain tensors, or both DTensors", "spread the gradient as the parameter"
        )
    part, mine = local(grad), local(p)
    if part.shape != mine.shape or part.device != mine.device or part.dtype not in FLOATS:
        got = f"{name} of {tuple(part.shape)}, {part.dtype} on {part.device}"
        allowed = f"{tuple(mine.shape)} in float32, bfloat16 or float16 on {mine.device}"
        raise ArgumentError(operation, got, allowed, f"correct what is assigned to the parameter's {name}")
    return part.detach().contiguous()


def number(value: Any) -> Any:
    """A number that may lie in a tensor, in which torch's schedulers change it in place."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def refuse_quantized(operation: str, p: Any, allowed: str, do: str) -> None:
    """Refuse to update a quantized parameter. An optimizer may be made with one, that others then exchange."""
    if isinstance(local(p), QuantizedTorch):
        raise UnsupportedError(operation, f"a parameter of type {type(local(p)).__name__}", allowed, do)


def changed(p: Any, written: torch.Tensor | None = None) -> None:
    """Note that a parameter was changed in place; `written` is where its new values lie, if not in its own memory."""
    mine = local(p)
    if written is not None and written.data_ptr() != mine.data_ptr():
        mine.copy_(written)
    for t in (mine,) if mine is p else (mine, p):
        increment_version(t)


class FusedOptimizer(torch.optim.Optimizer):
    """Gradients that become None by default, closures, and options that copies and pickles keep."""

    set_grad_none: bool | None
    _KEPT: ClassVar[tuple[str, ...]] = ("set_grad_none",)

    def _check_group(self, operation: str, group: dict[str, Any]) -> None:
        """The options of a group are what a step can compute with."""
        betas = group.get("betas", (0.0, 0.0))
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ArgumentError(operation, f"betas={betas!r}", "two numbers", "correct betas")
        given = {name: group[name] for name in _NUMBERS if name in group}
        check_numbers(operation, **{"betas[0]": betas[0], "betas[1]": betas[1]}, **given)
        check_flags(operation, **{name: group[name] for name in ("bias_correction", "nesterov") if name in group})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group of parameters, with options that may differ from the optimizer's."""
        super().add_param_group(param_group)
        group, operation = self.param_groups[-1], type(self).__name__
        try:
            self._check_group(operation, group)
            for p in group["params"]:
                if not isinstance(local(p), QuantizedTorch) and p.dtype not in FLOATS:
                    allowed = "parameters in float32, bfloat16 or float16, and quantized ones"
                    do = "leave it to another optimizer"
                    raise UnsupportedError(operation, f"a parameter in {p.dtype}", allowed, do)
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch's GradScaler leaves the scale to `step`: of gradients in float16, which it does not unscale."""
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return any(grad is not None and grad.dtype is torch.float16 for grad in grads)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and states of an optimizer of the same model."""
        self._check_loaded(f"{type(self).__name__}.load_state_dict", state_dict)
        self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)

    def _check_loaded(self, operation: str, given: Any) -> None:
        """All of it, before anything is changed: the state is that of a model like this one."""
        if not isinstance(given, dict) or not {"state", "param_groups"} <= given.keys():
            got = f"a dict of {sorted(map(str, given))}" if isinstance(given, dict) else f"a {type(given).__name__}"
            raise ArgumentError(operation, got, "'state' and 'param_groups'", "pass what state_dict() returned")
        counts, mine = ([len(g["params"]) for g in groups] for groups in (given["param_groups"], self.param_groups))
        if counts != mine:
            got = f"groups of {counts} parameters"
            raise ArgumentError(operation, got, f"groups of {mine}, this optimizer's", "load a state of the same model")
        for group in [{**self.defaults, **group} for group in given["param_groups"]]:
            self._check_group(operation, {**group, "lr": number(group["lr"])})

    def _note_set_grad_none(self, value: bool | None) -> None:
        self.set_grad_none = value
        if value is not None:
            deprecated("set_grad_none", "zero_grad(set_to_none=...)", 2)

    def _loss(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Gradients become None, or zeros."""
        if set_to_none is not None and self.set_grad_none is not None and set_to_none != self.set_grad_none:
            got = f"set_to_none={set_to_none} beside set_grad_none={self.set_grad_none}"
            raise ArgumentError("zero_grad", got, "one of them, or both alike", "leave set_grad_none out")
        asked = self.set_grad_none if set_to_none is None else set_to_none
        self._zero(True if asked is None else asked)

    def _zero(self, none: bool) -> None:
        super().zero_grad(none)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._KEPT}}
