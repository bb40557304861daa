"""Rows of tokens between ranks on CUDA: one launch of context_rows.cu, in the widest vectors that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.context_rows import ContextRowsSpec

_THREADS = 256
_AT_ONCE = 4  # vectors of a thread, as the kernel has it


@dataclass(frozen=True, slots=True)
class ContextRowsPlan:
    """One launch; the numbers behind the pointers."""

    kernel: Kernel
    blocks: int
    threads: tuple[int, int]
    numbers: tuple[int, ...]
    family: str = "context_rows"


def plan_context_rows(rt: Runtime, spec: ContextRowsSpec) -> ContextRowsPlan:
    """Threads for the vectors of a token, four each, and as many tokens as a block then holds."""
    to_ranks, orders = spec.how.endswith("to_ranks"), "sequence" in spec.how
    kernel = loader.get(
        rt,
        "context_rows",
        args="ppp" + "i" * 9 + "q" * 7,
        WIDTH=spec.vector,
        MOVE="ORDER" if orders else "HEADS",
        TO_RANKS=int(to_ranks),
        PACKED=int(orders and spec.form == "thd"),
        BATCH_FIRST=int(spec.form == "bshd"),
    )
    heads, pieces = spec.heads, spec.width // spec.vector
    if heads > 1 and spec.ranked[3] == spec.plain[2] == spec.width and orders:
        heads, pieces = 1, heads * pieces
    across = min(_THREADS, 1 << max(-(-heads * pieces // _AT_ONCE) - 1, 0).bit_length())
    down = _THREADS // across
    slots = (spec.whole if orders and not to_ranks else spec.size * spec.tokens) * spec.batch
    steps = [n // spec.vector for n in (*spec.ranked, *spec.plain)]
    counts = (spec.sequences, spec.size, spec.parts, spec.repeats, spec.tokens, spec.whole, spec.batch)
    return ContextRowsPlan(
        kernel, -(-slots // down) if heads * pieces else 0, (across, down), (*counts, heads, pieces, *steps)
    )


def context_rows(rt: Runtime, plan: ContextRowsPlan, t: Tensor, cu: Tensor | None, out: Tensor) -> None:
    """Copy each token's heads."""
    if plan.blocks:
        plan.kernel(rt, plan.blocks, plan.threads, t.ptr, out.ptr, 0 if cu is None else cu.ptr, *plan.numbers)
