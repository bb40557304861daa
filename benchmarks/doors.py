"""One step of an FP8 LayerNormMLP (forward, backward, next scales) through each door: te_torch, CuPy, JAX.

    python -m benchmarks.doors [--out FOLDER]

Each door runs in a process of its own. `host us`: until the call returns, with the GPU idle before; `us`: a step among
many, the GPU busy; `peak MiB`: what the step takes above its inputs, as the door's allocator counts (large shape).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from te_core.recipe import DelayedScaling

SHAPES = {"tiny": (128, 256, 1024), "large": (8192, 4096, 14336)}
DOORS = ("te_torch", "cupy", "jax")
RECIPE = DelayedScaling(amax_history_len=16)


def by_torch(tokens: int, hidden: int, inner: int) -> tuple[Callable[[], Any], Callable[[], None], Callable[[], int]]:
    """(a step, a wait, the peak of memory in bytes)."""
    import torch

    import te_torch as te

    options: dict[str, Any] = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False, "device": "cuda"}
    module = te.LayerNormMLP(hidden, inner, params_dtype=torch.bfloat16, **options)
    x, dy = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        module.zero_grad()
        with te.autocast(recipe=RECIPE):
            y = module(x)
        y.backward(dy)

    return step, torch.cuda.synchronize, torch.cuda.max_memory_allocated


def by_cupy(tokens: int, hidden: int, inner: int) -> tuple[Callable[[], Any], Callable[[], None], Callable[[], int]]:
    """The same; float32 weights, since CuPy has no bf16, are quantized as bf16 ones are."""
    import cupy as np

    from te_core import functional as te

    draw = functools.partial(np.random.standard_normal, dtype=np.float32)
    half = lambda *shape: draw(shape).astype(np.float16)  # noqa: E731
    p = {"layer_norm_weight": np.ones(hidden, np.float16), "fc1_weight": half(2 * inner, hidden)}
    p["fc2_weight"] = half(hidden, inner)
    x, dy = half(tokens, hidden), half(tokens, hidden)
    scaling = te.Scaling(RECIPE, te.layernorm_mlp, like=x)

    def step() -> None:
        options: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu", "recipe": RECIPE}
        _, back = te.layernorm_mlp(x, **p, **options, scaling=scaling)
        back(dy)
        te.update(scaling)

    return step, np.cuda.Device().synchronize, np.get_default_memory_pool().total_bytes


def by_jax(tokens: int, hidden: int, inner: int) -> tuple[Callable[[], Any], Callable[[], None], Callable[[], int]]:
    """The same under jax.jit; the state is donated."""
    import jax
    import jax.numpy as jnp
    import te_jax as te

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((tokens, hidden), (tokens, hidden), (hidden, 2, inner), (inner, hidden))
    x, dy, w1, w2 = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    gamma = jnp.ones(hidden, jnp.bfloat16)

    def run(given: Any, state: Any) -> Any:
        x, gamma, w1, w2 = given
        options: dict[str, Any] = {"activation_type": ("silu", "linear"), "recipe": RECIPE, "scaling": state}
        return te.layernorm_mlp(x, gamma, None, [w1, w2], [None, None], "rmsnorm", **options)

    @functools.partial(jax.jit, donate_argnums=1)
    def grads(given: Any, state: Any, dy: Any) -> Any:
        _, back = jax.vjp(run, given, state)
        return back(dy)

    kept = {"state": te.scaling(RECIPE, te.layernorm_mlp), "last": None}

    def step() -> None:
        kept["last"] = None  # as torch lets go of gradients before a step
        kept["last"], kept["state"] = grads((x, gamma, w1, w2), kept["state"], dy)

    def wait() -> None:
        jax.block_until_ready(kept["last"])

    return step, wait, lambda: jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]


MAKERS = {"te_torch": by_torch, "cupy": by_cupy, "jax": by_jax}


def measured(door: str) -> list[dict[str, Any]]:
    """The rows of a door."""
    rows = []
    for case, shape in SHAPES.items():
        step, wait, peak = MAKERS[door](*shape)
        for _ in range(5):
            step()
        wait()
        host = []
        for _ in range(60):
            begin = time.perf_counter()
            step()
            host.append(time.perf_counter() - begin)
            wait()
        spans = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(20):
                step()
            wait()
            spans.append((time.perf_counter() - begin) / 20)
        row = {"door": door, "case": case, "host us": round(statistics.median(host) * 1e6, 1)}
        rows.append(row | {"us": round(statistics.median(spans) * 1e6, 1), "peak MiB": round(peak() / 2**20, 1)})
    return rows


def main() -> None:
    """All doors, or, with one named, its rows as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=DOORS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.door:
        print(json.dumps(measured(given.door)))
        return
    rows: list[dict[str, Any]] = []
    for door in DOORS:
        command = [sys.executable, "-m", "benchmarks.doors", "--door", door]
        paths = os.pathsep.join(filter(None, ["bindings/jax", os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        print(door, done.stdout.strip() or done.stderr[-1500:], flush=True)
        rows += json.loads(done.stdout) if done.returncode == 0 else []
    if given.out:
        (given.out / "doors.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
