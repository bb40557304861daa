"""Cross entropy on CUDA: one launch of loss.cu over logits, one of loss_values.cu over what it found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_core import device, dtypes
from te_core.backends.cuda import norm_tiling as tiling
from te_core.backends.cuda.sums import TYPES
from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.loss import LossOperands, LossTerms

_TARGETS = {dtypes.int64: "i64", dtypes.int32: "int"}
_TOTALS = {"sum": 0, "mean": 1, "mean of some": 2}
_EACH = 8  # vectors that a thread takes where a row is that short; a block is 128 to 1024 threads
#: Bytes of a row that a block holds: what a multiprocessor has, and on other architectures than these what all have.
_HELD, _HELD_ANYWHERE = {9: 224 << 10, 10: 224 << 10}, 96 << 10


def _tiling(rt: Runtime, logits: Tensor, alignment: int) -> tuple[int, int, int, bool]:
    """(elements of a vector, threads of a block, vectors that each holds, whether rows are no whole vectors)."""
    cols, size = logits.shape[1], logits.dtype.itemsize
    width = 16 // size
    peel = not alignment & 15 and cols % width > 0
    if not peel:
        width = tiling.vector_width(cols, alignment, (size,), width)
    vectors = -(-cols // width)
    threads = min(1024, max(128, 1 << (-(-vectors // _EACH) - 1).bit_length()))
    most = _HELD.get(device.info(rt.device.index).capability[0], _HELD_ANYWHERE) // (threads * width * size)
    return width, threads, min(-(-vectors // threads), most, 4 * _EACH), peel


def loss_rows(rt: Runtime, terms: LossTerms, operands: LossOperands) -> None:
    """The facts of rows, their gradient, or both."""
    logits, target, facts, known, grad, out = operands
    (rows, cols), dtype = logits.shape, logits.dtype
    width, threads, held, peel = _tiling(rt, logits, logits.ptr | (0 if out is None else out.ptr))
    kernel = loader.get(
        rt,
        "loss",
        args="p" * 6 + "qqqq" + "iii" + "ff",
        DTYPE=TYPES[dtype],
        TARGET=_TARGETS[target.dtype],
        VEC=width,
        SIZE=threads,
        HELD=held,
        PEEL=peel,
        FIND=known is None,
        GRADIENT=out is not None,
    )
    numbers = (rows, terms.first, terms.classes, terms.ignore_index, cols)
    ranks, step = 1 if known is None else known.shape[0], int(grad is not None and grad.size > 1)
    pointers = (logits, target, facts, known, grad, out)
    if rows:
        shared = held * threads * width * dtype.itemsize
        factors = (terms.label_smoothing, terms.z_loss)
        kernel(rt, rows, threads, *pointers, *numbers, ranks, step, *factors, shared=shared)


def loss_values(
    rt: Runtime, terms: LossTerms, total: str, facts: Tensor, target: Tensor, losses: Tensor, both: Tensor
) -> None:
    """The loss of each row, and their total."""
    kernel = loader.get(rt, "loss_values", args="ppppqqqiff", TARGET=_TARGETS[target.dtype], HOW=_TOTALS[total])
    ranks, rows, _ = facts.shape
    numbers = (rows, terms.classes, terms.ignore_index, ranks, terms.label_smoothing, terms.z_loss)
    kernel(rt, 1, 1024, facts, target, losses, both, *numbers)
