"""Run a step of yours twice, so that later processes find its kernels and its plans of attention on disk.
On a CPU there are none.

The step is a function without arguments, of a file or of a module, that runs a forward and a backward and returns the
model:

    te warmup train.py:step
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from te_cli.steps import add_step, function_of, model_of

add_arguments = add_step


def run(options: argparse.Namespace) -> tuple[dict[str, Any], str, int]:
    """The seconds of a first step, which compiles, and of a second one."""
    import torch

    step, seconds = function_of(options.step), []
    for _ in range(2):
        start = time.perf_counter()
        model = model_of(step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    on_gpu = any(t.is_cuda for t in (*model.parameters(), *model.buffers()))
    kept = "kernels and plans are on disk" if on_gpu else "nothing was compiled: the model is on the CPU"
    said = f"first step {seconds[0]:.2f} s, second step {seconds[1]:.2f} s; {kept}"
    return {"seconds": seconds, "on disk": on_gpu}, said, 0
