"""What programs with layers of te_jax contain: which calls, which copies; and how long they live."""

from __future__ import annotations

import gc
import re
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import te_jax as te  # noqa: E402
from te_jax import quantizing, record, rules  # noqa: E402
from te_jax.state import _update  # noqa: E402

from te_core import UnsupportedError  # noqa: E402
from te_core.layers.table import LAYERS  # noqa: E402
from te_core.recipe import Float8CurrentScaling  # noqa: E402
from te_core.tensor import cuda_device  # noqa: E402
from tests.jax.test_te_jax import DELAYED, W1, W2, P, X, alike, loss_of  # noqa: E402

BOTH = jax.value_and_grad(loss_of, argnums=(0, 1))


@pytest.mark.parametrize(
    "names, forwards",
    [((), 2), (te.checkpoint_names, 1), (("te_jax.layernorm_mlp",), 1), (("te_jax.dense",), 2)],
    ids=["nothing", "all", "layernorm_mlp", "dense"],
)
def test_policies_of_remat_know_layers_by_name(names: tuple[str, ...], forwards: int) -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    again = lambda p, s, x: jnp.sin(jax.checkpoint(loss_of, policy=policy)(p, s, x))  # noqa: E731
    text = jax.jit(jax.value_and_grad(again, argnums=(0, 1))).lower(P, te.scaling(DELAYED, te.layernorm_mlp), X)
    calls = re.findall(r"@te_tape(?:_c)?\(", text.as_text())
    assert len(calls) == forwards + 3  # backward, and the update of two scales


def test_every_function_has_a_name_for_policies() -> None:
    called = {f"te_jax.{rules.CALLED.get(name, name)}" for name in LAYERS}
    assert set(te.checkpoint_names) <= called and all(hasattr(te, n.split(".")[1]) for n in te.checkpoint_names)


def test_nothing_large_is_copied() -> None:
    """Weights and what backward reads are used where they lie; of donated states a row of maxima is written."""
    state = te.scaling(DELAYED, te.layernorm_mlp)
    text = jax.jit(BOTH, donate_argnums=1).lower(P, state, X).compile().as_text()
    copied = re.findall(r"= (\w+)\[([\d,]*)\]\S* (?:copy|transpose)\(", text)
    largest = max(array.size for array in state.arrays)
    assert all(np.prod([int(n) for n in shape.split(",") if n]) <= largest for _, shape in copied), copied
    assert min(W1.size, W2.size, X.size) > largest


def test_a_compiled_program_outlives_what_made_it() -> None:
    state = te.scaling(DELAYED, te.layernorm_mlp)
    compiled = jax.jit(BOTH).lower(P, state, X[:3]).compile()
    wanted = compiled(P, state, X[:3])
    for layer in LAYERS.values():
        layer.calls.clear()
    jax.clear_caches()
    gc.collect()
    alike(compiled(P, state, X[:3]), wanted)


def test_shapes_leave_nothing_that_jax_does_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What te_jax makes for a shape is JAX's to keep, and goes with its caches. (Programs that run stay known.)"""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    for kind in (rules.Layered, quantizing.Kind):
        monkeypatch.setattr(kind, "settle", lambda self, settle=kind.settle: [settle(self), made.add(self)])
    monkeypatch.setattr(record, "_works", dict(record._works))
    for rows in (41, 42, 41):
        te.dense(jnp.ones((rows, 64)), W2)
        te.quantize(jnp.ones((rows, 64)), Float8CurrentScaling())
    assert len(made) == 4
    monkeypatch.undo()
    jax.clear_caches()
    gc.collect()
    assert not made


def test_a_program_has_room_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of one kind may need different temporaries. A GPU for which it was not lowered must need no more."""
    work, needed = _update.__wrapped__(2, 4, "max", 448.0), {0: 0, 1: 512, 2: 256, 3: 1024}

    def brought(rt: Any, *_: Any) -> Any:
        return SimpleNamespace(made=SimpleNamespace(block=needed[rt], results=tuple))

    monkeypatch.setattr(record, "runtime", lambda device: device.index)
    monkeypatch.setattr(record, "brought", brought)
    gpus = [cuda_device(i) for i in needed]
    assert work.temporaries(gpus[:2]) == 512
    assert work.on(gpus[2]).made.block == 256
    with pytest.raises(UnsupportedError, match="1024 bytes of temporaries on cuda:3, 512 where it was lowered"):
        work.on(gpus[3])
