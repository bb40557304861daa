"""All that a step of training changes, put aside and brought back: so that it can be run again as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from te_core.errors import ArgumentError
from te_torch.base.module import BaseModule
from te_torch.draws import Stand
from te_torch.state import ScalingState

#: What a ScalingState knows besides its buffers.
_OF_STATE = ("precision", "recipe", "group", "due", "in_use", "seen_version")


def _copied(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach().clone()


class Snapshot:
    """Parameters, gradients, buffers, FP8 states, generators and what `others` have in their state_dict."""

    def __init__(self, model: torch.nn.Module, others: Iterable[Any]) -> None:
        others = list(others) if isinstance(others, Iterable) else [others]
        for other in others:
            if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
                allowed = "objects with state_dict and load_state_dict"
                raise ArgumentError("bisect", f"restore=[{other!r}]", allowed, "pass optimizers and schedulers")
        self._modules = list(model.modules())
        self._parameters = [(p, _copied(p)) for p in model.parameters()]
        self._gradients = [(p, p.grad, _copied(p.grad)) for p, _ in self._parameters]
        self._main = [(main, _copied(main)) for p, _ in self._parameters if (main := main_gradient(p)) is not None]
        self._buffers = [(m, n, t, _copied(t)) for m in self._modules for n, t in m._buffers.items()]
        self._states = [(m, m._modules["fp8_state"]) for m in self._modules if "fp8_state" in m._modules]
        self._known = {
            s: {name: getattr(s, name) for name in _OF_STATE} for s in self._modules if isinstance(s, ScalingState)
        }
        self._training = [(m, m.training) for m in self._modules]
        self._caches = [(m, dict(m._weight_cache)) for m in self._modules if isinstance(m, BaseModule)]
        self._stand = Stand(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else (), ())
        self._random, self._numpy = random.getstate(), np.random.get_state()
        self._others = [(other, copy.deepcopy(other.state_dict())) for other in others]

    @torch.no_grad()
    def restore(self) -> None:
        """Everything as it was."""
        for p, value in self._parameters:
            if value is not None:
                p.copy_(value)
        for p, grad, value in self._gradients:
            p.grad = grad
            if grad is not None:
                grad.copy_(value)  # type: ignore[arg-type]
        for main, value in self._main:
            main.copy_(value)  # type: ignore[arg-type]
        for module, state in self._states:
            module._modules["fp8_state"] = state
        moved = set()
        for module, name, buffer, value in self._buffers:
            if module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
                moved.add(module)
            if buffer is not None:
                buffer.copy_(value)  # type: ignore[arg-type]
        for state, known in self._known.items():
            if state in moved:
                state._renew()
            state.__dict__.update(known)
        for module, training in self._training:
            module.training = training
        for module, cache in self._caches:
            module._weight_cache = dict(cache)
        self._stand.restore()
        random.setstate(self._random), np.random.set_state(self._numpy)
        for other, kept in self._others:
            other.load_state_dict(copy.deepcopy(kept))


def main_gradient(p: Any) -> torch.Tensor | None:
    """Where a trainer has gradients added up, if it does."""
    main = getattr(p, "main_grad", None)
    return main if isinstance(main, torch.Tensor) else None
