"""What the optimizers share: the part of a parameter that this process holds, its gradient, the documented options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from te_core.errors import ArgumentError, UnsupportedError
from te_core.tensor import Tensor
from te_torch.deprecation import deprecated
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import FLOATS, in_place, is_dtensor, to_core


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


def check_parameter(operation: str, p: Any) -> None:
    """A parameter that an optimizer of ours updates."""
    if not isinstance(local(p), QuantizedTorch) and p.dtype not in FLOATS:
        allowed = "parameters in float32, bfloat16 or float16, and quantized ones"
        raise UnsupportedError(operation, f"a parameter in {p.dtype}", allowed, "leave it to another optimizer")


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
