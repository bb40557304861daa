"""The core without a framework on a GPU: one FP8 linear, forward and backward, on CuPy arrays, without a copy.

python examples/core_cupy.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

try:
    import cupy as cp
except ImportError as error:
    sys.exit(f"core_cupy.py: {error}. It needs CuPy and an NVIDIA GPU; examples/core_numpy.py runs anywhere.")
if not cp.cuda.is_available():
    sys.exit("core_cupy.py: CuPy sees no GPU. It needs CuPy and an NVIDIA GPU; examples/core_numpy.py runs anywhere.")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

from te_core import dtypes
from te_core.dlpack import from_dlpack
from te_core.layers import linear
from te_core.recipe import Float8CurrentScaling, resolve
from te_core.runtime import Runtime

rng = np.random.default_rng(0)
arrays = [rng.standard_normal(shape).astype(np.float16) for shape in ((64, 256), (128, 256), (64, 128))]
x, w, dy = map(cp.asarray, arrays)

rt = Runtime.cuda(stream=cp.cuda.get_current_stream().ptr)  # CuPy's stream: one order of work for both
spec = linear.LinearSpec(dtypes.float16, resolve(Float8CurrentScaling()), linear.Needs(True, True, False))
(y,), saved = linear.forward(rt, from_dlpack(x), from_dlpack(w), None, spec=spec)
dx, dw, _ = linear.backward(rt, from_dlpack(dy), saved, spec=spec)

wanted = arrays[0].astype(np.float32) @ arrays[1].astype(np.float32).T
error = np.linalg.norm(cp.asnumpy(cp.from_dlpack(y)) - wanted) / np.linalg.norm(wanted)
print(f"y {y.shape}, dx {dx.shape}, dw {dw.shape}; FP8 differs from float32 by {error:.1%}; on {rt}")
assert error < 0.06 and "torch" not in sys.modules
