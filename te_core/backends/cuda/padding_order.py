"""The order of tokens in rows with padding on CUDA: one launch of padding_order.cu."""

from __future__ import annotations

from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_THREADS = 1024  # as the kernel has it


def padding_order(rt: Runtime, steps: tuple[int, int], mask: Tensor, there: Tensor, again: Tensor, cu: Tensor) -> None:
    """Tokens first, a block for each row; and one for the sums, which are all where there are no rows or tokens."""
    kernel = loader.get(rt, "padding_order", args="ppppiiqq")
    kernel(rt, mask.shape[0] + 1, _THREADS, mask, there, again, cu, *mask.shape, *steps)
