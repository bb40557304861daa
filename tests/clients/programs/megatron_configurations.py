"""Megatron-core's configurations: each trains three steps with this package's layers, on one rank or on two.

Arguments: what (names of rows with " + " between, or "all"), device, folder, where the release is installed. It prints
a line for each row; a release that does not know an option has no such row.
"""

import os
import sys
import traceback

import te_torch.compat  # noqa: F401
import torch
import torch.distributed as dist
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

from support import arguments, in_ranks

given = arguments()
sys.path.insert(0, sys.argv[4])
VOCABULARY, LENGTH = 64, 32
F = torch.nn.functional
os.environ["NVTE_GROUPED_LINEAR_SINGLE_PARAM"] = "1"  # as the documented package asks for
os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"  # without it Megatron-core refuses its op fuser for experts

FP8 = {"fp8": "hybrid", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
RECIPES = {r: {**FP8, "fp8_recipe": r} for r in ("delayed", "tensorwise", "blockwise", "mxfp8")}
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
    "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
GELU = {"activation_func": F.gelu, "gated_linear_unit": False}
MLA = {"multi_latent_attention": True}
FUSER = {"use_transformer_engine_op_fuser": True}
GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
SIGMOID = {"moe_router_score_function": "sigmoid"}

#: What is set beyond a Llama-like model of two layers.
ROWS: dict[str, dict[str, Any]] = {
    "dense": {},
    **{f"dense {r}": of for r, of in RECIPES.items()},
    "LayerNorm": {"normalization": "LayerNorm"},
    "zero-centered gamma": {"layernorm_zero_centered_gamma": True},
    "bias and gelu": {"add_bias_linear": True, **GELU},
    "squared relu": {"activation_func": "squared_relu", "gated_linear_unit": False},
    "norms of q and k": {"qk_layernorm": True},
    "L2 norms of q and k": {"qk_l2_norm": True},
    "window": {"window_size": (4, 0)},
    "softmax off-by-one": {"softmax_type": "off-by-one"},
    "learnable softmax": {"softmax_type": "learnable"},
    "first and last in bf16": {**RECIPES["tensorwise"], "first_last_layers_bf16": True},
    "FP8 attention": {**RECIPES["delayed"], "fp8_dot_product_attention": True, "fp8_multi_head_attention": True},
    "rotary fusion": {"apply_rope_fusion": True},
    "dropout": {"hidden_dropout": 0.1},
    "recompute full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recompute full delayed": {
        **RECIPES["delayed"],
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "recompute mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "recompute core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "recompute mlp tensorwise": {
        **RECIPES["tensorwise"],
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp"],
    },
    "te rng tracker": {"use_te_rng_tracker": True},
    "multi-token prediction": {"mtp_num_layers": 1},
    "latent attention": MLA,
    "latent attention delayed": {**MLA, **RECIPES["delayed"]},
    "latent attention blockwise": {**MLA, **RECIPES["blockwise"]},
    "FP8 parameters delayed": {**RECIPES["delayed"], "fp8_param": True},
    "FP8 parameters tensorwise": {**RECIPES["tensorwise"], "fp8_param": True},
    "FP8 parameters blockwise": {**RECIPES["blockwise"], "fp8_param": True},
    "FP8 parameters mxfp8": {**RECIPES["mxfp8"], "fp8_param": True},
    "activation of te.ops": {"use_te_activation_func": True},
    "activation of te.ops, gelu": {"use_te_activation_func": True, **GELU},
    "activation of te.ops, input in FP8": {"use_te_activation_func": True, "activation_func_fp8_input_store": True},
    "op fuser": FUSER,
    **{f"op fuser {r}": {**FUSER, **of} for r, of in RECIPES.items()},
    "op fuser, bias and gelu": {**FUSER, "add_bias_linear": True, **GELU},
    "op fuser, LayerNorm": {**FUSER, "normalization": "LayerNorm"},
    "op fuser, FP8 parameters": {**FUSER, **RECIPES["tensorwise"], "fp8_param": True},
    "experts": EXPERTS,
    **{f"experts {r}": {**EXPERTS, **of} for r, of in RECIPES.items()},
    "experts by allgather": {**EXPERTS, "moe_token_dispatcher_type": "allgather"},
    "experts, permute fusion": {**EXPERTS, "moe_permute_fusion": True},
    "experts, permute fusion and padding": {
        **EXPERTS,
        **RECIPES["delayed"],
        "moe_permute_fusion": True,
        "moe_router_padding_for_fp8": True,
    },
    "experts, permute fusion and padding, blockwise": {
        **EXPERTS,
        **RECIPES["blockwise"],
        "moe_permute_fusion": True,
        "moe_router_padding_for_fp8": True,
    },
    "experts, shared": {**EXPERTS, "moe_shared_expert_intermediate_size": 64},
    "experts, shared and gated": {**EXPERTS, "moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True},
    "experts, capacity": {**EXPERTS, "moe_expert_capacity_factor": 1.0},
    "experts, capacity and padding": {
        **EXPERTS,
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
    "experts, z loss": {**EXPERTS, "moe_z_loss_coeff": 1e-3},
    "experts, recompute": {**EXPERTS, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "experts, recompute of the activation": {
        **EXPERTS,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act"],
    },
    "experts, bias of the router": {**EXPERTS, **SIGMOID, "moe_router_enable_expert_bias": True},
    "experts, probabilities on the input": {
        **EXPERTS,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
    },
    "experts, latent attention": {**EXPERTS, **MLA},
    "router fusion": {**EXPERTS, "moe_router_fusion": True},
    "router fusion, sigmoid": {**EXPERTS, **SIGMOID, "moe_router_fusion": True},
    "router fusion, groups": {**EXPERTS, **SIGMOID, **GROUPS, "moe_router_fusion": True},
    "router fusion, softmax before": {**EXPERTS, "moe_router_pre_softmax": True, "moe_router_fusion": True},
    "router fusion, bias and scaling": {
        **EXPERTS,
        **SIGMOID,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_fusion": True,
    },
    "router fusion, sequence loss": {
        **EXPERTS,
        "moe_router_fusion": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "router fusion, global loss": {
        **EXPERTS,
        "moe_router_fusion": True,
        "moe_router_load_balancing_type": "global_aux_loss",
    },
    "router fusion, float32 scores": {**EXPERTS, "moe_router_fusion": True, "moe_router_dtype": "fp32"},
    "router and permute fusion, delayed": {
        **EXPERTS,
        **RECIPES["delayed"],
        "moe_router_fusion": True,
        "moe_permute_fusion": True,
        "moe_router_padding_for_fp8": True,
    },
    "op fuser with experts": {**FUSER, **EXPERTS},
    "op fuser with experts mxfp8": {**FUSER, **EXPERTS, **RECIPES["mxfp8"]},
    "op fuser with experts delayed": {**FUSER, **EXPERTS, **RECIPES["delayed"]},
    "one grouped weight": {**FUSER, **EXPERTS, **RECIPES["mxfp8"], "moe_single_grouped_weight": True},
    **{
        f"distributed optimizer, FP8 parameters {r}": {**of, "fp8_param": True, "distributed_optimizer": True}
        for r, of in RECIPES.items()
    },
    "distributed optimizer": {"distributed_optimizer": True},
    "distributed optimizer, experts": {**EXPERTS, "distributed_optimizer": True},
}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
#: The same on two ranks.
PAIRS: dict[str, dict[str, Any]] = {
    "tensor": TENSOR,
    **{f"tensor and sequence{r and ' ' + r}": {**SEQUENCE, **RECIPES.get(r, {})} for r in ("", *RECIPES)},
    "tensor, op fuser": {**TENSOR, **FUSER},
    "tensor and sequence, op fuser": {**SEQUENCE, **FUSER},
    "tensor and sequence, op fuser delayed": {**SEQUENCE, **FUSER, **RECIPES["delayed"]},
    **{f"context by {how}": {"context_parallel_size": 2, "cp_comm_type": how} for how in ("p2p", "a2a", "all_gather")},
    **{f"ranks of experts{r and ' ' + r}": {**EXPERTS, "expert_model_parallel_size": 2, **RECIPES.get(r, {})}
       for r in ("", "delayed", "blockwise")},
    "ranks of experts, router and permute fusion": {
        **EXPERTS, "expert_model_parallel_size": 2, "moe_router_fusion": True, "moe_permute_fusion": True,
    },
    "ranks of experts, op fuser": {**EXPERTS, "expert_model_parallel_size": 2, **FUSER},
    "two replicas, distributed optimizer, FP8 parameters": {
        **RECIPES["tensorwise"], "fp8_param": True, "distributed_optimizer": True,
    },
}  # fmt: skip


#: Rows that compute the same: of (beginning of the name, beginning of the other's name) with equal endings.
SAME = (
    ("op fuser with experts", "experts"), ("op fuser", "dense"), ("activation of te.ops", "dense"),
    ("router fusion", "experts"), ("experts, permute fusion", "experts"), ("recompute full", "dense"),
    ("tensor and sequence, op fuser", "tensor and sequence"), ("tensor, op fuser", "tensor"),
    ("ranks of experts, router and permute fusion", "ranks of experts"),
    ("ranks of experts, op fuser", "ranks of experts"),
)  # fmt: skip


#: What a specification of layers is asked for beside the configuration.
ASKED = {
    "use_te_op_fuser": "use_transformer_engine_op_fuser", "use_te_activation_func": "use_te_activation_func",
}  # fmt: skip


def of_the_cpu(make: Any) -> Any:
    def made_there(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
        return make(*args, device="cpu" if "cuda" in str(device) else device, **options)

    return made_there


def on_the_cpu() -> None:
    """Megatron-core asks for the current GPU, waits for it, and keeps streams of its random numbers."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = torch.cuda.Event = MagicMock
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: MagicMock()
    torch.cuda.stream = lambda stream: nullcontext()
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.cuda.is_current_stream_capturing = lambda: False
    for name in ("ops.paged_stash", "paged_stash"):  # kernels in Triton, which torch for the CPU does not bring
        sys.modules[f"megatron.core.transformer.moe.{name}"] = MagicMock()
    for name in ("arange", "tensor", "zeros", "ones", "empty", "full"):
        setattr(torch, name, of_the_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *args, **options: tensor
    kind = torch.Tensor.type
    torch.Tensor.type = lambda t, *to: kind(t, *to) if to else kind(t).replace("torch.", "torch.cuda.")
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # Gloo gathers what is coalesced in the first one's dtype.
    param_and_grad_buffer._coalescing_manager = lambda *args, **options: nullcontext(MagicMock())

    token_dispatcher.maybe_move_tensor_to_cpu = lambda t, as_numpy=False, **options: (
        t.numpy() if as_numpy and torch.is_tensor(t) else t
    )

    random._get_cuda_rng_state, random._set_cuda_rng_state = (
        lambda *args, **of: torch.empty(0),
        lambda *args, **of: None,
    )
    random.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()


def made(options: dict[str, Any]) -> Any:
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    torch.manual_seed(1)
    options = dict(options)
    if options.get("activation_func") == "squared_relu":
        options["activation_func"] = squared_relu
    latent = options.pop("multi_latent_attention", False)
    base: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128,
        "normalization": "RMSNorm", "activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "params_dtype": torch.bfloat16, "bf16": True,
        "use_cpu_initialization": True, "gradient_accumulation_fusion": False, "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
    }  # fmt: skip
    if latent:
        base |= {
            "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16,
            "qk_pos_emb_head_dim": 16, "v_head_dim": 16, "rope_type": "rope", "add_bias_linear": False,
        }  # fmt: skip
    else:
        base["num_query_groups"] = 2
    config = (MLATransformerConfig if latent else TransformerConfig)(**{**base, **options})
    spec = specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        qk_l2_norm=config.qk_l2_norm,
        multi_latent_attention=latent,
        **{asked: True for asked, option in ASKED.items() if option in options},
    )
    more = {}
    if config.mtp_num_layers:
        more["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True)
    from megatron.core.fp8_utils import get_fp8_context

    with get_fp8_context(config, is_init=True) if config.fp8_param else nullcontext():
        model = GPTModel(
            config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
            position_embedding_type="none" if latent else "rope", **more,
        )  # fmt: skip
    return model.to(given.device)


def step(model: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator).to(given.device)
    positions = torch.arange(LENGTH, device=given.device).expand(2, LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=given.device).triu(1)
    loss = model(tokens, positions, hidden, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()
    for module in model.modules():
        if hasattr(module, "backward_dw") and getattr(model.config, "delay_wgrad_compute", False):
            module.backward_dw()
    return loss.item()


class Sgd:
    """torch's, and a look whether each parameter got a gradient."""

    def __init__(self, model: Any) -> None:
        self.model, self.plain = model, torch.optim.SGD(model.parameters(), lr=0.1)
        self.zero_grad = self.plain.zero_grad

    def step(self) -> None:
        without = [n for n, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        assert not without, f"no gradient: {without}"
        self.plain.step()


def distributed(model: Any) -> tuple[Any, Any]:
    """Megatron-core's data parallelism around a model, and its optimizer, which spreads its state over ranks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    for p in model.parameters():  # `use_cpu_initialization` writes the weights after their first values were kept
        if hasattr(p, "get_high_precision_init_val"):
            p.get_high_precision_init_val().copy_(p.detach().dequantize())
    quantized, blocks = model.config.fp8_param, model.config.fp8_param and model.config.fp8_recipe == "mxfp8"
    reuse = {"reuse_grad_buf_for_mxfp8_param_ag": blocks, "overlap_param_gather": blocks}  # MXFP8 has no other way
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, fp8_param_gather=quantized, **reuse
    )
    model = DistributedDataParallel(model.config, config, model)
    options = {"fp8_recipe": model.config.fp8_recipe if quantized else None, **reuse}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=True, **options), [model]
    )
    return model, optimizer


def train(options: dict[str, Any]) -> list[float]:
    options = dict(options)
    spread = options.pop("distributed_optimizer", False)
    model = made(options)
    if spread:
        model, optimizer = distributed(model)
    else:
        optimizer = Sgd(model)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        if spread:
            model.zero_grad_buffer()
            if model.ddp_config.overlap_param_gather:
                for part in optimizer.chained_optimizers:
                    part._copy_main_params_to_param_buffer()
        losses.append(step(model, 1))
        if spread:
            model.finish_grad_sync()
        optimizer.step()
    assert losses[-1] < losses[0], losses
    return losses


def compare(name: str, losses: dict[str, list[float]]) -> None:
    """That a row has the losses of the one that computes the same, if that one ran before."""
    for begin, other in SAME:
        if name.startswith(begin):
            wanted = losses.get(other + name.removeprefix(begin))
            if wanted is not None:
                assert max(abs(a - b) for a, b in zip(losses[name], wanted, strict=True)) < 3e-3, (losses[name], wanted)
            return


def run(rank: int, size: int) -> None:
    torch._dynamo.config.disable = True  # Megatron-core compiles its small fusions: that is not what is tested
    if given.device == "cpu":
        on_the_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    store = f"file://{given.folder}/configurations-{size}"
    dist.init_process_group("gloo" if given.device == "cpu" else "nccl", store, rank=rank, world_size=size)
    known = {*TransformerConfig.__dataclass_fields__, "distributed_optimizer", "multi_latent_attention"}
    failed, losses = [], {}
    for name, options in (ROWS if size == 1 else PAIRS).items():
        if given.what != "all" and name not in given.what.split(" + "):
            continue
        if unknown := [option for option in options if option not in known]:
            print(f"absent  {name}: {unknown}")
            continue
        sizes = {k: v for k, v in options.items() if k.endswith("parallel_size")}
        parallel_state.initialize_model_parallel(**sizes)
        if given.device == "cuda":
            model_parallel_cuda_manual_seed(1)
        try:
            losses[name] = train(options)
            compare(name, losses)
            told = f"ok      {name}: {' '.join(f'{loss:.3f}' for loss in losses[name])}"
        except Exception as error:
            failed.append(name)
            last = traceback.extract_tb(error.__traceback__)[-1]
            told = f"failed  {name}: {type(error).__name__}: {str(error)[:300]} ({last.filename}:{last.lineno})"
            if given.what != "all":
                traceback.print_exc()
        if rank == 0 or told.startswith("failed"):
            print(told, flush=True)
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    assert not failed, failed


if __name__ == "__main__":  # Megatron-core starts processes that import this file
    for size in (1, 2):
        in_ranks(run, size, size)
    print("ok")
