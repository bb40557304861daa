"""A Llama of te_torch's Transformer layers, and its weights as Hugging Face's `LlamaForCausalLM` saves them.

`load_folder(folder, device)` makes the model of a folder with config.json and *.safetensors, `save_folder(...)` writes
one that transformers reads. `examples/train_llama.py` trains it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import te_torch as te
from te_cli.arguments import UserError

#: Weights of a layer here, and those that Hugging Face keeps for each, which lie one below the other in ours.
NAMES = {
    "self_attention.layernorm_qkv.layer_norm_weight": ("input_layernorm",),
    "self_attention.layernorm_qkv.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.proj.weight": ("self_attn.o_proj",),
    "layernorm_mlp.layer_norm_weight": ("post_attention_layernorm",),
    "layernorm_mlp.fc1_weight": ("mlp.gate_proj", "mlp.up_proj"),
    "layernorm_mlp.fc2_weight": ("mlp.down_proj",),
}
#: The others.
AROUND = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model; `rope` holds what Hugging Face calls rope_parameters."""

    vocabulary: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int  # heads of keys and values
    eps: float = 1e-5
    tied: bool = False  # head and embedding are one weight
    rope: tuple[tuple[str, Any], ...] = (("rope_theta", 10000.0), ("rope_type", "default"))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> LlamaConfig:
        """That of a config.json."""
        if given.get("model_type") != "llama" or given.get("attention_bias") or given.get("mlp_bias"):
            raise UserError(f"config.json is of a {given.get('model_type')}: only a llama without biases is known here")
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        rope = {"rope_theta": given.get("rope_theta", 10000.0), "rope_type": "default", **rope}
        if rope["rope_type"] not in ("default", "llama3"):
            raise UserError(f"config.json asks for rope_type {rope['rope_type']}: default and llama3 are known here")
        heads = given["num_attention_heads"]
        if given.get("head_dim", width := given["hidden_size"] // heads) not in (None, width):
            raise UserError(
                f"config.json asks for head_dim {given['head_dim']}: only hidden_size / heads is known here"
            )
        return cls(
            given["vocab_size"], given["num_hidden_layers"], given["hidden_size"], given["intermediate_size"], heads,
            given.get("num_key_value_heads") or heads, given["rms_norm_eps"], given.get("tie_word_embeddings", False),
            tuple(sorted(rope.items())),
        )  # fmt: skip

    def as_json(self, dtype: torch.dtype) -> dict[str, Any]:
        """The config.json of such a model."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "vocab_size": self.vocabulary, "num_hidden_layers": self.layers, "hidden_size": self.hidden,
            "intermediate_size": self.ffn, "num_attention_heads": self.heads, "num_key_value_heads": self.groups,
            "rms_norm_eps": self.eps, "tie_word_embeddings": self.tied, "rope_parameters": dict(self.rope),
            "rope_theta": dict(self.rope)["rope_theta"], "torch_dtype": str(dtype).removeprefix("torch."),
        }  # fmt: skip


class Llama(torch.nn.Module):
    """Embedding, layers, norm, and the projection to the vocabulary, which stays in high precision."""

    def __init__(self, config: LlamaConfig, device: str, dtype: torch.dtype = torch.bfloat16, **parallel: Any) -> None:
        """`parallel`: what the layers are told of tensor parallelism."""
        super().__init__()
        c, self.config = config, config
        self.embedding = torch.nn.Embedding(c.vocabulary, c.hidden, device=device, dtype=dtype)
        self.head = torch.nn.Linear(c.hidden, c.vocabulary, bias=False, device=device, dtype=dtype)
        if c.tied:
            self.head.weight = self.embedding.weight
        if parallel:  # ranks draw their parts of a layer each for itself
            torch.manual_seed(1 + torch.distributed.get_rank(parallel["tp_group"]))
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                c.hidden, c.ffn, c.heads, num_gqa_groups=c.groups, layer_number=i + 1, normalization="RMSNorm",
                layernorm_epsilon=c.eps, bias=False, activation="swiglu", hidden_dropout=0.0, attention_dropout=0.0,
                attn_input_format="bshd", fuse_qkv_params=True, qkv_weight_interleaved=False,
                params_dtype=dtype, device=device, **parallel,
            )
            for i in range(c.layers)
        )  # fmt: skip
        self.norm = te.RMSNorm(c.hidden, eps=c.eps, dtype=dtype, device=device)
        self.rope = [rotary(c).to(device)]  # in a list: its buffer is no weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, V]."""
        x, angles = self.embedding(tokens), self.rope[0](tokens.shape[1])
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def rotary(c: LlamaConfig) -> te.RotaryPositionEmbedding:
    """Angles of the positions; with rope_type llama3 slow ones turn slower, for longer sequences than were learnt."""
    rope = dict(c.rope)
    made = te.RotaryPositionEmbedding(c.hidden // c.heads, rotary_base=rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * made.inv_freq / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        made.inv_freq.mul_(kept + (1 - kept) / rope["factor"])
    return made


def pairs(config: LlamaConfig) -> Iterator[tuple[str, list[str], list[int]]]:
    """(a name here, the names there, how many rows each of these has)."""
    width = config.hidden // config.heads
    rows = {3: [config.heads * width, *[config.groups * width] * 2], 2: [config.ffn] * 2, 1: [-1]}
    for i in range(config.layers):
        for ours, theirs in NAMES.items():
            yield f"layers.{i}.{ours}", [f"model.layers.{i}.{name}.weight" for name in theirs], rows[len(theirs)]
    for ours, name in AROUND.items():
        if not (config.tied and ours == "head.weight"):
            yield ours, [name], [-1]


def from_hugging_face(config: LlamaConfig, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a LlamaForCausalLM by the names of `Llama`."""
    missing = [name for _, theirs, _ in pairs(config) for name in theirs if name not in state]
    if missing:
        raise UserError(f"these weights are no Llama's of {config.layers} layers: {missing[0]} is missing")
    made = {ours: torch.cat([state[name] for name in theirs]) for ours, theirs, _ in pairs(config)}
    return made | ({"head.weight": made["embedding.weight"]} if config.tied else {})


def to_hugging_face(config: LlamaConfig, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of `Llama` by the names of a LlamaForCausalLM."""
    made = {}
    for ours, theirs, rows in pairs(config):
        parts = [state[ours]] if len(theirs) == 1 else state[ours].split(rows)
        made |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    return made


def load_folder(folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> Llama:
    """The model of a folder of Hugging Face's; inside `te.quantized_model_init` its layers hold quantized weights."""
    try:
        config = LlamaConfig.of(json.loads((folder / "config.json").read_text()))
    except OSError as error:
        raise UserError(f"{folder / 'config.json'}: {error.strerror}") from error
    except (KeyError, json.JSONDecodeError) as error:
        raise UserError(f"{folder / 'config.json'} is no config of a Llama: {error}") from error
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= safetensors().load_file(file)
    model = Llama(config, device, dtype)
    model.load_state_dict(from_hugging_face(config, state))
    return model


def save_folder(config: LlamaConfig, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write weights of `Llama` (`te.plain_state_dict(model)`) for `LlamaForCausalLM.from_pretrained`."""
    theirs = to_hugging_face(config, state)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors().save_file(theirs, folder / "model.safetensors", {"format": "pt"})
    dtype = theirs["model.norm.weight"].dtype
    (folder / "config.json").write_text(json.dumps(config.as_json(dtype), indent=2) + "\n")


def safetensors() -> Any:
    """The package's functions for torch."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise UserError(f"{error}: weights of Hugging Face lie in its files. pip install safetensors") from error
    return safetensors.torch
