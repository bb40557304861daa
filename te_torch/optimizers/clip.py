"""Clipping by the norm of all gradients, which are read once: the optimizer multiplies them where it reads them."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch

from te_core.errors import ArgumentError
from te_core.ops import raw as ops
from te_torch.exchange import all_reduce
from te_torch.optimizers.parts import core, gradient, number
from te_torch.parallel.groups import group_of
from te_torch.runtime import is_dtensor, runtime_for, to_torch

_NAME = "clip_by_norm"


@torch.no_grad()
def clip_by_norm(
    parameters: Iterable[Any] | torch.Tensor, max_norm: float, *, group: Any = None, grad: str = "grad"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of all gradients, min(1, max_norm / (norm + 1e-6))), float32 [1] on the device.

    Nothing is multiplied here: `FusedAdam.step(grad_scale=factor)` does it. The host waits for nothing, so a CUDA graph
    may hold both. Of DTensors each process reads its part, and the parts are summed up over the mesh they are sharded
    over; with `group` the sum is one over its processes, too. `grad` names the attribute ("decoupled_grad").

    Example:
        layer = te.Linear(64, 64, device="cpu")
        optimizer = te.optimizers.FusedAdam(layer.parameters())
        layer(torch.randn(32, 64)).sum().backward()
        norm, factor = te.optimizers.clip_by_norm(layer.parameters(), 1.0)
        optimizer.step(grad_scale=factor)
    """
    max_norm, group = number(max_norm), group_of(_NAME, group, "group")
    if not isinstance(max_norm, Real) or not max_norm > 0:
        raise ArgumentError(_NAME, f"max_norm={max_norm!r}", "a number above 0", "correct max_norm")
    if not isinstance(parameters, Iterable):
        got = f"parameters of type {type(parameters).__name__}"
        raise ArgumentError(_NAME, got, "parameters, or one of them", "pass model.parameters()")
    spread: dict[Any, list[torch.Tensor]] = {}
    for p in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        part = gradient(_NAME, p, grad)
        if part is not None:
            spread.setdefault(_sharded_over(getattr(p, grad)), []).append(part)
    squares: list[torch.Tensor] = []
    for meshes, parts in spread.items():
        square = _square(parts)
        for mesh_group in meshes:
            all_reduce(_NAME, square, mesh_group)
        squares.append(square)
    if not squares:
        raise ArgumentError(_NAME, "parameters without gradients", "gradients", "call it behind backward()")
    total = squares[0] if len(squares) == 1 else torch.stack([s.to(squares[0].device) for s in squares]).sum(0)
    if group is not None:
        all_reduce(_NAME, total, group)
    norm = total.sqrt()
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _sharded_over(grad: Any) -> tuple[Any, ...]:
    """The groups whose processes hold different parts of a gradient."""
    if not is_dtensor(grad):
        return ()
    mesh = grad.device_mesh
    return tuple(mesh.get_group(i) for i, place in enumerate(grad.placements) if not place.is_replicate())


def _square(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of all squares, one launch for the gradients of a type."""
    devices: dict[torch.device, dict[torch.dtype, list[torch.Tensor]]] = {}
    for part in parts:
        devices.setdefault(part.device, {}).setdefault(part.dtype, []).append(part)
    norms = []
    for kinds in devices.values():
        lists = [[core(t) for t in some] for some in kinds.values()]
        norm, _ = ops.norm_many(runtime_for(next(iter(kinds.values()))[0]), lists)
        norms.append(to_torch(norm).square())
    return norms[0] if len(norms) == 1 else torch.stack([n.to(norms[0].device) for n in norms]).sum(0)
