"""The core without a framework: an FP8 MLP is trained on NumPy arrays. 2 seconds on a CPU core.

python examples/functional_numpy.py
"""

import functools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too
from examples.loop import learn
from te_core import functional as te
from te_core.recipe import DelayedScaling

draw = np.random.default_rng(0).standard_normal
x, wide, deep = (np.asarray(draw(n), np.float32) for n in ((2304, 16), (32, 16), (16, 32)))
target = np.tanh(x @ wide.T / 4) @ deep.T / 6  # what there is to be learnt
shapes = {"fc1_weight": (256, 16), "fc2_weight": (16, 128)}
p = {name: np.asarray(draw(shape), np.float32) * 0.1 for name, shape in shapes.items()}
p["layer_norm_weight"] = np.ones(16, np.float32)
recipe = DelayedScaling(amax_history_len=16)
mlp = functools.partial(te.layernorm_mlp, normalization="RMSNorm", activation="swiglu", recipe=recipe)
scaling = te.Scaling(recipe, te.layernorm_mlp, like=x)


def step(number):
    rows = slice(number % 8 * 256, number % 8 * 256 + 256)
    y, back = mlp(x[rows], **p, scaling=scaling)
    error = y - target[rows]
    grads = back(error * (2 / len(error)))
    for name in p:
        p[name] -= 0.1 * grads[name]
    te.update(scaling)
    return (error**2).mean()


learn(Path(__file__).stem, 401, step)
y, _ = mlp(x[2048:], **p, scaling=scaling, needs=())
held_out = float(((y - target[2048:]) ** 2).mean())
print(f"held out: {held_out:.4f}, of {float((target[2048:] ** 2).mean()):.4f} that there is to explain")
assert held_out < 0.4 * float((target[2048:] ** 2).mean())
