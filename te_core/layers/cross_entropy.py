"""Cross entropy of logits, and of the product that makes them, which then are never whole: a chunk of rows at a time.

Both also where ranks share the classes: `comm` connects them, each with its part of the logits or of the weight. What
travels is three numbers of a row, and the sum of hidden's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from te_core import dtypes
from te_core.arguments import explained
from te_core.errors import ArgumentError
from te_core.layers.communicator import Communicator, Handle
from te_core.layers.product import LinearSpec, Product, Sink, gradient_operand, input_operand, weight_operand
from te_core.ops import raw as ops
from te_core.ops.loss import FACTS, LossTerms
from te_core.quantize.operands import Uses, Value
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: Bytes that the logits of a chunk may take, but for rows that it may have in any case, and what these are rounded up
#: to. Each chunk reads and writes the weight's gradient in float32, and small products are slower: 8192 x 4096 x 128256
#: in chunks of 2048, 4096 and 8192 rows took 38.5, 36.8 and 35.8 ms (H100, 2026-11-27, benchmarks/loss.py).
CHUNK_BYTES, CHUNK_ROWS, CHUNK_STEP = 512 << 20, 4096, 128


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """All that the loss of a product depends on besides tensors."""

    linear: LinearSpec  # of the product; its needs of hidden's and the weight's gradient
    terms: LossTerms
    total: str = "sum"  # of the losses (te_core.ops.loss.TOTALS)
    chunk: int | None = None  # rows whose logits are there at a time; None: `chunk_rows`
    bias_gradient: bool = False

    def __post_init__(self) -> None:
        if self.chunk is not None and (type(self.chunk) is not int or self.chunk < 1):
            raise ArgumentError("linear_cross_entropy", f"chunk={self.chunk!r}", "a number of rows", "leave it out")


class HeadOperands(NamedTuple):
    """What the loss of a product reads."""

    hidden: Tensor  # [M, K]
    weight: Value  # [V, K]
    bias: Tensor | None
    target: Tensor


class Loss(NamedTuple):
    """What a forward computes."""

    losses: Tensor  # float32 [M]
    total: Tensor  # float32 [2]: theirs, and what a gradient of it is scaled by
    facts: Tensor  # [M, FACTS] of this rank's classes; of logits one row more, which has `total`


class Gradients(NamedTuple):
    """Of the sum of all losses; None for what nobody needs."""

    hidden: Tensor | None
    weight: Tensor | None  # float32, as that of the bias
    bias: Tensor | None


@explained
def logits_forward(
    rt: Runtime,
    logits: Tensor,
    target: Tensor,
    *,
    terms: LossTerms,
    total: str = "sum",
    comm: Communicator | None = None,
) -> Loss:
    """The loss of logits [M, V]; of ranks' logits each has its V columns."""
    rows = logits.shape[0]
    kept = rt.empty((rows + 1, FACTS), dtypes.float32)  # in one piece: what a backward has to have
    both = kept.reshape(-1).rows(rows * FACTS, rows * FACTS + 2)
    facts = ops.loss_facts(rt, logits, target, terms=terms, out=kept.rows(0, rows))
    values = ops.loss_values(rt, _of_all(rt, facts, comm), target, terms=terms, total=total, out=both)
    return Loss(*values, kept)


@explained
def logits_backward(
    rt: Runtime,
    logits: Tensor,
    target: Tensor,
    facts: Tensor,
    *,
    terms: LossTerms,
    grad: Tensor,
    out: Tensor | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """The gradient of logits, in `out` if given; grad float32 [M], or [1] for all; facts: as the forward gave them."""
    known = _of_all(rt, facts.rows(0, logits.shape[0]), comm)
    return ops.loss_gradient(rt, logits, target, terms=terms, known=known, grad=grad, out=out)[0]


@explained
def head_forward(
    rt: Runtime, given: HeadOperands, *, spec: HeadSpec, comm: Communicator | None = None, gradients: bool = False
) -> tuple[Loss, Gradients | None]:
    """The loss of hidden [M, K] weight [V, K]^T + bias; with `gradients` those of the sum of losses, on the way."""
    head, target = _Head(rt, given, spec, comm), given.target
    facts = rt.empty((target.shape[0], FACTS), dtypes.float32)
    for rows in head.chunks():
        logits, part, goal = head.logits(rows), facts.rows(*rows), target.rows(*rows)
        if gradients and comm is None:
            ops.loss_gradient(rt, logits, goal, terms=spec.terms, out=logits, facts=part)
        else:
            ops.loss_facts(rt, logits, goal, terms=spec.terms, out=part)
            if gradients:
                ops.loss_gradient(rt, logits, goal, terms=spec.terms, known=_of_all(rt, part, comm), out=logits)
        if gradients:
            head.add_gradients(rows, logits)
    values = ops.loss_values(rt, _of_all(rt, facts, comm), target, terms=spec.terms, total=spec.total)
    return Loss(*values, facts), head.gradients() if gradients else None


@explained
def head_backward(
    rt: Runtime, given: HeadOperands, facts: Tensor, grad: Tensor, *, spec: HeadSpec, comm: Communicator | None = None
) -> Gradients:
    """The gradients of losses whose own are `grad` [M]: the logits are computed again."""
    head, target = _Head(rt, given, spec, comm), given.target
    for rows in head.chunks():
        logits, part = head.logits(rows), grad.rows(*rows)
        known = _of_all(rt, facts.rows(*rows), comm)
        ops.loss_gradient(rt, logits, target.rows(*rows), terms=spec.terms, known=known, grad=part, out=logits)
        head.add_gradients(rows, logits)
    return head.gradients()


def chunk_rows(rows: int, classes: int, itemsize: int) -> int:
    """How many rows a chunk has: as few chunks as CHUNK_BYTES or CHUNK_ROWS allow, about equal."""
    most = max(CHUNK_ROWS, CHUNK_BYTES // (max(classes, 1) * itemsize) // CHUNK_STEP * CHUNK_STEP)
    parts = max(1, -(-rows // most))
    return max(1, -(-rows // (parts * CHUNK_STEP))) * CHUNK_STEP


def _of_all(rt: Runtime, facts: Tensor, comm: Communicator | None) -> Tensor:
    """[ranks, M, FACTS] of all ranks."""
    if comm is None:
        return facts.reshape(1, *facts.shape)
    known = rt.empty((comm.size, *facts.shape), dtypes.float32)
    comm.all_gather(rt, facts, known).wait()
    return known


class _Head:
    """The product over chunks of rows: what is made once, and what adds up."""

    def __init__(self, rt: Runtime, given: HeadOperands, spec: HeadSpec, comm: Communicator | None) -> None:
        hidden, weight, self.bias, _ = given
        self.rt, self.hidden, self.weight, self.spec, self.comm = rt, hidden, weight, spec, comm
        self.product = Product(spec.linear)
        self.w = weight_operand(rt, weight, self.product, None)
        self.kept: tuple[Tensor | None, Tensor | None] = None, None
        self.on_their_way: list[Handle] = []
        (rows, _), (classes, width) = hidden.shape, weight.shape
        self.rows = spec.chunk or chunk_rows(rows, classes, spec.linear.dtype.itemsize)
        needs = spec.linear.needs
        make = rt.empty if rows else rt.zeros  # without rows nothing is written
        self.d_hidden = make(hidden.shape, spec.linear.dtype) if needs.input else None
        self.d_weight = make((classes, width), dtypes.float32) if needs.weight else None
        self.d_bias = make((-(-rows // self.rows), classes), dtypes.float32) if spec.bias_gradient else None

    def chunks(self) -> Iterator[tuple[int, int]]:
        rows = self.hidden.shape[0]
        for start in range(0, rows, self.rows):
            yield start, min(start + self.rows, rows)

    def logits(self, rows: tuple[int, int]) -> Tensor:
        """Those of a chunk, whose operands are kept for its gradients."""
        rt, product, x = self.rt, self.product, self.hidden.rows(*rows)
        xs: tuple[Value, Uses] = x, input_operand(rt, x, product)
        ws = self.weight, self.w
        self.kept = product.keep(rt, xs, ws)
        out = rt.empty((x.shape[0], self.weight.shape[0]), self.spec.linear.dtype)
        return product.fprop(rt, xs, ws, out, self.bias)

    def add_gradients(self, rows: tuple[int, int], dy: Tensor) -> None:
        """Of the chunk whose logits came last, from the gradient of these."""
        rt, (start, stop), (kept_x, kept_w) = self.rt, rows, self.kept
        product = self.product
        if self.d_weight is not None:
            product = product._replace(sink=Sink(self.d_weight, accumulate=start > 0))
        if self.d_bias is not None:
            ops.column_sum(rt, dy, self.d_bias.rows(start // self.rows, start // self.rows + 1).reshape(-1))
        g, _ = gradient_operand(rt, dy, product, None, None)
        if self.d_hidden is not None:
            part = product.dgrad(rt, (dy, g), self.weight, kept_w, self.d_hidden.rows(start, stop))
            if self.comm is not None:
                self.on_their_way.append(self.comm.all_reduce(rt, part))
        if self.d_weight is not None:
            product.wgrad(rt, (dy, g), product.restored(rt, kept_x, stop - start, self.weight), self.weight, None)

    def gradients(self) -> Gradients:
        """What has added up."""
        for handle in self.on_their_way:
            handle.wait()
        bias = None
        if self.d_bias is not None:
            bias = self.rt.zeros(self.d_bias.shape[1:], dtypes.float32)
            if self.d_bias.shape[0]:
                ops.column_sum(self.rt, self.d_bias, bias)
        return Gradients(self.d_hidden, self.d_weight, bias)
