"""`L2Normalization`: heads divided by their length, one choice of QK normalization."""

from __future__ import annotations

from typing import Any

import torch

from te_core.layers import l2_norm as core
from te_torch.autocast import Now
from te_torch.base.module import CallingModule
from te_torch.base.options import check_values
from te_torch.base.plans import Prepared
from te_torch.export import layers
from te_torch.function import Call, of_table, register
from te_torch.runtime import check_dtype

L2_NORM = of_table("l2_norm", core.L2NormSaved, plain=layers.l2_norm)


class L2Normalization(CallingModule):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension; no parameters."""

    def __init__(self, eps: float = 1e-6) -> None:
        check_values("L2Normalization", {"eps": eps})
        super().__init__()
        self.eps = eps

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """The rows of the input, each of length one (but for eps), in its dtype."""
        out: torch.Tensor = self._call((inp,))
        return out

    def _prepare(self, inputs: tuple[Any, ...], options: tuple[Any, ...], now: Now) -> Prepared:
        check_dtype("L2Normalization", inputs[0])
        call = self._find_call((torch.is_grad_enabled() and inputs[0].requires_grad,))
        return Prepared(call, None, False, inputs, (0,))

    def _facts(self) -> tuple[float]:
        return (self.eps,)

    def _new_call(self, needs: bool) -> Call:
        return register(L2_NORM, core.L2NormSpec(self.eps), needs)

    def extra_repr(self) -> str:
        """What a printed module shows."""
        return f"eps={self.eps}"
