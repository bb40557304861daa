"""One step of an FP8 LayerNormMLP (forward, backward, next scales) through each door: te_torch, CuPy, JAX.

    python -m benchmarks.doors [--doors "jax" "jax, c" ...] [--out FOLDER]

XLA calls te_core in Python ("jax"), by its library in C ("jax, c"), and that in command buffers ("jax, c, captured").
Each door runs in a process of its own. `host us`: until the call returns, with the GPU idle before; `us`: a step among
many, the GPU busy. `busy host us` and `busy us`: the same beside a thread that computes in Python all the time, so that
whoever wants the interpreter's lock waits for it (up to 5 ms, `sys.getswitchinterval`).

`peak MiB`: the most that the door's allocator held, inputs included, while each step was waited for; `peak ahead MiB`:
also while the host ran ahead. XLA's memory is free again when the programs that use it have ended, so the gradients of
several steps are alive then.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from te_core.recipe import DelayedScaling

SHAPES = {"tiny": (128, 256, 1024), "large": (8192, 4096, 14336)}
#: In one program of XLA's: eight layers, one behind the other.
DEEP = {"tiny x 8": (128, 256, 1024, 8)}
#: What is set for the process of each door.
DOORS: dict[str, dict[str, str]] = {
    "te_torch": {},
    "cupy": {},
    "jax": {"TE_JAX_HANDLER": "python"},
    "jax, c": {"TE_JAX_HANDLER": "c", "XLA_FLAGS": "--xla_gpu_enable_command_buffer=-CUSTOM_CALL"},
    "jax, c, captured": {
        "TE_JAX_HANDLER": "c",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
    },
}
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


def by_jax(
    tokens: int, hidden: int, inner: int, layers: int = 1
) -> tuple[Callable[[], Any], Callable[[], None], Callable[[], int]]:
    """The same under jax.jit; the states are donated."""
    import jax
    import jax.numpy as jnp
    import te_jax as te

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((tokens, hidden), (tokens, hidden), (hidden, 2, inner), (inner, hidden))
    x, dy, w1, w2 = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    weights = [(jnp.ones(hidden, jnp.bfloat16), jnp.copy(w1), jnp.copy(w2)) for _ in range(layers)]
    options: dict[str, Any] = {"activation_type": ("silu", "linear"), "recipe": RECIPE}

    def run(given: Any, states: Any) -> Any:
        x, weights = given
        for (gamma, w1, w2), state in zip(weights, states, strict=True):
            x = te.layernorm_mlp(x, gamma, None, [w1, w2], [None, None], "rmsnorm", **options, scaling=state)
        return x

    @functools.partial(jax.jit, donate_argnums=1)
    def grads(given: Any, states: Any, dy: Any) -> Any:
        _, back = jax.vjp(run, given, states)
        return back(dy)

    kept: dict[str, Any] = {"states": [te.scaling(RECIPE, te.layernorm_mlp) for _ in weights], "last": None}

    def step() -> None:
        kept["last"] = None  # as torch lets go of gradients before a step
        kept["last"], kept["states"] = grads((x, weights), kept["states"], dy)

    def wait() -> None:
        jax.block_until_ready(kept["last"])

    return step, wait, lambda: jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]


MAKERS = {"te_torch": by_torch, "cupy": by_cupy, "jax": by_jax}


@contextmanager
def busy() -> Iterator[None]:
    """A thread beside it that always wants the interpreter's lock."""
    going = [True]

    def spin() -> None:
        while going:
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        going.clear()
        thread.join()


def host_us(step: Callable[[], Any], wait: Callable[[], None], calls: int) -> float:
    """Until a call returns, each one waited for."""
    spans = []
    for _ in range(calls):
        begin = time.perf_counter()
        step()
        spans.append(time.perf_counter() - begin)
        wait()
    return round(statistics.median(spans) * 1e6, 1)


def among_us(step: Callable[[], Any], wait: Callable[[], None], rounds: int, calls: int) -> float:
    """A step among many, with one wait behind them."""
    spans = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        wait()
        spans.append((time.perf_counter() - begin) / calls)
    return round(statistics.median(spans) * 1e6, 1)


def measured(door: str) -> list[dict[str, Any]]:
    """The rows of a door."""
    rows = []
    maker = door.partition(",")[0]
    for case, shape in (SHAPES | DEEP if maker == "jax" else SHAPES).items():
        step, wait, peak = MAKERS[maker](*shape)
        host_us(step, wait, 5)  # compiles, loads, records
        row: dict[str, Any] = {"door": door, "case": case, "host us": host_us(step, wait, 60)}
        waited = peak()
        row["us"] = among_us(step, wait, 5, 20)
        row["peak MiB"], row["peak ahead MiB"] = (round(n / 2**20, 1) for n in (waited, peak()))
        with busy():
            row["busy host us"], row["busy us"] = host_us(step, wait, 20), among_us(step, wait, 2, 20)
        rows.append(row)
    return rows


def main() -> None:
    """The doors' rows, or, of --door, its rows as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=DOORS, help="this one, in this process")
    parser.add_argument("--doors", choices=DOORS, nargs="+", default=list(DOORS), help="these (default: all)")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.door:
        print(json.dumps(measured(given.door)))
        return
    from benchmarks import harness  # opens the GPU by torch: not in the processes of the others

    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for door in given.doors:
        command = [sys.executable, "-m", "benchmarks.doors", "--door", door]
        paths = os.pathsep.join(filter(None, ["bindings/jax", os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": paths, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **DOORS[door]}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            print(f"{door} failed: {done.stderr[-1500:]}", file=sys.stderr)
        rows += json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []
    print(harness.table(rows))
    if given.out:
        print(harness.write("doors", rows, given.out, time.perf_counter() - begin))


if __name__ == "__main__":
    main()
