"""The core without a framework: one FP8 linear, forward and backward, on NumPy arrays. torch is never imported.

python examples/core_numpy.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

from te_core import dtypes
from te_core.layers import linear
from te_core.recipe import Float8CurrentScaling, resolve
from te_core.runtime import Runtime
from te_core.tensor import from_numpy

rng = np.random.default_rng(0)
x, w, dy = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((64, 256), (128, 256), (64, 128)))

rt = Runtime.cpu()
spec = linear.LinearSpec(dtypes.bfloat16, resolve(Float8CurrentScaling()), linear.Needs(True, True, False))
(y,), saved = linear.forward(rt, from_numpy(x), from_numpy(w), None, spec=spec)  # no copy: views of NumPy's memory
dx, dw, _ = linear.backward(rt, from_numpy(dy), saved, spec=spec)

wanted = x.astype(np.float32) @ w.astype(np.float32).T
error = np.linalg.norm(y.numpy().astype(np.float32) - wanted) / np.linalg.norm(wanted)
print(f"y {y.shape}, dx {dx.shape}, dw {dw.shape}; FP8 differs from float32 by {error:.1%}; on {rt}")
assert error < 0.06 and "torch" not in sys.modules
