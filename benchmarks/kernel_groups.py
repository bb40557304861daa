"""The kernels of a training step by what they are for, from a trace of torch's profiler.

A name says what a kernel is for, except beside the head: whatever runs between the last norm's forward and its backward
is the head's product or the loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

HEAD, LOSS, PRODUCTS, OTHER = "head", "loss", "products", "other"
#: Group -> what a kernel's name has in it. The first group that fits is a kernel's.
NAMES = {
    "optimizer": r"adam|multi_tensor|^(norm_of_(all|each)|square_many|scale_many)$",
    "attention": r"cudnn|sdpa|flash|attention|fmha",
    PRODUCTS: r"gemm|nvjet|xmma|cutlass|splitkreduce",
    "activation": r"^activation",
    "casts": r"quantize|^(amax|scale_|swizzle_scales|transpose)",
    "norms": r"^(l2_)?norm_|^add_partials$",
    LOSS: r"softmax|nll_loss|^loss",
    "rope, residual": r"^rope|^(bias_dropout_)?add$|CUDAFunctor_add",
}
GROUPS = (PRODUCTS, "attention", "activation", HEAD, LOSS, "optimizer", "casts", "norms", "rope, residual", OTHER)
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")  # of a trace's events


def group_of(name: str) -> str:
    """What a kernel is for, by its name alone."""
    short = name.removeprefix("void ")
    return next((group for group, has in NAMES.items() if re.search(has, short, re.IGNORECASE)), OTHER)


def by_group(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of each group in the trace of one step; none if the trace has no kernel."""
    works = sorted((e for e in events if e.get("cat") in KINDS), key=lambda e: float(e["ts"]))
    names = [str(e["name"]) for e in works]
    end = next((i for i, name in enumerate(names) if "norm_backward" in name), 0)
    begin = max((i for i, name in enumerate(names[:end]) if "norm_forward" in name), default=end)
    spent = dict.fromkeys(GROUPS, 0.0) if works else {}
    for i, (event, name) in enumerate(zip(works, names, strict=True)):
        group = group_of(name)
        if begin < i < end:
            group = HEAD if group == PRODUCTS else LOSS
        spent[group] += float(event["dur"]) / 1e3
    return spent
