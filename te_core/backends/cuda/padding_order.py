"""The order of tokens in rows with padding on CUDA: one launch of padding_order.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.padding_order import PaddingOrderSpec

_THREADS = 1024  # as the kernel has it


@dataclass(frozen=True, slots=True)
class PaddingOrderPlan:
    """A block for each row, and one for the sums; the numbers behind the pointers."""

    kernel: Kernel
    blocks: int
    numbers: tuple[int, int, int, int]
    family: str = "padding_order"


def plan_padding_order(rt: Runtime, spec: PaddingOrderSpec) -> PaddingOrderPlan:
    """The same kernel for all sizes."""
    kernel = loader.get(rt, "padding_order", args="ppppiiqq")
    return PaddingOrderPlan(kernel, spec.rows + 1, (spec.rows, spec.length, spec.token_step, spec.row_step))


def padding_order(rt: Runtime, plan: PaddingOrderPlan, mask: Tensor, there: Tensor, again: Tensor, cu: Tensor) -> None:
    """Tokens first; without rows or tokens the sums alone."""
    plan.kernel(rt, plan.blocks, _THREADS, mask.ptr, there.ptr, again.ptr, cu.ptr, *plan.numbers)
