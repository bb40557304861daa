"""What layers know of those who handle what they save (`training/offload`, `training/fsdp`): what a tensor is."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch


class _Active(threading.local):
    """The offload context that the calling thread is in."""

    def __init__(self) -> None:
        self.context: Any = None
        self.noting = False  # whether somebody asks which of the saved tensors were made of weights


active = _Active()

#: Attribute of a tensor that stays on the device (documented under this name).
STAYS = "_TE_do_not_offload"
#: Attribute of a tensor that was made of a weight: converted, joined or quantized. It travels as weights do.
OF_WEIGHT = "_te_of_weight"


def note_copies_of_weights(tensors: Iterable[Any]) -> None:
    """Tell what will be saved for backward and was made of a weight. Parameters are known by themselves."""
    for t in tensors:
        if isinstance(t, torch.Tensor) and not isinstance(t, torch.nn.Parameter):
            setattr(t, OF_WEIGHT, True)
