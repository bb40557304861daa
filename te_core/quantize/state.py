"""The scaling state of a module as plain tensors, and the casts that a recipe makes of it.

Every GEMM owns three forward slots (input, weight, output) and two backward slots (grad of output, grad of
input) in the scale and amax vectors of its module; GEMM i starts at 3 i and 2 i.
"""

from __future__ import annotations

from te_core import dtypes
from te_core.quantized import Cast
from te_core.recipe import Operand
from te_core.tensor import Tensor

FORWARD_SLOTS, BACKWARD_SLOTS = 3, 2
INPUT, WEIGHT, OUTPUT = 0, 1, 2  # forward slots
GRAD_OUTPUT, GRAD_INPUT = 0, 1  # backward slots


class Scales:
    """Views of a module's delayed-scaling state: what this call's casts read (scale) and raise (amax).

    An amax is None where nothing may be recorded: in a recomputed forward, whose maxima were taken before.
    """

    __slots__ = ("backward_amax", "backward_scale", "forward_amax", "forward_scale")

    def __init__(
        self, forward_scale: Tensor, forward_amax: Tensor | None, backward_scale: Tensor, backward_amax: Tensor | None
    ) -> None:
        self.forward_scale = forward_scale
        self.forward_amax = forward_amax
        self.backward_scale = backward_scale
        self.backward_amax = backward_amax


def element(vector: Tensor, index: int) -> Tensor:
    """One float32 of a vector, as a tensor [1]."""
    return Tensor(vector.ptr + 4 * index, (1,), dtypes.float32, vector.device, vector)


def forward_cast(
    operand: Operand, scales: Scales | None, gemm: int, slot: int, *, rowwise: bool, columnwise: bool
) -> Cast:
    """How a forward operand (slot INPUT or WEIGHT) of a GEMM is quantized in this call."""
    if operand.scaling == "delayed" and scales is not None:
        i = FORWARD_SLOTS * gemm + slot
        amax = scales.forward_amax
        return Cast(
            operand.dtype, rowwise=rowwise, columnwise=columnwise, scale=element(scales.forward_scale, i),
            amax=None if amax is None else element(amax, i),
        )  # fmt: skip
    return _current(operand, rowwise, columnwise)


def backward_cast(operand: Operand, scales: Scales | None, gemm: int, *, rowwise: bool, columnwise: bool) -> Cast:
    """How the output gradient of a GEMM is quantized in this call."""
    if operand.scaling == "delayed" and scales is not None:
        i = BACKWARD_SLOTS * gemm + GRAD_OUTPUT
        amax = scales.backward_amax
        return Cast(
            operand.dtype, rowwise=rowwise, columnwise=columnwise, scale=element(scales.backward_scale, i),
            amax=None if amax is None else element(amax, i),
        )  # fmt: skip
    return _current(operand, rowwise, columnwise)


def _current(operand: Operand, rowwise: bool, columnwise: bool) -> Cast:
    if operand.scaling != "current":
        raise RuntimeError("delayed scaling was asked for without a scaling state")
    return Cast(
        operand.dtype, rowwise=rowwise, columnwise=columnwise, epsilon=operand.epsilon,
        power_of_two=operand.power_of_two,
    )  # fmt: skip
