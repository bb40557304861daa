"""What `te_core.tools.counts` counts: that functions of arrays copy nothing, and wait for nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from te_core import dtypes
from te_core import functional as te
from te_core.kernels.loader import Kernel
from te_core.recipe import DelayedScaling, Float8CurrentScaling
from te_core.runtime import Runtime
from te_core.tape.tape import Tape
from te_core.tools.counts import Counts, counted
from tests.core.fake_cuda import Machine
from tests.recordings import tapes

RECIPE = DelayedScaling(amax_history_len=4)
DRAW = np.random.default_rng(0)
WEIGHTS: dict[str, Any] = {
    "layer_norm_weight": np.ones(32, np.float32),
    "fc1_weight": DRAW.standard_normal((128, 32)).astype(np.float32) / 6,
    "fc2_weight": DRAW.standard_normal((32, 64)).astype(np.float32) / 8,
}
#: Of a step: y and four gradients come out. Forward also takes the norm's rstd and FP8 output, both weights in FP8,
#: what fc1 gives, and what the activation gives in FP8; backward dy in FP8, the gradients of what the activation, fc1
#: (in FP8) and the norm gave.
KEPT, TEMPORARY = 5, 6 + 4


def mlp(x: Any, weights: Any, scaling: te.Scaling, rt: Runtime | None = None) -> dict[str, Any]:
    """A step of training."""
    options: Any = {"normalization": "RMSNorm", "activation": "swiglu", "recipe": RECIPE}
    y, back = te.layernorm_mlp(x, **weights, **options, scaling=scaling, rt=rt)
    grads = back(y)
    te.update(scaling, rt=rt)
    return {"y": y, **grads}


def test_fifty_steps_of_training_copy_nothing() -> None:
    x, weights = DRAW.standard_normal((16, 32)).astype(np.float32), {n: w.copy() for n, w in WEIGHTS.items()}
    scaling = te.Scaling(RECIPE, te.layernorm_mlp, like=x)
    with counted() as counts:
        for _ in range(50):
            found = mlp(x, weights, scaling)
            for name, weight in weights.items():
                weight -= 1e-3 * found[name]
    assert len(found) == KEPT
    assert counts == Counts(allocations=50 * (KEPT + TEMPORARY))


def test_what_the_host_copies_is_counted() -> None:
    rt = Runtime.cpu()
    with counted() as counts:
        t = rt.tensor(np.ones(4, np.float32))
        rt.numpy(t)
        rt.synchronize()
    assert counts == Counts(to_device=1, to_host=1, allocations=2)


@pytest.mark.parametrize("when", ["first", "never"])
def test_counts_are_what_a_device_is_given(when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    machine = Machine(monkeypatch, tmp_path)
    rt = machine.runtime()
    with tapes(when):
        with machine.noting() as made:
            x, w = rt.zeros((16, 32), dtypes.bfloat16), rt.zeros((64, 32), dtypes.bfloat16)
            _step(x, w, rt)  # makes plans, and scratch memory
        serial = machine.arena.take(1, 0)
        with machine.noting() as events, counted() as counts:
            _step(x, w, rt)
            rt.numpy(x)
    kinds = [event.kind for event in events]
    taken = [block for block in machine.arena.blocks.values() if block.start > serial]
    assert {"launch", "gemm", "copy", "synchronize"} <= {*kinds} and "fill" in [event.kind for event in made]
    launches = sum(kind in ("launch", "gemm", "cudnn", "fill") for kind in kinds)
    assert counts == Counts(
        to_device=sum(event.what[0] == "to device" for event in events if event.kind == "copy"),
        to_host=1,
        allocations=len(taken),
        launches=launches,
        waits=kinds.count("synchronize"),
    )


def _step(x: Any, w: Any, rt: Runtime) -> None:
    y, back = te.linear(x, w, recipe=Float8CurrentScaling(), rt=rt)
    back(y)
    rt.zeros((4,), dtypes.float32)


def test_nothing_is_left_behind() -> None:
    watched: list[Callable[[], Any]] = [lambda: Runtime.empty, lambda: Tape.replay, lambda: Kernel.__call__]
    before = [get() for get in watched]
    with counted() as outer:
        Runtime.cpu().empty((2,), dtypes.float32)
        with counted() as inner:
            Runtime.cpu().empty((2,), dtypes.float32)
        Runtime.cpu().empty((2,), dtypes.float32)
        assert [get() for get in watched] != before
    assert [get() for get in watched] == before
    assert (outer.allocations, inner.allocations) == (3, 1)
    Runtime.cpu().empty((2,), dtypes.float32)
    assert outer.allocations == 3


def test_a_wait_for_jax_is_counted() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((4, 32))
    with counted() as counts:
        te.l2_norm(x)
    assert counts.waits == 1 and not counts.to_host


def test_a_whole_layer_on_a_device_copies_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    machine = Machine(monkeypatch, tmp_path)
    rt = machine.runtime()
    shapes = {
        "layernorm_qkv_layer_norm_weight": (64,),
        "layernorm_qkv_weight": (128, 64),
        "proj_weight": (64, 64),
        "layernorm_mlp_layer_norm_weight": (64,),
        "layernorm_mlp_fc1_weight": (128, 64),
        "layernorm_mlp_fc2_weight": (64, 64),
    }
    p = {name: rt.zeros(shape, dtypes.bfloat16) for name, shape in shapes.items()}
    x, angles = rt.zeros((16, 2, 64), dtypes.bfloat16), rt.zeros((16, 1, 1, 16), dtypes.float32)
    options: Any = {"normalization": "RMSNorm", "activation": "swiglu", "recipe": Float8CurrentScaling(), "rt": rt}
    options |= {"num_attention_heads": 4, "num_gqa_groups": 2, "rotary_pos_emb": angles}
    with tapes("first"):
        for _ in range(2):
            with machine.noting() as events, counted() as counts:
                y, back = te.transformer_layer(x, **p, **options)
                grads = back(y)
    assert grads.keys() == {"x", *p} and not machine.faults
    launches = sum(event.kind in ("launch", "gemm", "cudnn", "fill") for event in events)
    assert counts == Counts(allocations=counts.allocations, launches=launches)
    assert counts.allocations and {"launch", "gemm", "cudnn"} <= {event.kind for event in events}
