"""What precision debugging costs: a step of a Llama-like TransformerLayer in FP8, plain, while nvdlfw_inspect is
initialised and looks at another layer, with all statistics of all tensors in every step, and under `inspect`.

Without nvdlfw-inspect (the extra `debug`) the rows of `inspect` alone. Host times are those of a tiny layer.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import te_torch as te
from benchmarks import harness
from te_core.recipe import DelayedScaling

RUNS, CALLS = 20, 300
ALL, IDLE, IDLE_HOST = 1.5, 1.01, 3.0  # of the plain step; microseconds
OPERANDS = ["activation", "weight", "gradient"]
VALUES = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
CASTS = ["underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse"]
#: Both features on all tensors of the layers whose names begin with `looked`.
CONFIG: dict[str, Any] = {
    "all": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": "^looked"},
        "transformer_engine": {
            "LogTensorStats": {"enabled": True, "stats": VALUES, "tensors": [*OPERANDS, "output", "dgrad", "wgrad"]},
            "LogFp8TensorStats": {"enabled": True, "stats": CASTS, "tensors": OPERANDS},
        },
    }
}
FEATURES = Path(te.__file__).parent / "debug" / "features"


def llama(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The layer and its input; on a CPU a small one of its kind."""
    hidden, ffn, heads, groups, tokens = (4096, 14336, 32, 8, 8192) if harness.gpu() else (64, 224, 4, 2, 64)
    layer = te.TransformerLayer(
        hidden,
        ffn,
        heads,
        num_gqa_groups=groups,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        device=harness.device(),
        name=name,
    )
    return layer, torch.randn(tokens, 1, hidden, device=harness.device()).bfloat16().requires_grad_()


def tiny(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer of which only the host's time counts."""
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device=harness.device(), name=name)
    return layer, torch.randn(32, 64, device=harness.device()).bfloat16().requires_grad_()


def step_of(layer: torch.nn.Module, x: torch.Tensor, ends: Callable[[], object] = lambda: None) -> harness.Work:
    """Forward, backward, and what ends an iteration."""
    recipe, grad = DelayedScaling(), torch.ones_like(x)

    def step() -> None:
        for p in (x, *layer.parameters()):
            p.grad = None
        with te.autocast(recipe=recipe):
            out = layer(x)
        out.backward(grad)
        ends()

    return step


def row(case: str, us: float, plain: float, target: float | None = None) -> harness.Row:
    """A step against the plain one: wall time of several in a row, in which the host may be what counts."""
    found: harness.Row = {"case": case, "us": us, "of_plain": us / plain}
    return found if target is None else {**found, "target": f"<= {target:g}", "ok": us / plain <= target}


def host_row(case: str, us: float, plain: float, target: float | None = None) -> harness.Row:
    """The host's time of a tiny layer that nobody looks at, against what it was."""
    found: harness.Row = {"case": case, "host us": us, "more us": us - plain}
    return found if target is None else {**found, "target": f"<= {target:g} us more", "ok": us - plain <= target}


def measure_inspect() -> list[harness.Row]:
    """`te_torch.debug.inspect` around the model, with nothing else installed."""
    layer, x = llama("inspected")
    plain = harness.row_us(step_of(layer, x), RUNS)
    with te.debug.inspect(layer) as seen:
        looked = harness.row_us(step_of(layer, x, seen.step), RUNS)
    again = harness.row_us(step_of(layer, x), RUNS)
    return [row("plain", plain, plain), row("inspect", looked, plain, ALL), row("after inspect", again, plain)]


def measure_features() -> list[harness.Row]:
    """A configuration: what it costs a layer that it names, and one that it does not."""
    if find_spec("nvdlfw_inspect") is None:
        return []
    from nvdlfw_inspect import api

    layer, x = llama("untouched")
    small = step_of(*tiny("untouched_small"))
    bare, plain_host = step_of(layer, x), harness.host_us(small, calls=CALLS)[0]
    plain, bare_gpu = harness.row_us(bare, RUNS), harness.gpu_us(bare, runs=RUNS)[0]
    with tempfile.TemporaryDirectory() as folder:
        api.initialize(CONFIG, str(FEATURES), log_dir=folder, default_logging_enabled=True)
        try:
            idle = harness.gpu_us(step_of(layer, x, api.step), runs=RUNS)[0]
            touched = harness.row_us(step_of(*llama("looked"), api.step), RUNS)
            idle_host = harness.host_us(small, calls=CALLS)[0]
        finally:
            api.end_debug()
            for name in ("nvdlfw_inspect", "Default Statistics"):
                logging.getLogger(name).handlers.clear()
    return [
        {**row("initialised, another layer", idle, bare_gpu, IDLE), "measured": "on the GPU"},
        row("all statistics", touched, plain, ALL),
        host_row("tiny layer", plain_host, plain_host),
        host_row("tiny layer, initialised", idle_host, plain_host, IDLE_HOST),
    ]


if __name__ == "__main__":
    from benchmarks.run import main

    sys.exit(main(["debugging", *sys.argv[1:]]))
