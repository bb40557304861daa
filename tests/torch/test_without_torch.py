"""A layer without torch: called on NumPy's memory, on our own device's, and in programs that cannot import torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from te_core import Runtime, dtypes
from te_core.layers import linear
from te_core.recipe import resolve
from tests.backends import on_devices
from tests.world import RECIPES, WIDTH, gradient_for, make, step, values


def _numpy_linear(rt: Runtime, recipe: str, x: Any, w: Any, b: Any, dy: Any) -> list[np.ndarray]:
    precision = None if RECIPES[recipe] is None else resolve(RECIPES[recipe])
    scales = None
    if precision is not None and precision.history is not None:
        from te_core.quantize import Scales

        ones, zeros = rt.tensor(np.ones(3, np.float32)), rt.tensor(np.zeros(3, np.float32))
        back = rt.tensor(np.ones(2, np.float32)), rt.tensor(np.zeros(2, np.float32))
        scales = Scales(ones, zeros, *back)
    spec = linear.LinearSpec(dtypes.bfloat16, precision, linear.Needs(True, True, True))
    (y,), saved = linear.forward(rt, x, w, b, spec=spec, scales=scales)
    return [rt.numpy(t) for t in (y, *linear.backward(rt, dy, saved, spec=spec, scales=scales))]


@on_devices
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_core_without_torch_gives_the_same(recipe: str, device: str) -> None:
    """The layer called on NumPy's (or our own device's) memory equals the module on torch's, bit for bit."""
    module, x = make("Linear", device, torch.bfloat16), values(40, WIDTH, device=device, dtype=torch.bfloat16)
    expected = step(module, x, recipe)
    rt = Runtime.cpu() if device == "cpu" else Runtime.cuda(0)

    def core(t: torch.Tensor) -> Any:
        return rt.tensor(t.detach().cpu().view(torch.uint16).numpy().view(dtypes.bfloat16.numpy))

    results = _numpy_linear(
        rt, recipe, core(x), core(module.weight), core(module.bias), core(gradient_for(expected["y"]))
    )
    for got, wanted in zip(results, [expected[n] for n in ("y", "dx", "weight", "bias")], strict=True):
        assert np.array_equal(got.view(np.uint16), wanted.cpu().view(torch.uint16).numpy())


CORE_ALONE = """
import sys
sys.modules["torch"] = None  # any import of it fails
import numpy as np
from te_core import Runtime, dtypes, from_dlpack
from te_core.layers import linear
from te_core.recipe import Float8CurrentScaling, resolve
cuda = {cuda}
if cuda:
    import cupy as xp
    rt = Runtime.cuda(0, xp.cuda.get_current_stream().ptr)
else:
    xp, rt = np, Runtime.cpu()
x, w = (xp.asarray(np.random.default_rng(i).standard_normal(s, np.float32)) for i, s in enumerate([(40, 64), (48, 64)]))
spec = linear.LinearSpec(dtypes.float32, resolve(Float8CurrentScaling()), linear.Needs(True, True, False))
(y,), saved = linear.forward(rt, from_dlpack(x), from_dlpack(w), None, spec=spec)
dx, dw, _ = linear.backward(rt, y, saved, spec=spec)
out = xp.from_dlpack(y)
error = float(xp.linalg.norm(out - x @ w.T) / xp.linalg.norm(x @ w.T))
assert 0.005 < error < 0.08, error
assert "torch" not in [m for m, v in sys.modules.items() if v is not None]
print("ok", dx.shape, dw.shape)
"""


@on_devices
def test_numpy_and_cupy_programs_without_torch(device: str) -> None:
    code = CORE_ALONE.format(cuda=device == "cuda")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "ok (40, 64) (48, 64)" in done.stdout, done.stderr[-2000:]
