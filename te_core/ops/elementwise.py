"""Residual add, and bias + dropout + residual add with a mask that is drawn again instead of stored.

The mask: word i of Philox4x32-10 decides element i. Key = (seed low 32 bits, seed high 32 bits); counter =
(low 32 bits of i // 4, high 32 bits of i // 4, low 32 bits of offset, (high 32 bits of offset) XOR site), word
i % 4 of the output. Element i is kept when word >= floor(p * 2^32), and scaled by float32(1 / (1 - p)); p = 1 keeps
none.
`rng` is an int64 tensor [2] = (seed, offset) on the device; `site` numbers the place in the model.
"""

from __future__ import annotations

from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor


@operation("""
    a [...] act
    b =a
    out? =a written
""")
def add(rt: Runtime, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a + b in float32, rounded to a's dtype; `out` may be a or b."""
    if out is None:
        out = rt.empty(a.shape, a.dtype)
    rt.backend.add(rt, a, b, out)
    return out


@operation("""
    parts [ranks, m, n] act: The summands.
    out [m, n] parts rows written: Where the result is written.
    must ranks: parts [ranks, m, n] and out [m, n] of one rank or more
""")
def rank_sum(rt: Runtime, parts: Tensor, *, out: Tensor) -> None:
    """out [m, n] = the summands [ranks, m, n] of as many ranks, added in float32 in this order and rounded once.

    Rows of out may lie apart: it may be some of the columns of a matrix.
    """
    rt.backend.rank_sum(rt, parts, out)


_DROPPED = """
    p: Probability that an element is dropped.
    must 0.0 <= p <= 1.0: a probability
    rng? [2] i64: Seed and offset of the draws. None where nothing is drawn.
    must p == 0.0 or rng is not None: rng, an int64 tensor (seed, offset), where p is not 0; pass rng=
    site: Number that tells the draws of one call apart.
"""


@operation(
    """
    x [M, N] act
    bias? [N] x
    residual? =x: Matrix that the result is added to. None adds nothing.
    out? =x written
""",
    _DROPPED,
)
def bias_dropout_add(
    rt: Runtime,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    p: float,
    rng: Tensor | None = None,
    site: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """residual + dropout(x + bias, p) over a matrix x [M, N]; the sum is formed in float32 and rounded once."""
    if out is None:
        out = rt.empty(x.shape, x.dtype)
    rt.backend.bias_dropout_add(rt, x, bias, residual, out, p, rng, site)
    return out


@operation(
    """
    dy [M, N] act
    column_sum? [N] act written
""",
    _DROPPED,
)
def bias_dropout_add_backward(
    rt: Runtime, dy: Tensor, *, p: float, rng: Tensor | None = None, site: int = 0, column_sum: Tensor | None = None
) -> Tensor:
    """The gradient of x: dy where the same mask kept the element, scaled. `column_sum` [N] is the bias gradient.

    The residual's gradient is dy itself.
    """
    dx = rt.empty(dy.shape, dy.dtype)
    rt.backend.bias_dropout_add_backward(rt, dy, dx, p, rng, site, column_sum)
    return dx
