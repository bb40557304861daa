"""Softmax on CUDA: one launch of softmax.cu, and for dsink the column sums of what its rows leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_core import dtypes
from te_core.backends.cuda import norm_tiling as tiling
from te_core.backends.cuda.sums import TYPES, column_sum
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.softmax import Band

_HELD = 32  # elements of a row in one thread; a longer row is read again instead
_VECTORS = 4  # of a row in one thread, where a row is that long
_THREADS = 128  # of a block of small teams
_LARGEST = 1024

_ARGS = {
    # x, y, mask, sink, share, cu_q, cu_kv | three steps of the mask | rows, cols, sq, heads, band | scale
    "softmax_forward": "pppppppqqqiiiiiiif",
    # dy, y, dx, share, partials, cu_q, cu_kv | rows, cols, sq, heads, band | scale
    "softmax_backward": "pppppppiiiiiiif",
}
Pair = tuple[Tensor | None, Tensor | None]


def team_of(cols: int, itemsize: int, alignment: int) -> tiling.Team:
    """How a row is shared; `alignment` is the bitwise or of the operands' addresses and of what mask rows need."""
    width = tiling.vector_width(cols, alignment, (itemsize,), 16 // itemsize)
    vectors = max(1, cols // width)
    each = max(_VECTORS, 16 // width)
    size = min(_LARGEST, max(_power_from(-(-vectors // each)), min(8, _power_from(vectors))))
    iters = _power_from(-(-vectors // size))
    if iters * width > _HELD:
        size, iters = _LARGEST, 0
    return tiling.Team(size, iters, width, max(1, _THREADS // size) if size <= 32 else 1)


def _power_from(n: int) -> int:
    """The smallest power of two from n on."""
    return 1 << (n - 1).bit_length()


def _run(
    rt: Runtime,
    entry: str,
    band: Band,
    x: Tensor,
    alignment: int,
    operands: tuple[Any, ...],
    scale: float,
    **flags: bool,
) -> None:
    """`operands`: all that the kernel takes before its sizes."""
    (batch, heads, sq, cols), dtype = x.shape, x.dtype
    team = team_of(cols, dtype.itemsize, alignment)
    kernel = loader.get(
        rt,
        "softmax",
        entry=entry,
        args=_ARGS[entry],
        DTYPE=TYPES[dtype],
        VEC=team.width,
        SIZE=team.size,
        ITERS=team.iters,
        TEAMS=team.teams,
        FULL=not flags["BANDED"] and team.is_full(cols),
        **flags,
    )
    rows = batch * heads * sq
    sizes = (rows, cols, sq, heads, band.left, band.right, band.bottom_right)
    if rows:
        kernel(rt, -(-rows // team.teams), team.threads, *operands, *sizes, scale)


def softmax_forward(
    rt: Runtime, band: Band, x: Tensor, mask: Tensor | None, lengths: Pair, sinks: Pair, out: Tensor, scale: float
) -> None:
    """out = softmax(scale * x) over what is seen; of `sinks` the second, the share, is written."""
    steps, alignment, sink = (0, 0, 0), x.ptr | out.ptr, sinks[0] is not None
    if mask is not None:
        b, h, q, k = mask.shape
        steps = (0 if b == 1 else h * q * k, 0 if h == 1 else q * k, 0 if q == 1 else k)
        # A vector of mask bytes stands at its columns: on its boundary as the scores are, in bytes of its own.
        alignment |= mask.ptr * x.dtype.itemsize
    operands = (x, out, mask, *sinks, *lengths, *steps)
    if x.shape[3] or sink:  # a row of no scores is all the sink's
        banded = band.bounded or lengths[0] is not None
        flags = {"BANDED": banded, "MASK": mask is not None, "SINK": sink}
        _run(rt, "softmax_forward", band, x, alignment, operands, scale, **flags)


def softmax_backward(
    rt: Runtime, band: Band, dy: Tensor, y: Tensor, lengths: Pair, sinks: Pair, dx: Tensor, scale: float
) -> None:
    """dx = scale * y * (dy - sum(dy * y)); of `sinks`, (share, dsink), dsink = - sum of share * sum(dy * y)."""
    share, dsink = sinks
    if not y.size:
        if dsink is not None:
            rt.backend.zero(rt, dsink)
        return
    partials = 0 if share is None else rt.workspace("softmax sinks", share.nbytes)
    operands = (dy, y, dx, share, partials, *lengths)
    flags = {"BANDED": band.bounded or lengths[0] is not None, "MASK": False, "SINK": share is not None}
    _run(rt, "softmax_backward", band, y, dy.ptr | y.ptr, operands, scale, **flags)
    if dsink is not None:
        batch, heads, sq, _ = y.shape
        column_sum(rt, partials, (batch * sq, heads), dtypes.float32, dsink)
