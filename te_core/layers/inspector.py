"""The named points at which a layer offers its tensors to an inspector (statistics, fake quantization, logging).

A layer runs inspected only if its spec holds a request; the request is part of the spec, so an inspected layer
is another plan of the same code and an uninspected one pays one attribute test.
"""

from __future__ import annotations

from typing import Protocol

from te_core.errors import ArgumentError
from te_core.quantize.operands import Value
from te_core.quantized import Cast, Format, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor

#: (gemm, tensor): the two operands of each GEMM, and its result.
POINTS = frozenset(
    {("fprop", tensor) for tensor in ("activation", "weight", "output")}
    | {("dgrad", tensor) for tensor in ("gradient", "weight", "dgrad")}
    | {("wgrad", tensor) for tensor in ("activation", "gradient", "wgrad")}
)

#: The same of attention in FP8: its inputs, apart or as they are packed, and the gradient of its output; where scores
#: are tensors, what softmax made of them and their gradient. Only there a replacement is taken, and is plain.
ATTENTION_POINTS = frozenset(
    {("fprop", tensor) for tensor in ("q", "k", "v", "kv", "qkv", "s")} | {("dgrad", tensor) for tensor in ("do", "dp")}
)

Request = frozenset[tuple[str, str]]  # the points an inspector wants to see

#: The mark that a request has beside an operand's point if the inspector always puts something in its place: nothing is
#: quantized for that GEMM then, and no maximum recorded.
PLAIN = {
    (gemm, tensor): (gemm, f"plain {tensor}")
    for gemm, tensor in sorted(POINTS)
    if tensor in ("activation", "weight", "gradient")
}
#: The same of attention: nothing is rounded in this direction that no inspector rounds.
PLAIN_ATTENTION = {gemm: (gemm, "plain attention") for gemm in ("fprop", "dgrad")}


class Inspector(Protocol):
    """Sees a layer's tensors and may replace them."""

    @property
    def request(self) -> Request:
        """The points it wants; fixed while a layer uses it."""

    def inspect(
        self, rt: Runtime, gemm: str, tensor: str, value: Tensor, cast: Cast | None, out: QuantizedTensor | None
    ) -> Value | None:
        """Called at a point with the high-precision value and, for a quantized operand, how it was cast and to what.

        Returns None to leave it, or a replacement, plain or quantized in the orientation that the GEMM reads. If
        the other operand of the GEMM is then of another kind, the quantized one is dequantized, from the copy that the
        GEMM would have read.

        Of an operand the GEMM that reads its columns comes first (wgrad's activation and gradient, dgrad's weight). An
        inspector may have a method `finished(rt, tensor)`: it is called when both GEMMs of a gradient were offered, or
        the one that there is.

        Of a weight that is spread over ranks each rank's inspector sees what lies there: this rank's part of what is
        split, before it travels, and the copy that will travel. All ranks look, and put in values of one kind, or none
        do. A quantized part goes on in high precision unless all ranks' parts have one scale, or a scale for each
        block. A part in high precision may be quantized once it is whole: then `out` is None, a replacement stays in
        high precision, and a method `quantized_whole(rt, gemm, tensor, format)` is called, if there is one.
        """


def offer(
    rt: Runtime,
    inspector: Inspector | None,
    point: tuple[str, str],
    value: Tensor,
    cast: Cast | None = None,
    current: Value | None = None,
) -> Value:
    """What shall be used at this point: the inspector's replacement, or what there was (`current`, else `value`)."""
    if current is None:
        current = value
    replaced = answer(rt, inspector, point, value, cast, current)
    return current if replaced is None else replaced


def answer(
    rt: Runtime, inspector: Inspector | None, point: tuple[str, str], value: Tensor, cast: Cast | None, current: Value
) -> Value | None:
    """The inspector's replacement; None where it leaves what there is."""
    if inspector is None or point not in inspector.request:
        return None
    quantized = current if isinstance(current, QuantizedTensor) else None
    return inspector.inspect(rt, *point, value, cast, quantized)


def finished(rt: Runtime, inspector: Inspector | None, tensor: str) -> None:
    """Tell an inspector that wants to know it that all GEMMs which read this tensor were offered."""
    told = getattr(inspector, "finished", None)
    if told is not None:
        told(rt, tensor)


def quantized_whole(rt: Runtime, inspector: Inspector | None, point: tuple[str, str], form: Format) -> None:
    """Tell an inspector that wants to know it how an operand was quantized of which it saw a part."""
    told = getattr(inspector, "quantized_whole", None)
    if told is not None:
        told(rt, *point, form)


def offer_result(rt: Runtime, inspector: Inspector | None, point: tuple[str, str], value: Tensor) -> Tensor:
    """The same for the result of a GEMM, whose replacement is plain."""
    result = offer(rt, inspector, point, value)
    if isinstance(result, QuantizedTensor):
        raise ArgumentError(
            f"inspect {point}", repr(result), "None or a plain tensor in place of a result", "dequantize it first"
        )
    return result
