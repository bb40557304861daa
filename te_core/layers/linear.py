"""The one linear: y = x w^T + b and its gradients, in any precision.

The GEMMs, those of every module, are in te_core/layers/product.py, which says the shapes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from te_core.arguments import explained
from te_core.layers.communicator import Communicator
from te_core.layers.inspector import Inspector
from te_core.layers.meeting import meet
from te_core.layers.parallel import Spread
from te_core.layers.product import LinearSpec as LinearSpec
from te_core.layers.product import Needs as Needs
from te_core.layers.product import Product, gradient_operand, input_operand, saved_weight, sums_of_part, weight_operand
from te_core.layers.product import Sink as Sink
from te_core.quantize.operands import Value, flattened
from te_core.quantize.state import Scales
from te_core.quantized import QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor


class LinearSaved(NamedTuple):
    """What backward reads. Inputs stand here as themselves; quantized operands as the copy it needs."""

    x: Tensor | None  # plain [.., K], or the block of a quantized copy
    weight: Value | None  # the parameter itself: its shape, its dtype, its version
    w: Tensor | None  # plain [N, K], or the block of a quantized copy; None if the parameter is quantized itself
    rng: Tensor | None  # the draws of stochastic rounding


@explained
def forward(
    rt: Runtime,
    x: Value,
    weight: Value,
    bias: Tensor | None,
    rng: Tensor | None = None,
    *,
    spec: LinearSpec,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] = (None,),
    ready: Sequence[QuantizedTensor | None] = (None,),
    comm: Communicator | None = None,
) -> tuple[tuple[Value], LinearSaved]:
    """((y,), saved). `scales` is the delayed-scaling state, if the recipe keeps one; `ready` the weight quantized
    before, if it is; `comm` connects the ranks of a weight that is spread."""
    leading, x2 = flattened(x)
    parallel = None
    if comm is not None:
        parallel = Spread(spec, comm, (scales, 0))
        meet(rt, comm, "Linear", spec, input=x, weight=weight, bias=bias)
        leading = parallel.leading("fprop", leading)
    product = Product(spec, scales, 0, inspectors[0], None, parallel)
    out = rt.empty((*leading, product.sides(weight)[0]), spec.dtype)
    xs = x2, input_operand(rt, x2, product)
    if parallel is not None:
        parallel.send(rt, xs[1])
    ws = weight, weight_operand(rt, weight, product, ready[0])
    kept_x, kept_w = product.keep(rt, xs, ws)
    made = product.fprop(rt, xs, ws, out, bias)
    y = product.delivered(rt, made) if spec.quantize_output else made
    used = any(spec.needs)
    return (y,), LinearSaved(kept_x, weight if used else None, kept_w, rng if used else None)


@explained
def backward(
    rt: Runtime,
    dy: Value,
    saved: LinearSaved,
    *,
    spec: LinearSpec,
    scales: Scales | None = None,
    inspectors: Sequence[Inspector | None] = (None,),
    sinks: Sequence[Sink | None] = (None,),
    comm: Communicator | None = None,
) -> tuple[Value | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), None where `spec.needs` or a sink says so."""
    weight = saved_weight(saved.weight)
    parallel = None if comm is None else Spread(spec, comm, (scales, 0))
    product = Product(spec, scales, 0, inspectors[0], sinks[0], parallel)
    leading, dy2 = flattened(dy)
    db = product.bias_gradient(rt, weight)
    left = db
    if parallel is not None:
        leading = parallel.leading("dgrad", leading)
        left = sums_of_part(rt, dy2, product, db, saved.rng)
    g, db_left = gradient_operand(rt, dy2, product, left, saved.rng)
    if parallel is not None:
        product.begin(rt, g, saved.x, dy2.shape[0], weight)
    dx: Value | None = None
    dw = None
    if spec.needs.input:
        out = rt.empty((*leading, product.sides(weight)[1]), spec.dtype)
        dx = product.dgrad(rt, (dy2, g), weight, saved.w, out)
        if spec.quantize_grad:
            dx = product.delivered_gradient(rt, dx)
    if spec.needs.weight:
        dw = product.wgrad(rt, (dy2, g), product.restored(rt, saved.x, dy2.shape[0], weight), weight, db_left)
    if parallel is not None:
        parallel.settle()
    return dx, dw, db
