"""Experts of Hugging Face's models (transformers 5) as a MoELayer: Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V3.

Their router stays in its place, so that who records its logits (`output_router_logits`) goes on doing so; the choice
and all behind it are ours. Their weights of all experts are one parameter, and stay it; what is held quantized is a
parameter of each expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from te_torch.runtime import FLOATS
from te_torch.training.moe_layer import MoELayer


class ForeignExperts(NamedTuple):
    """A block of theirs: the options of a MoELayer that computes the same, and its parts."""

    options: dict[str, Any]
    experts: nn.Module  # with gate_up_proj [experts, 2 ffn, hidden] and down_proj [experts, hidden, ffn]
    bias: str = ""  # the router's buffer with the bias of each expert
    shared: str = ""  # the name of the MLP that all tokens go to
    shared_gate: str = ""


def known_experts(block: nn.Module) -> ForeignExperts | str | None:
    """What a block is, why it can be no MoELayer, or None if it is no block of experts."""
    read = _KINDS.get(type(block).__name__)
    if read is None or not type(block).__module__.startswith("transformers."):
        return None
    experts = getattr(block, "experts", None)
    stacks = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(t, nn.Parameter) and t.ndim == 3 for t in stacks):
        return "its experts are not in the layout of transformers 5"
    if any(t.dtype not in FLOATS for t in stacks):  # type: ignore[union-attr]
        return "its experts are not float32, bfloat16 or float16"
    odd = ("has_bias", "is_transposed", "_is_expert_parallel", "has_post_expert_norm")
    if any(getattr(experts, name, False) for name in odd) or not getattr(experts, "is_concatenated", True):
        return f"its experts are no plain ones ({', '.join(name for name in odd if getattr(experts, name, False))})"
    activation = type(experts.act_fn).__name__  # type: ignore[union-attr]
    if activation not in ("SiLU", "SiLUActivation"):
        return f"its experts have the activation {activation}; SiLU is converted"
    return read(block)


def _sizes(block: Any) -> dict[str, Any]:
    count, hidden, ffn = block.experts.down_proj.shape
    return {"hidden_size": hidden, "ffn_hidden_size": ffn, "num_experts": count, "topk": block.gate.top_k}


def _mixtral(block: Any) -> ForeignExperts | str:
    if block.jitter_noise:
        return "router_jitter_noise multiplies its input in training"
    return ForeignExperts(_sizes(block), block.experts)


def _qwen(block: Any) -> ForeignExperts | str:
    options = {**_sizes(block), "use_pre_softmax": not block.gate.norm_topk_prob}
    shared = [name if hasattr(block, name) else "" for name in ("shared_expert", "shared_expert_gate")]
    return ForeignExperts(options, block.experts, "", *shared)


def _deepseek(block: Any) -> ForeignExperts | str:
    gate, options = block.gate, _sizes(block)
    if not gate.norm_topk_prob or gate.top_k == 1:
        return "its gates are not divided by their sum as those of sigmoid scores are here"
    options |= {"score_function": "sigmoid", "expert_bias": True, "scaling_factor": float(gate.routed_scaling_factor)}
    if gate.topk_group < gate.num_group:
        if gate.top_k != 2 * gate.topk_group:
            return "a group of experts is as good as its best 2, here as its best topk / group_topk"
        options |= {"num_groups": gate.num_group, "group_topk": gate.topk_group}
    return ForeignExperts(options, block.experts, "e_score_correction_bias", "shared_experts")


_KINDS = {
    "MixtralSparseMoeBlock": _mixtral,
    "Qwen2MoeSparseMoeBlock": _qwen,
    "Qwen3MoeSparseMoeBlock": _qwen,
    "DeepseekV3MoE": _deepseek,
}


def as_moe_layer(block: Any, known: ForeignExperts, name: str, holds: bool) -> MoELayer:
    """The layer around the parameters of the block, which it `holds` quantized afterwards or does not."""
    stacks = {"fc1": block.experts.gate_up_proj, "fc2": block.experts.down_proj}
    some = stacks["fc1"]
    options: dict[str, Any] = {"single_grouped_weight": not holds, "params_dtype": some.dtype, "device": "meta"}
    layer = MoELayer(**known.options, **options, name=name)
    layer.router, layer._bias_name = block.gate, known.bias
    for part, stack in stacks.items():
        linear = getattr(layer, part)
        if linear.single_grouped_weight:
            linear._parameters["weight"] = stack
        else:
            for i, weight in enumerate(stack.detach().unbind()):
                linear._parameters[f"weight{i}"] = nn.Parameter(weight, requires_grad=stack.requires_grad)
        for i in range(linear.num_gemms):
            linear.__dict__[f"bias{i}"] = some.new_empty(0).detach()
    if known.shared:
        layer.shared_experts = getattr(block, known.shared)
    if known.shared_gate:
        layer.shared_gate = getattr(block, known.shared_gate)
    layer.train(block.training)
    return layer


def new_keys(known: ForeignExperts) -> dict[str, str]:
    """By the block's entries of a state_dict those of the layer, which takes weights of all experts in one tensor."""
    names = {"gate.weight": "router.weight", "experts.gate_up_proj": "fc1.weight", "experts.down_proj": "fc2.weight"}
    if known.bias:
        names[f"gate.{known.bias}"] = f"router.{known.bias}"
    if known.shared_gate:
        names[f"{known.shared_gate}.weight"] = "shared_gate.weight"
    if known.shared and known.shared != "shared_experts":
        names |= {
            f"{known.shared}.{p}.weight": f"shared_experts.{p}.weight" for p in ("gate_proj", "up_proj", "down_proj")
        }
    return names
