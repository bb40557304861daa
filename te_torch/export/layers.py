"""The core's layers in torch's operators: what an exporter traces in place of them.

Each function takes a layer's inputs in the layer's order, its spec, and the forward scales of delayed scaling if the
recipe keeps them, and gives what the layer's forward gives. Norms, activations and FP8 products are computed in float32
and rounded where the layers round; high-precision products are in the activation dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from te_core.layers.activation import ActivationLayerSpec
from te_core.layers.grouped_linear import GroupedSpec
from te_core.layers.l2_norm import L2NormSpec
from te_core.layers.linear import LinearSpec
from te_core.layers.mlp import FC1, FC2, MLPSpec
from te_core.layers.norm import NormSpec
from te_core.layers.norm_linear import NormLinearSpec
from te_core.layers.residual import AddSpec
from te_core.ops.activation import GATED, Clamp
from te_core.precision import Operand
from te_core.quantize.state import FORWARD_SLOTS, INPUT, OUTPUT, WEIGHT
from te_torch.export import operators
from te_torch.export.handed import Handed, as_handed, plain
from te_torch.export.mode import module_to_module, not_exported
from te_torch.quantized import QuantizedTorch
from te_torch.runtime import TO_TORCH

Maybe = torch.Tensor | None
Outputs = tuple[torch.Tensor, ...]

# ---------------------------------------------------------------------------------------------------- quantization


def quantized(x: torch.Tensor, rule: Operand, scale: Maybe) -> torch.Tensor:
    """The values, in float32, that x has in the rule's format. `scale` is that of delayed scaling."""
    if rule.custom is not None or rule.scaling not in ("delayed", "current", "mxfp8"):
        what = "a quantizer of yours" if rule.custom is not None else f"{rule.format}"
        allowed = "per-tensor FP8 (DelayedScaling, Float8CurrentScaling), MXFP8, or high precision"
        raise not_exported(f"a product whose operand is in {what}", allowed, "export in one of these recipes")
    dtype = TO_TORCH[rule.dtype]
    if rule.scaling == "mxfp8":
        return operators.mxfp8_dequantize(*operators.mxfp8_quantize(x, dtype, rule.tiled))
    if rule.scaling == "current":
        largest = x.detach().abs().flatten().amax(0).float().clamp(min=rule.epsilon)
        scale = (torch.finfo(dtype).max / largest).clamp(max=torch.finfo(torch.float32).max)
        if rule.power_of_two:
            scale = torch.exp2(operators.power_of_two(scale, False))
        scale = torch.where((largest > 0) & (largest < torch.inf), scale, 1.0)
    assert scale is not None
    return operators.fp8_dequantize(operators.fp8_quantize(x.float(), scale, dtype), scale)


def _operand(x: torch.Tensor, rule: Operand | None, scales: Maybe, gemm: int, slot: int) -> Maybe:
    """An operand of a GEMM as its format holds it; None where it is not quantized."""
    if rule is None or rule.scaling in ("none", "calibrate"):
        return None
    return quantized(x, rule, None if scales is None else scales[FORWARD_SLOTS * gemm + slot])


# --------------------------------------------------------------------------------------------------------- layers


def linear(inputs: Sequence[Maybe], spec: LinearSpec, scales: Maybe, gemm: int = 0) -> Outputs:
    """(x w^T + b,) of (x, w, b, ..)."""
    x, w, bias = inputs[:3]
    assert x is not None and w is not None
    if isinstance(x, QuantizedTorch):
        raise module_to_module()
    dtype, precision = TO_TORCH[spec.dtype], spec.precision
    form, w = _held(w)
    rows = columns = None
    if precision is not None and precision.input is not None and precision.backward is None:
        rows = as_handed(x, precision.input.format)
    x = plain(x)
    if precision is not None:
        rows = _operand(x, precision.input, scales, gemm, INPUT) if rows is None else rows
        as_held = form is not None and precision.weight is not None and precision.weight.format is form
        columns = w if as_held else _operand(w, precision.weight, scales, gemm, WEIGHT)
    if rows is None or columns is None:
        x, w = (t if q is None else q for t, q in ((x, rows), (w, columns)))
        return (_delivered(F.linear(x.to(dtype), w.to(dtype), bias), spec, scales, gemm),)
    out = F.linear(rows, columns, None if bias is None else bias.float()).to(dtype)
    return (_delivered(out, spec, scales, gemm),)


def _delivered(out: torch.Tensor, spec: LinearSpec, scales: Maybe, gemm: int) -> Any:
    """The output as the spec wants it."""
    rule = None if spec.precision is None else spec.precision.output
    values = _operand(out, rule, scales, gemm, OUTPUT) if spec.quantize_output else None
    return out if rule is None or values is None else Handed(values, out.dtype, rule.format)


def _held(w: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """(the format that a weight is held in or None, its values)."""
    if not isinstance(w, QuantizedTorch):
        return None, w
    if w.requires_grad:
        got, do = "a weight that is held quantized and requires a gradient", "call model.requires_grad_(False) before"
        raise not_exported(got, "one that does not: torch's exporter takes its bytes for a parameter", do)
    weight: Any = w
    return weight._format, weight.dequantize(dtype=torch.float32)


def norm(inputs: Sequence[Maybe], spec: NormSpec, scales: Maybe = None) -> Outputs:
    """(the normalized rows,) of (x, gamma, beta)."""
    x, gamma, beta = inputs
    assert x is not None and gamma is not None
    v, gain = x.float(), gamma.float()
    if spec.zero_centered:
        gain = gain + 1.0
    if spec.kind == "LayerNorm":
        y = F.layer_norm(v, gain.shape, gain, None if beta is None else beta.float(), spec.eps)
    else:
        y = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + spec.eps) * gain
    return (y.to(TO_TORCH[spec.dtype]),)


def l2_norm(inputs: Sequence[Maybe], spec: L2NormSpec, scales: Maybe = None) -> Outputs:
    """(rows of length one,) of (x,)."""
    (x,) = inputs
    assert x is not None
    v = x.float()
    return ((v * torch.rsqrt(v.square().sum(-1, keepdim=True) + spec.eps)).to(x.dtype),)


def activation(inputs: Sequence[Maybe], spec: ActivationLayerSpec, scales: Maybe = None) -> Outputs:
    """(act(x),) of (x,)."""
    (x,) = inputs
    assert x is not None
    return (activated(x, spec.kind, spec.clamp),)


def norm_linear(inputs: Sequence[Maybe], spec: NormLinearSpec, scales: Maybe) -> Outputs:
    """(norm(x) w^T + b[, norm(x)]) of (x, gamma, beta, w, b, ..)."""
    (n,) = norm(inputs[:3], spec.norm)
    out = linear((n, *inputs[3:5]), spec.linear, scales)
    return (*out, n) if spec.return_norm else out


def mlp(inputs: Sequence[Maybe], spec: MLPSpec, scales: Maybe) -> Outputs:
    """(act(norm(x) w1^T + b1) w2^T + b2[, norm(x)]) of (x, gamma, beta, w1, b1, w2, b2, ..)."""
    n: Any = inputs[0] if spec.norm is None else norm(inputs[:3], spec.norm)[0]
    (h,) = linear((n, *inputs[3:5]), spec.fc1, scales, FC1)
    a = activated(h, spec.activation, spec.clamp)
    out = linear((a, *inputs[5:7]), spec.fc2, scales, FC2)
    return (*out, n) if spec.return_norm else out


def grouped_linear(inputs: Sequence[Maybe], spec: GroupedSpec, scales: Maybe, sizes: Sequence[int]) -> Outputs:
    """(the groups' products, one behind another,) of (x, all weights, all biases, ..); the sizes are constants."""
    x, n = inputs[0], len(spec.parts)
    assert x is not None
    weights, biases = inputs[1 : 1 + n], inputs[1 + n : 1 + 2 * n]
    parts = x.flatten(0, -2).split(list(sizes))
    made = [
        linear((part, w, b), each, scales, i)[0]
        for i, (part, w, b, each) in enumerate(zip(parts, weights, biases, spec.parts, strict=True))
        if part.shape[0]
    ]
    return (torch.cat(made).unflatten(0, x.shape[:-1]) if x.ndim > 2 else torch.cat(made),)


def bias_dropout_add(inputs: Sequence[Maybe], spec: AddSpec, scales: Maybe = None) -> Outputs:
    """(residual + (x + bias),) of (x, bias, residual, ..)."""
    x, bias, residual = inputs[:3]
    assert x is not None
    if spec.p:
        raise dropout_refused()
    v = x.float()
    for t in (bias, residual):
        v = v if t is None else v + t.float()
    return (v.to(x.dtype),)


def dropout_refused() -> Exception:
    """The error for a model in training mode."""
    return not_exported("dropout in training mode", "a model in eval mode", "call model.eval() before the export")


# ---------------------------------------------------------------------------------------------------- activations

_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: _positive(x),
    "srelu": lambda x: _positive(x).square(),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def _positive(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0). As ONNX's Relu before a QuantizeLinear, onnxruntime would take it for one that the cast makes idle."""
    return torch.maximum(x, torch.zeros_like(x))


def activated(h: torch.Tensor, kind: str, clamp: Clamp | None) -> torch.Tensor:
    """act(h), or act(a) * b for h = (a | b), rounded once."""
    v = h.float()
    if kind not in GATED:
        return _PLAIN[kind](v).to(h.dtype)
    a, b = v.chunk(2, dim=-1)
    if GATED[kind] != "clamped":
        return (_PLAIN[GATED[kind]](a) * b).to(h.dtype)
    limit, alpha, offset = clamp or Clamp()
    a = a.clamp(max=limit)
    return (a * torch.sigmoid(alpha * a) * (b.clamp(-limit, limit) + offset)).to(h.dtype)
