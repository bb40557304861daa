"""The order of tokens in rows with padding: the tokens of each row first, then its padding, each in their own order.

All backends of attention take sequences by their lengths, from the beginning of a row on. A mask's order says where
tokens have to go for that, and its running sums say how long the rows then are. Nothing here waits for the host.
"""

from __future__ import annotations

from math import prod

from te_core import dtypes
from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_FORMATS = ("sbhd", "bshd")
_MASKS = (dtypes.bool_, dtypes.uint8)


@operation("""
    form in _FORMATS: Format that places are counted in.
    mask [...] _MASKS: Mask [b, s] or [b, .., s], not 0 where padding is.
    must mask.ndim > 0: a mask [b, s]; pass a row for each sequence
    must max(mask.size, mask.shape[0] + 1) < 1 << 31: less than 2^31 tokens and rows; split the batch
""")
def padding_order(rt: Runtime, mask: Tensor, *, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """(there, again, cu_seqlens) of a padding mask [b, s], or [b, .., s], which is not 0 where padding is.

    `form` says what places are counted in: bshd in [b, s, ..], sbhd in [s, b, ..].

        there       int64 [b * s]: the place of the token that comes to place i
        again       int64 [b * s]: the place that the token of place i has gone to
        cu_seqlens  int32 [b + 1]: running sums of the tokens of rows
    """
    rows, length = mask.shape[0], prod(mask.shape[1:])
    steps = (rows, 1) if form == "sbhd" else (1, length)  # from a token, and from a row, to the next
    there, again = (rt.empty((mask.size,), dtypes.int64) for _ in range(2))
    cu = rt.empty((rows + 1,), dtypes.int32)
    rt.backend.padding_order(rt, steps, mask.reshape(rows, length), there, again, cu)
    return there, again, cu
