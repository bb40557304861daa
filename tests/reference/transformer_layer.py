"""MultiheadAttention and TransformerLayer in float64, from the formulas, in plain torch operations.

Hidden states are [s, b, H]; what a constructor was given comes as `o`, parameters by their documented names as `p`.
Gradients are autograd's of these formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.reference.modules import activation, linear, norm

Params = Mapping[str, torch.Tensor]
Options = Mapping[str, Any]


def below(p: Params, prefix: str) -> dict[str, torch.Tensor]:
    """The parameters of a part."""
    return {name[len(prefix) + 1 :]: t for name, t in p.items() if name.startswith(prefix + ".")}


# ------------------------------------------------------------------------------------------- what is seen


def hidden_pairs(
    mask: str,
    sq: int,
    skv: int,
    lengths: list[tuple[int, int]] | None = None,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool | None = None,
    given: torch.Tensor | None = None,
) -> torch.Tensor:
    """[b, 1, sq, skv], True where query i does not see key j; pair by pair, as the rules are written."""
    batch = 1 if lengths is None else len(lengths)
    hidden = torch.zeros(batch, 1, sq, skv, dtype=torch.bool)
    left, right = window
    if "causal" in mask:
        right = 0
    corner = mask.endswith("bottom_right") or (mask not in ("causal", "padding_causal") and bottom_right is not False)
    for b in range(batch):
        lq, lkv = (sq, skv) if lengths is None else lengths[b]
        shift = lkv - lq if corner else 0
        for i in range(sq):
            for j in range(skv):
                far = (left >= 0 and j < i + shift - left) or (right >= 0 and j > i + shift + right)
                hidden[b, 0, i, j] = far or i >= lq or j >= lkv
    return hidden if given is None else hidden | given.cpu()


# ------------------------------------------------------------------------------------------- attention


def turned(t: torch.Tensor, angles: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Heads [s, b, h, d] with the pairs of their first channels turned by angles [s, d2]."""
    d2 = angles.shape[-1]
    out = t.clone()
    for c in range(d2 // 2):
        a, b = (2 * c, 2 * c + 1) if interleaved else (c, c + d2 // 2)
        fa, fb = (angles[: t.shape[0], n].double().view(-1, 1, 1) for n in (a, b))
        out[..., a] = t[..., a] * fa.cos() - t[..., b] * fa.sin()
        out[..., b] = t[..., b] * fb.cos() + t[..., a] * fb.sin()
    return out


def dot_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    *,
    softmax: str = "vanilla",
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[s, b, h * d] of heads q [s, b, h, d], k and v [s, b, g, d]; bias is added to the scaled scores."""
    h, g = q.shape[2], k.shape[2]
    k, v = (t.repeat_interleave(h // g, dim=2) for t in (k, v))
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias.double()
    hidden = hidden.to(scores.device).expand_as(scores)
    weights = torch.where(hidden, 0.0, torch.exp(scores))  # small sizes: no maximum has to be taken off
    total = weights.sum(-1, keepdim=True)
    if softmax == "off-by-one":
        total = total + 1
    elif softmax == "learnable":
        total = total + torch.exp(sink).view(1, -1, 1, 1)
    weights = weights / torch.where(total == 0, 1.0, total)
    return torch.einsum("bhij,jbhd->ibhd", weights, v).flatten(2)


def _rows(p: Params, parts: list[str], counts: list[int], groups: int, d: int, interleaved: bool) -> list[Params]:
    """weight and bias of each of `parts`, which have `counts` heads, out of one parameter or several."""
    if f"{parts[0]}_weight" in p:
        return [{"weight": p[f"{n}_weight"], "bias": p.get(f"{n}_bias")} for n in parts]  # type: ignore[misc]
    found: list[Params] = []
    heads_of_group = [n // groups for n in counts]
    for i, count in enumerate(counts):
        if interleaved:
            width = sum(heads_of_group)
            start = sum(heads_of_group[:i])
            heads = [g * width + start + n for g in range(groups) for n in range(heads_of_group[i])]
        else:
            heads = list(range(sum(counts[:i]), sum(counts[:i]) + count))
        rows = torch.tensor([head * d + c for head in heads for c in range(d)])
        found.append({n: None if p.get(n) is None else p[n][rows] for n in ("weight", "bias")})  # type: ignore[misc]
    return found


def multihead(
    p: Params,
    x: torch.Tensor,
    o: Options,
    *,
    hidden: torch.Tensor,
    encoded: torch.Tensor | None = None,
    angles: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    bias: torch.Tensor | None = None,
    add_bias: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, output of the input norm or x itself). Without `add_bias` the last bias is left out."""
    h = o["num_attention_heads"]
    g = o.get("num_gqa_groups") or h
    d = o.get("kv_channels") or x.shape[-1] // h
    interleaved = o.get("qkv_weight_interleaved", True) and o.get("fuse_qkv_params", False)
    cross = encoded is not None
    first = below(p, "layernorm_query" if cross else "layernorm_qkv") or below(p, "query_layer" if cross else "qkv")
    n = x
    if "layer_norm_weight" in first:
        n = _norm(first, "layer_norm_", x, o, o.get("layernorm_epsilon", 1e-5), o.get("zero_centered_gamma", False))
    if cross:
        (wq,) = _rows(first, ["query"], [h], g, d, False) if "query_weight" in first else [first]
        wk, wv = _rows(below(p, "key_value"), ["key", "value"], [g, g], g, d, interleaved)
    else:
        wq, wk, wv = _rows(first, ["query", "key", "value"], [h, g, g], g, d, interleaved)
    source = encoded if encoded is not None else n
    q = linear(n, wq["weight"], wq.get("bias")).unflatten(-1, (h, d))
    k, v = (linear(source, w["weight"], w.get("bias")).unflatten(-1, (g, d)) for w in (wk, wv))

    def turn(heads: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        how = o.get("rotary_pos_interleaved", False)
        return tuple(t if f is None else turned(t, f.flatten(1).cpu(), how) for t, f in zip(heads, angles, strict=True))

    def normed(heads: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(qk_norm(p, name, t, o) for name, t in zip(("q_norm", "k_norm"), heads, strict=True))

    steps: list[Callable[..., Any]] = [normed, turn] if o.get("qk_norm_before_rope") else [turn, normed]
    for step in steps:
        q, k = step((q, k))
    attended = dot_product(
        q,
        k,
        v,
        hidden,
        softmax=o.get("softmax_type", "vanilla"),
        sink=p.get("core_attention.softmax_offset"),
        bias=bias,
    )
    return linear(attended, p["proj.weight"], p.get("proj.bias") if add_bias else None), n


def qk_norm(p: Params, name: str, t: torch.Tensor, o: Options) -> torch.Tensor:
    """Each head of queries or keys normalized."""
    kind, eps = o.get("qk_norm_type"), o.get("qk_norm_eps", 1e-6)
    if kind is None:
        return t
    if kind == "L2Normalization":
        return t / torch.sqrt((t * t).sum(-1, keepdim=True) + eps)
    part = below(p, name)
    return norm(t, part["weight"], part.get("bias"), rms=kind == "RMSNorm", eps=eps, zero_centered=False)


def _norm(p: Params, prefix: str, x: torch.Tensor, o: Options, eps: float, zero_centered: bool) -> torch.Tensor:
    rms = o.get("normalization", "LayerNorm") == "RMSNorm"
    return norm(x, p[f"{prefix}weight"], p.get(f"{prefix}bias"), rms=rms, eps=eps, zero_centered=zero_centered)


# ------------------------------------------------------------------------------------------- the layer


def layer(
    p: Params,
    x: torch.Tensor,
    o: Options,
    *,
    hidden: torch.Tensor,
    encoded: torch.Tensor | None = None,
    cross_hidden: torch.Tensor | None = None,
    keep: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    **attention: Any,
) -> torch.Tensor:
    """The layer's output. `keep(part, t)` stands for the dropout behind a part; default: none."""
    drop = keep or (lambda part, t: t)
    eps, zero_centered = o.get("layernorm_epsilon", 1e-5), o.get("zero_centered_gamma", False)
    late = o.get("apply_residual_connection_post_layernorm", False)

    def mlp(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = below(p, "layernorm_mlp")
        n = _norm(part, "layer_norm_", t, o, eps, zero_centered)
        inside = activation(o.get("activation", "gelu"), linear(n, part["fc1_weight"], part.get("fc1_bias")))
        return linear(inside, part["fc2_weight"], part.get("fc2_bias")), n

    out, n = multihead(below(p, "self_attention"), x, o, hidden=hidden, **attention)
    if o.get("parallel_attention_mlp"):
        return x + drop("both", out + mlp(x)[0])
    x = (n if late else x) + drop("self_attention", out)
    if o.get("layer_type") == "decoder":
        assert cross_hidden is not None
        out, n = multihead(below(p, "inter_attention"), x, o, hidden=cross_hidden, encoded=encoded, **attention)
        x = (n if late else x) + drop("inter_attention", out)
    out, n = mlp(x)
    y = (n if late else x) + drop("layernorm_mlp", out)
    return _norm(below(p, "layernorm"), "", y, o, eps, zero_centered) if o.get("output_layernorm") else y


def results(
    forward: Callable[[Params, torch.Tensor], torch.Tensor], module: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    """y, dx and the gradient of every parameter of `module`, by `forward(parameters, x)` in float64."""
    leaf = x.detach().cpu().double().requires_grad_()
    p = {name: t.detach().cpu().double().requires_grad_() for name, t in module.named_parameters()}
    y = forward(p, leaf)
    grads = torch.autograd.grad((y * dy.detach().cpu().double()).sum(), [leaf, *p.values()])
    return {"y": y.detach(), "dx": grads[0], **dict(zip(p, grads[1:], strict=True))}
