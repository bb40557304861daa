"""Attention by cuDNN with a user's functions in the graph; see te_core.ops.attention_scored for the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_core.backends.cuda import cudnn
from te_core.backends.cuda.attention_graph import Given
from te_core.backends.cuda.attention_plan import Frame, dense_like, graph_of, graph_spec, layouts, require, run_graph
from te_core.errors import UnsupportedError
from te_core.runtime import Runtime

if TYPE_CHECKING:
    from te_core.ops.attention_scored import ScoredAsked, ScoredOperands


def plan_attention_scored(rt: Runtime, asked: ScoredAsked) -> cudnn.Graph:
    """Find or build the graph."""
    spec, mod, q, k, v, given, backward, stats, terms = asked
    size = asked.size
    op = "attention_scored"
    require(rt, op, spec, size, q.dtype, (q, k, v), training=backward, terms=terms)
    if not (q.size and k.size):
        raise UnsupportedError(op, f"q {q!r} and k {k!r}", "some queries and keys", "leave an empty batch out")
    # No lengths, whatever the sizes are: cuDNN takes none where scores are modified.
    frame = Frame(spec, size, size.batch, size.sq, size.skv, False, False)
    found = layouts(frame, q, k, v, False, stats, dense_like(q, k, v) if backward else None)
    tensors = tuple(Given(name, t.shape, t.row_major_strides(), t.dtype.name) for name, t in given)
    deterministic = spec.deterministic and backward
    wants = graph_spec(
        frame, q.dtype, found, backward=backward, deterministic=deterministic, score_mod=mod, given=tensors
    )
    return graph_of(rt, wants)


def attention_scored(rt: Runtime, plan: cudnn.Graph, operands: ScoredOperands) -> None:
    """Run the graph."""
    run_graph(rt, plan, {**operands._asdict(), **dict(operands.given)})
