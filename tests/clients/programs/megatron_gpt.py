"""Megatron-core: a GPT, or a Mixtral-like model with grouped experts, on one rank or on two of tensor parallelism.

Its layers of this package train as its own do; in FP8 they go on from a distributed checkpoint. On the CPU it needs a
few calls of torch.cuda answered, see `on_the_cpu`. Arguments: what, device, folder, where the release is installed,
dense or moe, how many ranks.
"""

import json
import sys

import te_torch.compat  # noqa: F401
import torch
import torch.distributed as dist
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock

from support import arguments, check_fp8, falls, in_ranks, keep, kept

given = arguments()
release, kind, size = sys.argv[4], sys.argv[5], int(sys.argv[6])
sys.path.insert(0, release)
VOCABULARY, LENGTH, EXPERTS = 64, 32, 4


def on_the_cpu() -> None:
    """Megatron-core asks for the current GPU, waits for it, and keeps streams of its random numbers."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    # Kernels in Triton, which torch for the CPU does not bring. They move activations to the host: not used here.
    sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = MagicMock()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()  # nothing is drawn: weights are made on the CPU


def made(layers: str, dtype: torch.dtype, **options: Any) -> Any:
    """A model of Megatron-core's own layers ("local"), or of this package's ("te")."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig

    experts = EXPERTS if kind == "moe" else None
    if experts:
        options |= {"num_moe_experts": experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}
        options |= {"moe_grouped_gemm": layers == "te", "moe_aux_loss_coeff": 1e-2}
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=size,
        sequence_parallel=size > 1,
        **options,
    )
    if layers == "te":
        spec = specs.get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=bool(experts))
    else:
        spec = specs.get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    return model.to(given.device, dtype)


def copy(model: Any, source: Any) -> None:
    """The weights of its own layers under the names of this package's: experts are drawn in another order."""
    values = dict(source.named_parameters())
    for name, p in model.named_parameters():
        if "layer_norm_weight" in name:  # ones, as all norms
            continue
        if ".experts." in name:
            head, _, last = name.partition(".experts.")
            which, _, weight = last.partition(".weight")
            name = f"{head}.experts.local_experts.{weight}.{which}.weight"
        with torch.no_grad():
            p.copy_(values[name])


def loss_of(model: Any) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3)).to(given.device)
    positions = torch.arange(LENGTH, device=given.device).expand(2, LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=given.device).triu(1)
    return model(tokens, positions, hidden, labels=tokens.roll(-1, 1)).float().mean()


def trained(model: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        for p in model.parameters():  # what norms have seen of the tokens
            if size > 1 and p.grad is not None and (getattr(p, "sequence_parallel", False)):
                dist.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.item())
    falls(losses, by=0.85)
    return losses


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(one, other, strict=True))


def train() -> None:
    ours, half, low = made("te", torch.float32), made("te", torch.bfloat16), made("te", torch.bfloat16, **FP8)
    if size == 1:
        own = made("local", torch.float32)
        copy(ours, own)
        save(ours, "begin")
        wanted = trained(own)
        (given.folder / "losses").write_text(json.dumps(wanted))
    else:  # each rank takes its part of the same weights, to come to the same losses
        restore(ours, "begin")
        wanted = json.loads((given.folder / "losses").read_text())
    for model in (half, low):
        for p, value in zip(model.parameters(), ours.parameters(), strict=True):
            p.data.copy_(value)
    assert difference(trained(ours), wanted) < 2e-6
    assert difference(trained(half), wanted) < 2e-3
    assert difference(trained(low), wanted) < 5e-3
    check_fp8(low, layers=LINEARS)
    save(low, f"fp8-{size}")
    with torch.no_grad():
        keep_on_first(loss=loss_of(low))


def load() -> None:
    import te_torch as te
    from transformer_engine.common.recipe import DelayedScaling

    model = made("te", torch.bfloat16, **FP8)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    # Megatron-core loads what a model asks for, and delayed scaling keeps scales only once it has run.
    te.prepare_state(model, DelayedScaling(amax_history_len=FP8["fp8_amax_history_len"]))
    restore(model, f"fp8-{size}")
    with torch.no_grad():
        assert torch.equal(loss_of(model).cpu(), kept(given.folder)["loss"])
    loss_of(model).backward()
    check_fp8(model, layers=LINEARS)


FP8 = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
LINEARS = 2 * (4 if kind == "dense" else 2 + 2 * EXPERTS)  # the router, embedding and output are Megatron-core's own


def save(model: Any, name: str) -> None:
    from megatron.core import dist_checkpointing

    (given.folder / name).mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(entries(model), str(given.folder / name))


def restore(model: Any, name: str) -> None:
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load(entries(model), str(given.folder / name))
    missing, unexpected = model.load_state_dict(found)
    assert not missing and not unexpected, (missing, unexpected)


def entries(model: Any) -> Any:
    from megatron.core import parallel_state

    return model.sharded_state_dict(
        metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    )


def keep_on_first(**values: Any) -> None:
    if dist.get_rank() == 0:
        keep(given.folder, **values)
    dist.barrier()


def run(rank: int) -> None:
    torch._dynamo.config.disable = True  # Megatron-core compiles its small fusions: that is not what is tested
    if given.device == "cpu":
        on_the_cpu()
    from megatron.core import parallel_state

    store = f"file://{given.folder}/{given.what}-{size}"
    dist.init_process_group("gloo" if given.device == "cpu" else "nccl", store, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    if given.device == "cuda":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1)
    train() if given.what == "train" else load()
    dist.destroy_process_group()


if __name__ == "__main__":  # Megatron-core starts processes that import this file
    in_ranks(run, size)
    print("ok")
