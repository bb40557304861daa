"""Activation functions over the rows of a matrix, forward and backward, optionally delivered in FP8.

Plain ones map x [M, N] to [M, N]; gated ones map x [M, 2N] = (a | b) to act(a) * b, [M, N]. All arithmetic is in
float32 and the result is rounded to the dtype of x; a cast starts from exactly that rounded value.

    gelu   0.5 x (1 + tanh(0.7978845608 (x + 0.044715 x^3)))        geglu   gelu(a) * b
    qgelu  x sigmoid(1.702 x)                                        qgeglu  qgelu(a) * b
    relu   max(x, 0)                                                 reglu   relu(a) * b
    srelu  max(x, 0)^2                                               sreglu  srelu(a) * b
    silu   x sigmoid(x)                                              swiglu  silu(a) * b
                                                                     glu     sigmoid(a) * b
    clamped_swiglu   with a' = min(a, limit) and b' = b between -limit and limit:  a' sigmoid(alpha a') * (b' + offset);
                     the gradient is 0 where the limit was passed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from te_core.ops.declare import exported, operation
from te_core.ops.quantize import allocate, check_cast, is_apart, needs_values, quantize
from te_core.quantized import BLOCK, Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
#: What is applied to the first half.
GATED = {
    "geglu": "gelu",
    "glu": "sigmoid",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped",
}
KINDS = (*PLAIN, *GATED)


class Clamp(NamedTuple):
    """The parameters of clamped_swiglu."""

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """What is asked of an activation besides its tensors."""

    kind: str
    clamp: Clamp  # read by clamped_swiglu
    keep: bool

    @property
    def gated(self) -> bool:
        """Whether it halves the width."""
        return self.kind in GATED

    @property
    def plain(self) -> str:
        """What is applied to x, or to its first half."""
        return GATED.get(self.kind, self.kind)


class ActivationOperands(NamedTuple):
    """What an activation reads and writes: forward y of x, backward dx of dy and x."""

    x: Tensor
    dy: Tensor | None
    out: Tensor | None
    cast: Cast | None
    q: QuantizedTensor | None
    column_sum: Tensor | None


@exported('kind: Activation, such as "gelu" or "swiglu".')
def is_gated(kind: str) -> bool:
    """Whether the activation halves the width."""
    return kind in GATED


_ACTIVATED = """
    kind in KINDS: Activation, such as "gelu" or "swiglu".
    clamp: Numbers of clamped_swiglu. None are the usual ones.
    must clamp is None or (kind == "clamped_swiglu" and clamp.limit >= 0): a limit of at least 0, for clamped_swiglu;
        correct the limit, or leave the parameters out
    x [M, N] act: Input of the forward.
    must kind not in GATED or N % 2 == 0: an even number of columns; concatenate the two halves (a | b) along the last
        dimension
"""


@operation(_ACTIVATED)
def activation_forward(
    rt: Runtime, x: Tensor, kind: str, *, clamp: Clamp | None = None, cast: Cast | None = None, keep: bool = False
) -> tuple[Tensor | None, QuantizedTensor | None]:
    """(y, quantized): y is None when only the FP8 copy is wanted (`cast` without `keep`).

    `clamp` is for clamped_swiglu (None: the defaults).
    """
    # A launch of its own, from the rounded values, as fused kernels have them.
    if cast is not None and is_apart(cast, keep):
        y, _ = activation_forward(rt, x, kind, clamp=clamp)
        assert y is not None
        return (y if keep else None), quantize(rt, y, cast)
    if cast is not None:
        check_cast("activation_forward", rt.device, cast)
    spec = ActivationSpec(kind, clamp or Clamp(), keep)
    shape = x.shape[0], x.shape[1] // 2 if kind in GATED else x.shape[1]
    y = rt.empty(shape, x.dtype) if needs_values(cast, keep) else None
    q = allocate(rt, shape, cast) if cast is not None else None
    rt.backend.activation_forward(rt, spec, ActivationOperands(x, None, y, cast, q, None))
    return (y if cast is None or keep else None), q


@operation(
    _ACTIVATED,
    """
    dy [M, N // 2 if kind in GATED else N] x
    column_sum? [N] act written
""",
)
def activation_backward(
    rt: Runtime,
    dy: Tensor,
    x: Tensor,
    kind: str,
    *,
    clamp: Clamp | None = None,
    cast: Cast | None = None,
    keep: bool = False,
    column_sum: Tensor | None = None,
) -> tuple[Tensor | None, QuantizedTensor | None]:
    """(dx, quantized): dx has the shape and dtype of x. `column_sum` is set to the column sums of the rounded dx."""
    if cast is not None:
        # A gradient's halves are whole blocks, and two tiles fit into any multiprocessor at once.
        fits = kind not in GATED or (x.shape[1] % (2 * BLOCK["block"]) == 0 and x.dtype.itemsize == 2)
        if is_apart(cast, keep, in_blocks=fits):
            dx, _ = activation_backward(rt, dy, x, kind, clamp=clamp)
            assert dx is not None
            return (dx if keep else None), quantize(rt, dx, cast, column_sum=column_sum)
        check_cast("activation_backward", rt.device, cast)
    spec = ActivationSpec(kind, clamp or Clamp(), keep)
    dx = rt.empty(x.shape, x.dtype) if needs_values(cast, keep) else None
    q = allocate(rt, x.shape, cast) if cast is not None else None  # type: ignore[arg-type]
    rt.backend.activation_backward(rt, spec, ActivationOperands(x, dy, dx, cast, q, column_sum))
    return (dx if cast is None or keep else None), q
