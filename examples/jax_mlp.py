"""FP8 in a JAX program: an MLP with delayed scaling, whose state is one more argument. 5 seconds on a CPU core, or on
JAX's first GPU.

python examples/jax_mlp.py
"""

import sys
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    sys.exit(f"jax_mlp.py: {error}. Install it: pip install jax")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "bindings" / "jax"))
import te_jax as te

from examples.loop import learn
from te_core.recipe import DelayedScaling

keys = jax.random.split(jax.random.key(0), 5)
x, wide, deep = (jax.random.normal(k, s) for k, s in zip(keys, ((2304, 16), (16, 32), (32, 16)), strict=False))
target = jnp.tanh(x @ wide / 4) @ deep / 6  # what there is to be learnt
p = {"w1": jax.random.normal(keys[3], (16, 2, 128)) * 0.1, "w2": jax.random.normal(keys[4], (128, 16)) * 0.1}
p["gamma"] = jnp.ones(16)
recipe = DelayedScaling(amax_history_len=16)
scaling = te.scaling(recipe, te.layernorm_mlp)


def forward(p, scaling, x):
    return te.layernorm_mlp(
        x, p["gamma"], None, [p["w1"], p["w2"]], [None, None], "rmsnorm", activation_type=("silu", "linear"),
        recipe=recipe, scaling=scaling,
    )  # fmt: skip


def loss(p, scaling, x, target):
    return ((forward(p, scaling, x) - target) ** 2).mean()


@jax.jit
def updated(p, scaling, x, target):
    value, (grads, scaling) = jax.value_and_grad(loss, argnums=(0, 1))(p, scaling, x, target)
    return jax.tree.map(lambda a, g: a - 2.0 * g, p, grads), scaling, value


def step(number):
    global p, scaling
    rows = slice(number % 8 * 256, number % 8 * 256 + 256)
    p, scaling, value = updated(p, scaling, x[rows], target[rows])
    return value


learn("jax_mlp", 401, step)
held_out, whole = loss(p, scaling, x[2048:], target[2048:]), (target[2048:] ** 2).mean()
print(f"held out: {held_out:.4f}, of {whole:.4f} that there is to explain")
assert held_out < 0.4 * whole
