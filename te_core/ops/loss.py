"""Cross entropy over the rows of logits, whole or one rank's part of the classes, in float32 whatever they lie in.

With t the target of a row, V all classes, s label smoothing and z the factor of the z-loss:

    lse = log(sum(exp(x)))        loss = lse - (1 - s) x_t - s / V sum(x) + z lse^2
    dx_j = g ((1 + 2 z lse) exp(x_j - lse) - s / V - (1 - s) [j = t])

A row whose target is `ignore_index` has loss 0 and gradient 0, and is not read. A target that is neither that nor a
class gives NaN, in both: nothing waits for the device to tell. What the ranks of a vocabulary exchange are `facts`,
three numbers of a row: lse and sum(x) over its classes, and x_t where it has the target (else 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor

FACTS = 3
MAX_ROW = MAX_ROWS = 2**31 - 1
TARGETS = (dtypes.int64, dtypes.int32)
#: What a row's losses come to: their sum; their mean, NaN over no rows; the same, 0 over no rows.
TOTALS = ("sum", "mean", "mean of some")


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Which loss it is. `classes` counts those of all ranks, of which logits begin with `first`."""

    classes: int
    first: int = 0
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ArgumentError("cross entropy", f"label_smoothing={self.label_smoothing}", "0 to 1", "correct it")
        if not 0.0 <= self.z_loss < float("inf"):
            raise ArgumentError("cross entropy", f"z_loss={self.z_loss}", "a finite number from 0 on", "correct it")


class LossOperands(NamedTuple):
    """What a launch over logits reads and writes."""

    logits: Tensor
    target: Tensor
    facts: Tensor  # written where `known` is None
    known: Tensor | None  # [ranks, M, FACTS]
    grad: Tensor | None  # of each row's loss, or one for all
    out: Tensor | None


_ROWS = """
    logits [M, V] act: Scores of the classes.
    target [M] TARGETS: Class of each row.
    terms: Options of the loss.
    must M <= MAX_ROWS and 1 <= V <= MAX_ROW and 0 <= terms.first <= terms.classes - V: 1 to {MAX_ROW} classes, all
        among those of terms; correct the terms
"""


@operation(
    _ROWS,
    """
    out? [M, FACTS] f32 written
""",
    runs="loss_rows",
)
def loss_facts(rt: Runtime, logits: Tensor, target: Tensor, *, terms: LossTerms, out: Tensor | None = None) -> Tensor:
    """float32 [M, FACTS] of the rows of logits [M, V]; target int64 or int32 [M]."""
    facts = rt.empty((logits.shape[0], FACTS), dtypes.float32) if out is None else out
    rt.backend.loss_rows(rt, terms, LossOperands(logits, target, facts, None, None, None))
    return facts


@operation("""
    target [M] TARGETS
    total in TOTALS: How the losses come to one number: "sum", "mean" over rows that count, or "mean of some", whose
        part is here.
    facts [ranks, M, FACTS] f32: Facts of all ranks.
    out? [2] f32 written: The total and its factor. None allocates them.
    must ranks >= 1: facts of one rank or more; put the facts of all ranks behind one another
""")
def loss_values(
    rt: Runtime, facts: Tensor, target: Tensor, *, terms: LossTerms, total: str = "sum", out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(float32 [M], the loss of each row; float32 [2]: their total, and what a gradient of the total is scaled by).

    facts: [ranks, M, FACTS], of all ranks. The order of the additions depends on M alone. `out` receives the second.
    """
    losses, both = rt.empty(target.shape, dtypes.float32), rt.empty((2,), dtypes.float32) if out is None else out
    rt.backend.loss_values(rt, terms, total, facts, target, losses, both)
    return losses, both


@operation(
    _ROWS,
    """
    known? [ranks, M, FACTS] f32: Facts of all ranks. None finds them in the same pass.
    must known is None or known.shape[0] >= 1: facts of one rank or more; put the facts of all ranks behind one another
    must known is not None or V == terms.classes: all classes, or known; pass known
    grad? [...] f32: Factor of the gradient, [M] or [1]. None is 1.
    must grad is None or grad.shape in ((1,), (M,)): a factor for each row, or one for all; correct grad
    out? =logits written
    facts? [M, FACTS] f32 written: Where facts of the rows are written, without `known`. None allocates them.
""",
    runs="loss_rows",
)
def loss_gradient(
    rt: Runtime,
    logits: Tensor,
    target: Tensor,
    *,
    terms: LossTerms,
    known: Tensor | None = None,
    grad: Tensor | None = None,
    out: Tensor | None = None,
    facts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(the gradient of logits, in their dtype; facts). `out` may be logits.

    known: the facts of all ranks. Without them logits are all classes, and the same pass finds their facts. grad:
    float32 [M], or [1] for all rows: what the gradient is multiplied by.
    """
    if known is None and facts is None:
        facts = rt.empty((logits.shape[0], FACTS), dtypes.float32)
    if out is None:
        out = rt.empty(logits.shape, logits.dtype)
    read = facts if known is None else known
    assert read is not None
    rt.backend.loss_rows(rt, terms, LossOperands(logits, target, read, known, grad, out))
    return out, None if known is not None else facts
