"""The door from the modules to the quantized tensor classes, which are imported when the first one is made."""

from __future__ import annotations

from typing import Any

import torch

from te_core.precision import Operand
from te_core.quantized import QuantizedTensor


class QuantizedTorch(torch.Tensor):
    """What every quantized tensor class is, for those who have to tell one from a plain tensor."""


def core_of(t: Any) -> QuantizedTensor:
    """The core's view of a quantized torch tensor, which becomes its owner."""
    q: QuantizedTensor = t.to_core()
    q.owner = t
    return q


def from_core(q: QuantizedTensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A quantized torch tensor over the storage of a core one."""
    from te_torch.tensors import wrap

    made: torch.Tensor = wrap.from_core(q, shape, dtype)
    return made


def quantizer_of(rule: Operand, device: torch.device) -> Any:
    """The quantizer that follows an operand rule."""
    from te_torch.tensors import wrap

    return wrap.quantizer_of(rule, device)
