"""Parts of a tensor with one scale, as a distributed checkpoint brings them: shards of another, one after another.

Each comes with the scale that its whole had. Written by itself it is quantized anew, with the scale that the rest of
the tensor has, for the rest's values must not change. Once parts of one scale have come for all of the tensor, it holds
their bytes and that scale: what was saved, exactly.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch


class Arriving:
    """The parts that have come to one memory since anything else changed it."""

    __slots__ = ("parts", "writes")

    def __init__(self) -> None:
        self.parts: dict[int, tuple[Any, Any]] = {}  # by where it begins: (the part, what came)
        self.writes = 0

    def complete(self, size: int) -> bool:
        """Whether they are the whole tensor, and bring one scale."""
        if sum(prod(part.shape) for part, _ in self.parts.values()) != size:
            return False
        (_, first), *others = self.parts.values()
        scale = first._scale_inv.cpu()
        return all(torch.equal(scale, came._scale_inv.cpu()) for _, came in others)


def has_one_scale(t: Any) -> bool:
    """Whether a tensor is FP8 with one scale."""
    return t._format is not None and t._format.scaling == "tensor" and t._scale_inv is not None


def is_part(t: Any) -> bool:
    """Whether a tensor is a part of one with one scale, beside other values."""
    return t._format is not None and t._format.scaling == "tensor" and t._shares_scale()


def write(part: Any, came: Any, values: torch.Tensor) -> None:
    """Write what came, whose values these are, to a part; and all that came, once it is the whole tensor."""
    part._update(part._build_default_quantizer(), values, None)  # no new maximum: it was quantized before
    alike = came._format is part._format and came.shape == part.shape
    if not alike or part._row_data is None or came._row_data is None:
        return
    memory = part._memory
    found = memory.arriving
    if found is None or found.writes != memory.writes - 1:  # that write was this part's
        found = memory.arriving = Arriving()
    found.parts[part.storage_offset()] = (part, came)
    found.writes = memory.writes
    if found.complete(memory.size):
        memory.arriving = None
        for other, bytes_of in found.parts.values():
            other._data.copy_(bytes_of._data.reshape(other._data.shape))
        part._scale_inv.copy_(came._scale_inv)
        part._wrote()
