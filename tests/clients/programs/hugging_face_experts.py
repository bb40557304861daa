"""Models of transformers with experts, converted: outputs and gradients of theirs, their checkpoints, FP8, refusals."""

import copy

import torch
from support import arguments
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

import te_torch as te
from te_core.recipe import Float8CurrentScaling
from tests.tolerances import DB, snr_db

given = arguments()
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
DEEPSEEK = {"num_local_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1}
DEEPSEEK |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
DEEPSEEK |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
CONFIGS = {
    "Mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "Qwen2-MoE": Qwen2MoeConfig(**SIZES, **QWEN, shared_expert_intermediate_size=40),
    "Qwen3-MoE": Qwen3MoeConfig(**SIZES, **QWEN, norm_topk_prob=True, head_dim=16),
    "DeepSeek-V3": DeepseekV3Config(**SIZES, **DEEPSEEK),
    "DeepSeek-V3 in one group": DeepseekV3Config(**SIZES, **DEEPSEEK | {"n_group": 1, "topk_group": 1}),
}


def made(config):
    """A model whose weights and biases of experts are far from their beginnings."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model.to(given.device)


def gradients(block):
    """Of the experts' weights, in their layout, of the router's, and of the shared ones."""
    if not isinstance(block, te.MoELayer):
        stacks, router = (block.experts.gate_up_proj.grad, block.experts.down_proj.grad), block.gate
        shared = getattr(block, "shared_expert", getattr(block, "shared_experts", None))
    else:
        stacks = [part.weight.grad for part in (block.fc1, block.fc2)]
        router, shared = block.router, block.shared_experts
    return [*stacks, router.weight.grad, *([] if shared is None else [p.grad for p in shared.parameters()])]


def step(block, x):
    x = x.detach().requires_grad_()
    y = block(x)
    y.backward(torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape).to(y.dtype))
    return [y, x.grad, *gradients(block)]


for name, config in CONFIGS.items():
    theirs, ids = made(config), torch.randint(64, (2, 16), device=given.device)
    ours = copy.deepcopy(theirs)
    before = {id(p) for p in ours.parameters()}
    report = te.convert(ours)
    assert {id(p) for p in ours.parameters()} == before, "an optimizer made before goes on"
    assert sum(row.became == "MoELayer" for row in report.rows) == 2 - ("DeepSeek" in name), str(report)
    losses = []
    for model in (theirs, ours):
        found = model(input_ids=ids, labels=ids)
        found.loss.backward()
        losses.append(found.logits)
    assert snr_db(losses[1], losses[0]) > DB["fp32"] - 15, name
    blocks = [model.model.layers[1].mlp for model in (theirs, ours)]
    for a, b in zip(*map(gradients, blocks), strict=True):
        assert snr_db(b, a) > DB["fp32"] - 15, (name, a.shape)
    ours.load_state_dict({report.keys.get(key, key): 2 * value for key, value in theirs.state_dict().items()})
    back = copy.deepcopy(theirs)
    back.load_state_dict(report.as_before(te.plain_state_dict(ours)))
    assert all(torch.equal(a, 2 * b) for a, b in zip(back.parameters(), theirs.parameters(), strict=True)), name
    assert torch.equal(ours.model.layers[1].mlp.fc1.weight[3], 2 * theirs.model.layers[1].mlp.experts.gate_up_proj[3])

    # In bfloat16 no further from float32 than twice what theirs is.
    block = copy.deepcopy(blocks[0]).bfloat16()
    x = torch.randn(2, 12, 32, device=given.device).bfloat16()
    wanted = copy.deepcopy(block).float()
    holder = torch.nn.ModuleList([copy.deepcopy(block)])
    te.convert(holder)
    for part in (block, wanted, holder):
        part.zero_grad()
    for a, b, c in zip(step(block, x), step(holder[0], x), step(wanted, x.float()), strict=True):
        assert (b.float() - c).norm() <= 2 * (a.float() - c).norm() + 1e-6, (name, c.shape)

    # FP8, with weights held in it.
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        te.convert(theirs)
    layer = theirs.model.layers[1].mlp
    assert isinstance(layer.fc1.weight0, te.Float8Tensor) and not isinstance(layer.router.weight, te.Float8Tensor)
    with te.autocast(recipe=Float8CurrentScaling()):
        loss = theirs(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.isfinite() and layer.router.weight.grad.isfinite().all()

# Who records the logits of routers goes on doing so: the auxiliary loss of theirs is there.
theirs = made(CONFIGS["Mixtral"])
ours, ids = copy.deepcopy(theirs), torch.randint(64, (2, 16), device=given.device)
te.convert(ours)
wanted, found = (m(input_ids=ids, labels=ids, output_router_logits=True).aux_loss for m in (theirs, ours))
torch.testing.assert_close(found, wanted)

REFUSED = {
    "jitter": (MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.1), "router_jitter_noise"),
    "sums": (DeepseekV3Config(**SIZES, **DEEPSEEK, norm_topk_prob=False), "divided by their sum"),
    "groups": (DeepseekV3Config(**SIZES, **DEEPSEEK | {"num_experts_per_tok": 6}), "as its best 2"),
    "activation": (MixtralConfig(**SIZES, num_local_experts=4, hidden_act="gelu"), "has the activation|SiLU"),
}
for name, (config, words) in REFUSED.items():
    model = made(config)
    kept = [row.note for row in te.convert(model).kept if row.name == "model.layers.1.mlp"]
    assert kept and any(word in kept[0] for word in words.split("|")), (name, kept)
    assert model(input_ids=ids).logits.isfinite().all()
print("ok")
