"""The router on CUDA: one launch of router.cu or router_loss.cu for each operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_core import device, dtypes
from te_core.backends.cuda.sums import TYPES
from te_core.kernels import loader
from te_core.kernels.loader import Kernel
from te_core.runtime import Runtime
from te_core.tensor import Tensor

if TYPE_CHECKING:
    from te_core.ops.router import Routed, RouterTerms, Weighed

_SCORES = {"softmax": 0, "sigmoid": 2, "sqrtsoftplus": 3}
_FORMS = {"": (0, "u8"), "bytemap": (0, "u8"), "bitmap_u8": (1, "u8"), "int16": (2, "short")}
_FORMS |= {"int32": (2, "int"), "int64": (2, "i64")}
_NUMBERS = {dtypes.int32: "int", dtypes.int64: "i64", dtypes.float32: "float", dtypes.bfloat16: "bf16"}
_WARPS = 8  # of a block, at most
_SHARED = 32 << 10  # bytes of a block's keys that are enough for that many; a very long row has a warp alone
_PART, _PARTS = 64, 1024  # rows of a block of the loss at least, blocks at most


def _kernel(rt: Runtime, entry: str, args: str, terms: RouterTerms, form: str, logits: Tensor, dense: bool) -> Kernel:
    score = _SCORES[terms.score] + (terms.score == "softmax" and (dense or terms.pre_softmax))
    kind, routing = _FORMS[form]
    numbers = {"SCORE": score, "DENSE": dense, "FORM": kind}
    return loader.get(rt, "router", entry=entry, args=args, DTYPE=TYPES[logits.dtype], ROUTING=routing, **numbers)


def _grid(rt: Runtime, tokens: int, each: int) -> tuple[int, int]:
    """(blocks, warps of a block) of a launch that has a warp for each token, and so many shared bytes for each warp."""
    warps = max(1, min(_WARPS, _SHARED // each))
    full = device.info(rt.device.index).multiprocessors * (64 // warps)
    return min(-(-tokens // warps), full), warps


def router_forward(rt: Runtime, terms: RouterTerms, form: str, dense: bool, given: Routed) -> None:
    """A warp a token; the last block writes what all have counted."""
    logits, bias, out, routing, counts, offsets, align, histogram, bounds = given
    tokens, experts = logits.shape
    counted = [t for t in (counts, offsets) if t is not None]
    if not tokens:
        for t in counted:
            rt.backend.zero(rt, t)
        return
    each = 4 * (experts + terms.groups)
    blocks, warps = _grid(rt, tokens, each)
    work = rt.workspace("router counts", 4 * (experts + 1), zeroed=True) if counted else 0
    kernel = _kernel(rt, "router_forward", "p" * 9 + "qiiiiiif", terms, form, logits, dense)
    sizes = experts, terms.topk, terms.groups, terms.group_topk, 0 if histogram is None else histogram.shape[1]
    pointers = logits, bias, out, routing, counts, offsets, work, histogram, bounds
    shared = warps * each + (4 * experts if counted else 0)
    kernel(rt, blocks, 32 * warps, *pointers, tokens, *sizes, align, terms.scale, shared=shared)


def router_backward(
    rt: Runtime, terms: RouterTerms, form: str, grad: Tensor, logits: Tensor, routing: Tensor | None, out: Tensor
) -> None:
    """A warp a token."""
    tokens, experts = logits.shape
    dense, each = routing is None, 4 * -(-experts // 32)
    kernel = _kernel(rt, "router_backward", "ppppqiif", terms, form, logits, dense)
    if tokens:
        blocks, warps = _grid(rt, tokens, each)
        numbers = tokens, experts, terms.topk, 1.0 if dense else terms.scale
        kernel(rt, blocks, 32 * warps, grad, logits, routing, out, *numbers, shared=warps * each)


def _loss(rt: Runtime, entry: str, args: str, probs: Tensor, given: Weighed) -> Kernel:
    weight, total = (_NUMBERS[t.dtype] for t in (given.weights, given.total))
    types = {"DTYPE": TYPES[probs.dtype], "WEIGHT": weight, "TOTAL": total}
    return loader.get(rt, "router_loss", entry=entry, args=args + "qqiiif", **types)


def _parts(rows: int, columns: int) -> tuple[tuple[int, int], int]:
    """(blocks over the columns and the rows, rows of a block)."""
    across = -(-columns // 32)
    part = max(_PART, -(-rows // max(1, _PARTS // across)))
    return (across, max(1, -(-rows // part))), part


def _numbers(given: Weighed) -> tuple[float, ...]:
    return given.weights.shape[0], given.experts, given.topk, given.coeff


def router_aux_loss(rt: Runtime, given: Weighed, probs: Tensor, loss: Tensor) -> None:
    """A sum in each block, which the last one adds up."""
    rows, columns = probs.shape
    if not columns:
        rt.backend.zero(rt, loss)
        return
    grid, part = _parts(rows, columns)
    partials = rt.workspace("router loss", 4 * grid[0] * grid[1])
    arrived = rt.workspace("router loss arrived", 4, zeroed=True)
    kernel = _loss(rt, "router_loss", "pppppp", probs, given)
    kernel(rt, grid, 256, probs, given.weights, given.total, loss, partials, arrived, rows, part, *_numbers(given))


def router_aux_loss_backward(rt: Runtime, given: Weighed, dloss: Tensor, out: Tensor) -> None:
    """Each column is one number."""
    rows, columns = out.shape
    kernel = _loss(rt, "router_loss_backward", "pppp", dloss, given)
    if out.size:
        grid, part = _parts(rows, columns)
        kernel(rt, grid, 256, dloss, given.weights, given.total, out, rows, part, *_numbers(given))
