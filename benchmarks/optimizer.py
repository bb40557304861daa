"""A step of FusedAdam on a Llama's parameters, in each format of its state, beside torch's fused AdamW and a copy.

The tensors are those of benchmarks/end_to_end.py (1.1 billion parameters in bf16, gradients in bf16). `bytes` is what
a step has to move, each tensor once when it is read and once when it is written; `of_copy` its rate against that of a
copy in the same process. Formats with scales read gradients and states twice, which `bytes` does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import te_torch as te
from benchmarks import harness
from benchmarks.catalogue import BENCHMARKS
from benchmarks.end_to_end import SMALL, Llama, Size
from benchmarks.modules import RECIPES
from te_torch import optimizers as opt

F32, BF16, F16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
#: Name -> (options, bytes of an element that a step has to move).
FORMATS: dict[str, tuple[dict[str, Any], int]] = {
    "moments bf16": ({"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, 2 + 4 + 4 + 4),
    "moments fp32": ({}, 2 + 4 + 8 + 8),
    "moments fp32, master fp32": ({"master_weights": True}, 2 + 2 + 8 + 8 + 8),
    "moments fp32, remainders": ({"master_weights": True, "store_param_remainders": True}, 2 + 4 + 4 + 8 + 8),
    "moments bf16, remainders": (
        {"master_weights": True, "store_param_remainders": True, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
        2 + 4 + 4 + 4 + 4,
    ),
    "moments fp8 and fp16": ({"exp_avg_dtype": FP8, "exp_avg_sq_dtype": F16}, 2 + 4 + 2 + 4),
}


def _model() -> Llama:
    """A smaller one without a GPU."""
    return Llama(Size() if harness.gpu() else SMALL)


def measure() -> Iterator[harness.Row]:
    """A row for each optimizer; `beside` is torch's fused AdamW in the same turns."""
    params = _with_gradients(_model(), None)
    count = sum(p.numel() for p in params)
    source = torch.randn(count // 4 * 2, device=harness.device(), dtype=BF16)
    target = torch.empty_like(source)
    copy: harness.Work = lambda: target.copy_(source)  # noqa: E731
    theirs = torch.optim.AdamW(params, lr=1e-5, fused=True)
    names = [None, *FORMATS]
    for name in names:
        if name is None:
            step, moved = theirs.step, 14
        else:
            options, moved = FORMATS[name]
            step = opt.FusedAdam(params, lr=1e-5, **options).step
        yield _row(name or "torch's fused AdamW, moments bf16", step, copy, count * moved, source.nbytes, theirs.step)
        del step
        harness.free()
    yield _row("clip_by_norm", lambda: opt.clip_by_norm(params, 1.0), copy, count * 2, source.nbytes, None)
    del theirs
    sgd = opt.FusedSGD(params, lr=1e-5, momentum=0.9)
    yield _row("FusedSGD, momentum bf16", sgd.step, copy, count * 10, source.nbytes, None)


def measure_quantized() -> Iterator[harness.Row]:
    """Of a model whose layers' weights are in FP8, with float32 masters and moments in bf16."""
    for name in ("delayed", "current", "block"):
        recipe = RECIPES[name]
        with te.quantized_model_init(recipe=recipe):
            model = _model()
        params = _with_gradients(model, recipe)
        count = sum(p.numel() for p in params)
        narrow = sum(p.numel() for p in params if hasattr(p, "_quantizer"))
        source = torch.randn(count // 4 * 2, device=harness.device(), dtype=BF16)
        target = torch.empty_like(source)
        copy: harness.Work = lambda t=target, s=source: t.copy_(s)  # type: ignore[misc]  # noqa: E731
        options: dict[str, Any] = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
        step = opt.FusedAdam(params, lr=1e-5, master_weights=True, **options).step
        yield _row(
            f"FP8 weights, {name}", step, copy, count * (2 + 8 + 8) + narrow + 2 * (count - narrow), source.nbytes, None
        )
        del model, params, step
        harness.free()


def _with_gradients(model: Llama, recipe: Any) -> list[Any]:
    """The parameters behind a short forward and backward, which also sets scales."""
    words = torch.arange(128, device=harness.device()).view(1, 128)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        loss = model(words, words)
    loss.backward()
    return list(model.parameters())


def _row(
    name: str, step: harness.Work, copy: harness.Work, moved: int, copied: int, beside: harness.Work | None
) -> harness.Row:
    times = harness.gpu_us(step, copy, *([] if beside is None else [beside]), runs=7)
    rate, of_copy = moved / times[0], 2 * copied / times[1]
    return {
        "case": name,
        "ms": times[0] / 1e3,
        "bytes": moved,
        "torch ms": times[2] / 1e3 if beside is not None else None,
        "TB/s": rate / 1e6,
        "of_copy": rate / of_copy,
        "host us": harness.host_us(step, calls=30)[0],
        **({"target": 0.85, "ok": rate / of_copy >= 0.85} if not name.startswith("torch") else {}),
    }


if __name__ == "__main__":
    for measured in (measure_quantized, measure):
        for row in measured():
            print(harness.table([row], BENCHMARKS["optimizer"].columns), flush=True)
