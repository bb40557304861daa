"""Softmax over the last dimension of attention scores, with what hides scores computed instead of read.

With v = scale * x in float32 and m the largest v seen of a row (and its head's sink):

    y_j = exp(v_j - m) / (sum of exp(v - m) over the seen + exp(sink_h - m) if there is a sink), 0 where j is not seen
    dx  = scale * y * (dy - sum(dy * y))        dsink_h = - sum over rows of p * sum(dy * y), p the sink's own share

y is rounded to x's dtype; a row that sees nothing is zeros. The row i of a sequence sees j when
i + shift - left <= j <= i + shift + right (-1: no bound), shift = len_kv - len_q for `bottom_right`, else 0; when
i < len_q and j < len_kv, the lengths being those of `cu_seqlens_*` where given, else sq and sk; and when `mask` is not
True there. dsink is summed in float32 in an order that the shape alone decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from te_core import dtypes
from te_core.ops import _check
from te_core.ops.declare import operation
from te_core.runtime import Runtime
from te_core.spelling import choice_error
from te_core.tensor import Tensor

#: Elements of a row; rows.
MAX_ROW = MAX_ROWS = 2**31 - 1
_MASKS = dtypes.bool_, dtypes.uint8
_CAUSAL = {None: None, "top_left": False, "bottom_right": True}


@dataclass(frozen=True, slots=True)
class Band:
    """Which keys a query sees by its place: `left` before its diagonal to `right` behind it, -1 unlimited."""

    left: int = -1
    right: int = -1
    bottom_right: bool = False

    @property
    def bounded(self) -> bool:
        """Whether it hides anything."""
        return self.left >= 0 or self.right >= 0


def band_of(causal: str | None, left: int = -1, right: int = -1, bottom_right: bool = True) -> Band:
    """The band of "top_left" or "bottom_right" causality within a window, or of a window alone."""
    if causal not in _CAUSAL:
        raise choice_error("softmax", "causal", causal, _CAUSAL)
    found = _CAUSAL[causal]
    return Band(left, right, bottom_right) if found is None else Band(left, max(right, 0), found)


_SCORES = """
    must b * h * sq <= MAX_ROWS and sk <= MAX_ROW: at most {MAX_ROWS} rows of at most as many; split the batch
    band: Which keys a query sees (`Band`).
    must min(band.left, band.right) >= -1: bounds of the window from 0 on, -1 for none; correct the window
    scale: Factor.
    cu_seqlens_q? [b + 1] i32: Running sums of the lengths of the queries' sequences. None: all are whole.
    cu_seqlens_kv? [b + 1] i32: Running sums of the lengths of the keys' sequences. None: all are whole.
    must (cu_seqlens_q is None) == (cu_seqlens_kv is None): both or none; pass the other
"""


@operation(
    """
    x [b, h, sq, sk] act: Scores.
    mask? [...] _MASKS: Mask, not 0 where a score is hidden. None hides nothing.
    sink? [h] f32: Addend of each head's denominator. None has none.
    out? =x written
""",
    _SCORES,
)
def softmax_forward(
    rt: Runtime,
    x: Tensor,
    *,
    scale: float = 1.0,
    band: Band = Band(),
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    sink: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(y, share): y like x [b, h, sq, sk]; share float32 [b, sq, h] is the sink's part of each row (None: no sink).

    mask: bool or uint8 [b or 1, h or 1, sq or 1, sk], dense, True where hidden. cu_seqlens: int32 [b + 1], both or
    none. sink: float32 [h], for "off-by-one" zeros. `out` may be x.
    """
    b, h, sq, _ = x.shape
    if mask is not None:
        _check.broadcast("softmax_forward", "mask", mask, x.shape, _MASKS)
    if out is None:
        out = rt.empty(x.shape, x.dtype)
    share = None if sink is None else rt.empty((b, sq, h), dtypes.float32)
    rt.backend.softmax_forward(rt, band, x, mask, (cu_seqlens_q, cu_seqlens_kv), (sink, share), out, scale)
    return out, share


@operation(
    """
    y [b, h, sq, sk] act: Output of the forward.
    dy =y
    share? [b, sq, h] f32: What forward gave as the sink's part. None without a sink.
""",
    _SCORES,
)
def softmax_backward(
    rt: Runtime,
    dy: Tensor,
    y: Tensor,
    share: Tensor | None = None,
    *,
    scale: float = 1.0,
    band: Band = Band(),
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(dx, dsink): dx like y; dsink float32 [h] with the `share` that forward returned, else None.

    dy and y are not read where the band and the lengths hide scores; a mask shows in y, whose zeros it made.
    """
    dx = rt.empty(y.shape, y.dtype)
    dsink = None if share is None else rt.empty((y.shape[1],), dtypes.float32)
    rt.backend.softmax_backward(rt, band, dy, y, (cu_seqlens_q, cu_seqlens_kv), (share, dsink), dx, scale)
    return dx, dsink
