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
from te_core.dtypes import ACTIVATION_DTYPES, DType
from te_core.ops import _check
from te_core.runtime import Runtime
from te_core.spelling import choice_error
from te_core.tensor import Tensor

#: Elements of a row; rows.
MAX_ROW = MAX_ROWS = 2**31 - 1
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


@dataclass(frozen=True, slots=True)
class SoftmaxOpSpec:
    """All that the launch of a softmax depends on besides addresses; of these how far they are off the 16-byte grid."""

    shape: tuple[int, ...]
    dtype: DType
    band: Band
    mask: tuple[int, ...] | None  # its shape
    lengths: bool
    sink: bool
    alignment: int
    mask_alignment: int = 0


def band_of(causal: str | None, left: int = -1, right: int = -1, bottom_right: bool = True) -> Band:
    """The band of "top_left" or "bottom_right" causality within a window, or of a window alone."""
    if causal not in _CAUSAL:
        raise choice_error("softmax", "causal", causal, _CAUSAL)
    found = _CAUSAL[causal]
    return Band(left, right, bottom_right) if found is None else Band(left, max(right, 0), found)


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
    op = "softmax_forward"
    _check_scores(op, "x", x, band)
    b, h, sq, _ = x.shape
    if mask is not None:
        _check.broadcast(op, "mask", mask, x.shape, (dtypes.bool_, dtypes.uint8))
    _check_lengths(op, b, cu_seqlens_q, cu_seqlens_kv)
    _check.vector(op, "sink", sink, h, (dtypes.float32,))
    _check.result(op, rt.device, "out", out, x.shape, (x.dtype,))
    _check.on_device(op, rt.device, x, mask, cu_seqlens_q, cu_seqlens_kv, sink)
    padded, off = cu_seqlens_q is not None, _check.off(x, out)
    spec = SoftmaxOpSpec(x.shape, x.dtype, band, _check.shape(mask), padded, sink is not None, off, _check.off(mask))
    if out is None:
        out = rt.empty(x.shape, x.dtype)
    share = None if sink is None else rt.empty((b, sq, h), dtypes.float32)
    rt.backend.softmax_forward(rt, spec, x, mask, (cu_seqlens_q, cu_seqlens_kv), (sink, share), out, scale)
    return out, share


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
    op = "softmax_backward"
    _check_scores(op, "y", y, band)
    b, h, sq, _ = y.shape
    _check.like(op, "dy", dy, y)
    _check_lengths(op, b, cu_seqlens_q, cu_seqlens_kv)
    if share is not None:
        _check.sized(op, "share", share, (b, sq, h), (dtypes.float32,), "pass forward's second result")
    _check.on_device(op, rt.device, dy, y, share, cu_seqlens_q, cu_seqlens_kv)
    padded, off = cu_seqlens_q is not None, _check.off(dy, y)
    spec = SoftmaxOpSpec(y.shape, y.dtype, band, None, padded, share is not None, off)
    dx = rt.empty(y.shape, y.dtype)
    dsink = None if share is None else rt.empty((h,), dtypes.float32)
    rt.backend.softmax_backward(rt, spec, dy, y, (cu_seqlens_q, cu_seqlens_kv), (share, dsink), dx, scale)
    return dx, dsink


def _check_scores(op: str, name: str, x: Tensor, band: Band) -> None:
    _check.require(
        x.ndim == 4 and x.is_contiguous and x.dtype in ACTIVATION_DTYPES,
        op,
        f"{name} = {x!r}",
        "dense [b, h, sq, sk] of float32, bfloat16 or float16",
        f"correct {name}",
    )
    _check.require(
        x.shape[0] * x.shape[1] * x.shape[2] <= MAX_ROWS and x.shape[3] <= MAX_ROW,
        op,
        f"{name} = {x!r}",
        f"at most {MAX_ROWS} rows of at most as many",
        "split the batch",
    )
    _check.require(
        min(band.left, band.right) >= -1,
        op,
        f"window ({band.left}, {band.right})",
        "bounds from 0 on, -1 for none",
        "correct the window",
    )


def _check_lengths(op: str, batch: int, cu_q: Tensor | None, cu_kv: Tensor | None) -> None:
    _check.require((cu_q is None) == (cu_kv is None), op, "cu_seqlens of one side", "both or none", "pass the other")
    _check.vector(op, "cu_seqlens_q", cu_q, batch + 1, (dtypes.int32,))
    _check.vector(op, "cu_seqlens_kv", cu_kv, batch + 1, (dtypes.int32,))
