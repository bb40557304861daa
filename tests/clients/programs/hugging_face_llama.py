"""Weights of transformers' Llama in examples/llama.py and back: the same logits, and the same weights."""

import torch
from examples.llama import load_folder, save_folder
from support import arguments
from transformers import LlamaConfig, LlamaForCausalLM

import te_torch as te

given = arguments()
long = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
long |= {"original_max_position_embeddings": 32, "rope_theta": 5000.0}
for options in ({}, {"tie_word_embeddings": True, "rope_parameters": long}):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, **options)
    theirs = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(given.folder / "theirs")
    ours = load_folder(given.folder / "theirs", given.device, torch.float32)
    tokens = torch.randint(64, (2, 100))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens.to(given.device)).cpu(), expected, rtol=1e-3, atol=1e-3)
        save_folder(ours.config, te.plain_state_dict(ours), given.folder / "ours")
        back = LlamaForCausalLM.from_pretrained(given.folder / "ours").eval()
        assert torch.equal(back(tokens).logits, expected)
print("ok")
