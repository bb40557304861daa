"""Scales and their inverses (kernels/scale_pairs.cu)."""

from __future__ import annotations

from collections.abc import Sequence

from te_core.kernels import loader
from te_core.runtime import Runtime
from te_core.tensor import Tensor

_SLOTS = 4  # pairs that the kernel has parameters for


def scale_pairs(rt: Runtime, scales: Sequence[Tensor], places: Sequence[Tensor | None], out: Tensor) -> None:
    """Each scale and its inverse, in one launch of one warp."""
    kernel = loader.get(rt, "scale_pairs", args="pppppppppq")
    missing = [None] * (_SLOTS - len(scales))
    kernel(rt, 1, 32, *scales, *missing, *places, *missing, out, len(scales))
