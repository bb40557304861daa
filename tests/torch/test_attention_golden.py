"""DotProductAttention and the float64 reference against what the peer's two backends gave (tests/data/README.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import te_torch as te
from te_core.attention import alibi_slopes
from tests.backends import devices
from tests.core.attention_cases import only
from tests.golden import load
from tests.reference import attention as reference
from tests.tolerances import DB, snr_db

CASES = sorted(tuple(k.split("/")[:2]) for k in load("attention") if k.endswith("/y"))
GRADIENTS = ("dq", "dk", "dv")

#: What the peer's module was told in each case.
MODULE: dict[str, dict[str, Any]] = {
    "no_mask": {"attn_mask_type": "no_mask"},
    "causal": {},
    "causal_bottom_right": {"attn_mask_type": "causal_bottom_right"},
    "causal_window": {"window_size": (5, 0)},
    "padding": {"attn_mask_type": "padding"},
    "padding_causal": {"attn_mask_type": "padding_causal"},
    "arbitrary": {"attn_mask_type": "arbitrary"},
    "off_by_one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable"},
    "alibi": {},
    "post_scale_bias": {"attn_mask_type": "no_mask"},
    "pre_scale_bias": {"attn_mask_type": "no_mask"},
}


def operands(case: str, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    golden = load("attention")
    q, k, v = (golden[n].to(device) for n in "qkv")
    return (q[:, -7:] if case == "causal_bottom_right" else q), k, v


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("family", ["fused", "unfused", "plain torch"])
@pytest.mark.parametrize(("theirs", "case"), CASES)
def test_module(monkeypatch, theirs, case, family, device):
    """Output and gradients, each of our backends against each of the peer's."""
    only(monkeypatch, family)
    golden = load("attention")
    module = te.DotProductAttention(4, 32, num_gqa_groups=2, qkv_format="bshd", **MODULE[case]).to(device)
    if case == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(golden["learnable/offset"])
    options: dict[str, Any] = {}
    if case.startswith("padding"):
        options["attention_mask"] = golden["padding_mask"].to(device)
    elif case == "arbitrary":
        options["attention_mask"] = golden["arbitrary_mask"].to(device)
    elif case.endswith("bias"):
        options |= {"core_attention_bias_type": case, "core_attention_bias": golden["bias"].to(device)}
    elif case == "alibi":
        options["core_attention_bias_type"] = "alibi"
    leaves = [t.clone().requires_grad_() for t in operands(case, device)]
    if device == "cuda" and family == "fused" and case == "arbitrary":
        with pytest.raises(ValueError, match="FusedAttention: .*arbitrary mask"):
            module(*leaves, **options)
        return
    y = module(*leaves, **options)
    y.backward(torch.ones_like(y))
    for key, value in zip(("y", *GRADIENTS), (y, *(t.grad for t in leaves)), strict=True):
        got = snr_db(value, golden[f"{theirs}/{case}/{key}"])
        assert got >= DB["bf16"], f"{key}: {got:.1f} dB"


@pytest.mark.parametrize(("theirs", "case"), CASES)
def test_reference(theirs, case):
    """The reference of the other attention tests agrees with the peer, too."""
    golden = load("attention")
    q, k, v = (t.float().numpy().transpose(0, 2, 1, 3) for t in operands(case))
    causal = "causal" in case or case in ("alibi", "off_by_one", "learnable")
    problem: dict[str, Any] = {"right": 0 if causal else -1, "left": 5 if "window" in case else -1}
    problem["bottom_right"] = case == "causal_bottom_right"
    if case.startswith("padding"):
        lengths = (~golden["padding_mask"]).sum((1, 2, 3)).numpy()
        problem |= {"len_q": lengths, "len_kv": lengths}
    elif case == "arbitrary":
        problem["mask"] = golden["arbitrary_mask"].numpy()
    elif case.endswith("bias"):
        problem["bias"] = golden["bias"].float().numpy() * (32**-0.5 if case.startswith("pre") else 1)
    elif case == "alibi":
        problem["slopes"] = np.array(alibi_slopes(4))
    elif case in ("off_by_one", "learnable"):
        problem |= {"softmax": case.replace("_", "-"), "sink": golden["learnable/offset"].numpy()}
    p = reference.Problem(32**-0.5, **problem)
    y = reference.forward(q, k, v, p).out
    g = reference.backward(np.ones_like(y), q, k, v, p)
    for key, value in zip(("y", *GRADIENTS), (y, *g[:3]), strict=True):
        wanted = golden[f"{theirs}/{case}/{key}"]
        assert snr_db(value.transpose(0, 2, 1, 3).reshape(wanted.shape), wanted) >= DB["bf16"], key
