"""FP8 from module to module in an exported program."""

from __future__ import annotations

from typing import Any

import torch


class StandIn:
    """In the place of a quantized tensor: for what modules ask of an input, a tensor of its values, which are `t`."""

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t

    @property
    def shape(self) -> torch.Size:
        """That of the values."""
        return self.t.shape

    @property
    def ndim(self) -> int:
        """Of how many dimensions they are."""
        return self.t.ndim

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.t.device

    @property
    def is_cuda(self) -> bool:
        """Whether that is a GPU."""
        return self.t.is_cuda

    def is_floating_point(self) -> bool:
        """Of its values."""
        return True

    def to(self, dtype: torch.dtype) -> Any:
        """Values of any dtype are quantized alike."""
        return self


class Handed(StandIn):
    """In the place of a quantized tensor, between modules that are exported: its values, and how it holds them.

    For what modules ask of an input it is a tensor of the activation dtype. The values are what a DequantizeLinear
    gave: whoever takes them as they are rounds nothing again. (No operator goes to an FP8 tensor itself: onnxruntime
    has none that changes its shape.)
    """

    requires_grad = False

    def __init__(self, values: torch.Tensor, dtype: torch.dtype, form: Any) -> None:
        super().__init__(values)
        self.values, self.dtype, self.format = values, dtype, form  # float32; te_core.quantized.Format

    def view(self, *shape: int) -> Handed:
        """The same values in another shape."""
        return Handed(self.values.view(*shape), self.dtype, self.format)

    def dequantize(self) -> torch.Tensor:
        """As a plain tensor."""
        return self.values.to(self.dtype)


def plain(t: torch.Tensor | Handed) -> torch.Tensor:
    """A tensor, or the values that were handed over."""
    return t.dequantize() if isinstance(t, Handed) else t


def as_handed(t: torch.Tensor | Handed, form: Any) -> torch.Tensor | None:
    """The values of what was handed over in this format; None where it has to be quantized."""
    return t.values if isinstance(t, Handed) and t.format is form else None
