"""Residual connections: `bias_dropout_add`, and `Branch`, which a module beginning with a norm adds itself.

    x1 = bias_dropout_add(y, bias, x, p, training)          one pass forward, one backward
    out = mlp(x1)

is `out, x1 = mlp(Branch(y, x, bias, p))` without a pass of its own in either direction: the norm forms the sum on its
way, and its backward adds the gradient that comes back along the stream. `mlp(Branch(x))` gives (mlp(x), x) in the
same way: what follows along the stream has its gradient added in the norm's backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_core.layers import residual as core
from te_core.layers.residual import AddSpec, BranchNeeds
from te_torch.base.module import wants_grad
from te_torch.calls import made_of_constants
from te_torch.draws import random_pair
from te_torch.export import layers
from te_torch.function import Call, apply, of_table, register
from te_torch.noting import Drawn

ADD = of_table("bias_dropout_add", core.AddSaved, twins=(0, 2), plain=layers.bias_dropout_add)


class Branch(NamedTuple):
    """In the place of a module's input: residual + dropout(x + bias, p), formed by the module's own norm.

    The sum comes back as the last output, where what follows takes the residual from. With residual=None x itself is
    the stream. p is 0 outside of training; `rng` is (seed, offset), drawn from torch's generator if there is none.
    """

    x: torch.Tensor
    residual: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    p: float = 0.0
    rng: torch.Tensor | None = None

    def added(self) -> torch.Tensor:
        """The sum by itself."""
        if self.residual is None:
            return self.x
        return bias_dropout_add(self.x, self.bias, self.residual, self.p, True, self.rng)


def given_of(inp: torch.Tensor | Branch) -> tuple[tuple[Any, ...], Any]:
    """A module's inputs, and of a branch the option (adds, p): what a plan compares."""
    if not isinstance(inp, Branch):
        return (inp,), None
    return (inp.x, inp.residual, inp.bias, inp.rng), (inp.residual is not None, inp.p)


def enter_stream(
    inputs: tuple[Any, ...], stream: Any, x: torch.Tensor
) -> tuple[tuple[torch.Tensor | None, ...], tuple[Any, ...]]:
    """(residual, bias, rng), which go behind a layer's own tensors, and their sources, of what `given_of` gave; `x` is
    the branch's own x in the compute dtype."""
    if stream is None:
        return (), ()
    adds, p = stream
    if not adds:
        return (None, None, None), (None, None, None)
    residual, bias, rng = _like(x, inputs[1]), _like(x, inputs[2]), inputs[3]
    drawn = rng is None and p > 0.0
    if drawn:
        rng = random_pair(x)
    sources = 1, None if bias is None else 2, Drawn(None, -1) if drawn else None if rng is None else 3
    return (residual, bias, rng), sources


def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    training: bool = True,
    rng: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + dropout(x + bias, p), rounded once; without `training` nothing is dropped."""
    p = p if training else 0.0
    if p == 0.0 and bias is None and residual is None:
        return x
    residual, bias = _like(x, residual), _like(x, bias)
    if rng is None and p > 0.0:
        rng = random_pair(x)
    grad = torch.is_grad_enabled()
    needs = (grad and x.requires_grad, grad and wants_grad(bias), grad and wants_grad(residual))
    (out,) = apply(_add(p, *needs), None, False, x, bias, residual, rng)
    return out


def _like(x: torch.Tensor, t: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor in the dtype of x."""
    return t if t is None or t.dtype == x.dtype else t.to(x.dtype)


@made_of_constants
def _add(p: float, *needs: bool) -> Call:
    return register(ADD, AddSpec(p, BranchNeeds(*needs)), any(needs))
