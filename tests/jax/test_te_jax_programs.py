"""What programs with layers of te_jax contain: which calls, which copies, which states; and how long they live."""

from __future__ import annotations

import copy
import gc
import pickle
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

from te_core import ArgumentError, UnsupportedError  # noqa: E402
from te_core.layers.table import LAYERS  # noqa: E402
from te_core.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402
from te_core.tensor import cuda_device  # noqa: E402
from tests.jax.test_te_jax import DELAYED, W1, W2, P, W, X, alike, loss_of  # noqa: E402

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


def _used(w: Any, s: Any, x: Any) -> Any:
    return te.dense(x, w, recipe=DELAYED, scaling=s).sum()


def test_a_loop_whose_body_closes_over_a_state_is_refused() -> None:
    """Each run would read the same scales, and JAX would add up the next states. A state that the body is handed is
    right, and so is one of several that the body picks."""
    state, both = te.scaling(DELAYED, te.dense), jax.grad(_used, argnums=(0, 1))
    stacked = jax.tree.map(lambda a: jnp.stack([a] * 4), state)
    scanned = lambda w, s: jax.lax.scan(lambda c, x: (c + _used(w, s, x), None), 0.0, X)[0]  # noqa: E731
    loop = jax.lax.fori_loop
    for closing in (
        lambda: scanned(W, state),
        lambda: jax.lax.scan(lambda w, x: (w - both(w, state, x)[0], None), W, X),
        lambda: jax.jit(jax.grad(scanned, 1))(W, state),
        lambda: jax.grad(jax.jit(scanned), 1)(W, state),
        lambda: jax.lax.map(lambda x: jax.checkpoint(lambda x: _used(W, state, x))(x), X),
        lambda: loop(0, 3, lambda i, c: c + _used(W, state, X), 0.0),
        lambda: jax.jit(lambda n: loop(0, n, lambda i, c: c + _used(W, state, X), 0.0))(3),
        lambda: jax.lax.while_loop(lambda c: c + _used(W, state, X) < 0, lambda c: c + 1, 0.0),
    ):
        with pytest.raises(
            ArgumentError, match=r"(?s)^dense: got a scaling state from outside.*To do: carry the state"
        ):
            closing()
    picked = lambda s: loop(0, 4, lambda i, c: c + _used(W, jax.tree.map(lambda a: a[i], s), X[i]), 0.0)  # noqa: E731
    each = jax.grad(lambda s: sum(_used(W, jax.tree.map(lambda a: a[i], s), X[i]) for i in range(4)))  # noqa: B023
    alike(jax.jit(jax.grad(picked))(stacked), jax.jit(each)(stacked))
    carried, _ = jax.lax.scan(lambda s, x: (both(W, s, x)[1], None), state, X)
    alike(carried, jax.jit(lambda s: both(W, both(W, both(W, both(W, s, X[0])[1], X[1])[1], X[2])[1], X[3])[1])(state))


def test_a_function_that_trains_with_a_state_as_a_constant_is_refused() -> None:
    """Its program would keep the scales of the first step. What JAX hands on, and inference, is right."""
    state, weight = te.scaling(DELAYED, te.dense), jax.grad(_used)
    for closing in (
        lambda: jax.jit(lambda w: weight(w, state, X))(W),
        lambda: jax.jit(lambda w: jax.grad(_used, argnums=(0, 1))(w, state, X))(W),
        lambda: jax.grad(jax.jit(lambda w: _used(w, state, X)))(W),
        lambda: jax.grad(jax.checkpoint(lambda w: _used(w, state, X)))(W),
        lambda: jax.grad(lambda w: jax.lax.cond(True, lambda w: _used(w, state, X), lambda w: 0.0, w))(W),
    ):
        with pytest.raises(ArgumentError, match=r"(?s)^dense: got a scaling state that is a constant.*as an argument"):
            closing()
    wanted = jax.jit(jax.grad(_used, argnums=(0, 1)))(W, state, X)
    for inner in (jax.jit, jax.checkpoint, lambda f: lambda w: jax.lax.cond(True, f, lambda w: 0.0, w)):
        handed = lambda w, s, x, inner=inner: inner(lambda w: _used(w, s, x))(w)  # noqa: E731
        alike(jax.grad(handed, argnums=(0, 1))(W, state, X), wanted)
    assert np.array_equal(jax.jit(lambda x: _used(W, state, x))(X), _used(W, state, X))
    alike(jax.jit(jax.grad(lambda x: _used(W, state, x)))(X), jax.grad(_used, 2)(W, state, X))


def test_states_and_quantized_arrays_are_copied_and_pickled() -> None:
    state = te.scaling(DelayedScaling(amax_history_len=5), te.dense)  # the recipe is gone, an equal one will do
    gc.collect()
    step = jax.grad(lambda s: te.dense(X, W, recipe=DelayedScaling(amax_history_len=5), scaling=s).sum())
    state, q = step(state), te.quantize(X, Float8CurrentScaling())
    te.dequantize(q)
    for copied in (copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))):
        other = copied({"state": state, "q": q})
        assert jax.tree.structure(other) == jax.tree.structure({"state": state, "q": q})
        alike(step(other["state"]), step(state))
        alike(te.dequantize(other["q"]), te.dequantize(q))


def test_jax_compiles_nothing() -> None:
    state, both = te.scaling(DELAYED, te.dense), jax.grad(_used, argnums=(0, 1))
    wanted = both(W, state, X)
    with jax.disable_jit():
        alike(both(W, state, X), wanted)
        alike(
            te.dequantize(te.quantize(X, Float8CurrentScaling())), te.dequantize(te.quantize(X, Float8CurrentScaling()))
        )
