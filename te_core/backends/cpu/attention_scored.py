"""What the CPU says to operations in a cuDNN graph; see te_core.ops.attention_scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_core.errors import UnsupportedError
from te_core.runtime import Runtime

if TYPE_CHECKING:
    from te_core.ops.attention_scored import ScoredAsked, ScoredOperands


def plan_attention_scored(rt: Runtime, asked: ScoredAsked) -> Any:
    """Refuse: the functions build a graph that only cuDNN runs."""
    raise UnsupportedError(
        "attention_scored",
        "functions of a cuDNN graph (score_mod) on the CPU",
        "a GPU with cuDNN",
        "write the function on torch tensors: torch_score_mod of DotProductAttention",
    )


def attention_scored(rt: Runtime, plan: Any, operands: ScoredOperands) -> None:
    """Never reached: there is no plan."""
