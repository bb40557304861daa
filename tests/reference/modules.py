"""The modules in float64 from the formulas; gradients by autograd of these formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

Params = Mapping[str, torch.Tensor]

GATED = {"geglu": "gelu", "glu": "sigmoid", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def activation(kind: str, h: torch.Tensor, params: Mapping[str, float] | None = None) -> torch.Tensor:
    """act(h), or act(first half) * second half."""
    if kind == "clamped_swiglu":
        o = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0, **(params or {})}
        a, b = h.chunk(2, dim=-1)
        a, b = a.clamp(max=o["limit"]), b.clamp(-o["limit"], o["limit"])
        return a * torch.sigmoid(o["alpha"] * a) * (b + o["glu_linear_offset"])
    if kind in GATED:
        a, b = h.chunk(2, dim=-1)
        return activation(GATED[kind], a) * b
    return {
        "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": lambda x: x.clamp(min=0),
        "srelu": lambda x: x.clamp(min=0) ** 2,
        "squared_relu": lambda x: x.clamp(min=0) ** 2,
        "silu": lambda x: x * torch.sigmoid(x),
        "sigmoid": torch.sigmoid,
    }[kind](h)


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, rms: bool, eps: float, zero_centered: bool
) -> torch.Tensor:
    """LayerNorm or RMSNorm over the last dimension."""
    if not rms:
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (weight + 1 if zero_centered else weight)
    return y if bias is None else y + bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x w^T + b."""
    y = x @ weight.T
    return y if bias is None else y + bias


def forward(module: torch.nn.Module, x: torch.Tensor, p: Params) -> list[torch.Tensor]:
    """[y, and the norm's output where the module begins with one], by the module's kind and options."""
    kind = type(module).__name__
    if kind == "Linear":
        weights = [p[n] for n in p if n.endswith("weight")]
        biases = [p[n] for n in p if n.endswith("bias")]
        return [linear(x, torch.cat(weights), torch.cat(biases) if biases and not module.return_bias else None)]
    how = {"eps": module.eps, "zero_centered": module.zero_centered_gamma}
    if kind in ("LayerNorm", "RMSNorm"):
        return [norm(x, p["weight"], p.get("bias"), rms=kind == "RMSNorm", **how)]
    n = norm(x, p["layer_norm_weight"], p.get("layer_norm_bias"), rms=module.normalization == "RMSNorm", **how)
    if kind == "LayerNormLinear":
        rest = {name: t for name, t in p.items() if not name.startswith("layer_norm")}
        weights = [t for name, t in rest.items() if name.endswith("weight")]
        biases = [t for name, t in rest.items() if name.endswith("bias")]
        return [linear(n, torch.cat(weights), torch.cat(biases) if biases and not module.return_bias else None), n]
    h = linear(n, p["fc1_weight"], p.get("fc1_bias"))
    last_bias = None if module.return_bias else p.get("fc2_bias")
    inside = activation(module.activation, h, module.activation_params)
    return [linear(inside, p["fc2_weight"], last_bias), n]


def results(module: torch.nn.Module, x: torch.Tensor, *output_grads: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """y (and norm), dx and the gradient of every parameter, for these gradients of the outputs."""
    leaf = x.detach().cpu().double().requires_grad_()
    p = {name: t.detach().cpu().double().requires_grad_() for name, t in module.named_parameters()}
    outputs = forward(module, leaf, p)
    pairs = [(y, g.detach().cpu().double()) for y, g in zip(outputs, output_grads, strict=False) if g is not None]
    loss = sum((y * g).sum() for y, g in pairs)
    grads = torch.autograd.grad(loss, [leaf, *p.values()], allow_unused=True)
    found = {"y": outputs[0].detach(), "dx": grads[0]}
    if len(outputs) > 1:
        found["norm"] = outputs[1].detach()
    return found | dict(zip(p, grads[1:], strict=True))
