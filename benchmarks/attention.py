"""Attention and the Transformer layer: GPU time, host time and peak memory beside the peer's figures, and start-up.

The method is that of benchmarks/modules.py. Also: our attention beside torch's own cuDNN and flash kernels in the same
process (of_torch), and how long the first forward and backward of a layer take in a process that finds no plan on
disk, and in the next one, which must build none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_torch as te
from benchmarks import harness
from benchmarks.modules import BF16, RECIPES, Case, forward_only, measure_all, peer, works
from te_core import ops
from te_core.attention import AttentionSpec
from te_torch.runtime import runtime_for, to_core
from tests import generators


def layer(hidden: int, ffn: int, heads: int, **options: object) -> torch.nn.Module:
    """A Transformer layer without dropout."""
    return te.TransformerLayer(
        hidden,
        ffn,
        heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        fuse_qkv_params=True,
        **BF16,
        **options,
    )


LLAMA = {"num_gqa_groups": 8, "activation": "swiglu", "normalization": "RMSNorm", "bias": False}
# fmt: off
LARGE = [
    Case("TransformerLayer llama8b 4096x2x4096", partial(layer, 4096, 14336, 32, **LLAMA), (4096, 2, 4096),
         tuple(RECIPES), targets=dict.fromkeys(RECIPES, 1.00)),
]
TINY = [
    Case("TransformerLayer tiny", partial(layer, 256, 1024, 4), (128, 2, 256),
         host={"bf16": (10, 5), "delayed": (14, 12), "current": (14, 12), "block": (14, 12)}),
]
# fmt: on
#: b, s, heads, groups, width
SHAPES = ((4, 4096, 32, 8, 128), (2, 16384, 16, 16, 128))
TARGET = 1.02


def attention_works(b: int, s: int, h: int, g: int, d: int, kind: str) -> tuple[harness.Work, harness.Work]:
    """(forward, forward and backward) of causal attention by our module, or by torch with one of its backends."""
    torch.manual_seed(0)
    q, k, v = (
        harness.matrix(generators.activations, b * s, n * d).view(b, s, n, d).requires_grad_() for n in (h, g, g)
    )
    dy = harness.matrix(generators.gradients, b * s, h * d).view(b, s, h * d)
    module = te.DotProductAttention(
        h, d, num_gqa_groups=g, attention_dropout=0.0, attn_mask_type="causal", qkv_format="bshd"
    )

    def forward() -> torch.Tensor:
        if kind == "ours":
            return module(q, k, v)
        turned = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, kind)):
            out = F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=g != h)
        return out.transpose(1, 2).reshape(b, s, h * d)

    def both() -> None:
        forward().backward(dy)
        q.grad = k.grad = v.grad = None

    return forward, both


def measure() -> list[harness.Row]:
    """The layer's and the attention's figures beside the peer's."""
    rows = measure_all(LARGE, TINY)
    for shape in SHAPES if harness.gpu() else []:
        b, s, h, g, d = shape
        name = f"DPA b{b} s{s} h{h} g{g} d{d} causal"
        forward, both = attention_works(*shape, "ours")
        (fwd,), (total,) = harness.gpu_us(forward_only(forward)), harness.gpu_us(both)
        theirs = {what: peer(name, what, "gpu_us") for what in ("fwd", "fwd+bwd")}
        rows.append(
            {
                "case": name,
                "recipe": "bf16",
                "fwd us": fwd,
                "fwd+bwd us": total,
                "peak MiB": harness.peak_mib(both),
                "peer fwd us": theirs["fwd"],
                "peer fwd+bwd us": theirs["fwd+bwd"],
                "of_peer": total / theirs["fwd+bwd"],
                "target": TARGET,
                "ok": total / theirs["fwd+bwd"] <= TARGET,
            }
        )
        harness.free()
    return [*rows, host_row(), *core_rows()]


def host_row() -> harness.Row:
    """Host time of a tiny attention, in turns with nn.Linear's."""
    forward, both = attention_works(2, 128, 4, 4, 64, "ours")
    linear = torch.nn.Linear(256, 256, device=harness.device(), dtype=torch.bfloat16)
    x = harness.matrix(generators.activations, 128, 256).requires_grad_()
    plain, plain_both = works(linear, x, None)
    fwd, linear_fwd = harness.host_us(forward, plain)
    total, linear_total = harness.host_us(both, plain_both)
    row: harness.Row = {
        "case": "host: DPA tiny",
        "recipe": "bf16",
        "fwd us": fwd,
        "fwd+bwd us": total,
        "nn.Linear fwd us": linear_fwd,
        "nn.Linear fwd+bwd us": linear_total,
        "peer fwd us": peer("DPA tiny", "fwd", "host_us"),
        "peer fwd+bwd us": peer("DPA tiny", "fwd+bwd", "host_us"),
        "of_linear fwd": fwd / linear_fwd,
        "of_linear": total / linear_total,
    }
    if harness.gpu():
        row |= {"target": "4, 2", "ok": row["of_linear fwd"] <= 4 and row["of_linear"] <= 2}
    return row


def core_rows() -> list[harness.Row]:
    """Host time of the core's two operations alone, launches included; on a GPU that is cuDNN's, on a built plan."""
    shape = (2, 128, 4, 64)
    q, k, v, dy = (harness.matrix(generators.activations, 256, 256, seed).view(shape) for seed in range(4))
    rt, (q1, k1, v1, dy1) = runtime_for(q), map(to_core, (q, k, v, dy))
    spec = AttentionSpec(0.125, "bshd", "bshd", right=0)
    done = ops.attention_forward(rt, q1, k1, v1, spec=spec)
    assert done.stats is not None
    forward = partial(ops.attention_forward, rt, q1, k1, v1, spec=spec)
    backward = partial(ops.attention_backward, rt, dy1, q1, k1, v1, done.out, done.stats, spec=spec)
    found = zip(("forward", "backward"), harness.host_us(forward, backward), strict=True)
    rows: list[harness.Row] = [
        {"case": f"host: ops.attention_{way}", "recipe": "bf16", "fwd us": us} for way, us in found
    ]
    return [row | {"target": "25", "ok": row["fwd us"] <= 25} for row in rows] if harness.gpu() else rows


def measure_torch() -> list[harness.Row]:
    """Our attention and torch's kernels, in turns; of_torch is their time over ours."""
    rows: list[harness.Row] = []
    for shape in SHAPES if harness.gpu() else []:
        for kind in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            ours, torchs = attention_works(*shape, "ours")[1], attention_works(*shape, kind)[1]
            mine, theirs = harness.gpu_us(ours, torchs)
            rows.append(
                {
                    "case": f"beside torch's {kind.lower()}, {'x'.join(map(str, shape))}",
                    "recipe": "bf16",
                    "fwd+bwd us": mine,
                    "torch fwd+bwd us": theirs,
                    "of_torch": theirs / mine,
                }
            )
            harness.free()
    return rows


#: Run in a new process: seconds of the first forward and backward of an FP8 layer after imports, and plans built.
FIRST = """
import json, time, torch, te_torch as te
from te_core.recipe import DelayedScaling
x = torch.randn(512, 2, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.cuda.synchronize()
start = time.perf_counter()
layer = te.TransformerLayer(1024, 4096, 16, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16)
with te.autocast(recipe=DelayedScaling()):
    y = layer(x)
y.sum().backward()
torch.cuda.synchronize()
from te_core.backends.cuda import cudnn
print(json.dumps({"seconds": time.perf_counter() - start, "plans built": cudnn.COUNTS.built}))
"""


def measure_start() -> list[harness.Row]:
    """The first step of a layer with empty caches, and in a second process."""
    if not harness.gpu():
        return []
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for case, limit in (("first step, empty caches", 15.0), ("first step, second process", 3.0)):
            done = subprocess.run(
                [sys.executable, "-c", FIRST],
                env={**os.environ, "TE_CORE_CACHE_DIR": folder},
                cwd=harness.ROOT,
                capture_output=True,
                text=True,
                timeout=180,
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            found = json.loads(done.stdout.splitlines()[-1])
            row = {"case": case, "recipe": "delayed", **found, "target": limit}
            row["ok"] = found["seconds"] <= limit and (case != "first step, second process" or not found["plans built"])
            rows.append(row)
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["attention", *sys.argv[1:]]))
