"""Residual add, and bias + dropout + add, on CUDA."""

from __future__ import annotations

from te_core.backends.cuda.quantize import BLOCKS_PER_SM, THREADS, Tiling, multiprocessors
from te_core.backends.cuda.sums import TYPES, add_column_sums, column_workspace
from te_core.dtypes import DType
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_TILE_ROWS, _LANES = 16, 32  # of the strips of elementwise.cu
_PER_BLOCK = 1024  # vectors of a row that a block of rank_sum.cu takes


def add(rt: Runtime, a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a + b."""
    aligned = not (a.ptr | b.ptr | out.ptr) & 15
    kernel = loader.get(
        rt,
        "elementwise",
        entry="add",
        args="pppq",
        DTYPE=TYPES[a.dtype],
        ALIGNED=aligned,
        DROPOUT=False,
        COLUMN_SUM=False,
    )
    blocks = min(1 << 20, max(1, -(-a.size * a.dtype.itemsize // (256 * 2 * 16))))
    kernel(rt, blocks, 256, a, b, out, a.size)


def rank_sum(rt: Runtime, parts: Tensor, out: Tensor) -> None:
    """Dense rows are one; a long row has several blocks."""
    ranks, rows, width = parts.shape
    step, size = out.row_major_strides()[0], parts.dtype.itemsize
    if step == width:
        rows, width = 1, rows * width
    bits = parts.ptr | out.ptr | width * size | (step * size if rows > 1 else 0) | 16
    vec = (bits & -bits) // size
    kernel = loader.get(
        rt, "rank_sum", args="ppqqiiq", DTYPE=TYPES[out.dtype], VEC=vec, RANKS=ranks if 2 <= ranks <= 8 else 0
    )
    vectors = width // vec
    segments = max(1, -(-vectors // _PER_BLOCK))
    if rows and vectors:
        kernel(rt, rows * segments, 256, parts, out, rows, vectors, segments, ranks, step)


def _strips(
    rt: Runtime, entry: str, args: str, x: Tensor, p: float, aligned: bool, sum_dtype: DType | None = None
) -> tuple[Kernel, Tiling]:
    """A kernel over the strips of a matrix."""
    (rows, cols), vector = x.shape, 16 // x.dtype.itemsize
    kernel = loader.get(
        rt,
        "elementwise",
        entry=entry,
        args=args,
        DTYPE=TYPES[x.dtype],
        DROPOUT=p > 0.0,
        COLUMN_SUM=sum_dtype is not None,
        ALIGNED=aligned and cols % vector == 0,
    )
    across = max(1, -(-cols // (_LANES * vector)))
    down = max(1, -(-rows // _TILE_ROWS))
    # Two tiles a block, or as many as keep the partial sums few.
    steps = -(-across * down // (BLOCKS_PER_SM * multiprocessors(rt))) if sum_dtype is not None else 2
    steps = max(1, steps, -(-down // 65535))
    return kernel, Tiling((across, -(-down // steps)), steps)


def mask_of(p: float) -> tuple[int, float]:
    """The threshold and the factor of a dropout, as the kernels take them."""
    if p == 1.0:  # a factor of 0 drops even the one word that reaches the threshold
        return signed(0xFFFFFFFF), 0.0
    return signed(int(p * 2.0**32)), 1.0 / (1.0 - p)


def signed(word: int) -> int:
    """The low 32 bits of a number, as the int32 that carries them to a kernel."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def bias_dropout_add(
    rt: Runtime,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    p: float,
    rng: Tensor | None,
    site: int,
) -> None:
    """out = residual + dropout(x + bias)."""
    aligned = not any(t is not None and t.ptr & 15 for t in (x, bias, residual, out))
    kernel, tiles = _strips(rt, "bias_dropout_add", "pppppqqiiif", x, p, aligned)
    numbers = (*x.shape, tiles.steps, signed(site), *mask_of(p))
    kernel(rt, tiles.grid, THREADS, x, bias, residual, out, rng, *numbers)


def bias_dropout_add_backward(
    rt: Runtime, dy: Tensor, dx: Tensor, p: float, rng: Tensor | None, site: int, column_sum: Tensor | None
) -> None:
    """dx = dy where the mask kept the element, scaled; its column sums."""
    sum_dtype = None if column_sum is None else column_sum.dtype
    aligned = not (dy.ptr | dx.ptr) & 15
    kernel, tiles = _strips(rt, "dropout_backward", "ppppqqiiif", dy, p, aligned, sum_dtype)
    sums = 0 if column_sum is None else column_workspace(rt, tiles.grid[1], dy.shape[1])
    numbers = (*dy.shape, tiles.steps, signed(site), *mask_of(p))
    kernel(rt, tiles.grid, THREADS, dy, dx, rng, sums, *numbers)
    add_column_sums(rt, sums, tiles.grid[1], column_sum)
