"""Calls that XLA makes in C on a GPU: the bits of those in Python, recorded in command buffers and not.

tests/core/test_jax_process.py starts this file once for each: XLA_FLAGS says which.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import te_jax as te  # noqa: E402
from te_jax import c_handler, record  # noqa: E402

from te_core import c_library  # noqa: E402
from te_core.recipe import Recipe  # noqa: E402
from te_core.tools.counts import counted  # noqa: E402
from tests.backends import HARDWARE, requires_jax_cuda  # noqa: E402
from tests.core.c_library import built  # noqa: E402
from tests.jax.test_te_jax import CASES, DELAYED, RECIPES, P, X, alike, by_jax, drawn, loss_of, scaling_of  # noqa: E402
from tests.jax.test_te_jax_devices import partitioned  # noqa: E402
from tests.threads import together  # noqa: E402

pytestmark = requires_jax_cuda
CAPTURED = "+CUSTOM_CALL" in os.environ.get("XLA_FLAGS", "")
BOTH = jax.value_and_grad(loss_of, argnums=(0, 1))
two = pytest.mark.skipif(len(jax.devices()) < 2, reason=f"{HARDWARE}one device")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is built; else one that is built for the tests."""
    if c_library.found() is None:
        if shutil.which("cc") is None:
            pytest.skip(f"{HARDWARE}no C compiler, and no library that it built")
        monkeypatch.setenv("TE_CORE_LIBRARY", str(built() / "libte_core.so"))
    assert c_handler.library() is not None, te.explain()


def called() -> int:
    """How often XLA has called work in C so far."""
    return sum(work.calls() for work in record._works.values() if work.calls)


def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Python, then C: what is lowered meanwhile is called in it."""
    for way in ("python", "c"):
        monkeypatch.setenv("TE_JAX_HANDLER", way)
        before = called()
        yield way
        assert (called() > before) == (way == "c"), (way, te.explain())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("name", CASES)
def test_by_c_are_the_bits_of_python(name: str, recipe: Recipe | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three steps, with the states that follow."""
    ours, _, call, given, _, _ = CASES[name]
    found: dict[str, Any] = {}
    for way in ways(monkeypatch):
        state = scaling_of(recipe, ours)
        made = []
        for step in range(3):
            now = (given[0] * (1 + step), *given[1:])
            shape = jax.eval_shape(lambda *g: call(recipe, scaling_of(recipe, ours), *g), *now).shape
            function = lambda *g, scaling: call(recipe, scaling, *g)  # noqa: E731
            y, grads, state = by_jax(function, drawn(*shape, seed=step), state, now)
            made.append((y, grads, state and state.arrays))
        found[way] = jax.device_get(made)
    alike(found["python"], found["c"])


def test_by_c_in_command_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where XLA captures, it calls no more once it has met the buffers; else once for each call of a step."""
    monkeypatch.setenv("TE_JAX_HANDLER", "c")
    compiled = jax.jit(BOTH).lower(P, te.scaling(DELAYED, te.layernorm_mlp), X).compile()
    assert f'"{c_handler.TARGET}"' in compiled.as_text()
    state = te.scaling(DELAYED, te.layernorm_mlp)
    before = called()
    wanted = jax.device_get(compiled(P, state, X))
    once = called() - before
    for _ in range(4):
        jax.block_until_ready(compiled(P, state, X))
    before = called()
    for _ in range(10):
        alike(jax.device_get(compiled(P, state, X)), wanted)
    grown = called() - before
    assert once and (grown < 10 * once if CAPTURED else grown == 10 * once), (once, grown)


def test_by_c_no_call_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_JAX_HANDLER", "c")
    step, state = jax.jit(BOTH), te.scaling(DELAYED, te.layernorm_mlp)
    jax.block_until_ready(step(P, state, X))
    with counted() as counts:
        jax.block_until_ready([step(P, state, X) for _ in range(10)])
    assert (counts.launches, counts.allocations, counts.to_device, counts.to_host, counts.waits) == (0,) * 5


def test_by_c_from_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_JAX_HANDLER", "c")
    step, state = jax.jit(BOTH), te.scaling(DELAYED, te.layernorm_mlp)
    wanted = [jax.device_get(step(P, state, X * (1 + i))) for i in range(4)]

    def run(i: int) -> None:
        for _ in range(10):
            alike(jax.device_get(step(P, state, X * (1 + i))), wanted[i])

    together(*(partial(run, i) for i in range(4)))


@two
def test_by_c_over_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), jax.sharding.PartitionSpec
    local = lambda p, s, x: jax.lax.pmean(loss_of(p, s, x), "data")  # noqa: E731
    specs = {"in_specs": (spec(), spec(), spec("data")), "out_specs": (spec(), spec())}
    found = {}
    for way in ways(monkeypatch):
        step = jax.jit(jax.shard_map(jax.value_and_grad(local, argnums=(0, 1)), mesh=mesh, **specs))
        state, made = te.scaling(DELAYED, te.layernorm_mlp, axis_names="data"), []
        for i in range(3):
            value, (grads, state) = step(P, state, X * (1 + i))
            made.append((value, grads, state.arrays))
        found[way] = jax.device_get(made)
    alike(found["python"], found["c"])


@two
def test_by_c_under_custom_partitioning(monkeypatch: pytest.MonkeyPatch) -> None:
    alike(*(partitioned() for _ in ways(monkeypatch)))


@two
def test_by_c_on_the_second_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the program was not lowered for."""
    monkeypatch.setenv("TE_JAX_HANDLER", "c")
    state = te.scaling(DELAYED, te.layernorm_mlp)
    given = [jax.device_put((P, state, X), device) for device in jax.devices()[:2]]
    step = jax.jit(BOTH)
    wanted, found = (jax.device_get(step(*each)) for each in given)
    alike(found, wanted)
