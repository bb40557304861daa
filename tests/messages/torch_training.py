"""Rows of messages of what goes around layers: regions, checkpoints, graphed callables, offloading, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import te_torch as te
from te_core.recipe import Float8CurrentScaling
from te_torch.tools import foreign_norms
from te_torch.training.graphs import device
from te_torch.training.graphs.schedule import of_pipeline
from tests.fake_graphs import FakeDevice
from tests.messages.rows import Rows

ROWS = Rows()
CURRENT = Float8CurrentScaling()

# ------------------------------------------------------------------------------------------------- regions

ROWS["autocast of a recipe, which would be taken for on"] = lambda: te.autocast(CURRENT)
for enabled in (None, 1, "yes", torch.tensor(True)):
    ROWS.add(te.autocast, enabled)
ROWS.each(te.autocast, amax_reduction_group=("world", 0, [0, 1], int))
for region, name in (
    (te.autocast, "fp8_group"),
    (te.fp8_autocast, "recipe"),
    (te.fp8_autocast, "amax_reduction_group"),
    (te.autocast, "recipes"),
):
    ROWS.add(region, **{name: None})

# --------------------------------------------------------------------------------- checkpoints, random numbers

ONES = torch.ones(3, requires_grad=True)
ROWS.add(te.checkpoint, ONES, torch.sin)
ROWS.add(te.checkpoint, torch.sin, ONES, distribute_saved_activations=True)
ROWS.add(te.checkpoint, torch.sin, ONES, distribute_saved_activations=True, use_reentrant=False)
ROWS.add(te.checkpoint, torch.sin, False, te.CudaRNGStatesTracker, None, ONES)
ROWS.each(te.checkpoint, torch.sin, ONES, get_rng_state_tracker=(object, te.CudaRNGStatesTracker(device="cpu")))
ROWS["checkpoint(sin, get_rng_state_tracker=lambda: None)"] = lambda: te.checkpoint(
    torch.sin, ONES, get_rng_state_tracker=lambda: None
)


def tracker(method: str, *args: Any) -> None:
    """A method of a tracker of two streams."""
    made = te.CudaRNGStatesTracker(device="cpu")
    made.add("model-parallel-rng", 7)
    made.add("other", 8)
    getattr(made, method)(*args)


ROWS.add(tracker, "add", "other", 9)
for seed in (7, "7", 1.5, None):
    ROWS.add(tracker, "add", "third", seed)
for states in (
    5,
    *({"other": state} for state in (5, "a", None, torch.zeros(3, dtype=torch.uint8), torch.zeros(5056))),
):
    ROWS.add(tracker, "set_states", states)
ROWS["fork of a stream that is not there"] = lambda: fork("expert")
ROWS.add(te.Linear, 8, 8, get_rng_state_tracker=type(None), device="cpu")


def fork(name: str) -> None:
    """A fork of a tracker without streams but one."""
    made = te.CudaRNGStatesTracker(device="cpu")
    made.add("model-parallel-rng", 7)
    with made.fork(name):
        pass


# ------------------------------------------------------------------------------------------------- offloading

ROWS.each(te.get_cpu_offload_context, True, num_layers=(0, "2"), model_layers=(-1,), offload_activations=(False,))
ROWS.each(te.get_cpu_offload_context, True, 4, model_layers=(4, 3))
ROWS.add(te.get_cpu_offload_context, True, 3, 4)  # a warning
ROWS["get_cpu_offload_context(offload_stream=object())"] = lambda: te.get_cpu_offload_context(
    True, offload_stream=object()
)

# ------------------------------------------------------------------------------------------ graphed callables

X = torch.ones(4, 16)
PAIR = ((X,), (X,))


def linear() -> te.Linear:
    """A callable."""
    return te.Linear(16, 16, device="cpu")


def graphed(make: Callable[[], Any], sample: Any, **options: Any) -> None:
    """A capture, on a device that is not there."""
    with patch.object(device, "device", FakeDevice()):
        te.make_graphed_callables(make(), sample, **options)


def with_hook(kind: str) -> te.Linear:
    """A module that something looks at."""
    module = linear()
    getattr(module, f"register_{kind}_hook")(lambda *args: None)
    return module


def with_buffer() -> te.Linear:
    """A module with a buffer that is learned."""
    module = linear()
    module.register_buffer("learned", torch.ones(2, requires_grad=True))
    return module


def evaluated() -> te.Linear:
    """A module in evaluation mode."""
    return linear().eval()


MODULES: dict[str, tuple[Callable[[], Any], Any]] = {
    "a function": (lambda: lambda x: x, (X,)),
    "a list": (lambda: [linear()], (X,)),
    "nothing": (lambda: (), ()),
    "two modes": (lambda: (linear(), evaluated()), PAIR),
    "a hook": (lambda: with_hook("forward"), (X,)),
    "a backward hook": (lambda: with_hook("full_backward_pre"), (X,)),
    "a buffer": (with_buffer, (X,)),
    "graphed already": (lambda: nn.Sequential(te.make_graphed_callables(linear(), (X,))), (X,)),
    "a bare tensor": (linear, X),
    "no tensor": (linear, (X, 3)),
    "bare tensors": (lambda: (linear(), linear()), (X, X)),
    "too few": (lambda: (linear(), linear()), ((X,),)),
    "twice": (lambda: (linear(),) * 2, PAIR),
}
for case, (make, sample) in MODULES.items():
    ROWS[f"make_graphed_callables: {case}"] = lambda make=make, sample=sample: graphed(make, sample)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"sample_kwargs": {"fp8_output": True}},
    {"enabled": 1},
    {"enabled": (1,)},
    {"enabled": (True, False)},
    {"recipe": "delayed"},
    {"calibrating": "yes"},
    {"num_warmup_iters": -1},
    {"_num_layers_per_chunk": 1},
    {"_reuse_graph_input_output_buffers": True},
    {"capture_time_hooks": []},
    {"capture_time_hooks": [{"hooks": {}}]},
)
for options in OPTIONS:
    ROWS.add(graphed, linear, (X,), **options)
ROWS["make_graphed_callables: sample_kwargs of another number"] = lambda: graphed(
    lambda: (linear(), linear()), PAIR, sample_kwargs=({},)
)
ROWS["make_graphed_callables: buffers used again in evaluation"] = lambda: graphed(
    evaluated, ((X,),), _reuse_graph_input_output_buffers=True, _order=[1, -1]
)
for older, newer, value in (
    ("fp8_enabled", "enabled", True),
    ("fp8_calibrating", "calibrating", True),
    ("fp8_recipe", "recipe", CURRENT),
    ("fp8_group", "amax_reduction_group", object()),
    ("fp8_weight_caching", "cache_quantized_params", True),
):
    ROWS[f"make_graphed_callables: {older}"] = lambda older=older, value=value: graphed(linear, (X,), **{older: value})
    ROWS[f"make_graphed_callables: {older} and {newer}"] = lambda older=older, newer=newer, value=value: graphed(
        linear, (X,), **{older: value, newer: value}
    )
ROWS["make_graphed_callables on a CPU"] = lambda: te.make_graphed_callables(linear(), (X,))


def in_autocast() -> None:
    """A capture in a region of torch that keeps casts."""
    with torch.autocast("cpu", torch.bfloat16):
        graphed(linear, (X,))


ROWS["make_graphed_callables in torch.autocast with its cache"] = in_autocast
for order in (
    (1, None, 1, 1),
    ([], None, 1, 1),
    ([1, "b"], None, 1, 1),
    ([1, 0, -1], None, 1, 1),
    ([1, -1, 0.3], None, 1, 1),
    ([1, -1, -0.5], None, 1, 1),
    ([1, -2], None, 1, 1),
    ([1, 1, -1], None, 1, 2),
    ([1, 1, -1, -1, 2, -2, 1, -1], None, 2, 4),
    ([1, -1, -1, 1], None, 1, 2),
    ([1, 0.5, -1], None, 1, 1),
    ([1, -1], None, 1, 2),
    ([1, 2, -2, -1], None, 3, 3),
    ([1, 2, -2, -1], 2, 3, 3),
    ([1, 2, -2, -1], [2, 2], 3, 3),
    ([1, 2, -2, -1], [3, 0], 3, 3),
    ([1, -1, 0.5], None, 2, 2),
    ([1, -1, 0.5, 1, -1], None, 1, 2),
):
    ROWS.add(of_pipeline, *order)

# ------------------------------------------------------------------------------------------ norms of others


class LlamaNorm(nn.Module):
    """One of a user's own."""


def register(*args: Any, **options: Any) -> None:
    """A registration of which nothing stays."""
    with patch.object(foreign_norms, "_registered", {}):
        te.register_norm(*args, **options)


for kind in (LlamaNorm(), "LlamaNorm", dict, nn.LayerNorm, te.RMSNorm):
    ROWS.add(register, kind)
ROWS.each(register, LlamaNorm, like=(nn.RMSNorm, "RMSNorm"), eps=(-1.0,), weight=(5,), zero_centered_gamma=("yes",))

# --------------------------------------------------------------------------------------- gradients elsewhere

for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
    for cls in (te.Linear, te.LayerNormLinear):
        ROWS.add(cls, 48, 64, parameters_split=("q", "k"), device="cpu", **{option: True})
