"""Golden files written by the peer on an H200 (tests/data/README.md says how they came about)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

DATA = Path(__file__).parent / "data"


@cache
def load(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a golden file by their keys; bf16 is stored as its bits."""
    with np.load(DATA / f"{name}.npz") as file:
        keys = [k for k in file.files if not k.endswith(":bf16")]
        marked = set(file.files)
        out = {}
        for key in keys:
            tensor = torch.from_numpy(file[key])
            out[key] = tensor.view(torch.bfloat16) if f"{key}:bf16" in marked else tensor
        return out


def tree(name: str, prefix: str) -> dict[str, torch.Tensor]:
    """What lies under a prefix, by the rest of its key."""
    return {k[len(prefix) :]: v for k, v in load(name).items() if k.startswith(prefix)}
