"""Which modules are alike: the registry of those that traced code knows by constants alone."""

from __future__ import annotations

from typing import Any

import torch

from te_core.tokens import enrolled, living, of_token

__all__ = ["alike", "enrolled", "of_token"]


def alike(kind: int, facts: tuple[Any, ...]) -> list[Any]:
    """The living modules of this class that are like this: what is compiled for one of them serves all."""
    return [module for module in living(torch.nn.Module) if _is_like(module, kind, facts)]


def _is_like(module: Any, kind: int, facts: tuple[Any, ...]) -> bool:
    try:
        return bool(module._kind == kind and module._facts() == facts)
    except AttributeError:  # another thread is about to make it: it has no forward that could be run yet
        return False
