"""The environment variables of te_core/env.py, as docs/guides/17-environment-variables.md shows them.

python tools/variable_table.py
"""

from __future__ import annotations

from collections.abc import Iterator

from te_core.env import VARIABLES, WITHOUT_EFFECT
from te_torch.attention.env import VARIABLES as ATTENTION


def tables() -> Iterator[str]:
    """A table for each kind of variable, and the names that change nothing."""
    own = [name for name in VARIABLES if not name.startswith("NVTE_")]
    kinds = {
        "The runtime": own,
        "Recipes, norms, modules": [name for name in VARIABLES if name not in {*own, *ATTENTION}],
        "Attention": list(ATTENTION),
    }
    for title, names in kinds.items():
        yield from (f"## {title}", "", "| Variable | Values | Default | Meaning |", "|---|---|---|---|")
        for name in names:
            v = VARIABLES[name]
            yield f"| `{name}` | {v.allowed} | {v.default or 'not set'} | {v.meaning} |"
        yield ""
    yield from ("## Known, without effect", "", ", ".join(f"`{name}`" for name in sorted(WITHOUT_EFFECT)))


if __name__ == "__main__":
    print(*tables(), sep="\n")
