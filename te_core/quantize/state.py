"""The scaling state of a module as plain tensors, and the casts that a recipe makes of it.

Every GEMM owns three forward slots (input, weight, output) and two backward slots (grad of output, grad of
input) in the scale and amax vectors of its module; GEMM i starts at 3 i and 2 i.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from te_core import dtypes
from te_core.errors import ArgumentError
from te_core.precision import Operand
from te_core.quantized import Cast
from te_core.tensor import Tensor

FORWARD_SLOTS, BACKWARD_SLOTS = 3, 2
INPUT, WEIGHT, OUTPUT = 0, 1, 2  # forward slots
GRAD_OUTPUT, GRAD_INPUT = 0, 1  # backward slots


@dataclass(eq=False, repr=False, slots=True)
class Scales:
    """Views of a module's delayed-scaling state: what this call's casts read (scale) and raise (amax).

    An amax is None where nothing may be recorded: in a recomputed forward, whose maxima were taken before. A scale is
    None where the recipe keeps none. `*_nonfinite`, if given, are counters (int64 [slots, 2]: NaNs, infinities).
    """

    forward_scale: Tensor | None
    forward_amax: Tensor | None
    backward_scale: Tensor | None
    backward_amax: Tensor | None
    forward_nonfinite: Tensor | None = None
    backward_nonfinite: Tensor | None = None
    #: The casts made of these views so far, by slot.
    casts: dict[tuple[int, bool, bool], Cast] = field(default_factory=dict, init=False)
    #: What recordings depend on of these views (te_core/tape/walk.py), once one was made.
    facts: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        # Casts take addresses inside of these: so they are dense and of the right type, and maxima may be written.
        for name in VIEWS:
            t, counters = getattr(self, name), name.endswith("nonfinite")
            kind = dtypes.int64 if counters else dtypes.float32
            if t is None:
                continue
            right = isinstance(t, Tensor) and t.dtype is kind and t.is_contiguous
            if not right or (counters and t.shape[1:] != (2,)):
                allowed = "a dense int64 tensor [slots, 2]" if counters else "a dense float32 vector"
                raise ArgumentError("Scales", f"{name} = {t!r}", allowed, f"correct {name}")
            if not name.endswith("scale") and not t.writable:
                raise ArgumentError("Scales", f"{name} in read-only memory", "memory that is raised", "pass a copy")


VIEWS = tuple(one.name for one in fields(Scales) if one.init)


def without_state(operation: str) -> ArgumentError:
    """What is wrong with a call that brings no scaling state where a recipe keeps one."""
    allowed = "a Scales (te_core.quantize.state): float32, 3 slots forward and 2 backward a GEMM"
    do = "pass scales=, or choose a recipe that keeps no history, such as Float8CurrentScaling"
    return ArgumentError(operation, "no scales", allowed, do)


def _too_short(t: Tensor, index: int) -> ArgumentError:
    slots = "3 slots forward and 2 backward for each GEMM of the layer"
    do = "make the vectors of the Scales as long; to a backward, pass what its forward saved"
    allowed = f"{slots}, dense: float32 [slots], counters int64 [slots, 2]"
    return ArgumentError("Scales", f"{t!r} where slot {index} is read", allowed, do)


def element(vector: Tensor, index: int) -> Tensor:
    """One float32 of a dense float32 tensor, as a tensor [1]."""
    if index >= vector.size or vector.dtype is not dtypes.float32 or not vector.is_contiguous:
        raise _too_short(vector, index)
    return Tensor(vector.ptr + 4 * index, (1,), dtypes.float32, vector.device, vector)


def _counter(counters: Tensor | None, index: int) -> Tensor | None:
    """The counters of one slot, int64 [2]."""
    if counters is None:
        return None
    if index >= counters.shape[0]:
        raise _too_short(counters, index)
    return Tensor(counters.ptr + 16 * index, (2,), dtypes.int64, counters.device, counters)


def forward_cast(
    operand: Operand, scales: Scales | None, gemm: int, slot: int, *, rowwise: bool, columnwise: bool
) -> Cast:
    """How a forward operand (slot INPUT, WEIGHT or OUTPUT) of a GEMM is quantized in this call."""
    if operand.scaling != "delayed" and (scales is None or scales.forward_nonfinite is None):
        return _stateless(operand, rowwise, columnwise)
    if scales is None:
        raise without_state("the forward of a recipe with a history")
    index = FORWARD_SLOTS * gemm + slot
    found = scales.casts.get((index, rowwise, columnwise))
    if found is None or found.dtype is not operand.dtype:
        counter = _counter(scales.forward_nonfinite, index)
        if operand.scaling != "delayed":
            return _make(operand, rowwise, columnwise, nonfinite=counter)
        found = _delayed(operand, scales.forward_scale, scales.forward_amax, index, rowwise, columnwise, counter)
        scales.casts[index, rowwise, columnwise] = found
    return found


def backward_cast(
    operand: Operand,
    scales: Scales | None,
    gemm: int,
    *,
    rowwise: bool,
    columnwise: bool,
    slot: int = GRAD_OUTPUT,
    rng: Tensor | None = None,
) -> Cast:
    """How a gradient (slot GRAD_OUTPUT or GRAD_INPUT) of a GEMM is quantized in this call."""
    index = BACKWARD_SLOTS * gemm + slot
    counter = None if scales is None else _counter(scales.backward_nonfinite, index)
    if operand.scaling != "delayed":
        if operand.stochastic and rng is None:
            where, allowed = "the backward of a recipe with stochastic rounding", "an int64 tensor [2] (seed, offset)"
            do = "pass rng= to the layer's forward, which saves it, or a recipe that rounds to nearest"
            raise ArgumentError(where, "no rng", allowed, do)
        if operand.stochastic or counter is not None:
            return _make(operand, rowwise, columnwise, rng, index, counter)
        return _stateless(operand, rowwise, columnwise)
    if scales is None:
        raise without_state("the backward of a recipe with a history")
    key = (-1 - index, rowwise, columnwise)
    found = scales.casts.get(key)
    if found is None or found.dtype is not operand.dtype:
        found = _delayed(operand, scales.backward_scale, scales.backward_amax, index, rowwise, columnwise, counter)
        scales.casts[key] = found
    return found


def _delayed(
    operand: Operand,
    scale: Tensor | None,
    amax: Tensor | None,
    index: int,
    rowwise: bool,
    columnwise: bool,
    nonfinite: Tensor | None,
) -> Cast:
    if scale is None:
        raise without_state("a recipe with a history")
    return Cast(
        operand.format,
        rowwise=rowwise,
        columnwise=columnwise,
        scale=element(scale, index),
        amax=None if amax is None else element(amax, index),
        nonfinite=nonfinite,
    )


def _make(
    operand: Operand,
    rowwise: bool,
    columnwise: bool,
    rng: Tensor | None = None,
    site: int = 0,
    nonfinite: Tensor | None = None,
) -> Cast:
    return Cast(
        operand.format,
        rowwise=rowwise,
        columnwise=columnwise,
        epsilon=operand.epsilon,
        power_of_two=operand.power_of_two,
        transform=operand.transform and columnwise,
        stochastic=operand.stochastic,
        rng=rng,
        site=site,
        four_over_six=operand.four_over_six,
        nonfinite=nonfinite,
    )


def _stateless(operand: Operand, rowwise: bool, columnwise: bool) -> Cast:
    found: Cast | None = operand.casts.get((rowwise, columnwise))
    if found is None:
        found = operand.casts[rowwise, columnwise] = _make(operand, rowwise, columnwise)
    return found
