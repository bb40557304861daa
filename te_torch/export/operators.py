"""The operators `tex::` of an exported program: FP8 and MXFP8 there and back, and what ONNX knows them as.

    fp8_quantize(x, scale, dtype)     sat_cast(float32(x) * scale)           QuantizeLinear(x, 1 / scale, 0)
    fp8_dequantize(q, scale)          float32(q) * (1 / scale)               DequantizeLinear(q, 1 / scale)
    mxfp8_quantize(x, dtype, tiled)   (q, e): 32 of a row, or 32 x 32        standard operators
    mxfp8_dequantize(q, e)            float32(q) * 2^(e - 127)               standard operators

torch runs them as they stand. Its exporter takes them apart by the rules registered here, in which the first two are
ONNX's own operators: so no translation table is needed, and constants are folded.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._decomp import register_decomposition

from te_torch.export.mode import not_exported

OPSET = 19  # the first that has FP8
BLOCK = 32  # elements that share a scale in MXFP8
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLT_MAX = torch.finfo(torch.float32).max

_library = torch.library.Library("tex", "FRAGMENT")
_library.define("fp8_quantize(Tensor x, Tensor scale, ScalarType dtype) -> Tensor")
_library.define("fp8_dequantize(Tensor q, Tensor scale) -> Tensor")
_library.define("mxfp8_quantize(Tensor x, ScalarType dtype, bool tiled=False) -> (Tensor, Tensor)")
_library.define("mxfp8_dequantize(Tensor q, Tensor exponents) -> Tensor")


# ----------------------------------------------------------------------------------------------- what they compute


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def power_of_two(v: torch.Tensor, up: bool) -> torch.Tensor:
    """The exponent, as a float, of v rounded up or down to a power of two; exact for normal v > 0.

    ONNX has no operator that takes a float's bits apart. A logarithm is right but for the last digit, and comparing
    with the power that it leads to says which way it was wrong.
    """
    e = torch.log2(v).round()
    power = torch.exp2(e)
    return e + (power < v).float() if up else e - (power > v).float()


def _mxfp8_exponents(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E8M0 as float32, -127 to 127: amax / limit rounded up to a power of two."""
    v = amax * (1.0 / torch.finfo(dtype).max)
    tiny = 2.0**-126  # below are the subnormal numbers: up to 2^-127, and those up to 2^-126
    low = torch.where(v > 2.0**-127, -126.0, -127.0)
    return torch.where(v >= tiny, power_of_two(v.clamp(tiny, 2.0**127), True), low).clamp(-127.0, 127.0)


def _mxfp8_quantize(x: torch.Tensor, dtype: torch.dtype, tiled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _blocks(x.float())
    amax = blocks.abs().amax(-1, keepdim=True)
    if tiled:
        above = torch.nn.functional.pad(amax, (0, 0, 0, 0, 0, -x.shape[0] % BLOCK)).unflatten(0, (-1, BLOCK))
        amax = above.amax(1).repeat_interleave(BLOCK, 0)[: x.shape[0]]
    e = _mxfp8_exponents(amax, dtype)
    rows = (blocks * torch.exp2(-e)).flatten(-2)[..., : x.shape[-1]]
    return _saturated(rows, dtype), (e + 127.0).squeeze(-1).to(torch.uint8)


def _mxfp8_dequantize(q: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    scaled = _blocks(q.float()) * torch.exp2(exponents.float() - 127.0).unsqueeze(-1)
    return scaled.flatten(-2)[..., : q.shape[-1]]


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[.., n, 32] of rows; the last block is filled up with zeros."""
    missing = -x.shape[-1] % BLOCK
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.unflatten(-1, (-1, BLOCK))


def _mxfp8_shapes(x: torch.Tensor, dtype: torch.dtype, tiled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = -(-x.shape[-1] // BLOCK)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((*x.shape[:-1], blocks), dtype=torch.uint8)


def _register(name: str, run: Any, shapes: Any) -> Any:
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tex::{name}", shapes, lib=_library)
    return getattr(torch.ops.tex, name)


fp8_quantize = _register(
    "fp8_quantize",
    lambda x, scale, dtype: _saturated(x.float() * scale, dtype),
    lambda x, scale, dtype: x.new_empty(x.shape, dtype=dtype),
)
fp8_dequantize = _register(
    "fp8_dequantize",
    lambda q, scale: q.float() * scale.reciprocal(),
    lambda q, scale: q.new_empty(q.shape, dtype=torch.float32),
)
mxfp8_quantize = _register("mxfp8_quantize", _mxfp8_quantize, _mxfp8_shapes)
mxfp8_dequantize = _register(
    "mxfp8_dequantize", _mxfp8_dequantize, lambda q, e: q.new_empty(q.shape, dtype=torch.float32)
)


def held_values(codes: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The values, in float32, of a matrix held in FP8: its codes and its scales as they are stored, padding and all.

    ONNX cannot take bytes for FP8, so sign, exponent and mantissa are worked out in numbers; the file keeps the bytes.
    """
    bits = 3 if dtype == torch.float8_e4m3fn else 2
    step = float(2**bits)
    c = codes[: shape[0], : shape[1]].float()
    negative = c >= 128.0
    c = torch.where(negative, c - 128.0, c)
    e = torch.floor(c / step)
    m = c - e * step
    value = torch.where(e > 0, (m + step) * torch.exp2(e - 1.0), m) * torch.finfo(dtype).smallest_normal / step
    value = torch.where(negative, -value, value)
    if scale.dtype == torch.float32:
        return value * scale
    return _mxfp8_dequantize(value, scale[: shape[0], : -(-shape[1] // BLOCK)])


# -------------------------------------------------------------------------------------------- what ONNX calls them


def _symbolic(name: str, inputs: tuple[torch.Tensor, ...], **result: Any) -> torch.Tensor:
    import torch.onnx.ops  # only exporters come here

    _check_opset()
    return torch.onnx.ops.symbolic(name, inputs, version=OPSET, **result)


@register_decomposition(fp8_quantize.default)
def _as_quantize_linear(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    inputs = (x, scale.reciprocal(), _zero(x, dtype))  # the type of the zero point is the result's
    return _symbolic("QuantizeLinear", inputs, dtype=dtype, shape=x.shape)


@register_decomposition(fp8_dequantize.default)
def _as_dequantize_linear(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # Without a zero point onnxruntime's optimizer, where it moves the operator, takes the values for unsigned integers.
    inputs = (q, scale.reciprocal(), _zero(q, q.dtype))
    return _symbolic("DequantizeLinear", inputs, dtype=torch.float32, shape=q.shape)


def _zero(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), device=x.device).to(dtype)


@register_decomposition(mxfp8_quantize.default)
def _as_standard_operators(
    x: torch.Tensor, dtype: torch.dtype, tiled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_opset()
    return _mxfp8_quantize(x, dtype, tiled)


register_decomposition(mxfp8_dequantize.default)(_mxfp8_dequantize)


def _check_opset() -> None:
    """Refuse an opset without FP8. A decomposition is not told of it: what torch.onnx.export got is on the stack."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not torch.onnx.export.__code__:
        frame = frame.f_back
    if frame is None:
        return
    default: int = getattr(getattr(torch.onnx, "_constants", None), "ONNX_DEFAULT_OPSET", OPSET)
    asked: int | None = frame.f_locals["opset_version"]
    opset = default if asked is None else asked
    if opset < OPSET:
        raise opset_refused(opset)


def opset_refused(asked: int) -> Exception:
    """The error for a file that could not hold FP8."""
    got = f"FP8 in a file of opset_version={asked}"
    return not_exported(
        got, f"{OPSET} or newer, the first opset with FP8", "pass opset_version=20, or export without FP8"
    )


_OLDEST = 7  # opset that torch's older exporter writes (`dynamo=False`, the default before torch 2.9)
_E5M2 = 23  # TorchScript's number of torch.float8_e5m2


def tell_older_exporter() -> None:
    """Tell it what per-tensor FP8 is in ONNX, and to refuse what it cannot write."""
    from torch.onnx import symbolic_helper, utils

    def too_old(g: Any, *args: Any) -> Any:
        raise opset_refused(g.opset)

    def no_blocks(g: Any, *args: Any) -> Any:
        raise not_exported("MXFP8 by torch's older exporter", "torch.onnx.export(.., dynamo=True)", "pass dynamo=True")

    @symbolic_helper.parse_args("v", "v", "i")
    def quantize(g: Any, x: Any, scale: Any, dtype: int) -> Any:
        zero = torch.zeros((), dtype=torch.float8_e5m2 if dtype == _E5M2 else torch.float8_e4m3fn)
        return g.op("QuantizeLinear", x, g.op("Reciprocal", scale), g.op("Constant", value_t=zero))

    def dequantize(g: Any, q: Any, scale: Any) -> Any:
        *_, zero = q.node().inputs()
        return g.op("DequantizeLinear", q, g.op("Reciprocal", scale), zero)

    for name, symbolic in (("fp8_quantize", quantize), ("fp8_dequantize", dequantize)):
        utils.register_custom_op_symbolic(f"tex::{name}", too_old, _OLDEST)
        utils.register_custom_op_symbolic(f"tex::{name}", symbolic, OPSET)
    utils.register_custom_op_symbolic("tex::mxfp8_quantize", no_blocks, _OLDEST)
