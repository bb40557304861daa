"""What a model's products are called, for who looks at one of them: a layer is a product of a module, by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from te_torch.base.module import BaseModule

_PARTS = {"LayerNormMLP": ("fc1", "fc2")}


class Layer(NamedTuple):
    """One product: the GEMMs of one weight."""

    name: str
    module: Any
    number: int  # among the module's products: the place of its inspector, its slots in the scaling state


def product_names(module: Any, name: str) -> tuple[str, ...]:
    """The names of a module's products: its own, or below it `fc1` and `fc2`, `gemm_0` and so on."""
    parts: tuple[str, ...] | None = _PARTS.get(type(module).__name__)
    if parts is None and type(module).__name__ == "GroupedLinear":
        parts = tuple(f"gemm_{i}" for i in range(module.gemms))
    return (name,) if parts is None else tuple(f"{name}.{part}" for part in parts)


def layers(model: torch.nn.Module, named: bool = False) -> Iterator[Layer]:
    """A model's products by their modules' paths in it, or (`named`) by the names that modules have themselves."""
    for path, module in model.named_modules():
        if isinstance(module, BaseModule) and hasattr(module, "_inspectors") and module._weight_names():
            own = module.name if named or not path else path
            for index, name in enumerate(product_names(module, own)):
                yield Layer(name, module, index)
