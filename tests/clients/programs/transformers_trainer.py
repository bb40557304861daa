"""transformers' Trainer: a Llama that its accelerator converts to FP8, and a model of ours in a PreTrainedModel."""

import os
import sys

os.environ |= {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"} if sys.argv[4] == "llama" else {}
import te_torch.compat  # noqa: F401
import torch
import transformer_engine.pytorch as te
from support import arguments, check_fp8, falls, keep, kept
from transformer_engine.common.recipe import DelayedScaling
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

given = arguments()
llama = sys.argv[4] == "llama"


class Config(PretrainedConfig):
    model_type = "te_small"
    vocab_size, hidden_size = 64, 32


class Small(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer = te.TransformerLayer(
            config.hidden_size,
            64,
            4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attn_input_format="bshd",
            device=torch.get_default_device(),
        )
        self.head = te.LayerNormLinear(config.hidden_size, config.vocab_size, device=torch.get_default_device())
        self.post_init()

    def _init_weights(self, module):
        """Ours are initialised; the default would set the weight of every class named ...LayerNorm... to one."""
        if "transformer_engine" not in type(module).__module__:
            super()._init_weights(module)

    def forward(self, input_ids, labels=None):
        with te.autocast(recipe=DelayedScaling(amax_history_len=8)):
            logits = self.head(self.layer(self.embed(input_ids)))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def fresh():
    torch.manual_seed(1)
    if not llama:
        return Small(Config())
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def trainer(model, steps):
    options = {"use_cpu": given.device == "cpu", "report_to": [], "logging_steps": 1, "disable_tqdm": True}
    made = TrainingArguments(
        str(given.folder / "runs"),
        max_steps=steps,
        per_device_train_batch_size=8,
        save_steps=10,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        **options,
    )
    rows = [{"input_ids": (torch.arange(16) + i) % 64, "labels": (torch.arange(16) + i) % 64} for i in range(64)]
    return Trainer(model, made, train_dataset=rows)


# Of a Llama q, k, v, o, gate, up, down and the head; of ours QKV, projection, two of the MLP, and the head.
layers = 8 if llama else 5
if given.what == "train":
    runs = trainer(fresh(), 20)
    runs.train()
    losses = [entry["loss"] for entry in runs.state.log_history if "loss" in entry]
    losses = [float(loss) for loss in losses]
    falls(losses)
    assert losses[0] > 3.5, "it began at random"
    check_fp8(runs.model, layers)
    runs.save_model(str(given.folder / "model"))
    weights = {n: p for n, p in runs.model.named_parameters()}
    keep(given.folder, loss=losses[-1], **{n: p for n, p in weights.items()})
else:
    seen = kept(given.folder)
    loaded = (LlamaForCausalLM if llama else Small).from_pretrained(given.folder / "model")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.detach().cpu(), seen[name]), name
    runs = trainer(fresh(), 24)
    runs.train(resume_from_checkpoint=str(given.folder / "runs" / "checkpoint-20"))
    losses = [float(entry["loss"]) for entry in runs.state.log_history if "loss" in entry]
    assert len(losses) == 24 and losses[20] < 1.5 * seen["loss"], losses
    check_fp8(runs.model, layers)
print("ok")
