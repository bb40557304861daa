"""The door from the modules to the quantized tensor classes."""

from __future__ import annotations

from typing import Any

import torch

from te_core.quantized import QuantizedTensor


class QuantizedTorch(torch.Tensor):
    """Base of the quantized tensor classes."""

    def dequantize(self) -> torch.Tensor:
        raise NotImplementedError


def core_of(t: Any) -> QuantizedTensor:
    """The core's view of a quantized torch tensor, which becomes its owner."""
    q: QuantizedTensor = t.to_core()
    q.owner = t
    return q


def from_core(q: QuantizedTensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A quantized torch tensor over the storage of a core one."""
    raise NotImplementedError


def quantizer_of(rule: Any, device: torch.device) -> Any:
    """The quantizer that follows an operand rule."""
    raise NotImplementedError
