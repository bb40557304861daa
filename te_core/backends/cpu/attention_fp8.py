"""Attention on FP8 operands: that of the file beside, given scales; and pairs of scales."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from te_core.backends.cpu.attention import attention_backward, attention_forward
from te_core.backends.cpu.attention_scores import planned
from te_core.runtime import Runtime
from te_core.tensor import Tensor

plan_attention_fp8_forward = plan_attention_fp8_backward = planned
attention_fp8_forward, attention_fp8_backward = attention_forward, attention_backward


@np.errstate(all="ignore")
def scale_pairs(rt: Runtime, scales: Sequence[Tensor], places: Sequence[Tensor | None], out: Tensor) -> None:
    """Each scale and its inverse."""
    for pair, scale, place in zip(out.numpy(), scales, places, strict=True):
        pair[0] = scale.numpy()[0]
        pair[1] = np.float32(1) / pair[0]
        if place is not None:
            place.numpy()[0] = pair[1]
