"""`DropPath`: a part of a layer that is left out for whole samples."""

from __future__ import annotations

import torch

from te_torch.forks import Fork, uniform, uniform_in


class DropPath(torch.nn.Module):
    """Zeroes whole samples (of the first dimension) with probability drop_prob in training, and scales up the rest."""

    def __init__(self, drop_prob: float = 0.0, fork: Fork | None = None) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        self._fork = fork  # of an RNG tracker; None: torch's own generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, each sample either 0 or x / (1 - drop_prob)."""
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1.0 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        subject = shape, x.device
        numbers = uniform(subject) if self._fork is None else uniform_in(self._fork, *subject)
        kept = numbers < keep
        scaled = x / keep if keep else x  # a division by zero would leave its NaN in the gradient
        return torch.where(kept, scaled, torch.zeros((), dtype=x.dtype, device=x.device))

    def extra_repr(self) -> str:
        """What a printed module shows."""
        return f"drop_prob={self.drop_prob}"
