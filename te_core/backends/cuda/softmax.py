"""Softmax on CUDA: one launch of softmax.cu, and for dsink the column sums of what its rows leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_core import dtypes
from te_core.backends.cuda.sums import TYPES, ColumnSum
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.softmax import SoftmaxOpSpec

_HELD = 32  # elements of a row in one thread; a longer row is read again instead
_VECTORS = 4  # of a row in one thread, where a row is that long
_THREADS = 128  # of a block of small teams
_LARGEST = 1024

#: x, y, mask, sink, share, cu_q, cu_kv | three steps of the mask | rows, cols, sq, heads, band | scale
_FORWARD_ARGS = "pppppppqqqiiiiiiif"
#: dy, y, dx, share, partials, cu_q, cu_kv | rows, cols, sq, heads, band | scale
_BACKWARD_ARGS = "pppppppiiiiiiif"
Pair = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class SoftmaxPlan:
    """One launch; `sizes` are its arguments between pointers and scale."""

    family: str
    kernel: Kernel
    blocks: int
    threads: int
    sizes: tuple[int, ...]
    sums: ColumnSum | None


@dataclass(frozen=True, slots=True)
class Team:
    """`size` threads share a row, `iters` vectors of `width` each (0: read again); `teams` of them make a block."""

    size: int
    iters: int
    width: int
    teams: int


def team_of(cols: int, itemsize: int, alignment: int) -> Team:
    """How a row is shared; `alignment` is the bitwise or of the operands' addresses and of what mask rows need."""
    width = 16 // itemsize
    while width > 1 and (cols % width or alignment % (width * itemsize)):
        width //= 2
    vectors = max(1, cols // width)
    each = max(_VECTORS, 16 // width)
    size = min(_LARGEST, max(_power_from(-(-vectors // each)), min(8, _power_from(vectors))))
    iters = _power_from(-(-vectors // size))
    if iters * width > _HELD:
        size, iters = _LARGEST, 0
    return Team(size, iters, width, max(1, _THREADS // size) if size <= 32 else 1)


def _power_from(n: int) -> int:
    """The smallest power of two from n on."""
    return 1 << (n - 1).bit_length()


def _plan(
    rt: Runtime, entry: str, args: str, spec: SoftmaxOpSpec, alignment: int, steps: tuple[int, ...] = ()
) -> SoftmaxPlan:
    """`steps`: what stands before the sizes."""
    (batch, heads, sq, cols), dtype, band = spec.shape, spec.dtype, spec.band
    team = team_of(cols, dtype.itemsize, alignment)
    banded = band.bounded or spec.lengths
    full = not banded and team.size * team.iters * team.width == cols
    kernel = loader.get(
        rt,
        "softmax",
        entry=entry,
        args=args,
        DTYPE=TYPES[dtype],
        VEC=team.width,
        SIZE=team.size,
        ITERS=team.iters,
        TEAMS=team.teams,
        FULL=int(full),
        BANDED=int(banded),
        MASK=int(spec.mask is not None),
        SINK=int(spec.sink),
    )
    rows = batch * heads * sq
    sums = None
    if entry == "softmax_backward" and spec.sink:
        sums = ColumnSum(rt, batch * sq, heads, dtypes.float32, dtypes.float32)
    how = "held" if team.iters else "streamed"
    writes = cols or (entry == "softmax_forward" and spec.sink)  # a row of no scores is all the sink's
    return SoftmaxPlan(
        f"{entry}_{how}",
        kernel,
        -(-rows // team.teams) if writes else 0,
        team.size * team.teams,
        (*steps, rows, cols, sq, heads, band.left, band.right, int(band.bottom_right)),
        sums,
    )


def plan_softmax_forward(rt: Runtime, spec: SoftmaxOpSpec) -> SoftmaxPlan:
    """The launch of `softmax_forward`."""
    steps, alignment = (0, 0, 0), spec.alignment
    if spec.mask is not None:
        b, h, q, k = spec.mask
        steps = (0 if b == 1 else h * q * k, 0 if h == 1 else q * k, 0 if q == 1 else k)
        # A vector of mask bytes stands at its columns: on its boundary as the scores are, in bytes of its own.
        alignment |= spec.mask_alignment * spec.dtype.itemsize
    return _plan(rt, "softmax_forward", _FORWARD_ARGS, spec, alignment, steps)


def softmax_forward(
    rt: Runtime,
    plan: SoftmaxPlan,
    x: Tensor,
    mask: Tensor | None,
    lengths: Pair,
    sinks: Pair,
    out: Tensor,
    scale: float,
) -> None:
    """out = softmax(scale * x) over what is seen; of `sinks` the second, the share, is written."""
    if plan.blocks:
        addresses = (0 if t is None else t.ptr for t in (mask, *sinks, *lengths))
        plan.kernel(rt, plan.blocks, plan.threads, x.ptr, out.ptr, *addresses, *plan.sizes, scale)


def plan_softmax_backward(rt: Runtime, spec: SoftmaxOpSpec) -> SoftmaxPlan:
    """The launches of `softmax_backward`."""
    return _plan(rt, "softmax_backward", _BACKWARD_ARGS, spec, spec.alignment)


def softmax_backward(
    rt: Runtime, plan: SoftmaxPlan, dy: Tensor, y: Tensor, lengths: Pair, sinks: Pair, dx: Tensor, scale: float
) -> None:
    """dx = scale * y * (dy - sum(dy * y)); of `sinks`, (share, dsink), dsink = - sum of share * sum(dy * y)."""
    share, dsink = sinks
    if not plan.blocks:
        if dsink is not None:
            rt.backend.zero(rt, dsink)
        return
    partials = 0 if share is None else rt.workspace("softmax sinks", share.nbytes)
    addresses = (0 if t is None else t.ptr for t in lengths)
    plan.kernel(
        rt,
        plan.blocks,
        plan.threads,
        dy.ptr,
        y.ptr,
        dx.ptr,
        0 if share is None else share.ptr,
        partials,
        *addresses,
        *plan.sizes,
        scale,
    )
    if plan.sums is not None and dsink is not None:
        plan.sums(rt, partials, 0, dsink.ptr)
