"""What a model's products are called, for who looks at one of them: a layer is a product of a module, by its name.

And over which ranks its weight is spread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

_PARTS = {"LayerNormMLP": ("fc1", "fc2")}


class Team(NamedTuple):
    """The ranks that a product's weight is spread over, and of which tensors each of them has a part."""

    group: Any = None
    ranks: tuple[int, ...] = ()  # their numbers among all; none where the weight is whole
    split: frozenset[str] = frozenset()
    gathered: str | None = None  # the operand that lies cut by rows, and is gathered

    @property
    def size(self) -> int:
        """How many there are."""
        return max(len(self.ranks), 1)


ALONE = Team()
#: By mode: the tensors that are always split, and those that are with sequence parallelism.
_SPLIT = {
    "column": (("weight", "wgrad", "output", "gradient"), ("activation", "dgrad")),
    "row": (("weight", "wgrad", "activation", "dgrad"), ("output", "gradient")),
}
_GATHERED = {"column": "activation", "row": "gradient"}


def team_of(module: Any, number: int) -> Team:
    """The team of a product of a module, by its number."""
    group, modes = getattr(module, "tp_group", None), getattr(module, "_modes", None)
    mode = getattr(module, "parallel_mode", None) if modes is None else modes()[number]
    if mode is None or group is None or module.tp_size == 1 or not module._weight_names():
        return ALONE
    always, by_rows = _SPLIT[mode]
    gathers = module.sequence_parallel and not _is(module, "GroupedLinear")  # that one communicates nothing
    split = frozenset((*always, *by_rows)) if gathers else frozenset(always)
    return Team(group, tuple(dist.get_process_group_ranks(group)), split, _GATHERED[mode] if gathers else None)


def product_names(module: Any, name: str) -> tuple[str, ...]:
    """The names of a module's products: its own, or below it `fc1` and `fc2`, `gemm_0` and so on."""
    parts: tuple[str, ...] | None = next((names for kind, names in _PARTS.items() if _is(module, kind)), None)
    if parts is None and _is(module, "GroupedLinear"):
        parts = tuple(f"gemm_{i}" for i in range(module.gemms))
    return (name,) if parts is None else tuple(f"{name}.{part}" for part in parts)


def _is(module: Any, kind: str) -> bool:
    """Whether a module is of this class, or of one made of it, as users and `fully_shard` do."""
    return any(base.__name__ == kind for base in type(module).__mro__)
