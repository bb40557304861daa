"""What a padding mask costs a TransformerLayer, beside `cu_seqlens` of the same lengths and beside no padding.

python -m benchmarks.run padding          on a GPU
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import te_torch as te
from benchmarks import harness

WIDTH, HEADS, LENGTH, BATCH, TOKENS = 1024, 16, 512, 8, 400  # of each row 400 are tokens


def measure() -> list[harness.Row]:
    """Forward and backward in bf16."""
    device = harness.device()
    layer = te.TransformerLayer(
        WIDTH, 4 * WIDTH, HEADS, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, device=device
    )
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    mask = (torch.arange(LENGTH, device=device) >= TOKENS).expand(BATCH, 1, 1, LENGTH).contiguous()
    sums = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * TOKENS
    ways: dict[str, dict[str, Any]] = {
        "no padding": {"self_attn_mask_type": "no_mask"},
        "cu_seqlens": {"self_attn_mask_type": "padding", "cu_seqlens_q": sums, "cu_seqlens_kv": sums},
        "a padding mask": {"self_attn_mask_type": "padding", "attention_mask": mask},
    }
    dy = torch.ones_like(x)

    def step(options: dict[str, Any]) -> Callable[[], None]:
        return lambda: layer(x, **options).backward(dy)

    works = [step(options) for options in ways.values()]
    on_gpu, on_host = harness.gpu_us(*works), harness.host_us(*works, calls=300)
    return [
        {"case": name, "gpu us": gpu, "host us": host, "of_plain": gpu / on_gpu[0], "of_plain host": host / on_host[0]}
        for name, gpu, host in zip(ways, on_gpu, on_host, strict=True)
    ]
