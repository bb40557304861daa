"""Run a step of yours, then print what its model really computed in, what memory it holds, and why its attention runs
as it does.

The step is a function without arguments, of a file or of a module, that runs a forward (and a backward, if that shall
be seen) and returns the model:

    te report train.py:step
    te report package.module:step --json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from te_cli.steps import add_step, function_of, model_of

if TYPE_CHECKING:
    import torch

add_arguments = add_step


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """A step's precision, memory and attention."""
    from te_torch.tools.memory_report import memory_report
    from te_torch.tools.precision_report import precision_report

    model = model_of(function_of(options.step))
    precision, memory, attention = precision_report(model), memory_report(model), choices(model)
    found = {
        "precision": precision.as_dict(),
        "memory": memory.as_dict(),
        "attention": [{"layers": layers, **choice._asdict()} for choice, layers in attention],
    }
    parts = [str(precision), str(memory), *(f"attention of {', '.join(names)}\n{said}" for said, names in attention)]
    return found, "\n\n".join(parts), 0


def choices(model: torch.nn.Module) -> list[tuple[Any, list[str]]]:
    """Each choice of a backend that attention made in its last call, with the layers that made it."""
    from te_torch.attention.dot_product import DotProductAttention
    from te_torch.module_names import known_as

    found: dict[str, tuple[Any, list[str]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, DotProductAttention) and module._last_plan is not None:
            choice = module.explain_key(module._last_plan.key)
            found.setdefault(str(choice), (choice, []))[1].append(name or known_as(module))
    return list(found.values())
