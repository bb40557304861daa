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
    missing = [0] * (_SLOTS - len(scales))
    pointers = [s.ptr for s in scales], [0 if p is None else p.ptr for p in places]
    kernel(rt, 1, 32, *pointers[0], *missing, *pointers[1], *missing, out.ptr, len(scales))
