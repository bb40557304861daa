"""Cross entropy: its kernels against the speed of a copy, and the loss of a product in chunks against both apart.

`bytes` is what an operation has to move: logits once for the facts; once in and once out for a gradient. A head's times
are of forward and backward: of torch's product and loss in float32 and in bf16, of torch's product and ours, of
linear_cross_entropy, and of Liger's where it is installed. Their gradients are those of a mean, and the weight's are in
its own dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

import te_torch as te
from benchmarks import harness
from benchmarks.norms import Clock, copy_rate
from te_core import ops
from te_core.ops.loss import LossTerms
from te_core.recipe import Float8BlockScaling, Float8CurrentScaling
from te_torch.runtime import runtime_for
from te_torch.runtime import to_core as core

#: Rows and classes; the last is no multiple of 8.
LOGITS = ((8192, 32000), (8192, 32768), (2048, 128256), (2048, 131072), (2048, 50257))
#: Tokens, hidden size, classes.
HEADS = ((16384, 2048, 32000), (8192, 4096, 128256))
#: Of copy speed, at least.
TARGET = 0.85


def kernels(rows: int, classes: int) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """(name, bytes, work)."""
    x = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, classes, (rows,), device="cuda")
    rt, logits, goal, out, terms = runtime_for(x), core(x), core(target), core(torch.empty_like(x)), LossTerms(classes)
    facts = ops.loss_facts(rt, logits, goal, terms=terms)
    known = facts.reshape(1, *facts.shape)
    yield "facts", x.nbytes, lambda: ops.loss_facts(rt, logits, goal, terms=terms, out=facts)
    yield (
        "gradient by facts",
        2 * x.nbytes,
        lambda: ops.loss_gradient(rt, logits, goal, terms=terms, known=known, out=out),
    )
    yield "loss and gradient", 2 * x.nbytes, lambda: ops.loss_gradient(rt, logits, goal, terms=terms, out=out)
    yield (
        "loss and gradient in place",
        2 * x.nbytes,
        lambda: ops.loss_gradient(rt, logits, goal, terms=terms, out=logits),
    )
    yield "losses of rows", facts.nbytes, lambda: ops.loss_values(rt, known, goal, terms=terms, total="mean")


def measure() -> list[dict[str, Any]]:
    """One row for each kernel and size."""
    clock = Clock()
    rate = copy_rate(clock)
    rows: list[dict[str, Any]] = [{"case": "copy 256 MiB", "TB/s": rate / 1e6}]
    for shape in LOGITS:
        for name, moved, work in kernels(*shape):
            us = clock(work)
            reached = moved / us / rate
            row: dict[str, Any] = {"case": name, "shape": shape, "us": us, "bytes": moved, "of_copy": reached}
            if "loss and" in name and shape[1] % 8 == 0:
                row |= {"target": TARGET, "ok": reached >= TARGET}
            rows.append(row)
    return rows


def heads(tokens: int, width: int, classes: int) -> dict[str, Callable[[], Any]]:
    """Works by name: each leaves gradients of hidden and weight."""
    hidden, weight = (
        (torch.randn(s, device="cuda", dtype=torch.bfloat16) * width**-0.5).requires_grad_()
        for s in ((tokens, width), (classes, width))
    )
    target = torch.randint(0, classes, (tokens,), device="cuda")

    def step(loss: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(), (hidden, weight))

    def ours_apart() -> torch.Tensor:
        logits = F.linear(hidden, weight).unsqueeze(0)
        return te.parallel_cross_entropy(logits, target.unsqueeze(0), reduce_loss=True, in_place=True)

    found: dict[str, Callable[[], torch.Tensor]] = {
        "torch, loss in float32": lambda: F.cross_entropy(F.linear(hidden, weight).float(), target),
        "torch, loss in bf16": lambda: F.cross_entropy(F.linear(hidden, weight), target),
        "product and parallel_cross_entropy": ours_apart,
        "linear_cross_entropy": lambda: te.linear_cross_entropy(hidden, weight, target),
    }
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        name = f"linear_cross_entropy, {type(recipe).__name__}"
        found[name] = partial(te.linear_cross_entropy, hidden, weight, target, recipe=recipe)
    if find_spec("liger_kernel") is not None:
        liger: Any = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
        found["Liger"] = lambda: liger(weight, hidden, target)
    return {name: step(loss) for name, loss in found.items()}


def measure_heads() -> list[dict[str, Any]]:
    """One row for each way of computing a head's loss, all measured in turns; `of_apart`: of torch's in float32."""
    rows: list[dict[str, Any]] = []
    for shape in HEADS:
        works = heads(*shape)
        times = harness.gpu_us(*works.values())
        for (name, work), us in zip(works.items(), times, strict=True):
            more = {"us": us, "peak MiB": harness.peak_mib(work), "of_apart": us / times[0]}
            rows.append({"case": name, "shape": shape, **more})
        harness.free()
    return rows


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["loss", *sys.argv[1:]]))
