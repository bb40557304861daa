"""The kernels around attention against the speed of a device-to-device copy: rotary embedding, the split of a packed
projection, softmax, QK norm, KV cache, norms that add a residual, and what context parallelism adds up and moves.

The method is that of benchmarks/norms.py. `bytes` is what an operation has to move, each operand once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.norms import Clock, copy_rate
from te_core import dtypes, ops
from te_core.ops.kv_cache import KVCache
from te_core.ops.norm import Branch
from te_torch.runtime import runtime_for
from te_torch.runtime import to_core as core

Case = tuple[str, tuple[int, ...], int, Callable[[], Any]]


def normal(*shape: int) -> torch.Tensor:
    """bf16 on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def rotations() -> Iterator[Case]:
    """Heads of 128 of 8192 tokens in sbhd: 32 of queries, 8 of keys and values."""
    s, b, h, g, d = 4096, 2, 32, 8, 128
    t, freqs = normal(s, b, h, d), torch.randn(s, 1, 1, d, device="cuda")
    rt, ct, cf = runtime_for(t), core(t), core(freqs)
    for way in (False, True):
        name = "rope backward" if way else "rope forward"
        yield name, (s, b, h, d), 2 * t.nbytes, lambda w=way: ops.rope(rt, ct, cf, backward=w)
        pairs = "neighbours" if way else "thd"
        if way:
            yield f"rope, {pairs}", (s, b, h, d), 2 * t.nbytes, lambda: ops.rope(rt, ct, cf, interleaved=True)
        else:
            cu = core(torch.tensor([0, 1000, 4096, 8192], device="cuda", dtype=torch.int32))
            flat = core(t.view(s * b, h, d))
            table = core(torch.randn(s, 1, 1, d, device="cuda"))
            yield (
                f"rope, {pairs}",
                (s * b, h, d),
                2 * t.nbytes,
                lambda c=cu, f=flat, a=table: ops.rope(rt, f, a, fmt="thd", cu_seqlens=c),
            )
    packed = normal(s, b, (h + 2 * g) * d)
    options: dict[str, Any] = {
        "heads": h,
        "groups": g,
        "head_dims": (d, d, d),
        "interleaved_groups": True,
        "fmt": "sbhd",
    }
    cp = core(packed)
    for name, angles in (("split of qkv", None), ("split of qkv and rope", cf)):
        parts = ops.rope_qkv(rt, cp, angles, angles, **options)
        yield name, tuple(packed.shape), 2 * packed.nbytes, lambda a=angles: ops.rope_qkv(rt, cp, a, a, **options)
        yield (
            f"{name}, backward",
            tuple(packed.shape),
            2 * packed.nbytes,
            lambda a=angles, p=parts: ops.rope_qkv_backward(rt, *p, a, a, **options),
        )


def softmaxes() -> Iterator[Case]:
    """Rows of 2048 scores."""
    x = normal(2, 16, 2048, 2048)
    rt, cx = runtime_for(x), core(x)
    mask = core(torch.rand(2, 1, 2048, 2048, device="cuda") < 0.5)
    shape = tuple(x.shape)
    y, _ = ops.softmax_forward(rt, cx, scale=0.1)
    yield "softmax forward", shape, 2 * x.nbytes, lambda: ops.softmax_forward(rt, cx, scale=0.1)
    yield (
        "softmax forward, mask",
        shape,
        2 * x.nbytes + mask.nbytes,
        lambda: ops.softmax_forward(rt, cx, scale=0.1, mask=mask),
    )
    yield "softmax backward", shape, 3 * x.nbytes, lambda: ops.softmax_backward(rt, cx, y, scale=0.1)


def norms() -> Iterator[Case]:
    """Heads of 128 (QK norm), and rows of 4096 with a residual."""
    heads = normal(8192 * 32, 128)
    rt, ch, grads = runtime_for(heads), core(heads), core(normal(8192 * 32, 128))
    yield "L2 norm forward", (8192 * 32, 128), 2 * heads.nbytes, lambda: ops.l2_norm_forward(rt, ch, eps=1e-6)
    yield "L2 norm backward", (8192 * 32, 128), 3 * heads.nbytes, lambda: ops.l2_norm_backward(rt, grads, ch, eps=1e-6)
    x, other, along, gamma = normal(8192, 4096), normal(8192, 4096), normal(8192, 4096), normal(4096)
    n = x.nbytes
    cx, co, ca, cg = map(core, (x, other, along, gamma))
    kind: dict[str, Any] = {"kind": "RMSNorm", "eps": 1e-5}
    total = rt.empty((8192, 4096), dtypes.bfloat16)
    rng = core(torch.tensor([1, 2], device="cuda"))
    for name, p in (("RMSNorm of x + residual", 0.0), ("RMSNorm of dropout(x) + residual", 0.1)):
        branch = Branch(co, total, None, p, rng if p else None)
        yield name, (8192, 4096), 4 * n, lambda b=branch: ops.norm_forward(rt, cx, cg, None, branch=b, **kind)
    _, _, mean, scale = ops.norm_forward(rt, cx, cg, None, **kind)
    yield (
        "RMSNorm backward + residual's",
        (8192, 4096),
        4 * n,
        lambda: ops.norm_backward(rt, co, cx, cg, mean, scale, kind="RMSNorm", add=ca),
    )


def caches() -> Iterator[Case]:
    """128 new tokens of 64 sequences into caches of 2048, in rows and in pages of 64."""
    batch, new, most, g, d = 64, 128, 2048, 8, 128
    k, v = normal(batch, new, g, d), normal(batch, new, g, d)
    rt, ck, cv = runtime_for(k), core(k), core(v)
    fresh = core(torch.arange(0, (batch + 1) * new, new, device="cuda", dtype=torch.int32))
    held = core(torch.arange(0, (batch + 1) * 1500, 1500, device="cuda", dtype=torch.int32))
    rows = KVCache(core(normal(batch, most, g, d)), core(normal(batch, most, g, d)), None)
    pages = core(torch.randperm(batch * most // 64, device="cuda").to(torch.int32).view(batch, most // 64))
    paged = KVCache(core(normal(batch * most // 64, 64, g, d)), core(normal(batch * most // 64, 64, g, d)), pages)
    for name, cache in (("KV append to rows", rows), ("KV append to pages", paged)):
        yield name, tuple(k.shape), 4 * k.nbytes, lambda c=cache: ops.kv_append(rt, ck, cv, c, fresh, held, form="bshd")


def partials() -> Iterator[Case]:
    """What context parallelism adds up and moves: 8192 tokens of 32 heads of 128, partial outputs in bf16."""
    s, b, h, d = 8192, 1, 32, 128
    a, other, total = normal(s, b, h, d), normal(s, b, h, d), torch.randn(s, b, h, d, device="cuda")
    rt, logs, size = runtime_for(a), core(torch.randn(b, h, s, device="cuda")), tuple(a.shape)
    ca, cb, ct, out = core(a), core(other), core(total), core(torch.empty_like(a))
    into: dict[str, Any] = {"stats": logs, "form": "sbhd"}
    for name, moved, first, result in (
        ("merge of two partials", 3 * a.nbytes, ca, out),
        ("merge into a sum", 2 * total.nbytes + a.nbytes, ct, ct),
        ("merge, rounded", total.nbytes + 2 * a.nbytes, ct, out),
    ):
        yield (
            name,
            size,
            moved + 3 * logs.nbytes,
            lambda x=first, y=result: ops.attention_merge(rt, x, logs, cb, logs, out=y, **into),
        )
    yield "sum of gradients", size, 2 * total.nbytes + a.nbytes, lambda: ops.context_sum(rt, ct, cb, out=ct)
    sink = core(torch.zeros(h, device="cuda"))
    yield (
        "gradient of a sink",
        size,
        2 * a.nbytes + logs.nbytes,
        lambda: ops.attention_sink_grad(rt, ca, cb, logs, sink, form="sbhd"),
    )
    cu = core(torch.tensor([0, 1024, 4096, 8192], device="cuda", dtype=torch.int32))
    for form, t in (("sbhd", ca), ("thd", core(a.view(s, h, d)))):
        options: dict[str, Any] = {"form": form, "size": 2}
        packed = {"cu_seqlens_padded": cu} if form == "thd" else {}
        for how, more in (("heads_to_ranks", {}), ("sequence_to_ranks", packed)):
            yield (
                f"{how}, {form}",
                size,
                2 * a.nbytes,
                lambda w=how, x=t, o=options | more: ops.context_rows(rt, x, how=w, **o),
            )


def measure() -> list[dict[str, Any]]:
    """One row for each operation."""
    clock = Clock()
    rate = copy_rate(clock)
    rows: list[dict[str, Any]] = [{"case": "copy 256 MiB", "TB/s": rate / 1e6}]
    for group in (rotations, softmaxes, norms, caches, partials):
        for name, shape, moved, work in group():
            us = clock(work)
            rows.append({"case": name, "shape": shape, "us": us, "bytes": moved, "of_copy": moved / us / rate})
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["attention_kernels", *sys.argv[1:]]))
