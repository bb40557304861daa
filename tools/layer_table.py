"""The table of layers (te_core/layers/table.py) as docs/functional.md shows it.

python tools/layer_table.py
"""

from __future__ import annotations

from te_core.layers.entries import Argument
from te_core.layers.table import LAYERS


def _when(argument: Argument) -> str:
    """Whether an argument may be left out."""
    if argument.name.endswith("layer_norm_bias"):
        return " (of LayerNorm)"
    return " (or none)" * argument.optional


def table() -> str:
    """A row for each layer."""
    lines = ["| function | takes | options | gradients |", "|---|---|---|---|"]
    for layer in LAYERS.values():
        takes = [f"`{a.name}`" + _when(a) for a in layer.offered()]
        options = ["`m_splits=`"] * any(a.several for a in layer.offered())
        options += [f"`{name}={o.default!r}`" for name, o in layer.options.items() if not o.implied]
        gradients = [f"`{a.name}`" for a in layer.offered() if a.gradient]
        cells = f"`{layer.name}`: {layer.about}", ", ".join(takes), ", ".join(options), ", ".join(gradients)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
