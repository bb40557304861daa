"""The order of tokens in rows with padding on CUDA: one launch of padding_order.cu."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.padding_order import PaddingOrderSpec

_THREADS = 1024  # as the kernel has it


def padding_order(rt: Runtime, spec: PaddingOrderSpec, mask: Tensor, there: Tensor, again: Tensor, cu: Tensor) -> None:
    """Tokens first, a block for each row; and one for the sums, which are all where there are no rows or tokens."""
    kernel = loader.get(rt, "padding_order", args="ppppiiqq")
    numbers = spec.rows, spec.length, spec.token_step, spec.row_step
    kernel(rt, spec.rows + 1, _THREADS, mask, there, again, cu, *numbers)
