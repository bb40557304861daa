"""What those who meet a tensor have to know of quantized ones: how to tell one, and what the core sees of it."""

from __future__ import annotations

from typing import Any

import torch

from te_core.quantized import QuantizedTensor


class QuantizedTorch(torch.Tensor):
    """What every quantized tensor class is, for those who have to tell one from a plain tensor."""

    _core_facts: Any
    _memory: Any
    _quantizer: Any
    # What the storage beside it in a concrete class gives.
    _dense_values: Any
    _inner_names: Any
    _requantize: Any
    _takes_bytes_of: Any
    _copy_bytes: Any


def core_of(t: Any) -> QuantizedTensor:
    """The core's view of a quantized torch tensor, which becomes its owner."""
    q: QuantizedTensor = t.to_core()
    q.owner = t
    return q
