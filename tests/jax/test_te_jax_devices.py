"""Layers of te_jax on several devices: what one device gives, or a refusal."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import te_jax as te  # noqa: E402
from jax.experimental.custom_partitioning import custom_partitioning  # noqa: E402

from te_core import ArgumentError, UnsupportedError  # noqa: E402
from te_core.recipe import Float8CurrentScaling  # noqa: E402
from tests.jax.test_te_jax import DELAYED, ON_GPU, W1, W2, P, W, X, alike, loss_of  # noqa: E402
from tests.tolerances import DB, snr_db  # noqa: E402

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="hardware: one device")


def test_data_parallel() -> None:
    """shard_map over devices: the gradients and the state of one device that has the whole batch."""
    count = min(4, len(jax.devices()))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("data",))
    spec = jax.sharding.PartitionSpec

    def local(p: Any, s: Any, x: Any) -> Any:
        return jax.lax.pmean(loss_of(p, s, x), "data")

    whole = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))
    inside = jax.shard_map(
        jax.value_and_grad(local, argnums=(0, 1)), mesh=mesh, in_specs=(spec(), spec(), spec("data")),
        out_specs=(spec(), spec()),
    )  # fmt: skip
    around = jax.value_and_grad(
        jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec(), spec("data")), out_specs=spec()), argnums=(0, 1)
    )
    wanted = te.scaling(DELAYED, te.layernorm_mlp)
    spread = te.scaling(DELAYED, te.layernorm_mlp, axis_names="data")
    text = jax.jit(inside).lower(P, spread, X).compile().as_text()
    assert "all-reduce" in text and not re.search("all-gather|all-to-all|collective-permute", text)
    found = [te.scaling(DELAYED, te.layernorm_mlp, axis_names="data")] * 2
    for step in range(3):
        x = X * (1 + step)
        value, (grads, wanted) = whole(P, wanted, x)
        for i, function in enumerate((inside, around)):
            got, (of, found[i]) = jax.jit(function)(P, found[i], x)
            np.testing.assert_allclose(got, value, rtol=1e-5)
            for a, b in zip(jax.tree.leaves(of), jax.tree.leaves(grads), strict=True):
                np.testing.assert_allclose(a, b, rtol=0.02, atol=2e-4)
            alike(found[i].arrays[:2], wanted.arrays[:2])


def partitioned() -> tuple[Any, Any]:
    """(what custom_partitioning gives of x divided over two devices, what it has to give)."""
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), jax.sharding.PartitionSpec
    rows, whole = (jax.sharding.NamedSharding(mesh, spec(*axes, None)) for axes in (("data",), (None,)))
    function = custom_partitioning(lambda x, w: te.dense(x, w))
    function.def_partition(
        partition=lambda mesh, given, found: (mesh, lambda x, w: te.dense(x, w), rows, (rows, whole)),
        infer_sharding_from_operands=lambda mesh, given, found: rows,
        sharding_rule="i j, j k -> i k",
    )
    x = X.reshape(-1, X.shape[-1])
    found = jax.jit(function)(jax.device_put(x, rows), jax.device_put(W, whole))
    assert found.sharding.is_equivalent_to(rows, 2)
    return jax.device_get((found, jax.jit(lambda x, w: te.dense(x, w))(x, W)))  # type: ignore[no-any-return]


def test_custom_partitioning() -> None:
    found, wanted = partitioned()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_state_of_all_devices_names_their_axis() -> None:
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), jax.sharding.PartitionSpec
    use = lambda s, x: jax.lax.pmean(te.dense(x, W, recipe=DELAYED, scaling=s).sum(), "data")  # noqa: E731
    for state, said in (
        (te.scaling(DELAYED, te.dense), r"axis_names=\['data'\]"),
        (te.scaling(DELAYED, te.dense, axis_names="nope"), r"inside of \('data',\)"),
    ):
        with pytest.raises(ArgumentError, match=said):
            jax.shard_map(jax.grad(use), mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())(state, X)


def test_column_and_row_parallel() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    spec = jax.sharding.PartitionSpec

    def local(x: Any, w1: Any, w2: Any) -> Any:
        return jax.lax.psum(te.dense(jax.nn.relu(te.dense(x, w1)), w2), "model")

    split = jax.shard_map(
        local, mesh=mesh, in_specs=(spec(), spec(None, "model"), spec("model", None)), out_specs=spec()
    )
    flat = W1.reshape(32, 128)[:, :64]
    found = jax.jit(jax.grad(lambda *a: (split(*a) ** 2).sum(), (0, 1, 2)))(X, flat, W2)
    x, w1, w2 = (np.asarray(t, np.float64) for t in (X, flat, W2))
    x = x.reshape(-1, len(w1))
    h = np.maximum(x @ w1, 0)
    dy = 2 * h @ w2
    dh = dy @ w2.T * (h > 0)
    products = "tf32" if ON_GPU else "fp32"
    for part, wanted in zip(found, (dh @ w1.T, x.T @ dh, h.T @ dy), strict=True):
        assert snr_db(part, wanted.reshape(part.shape)) > DB[products] - 6  # four in a row


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("field", ["dp_resource", "fsdp_resource", "tp_resource"])
def test_a_mesh_resource_names_the_axes_of_states(field: str, check: bool) -> None:
    """As axis_names do; also where JAX does not know which arrays differ. An axis that no array differs along counts
    for nothing."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "other"))
    spec = jax.sharding.PartitionSpec

    def states(s: Any, x: Any) -> Any:
        """After a step; of each device."""
        after = jax.grad(lambda s: (te.dense(x, W, recipe=DELAYED, scaling=s) ** 2).sum())(s)
        return jax.tree.map(lambda a: a[None], after.arrays)

    split = jax.jit(
        jax.shard_map(states, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"), check_vma=check)
    )
    x = X * jnp.arange(1, 5)[:, None, None]
    wanted = split(te.scaling(DELAYED, te.dense, axis_names="data"), x)
    resource = te.MeshResource(**{field: "data", "tpsp_resource": "other"})
    with te.autocast(mesh_resource=resource), te.autocast(enabled=False):  # a region inside keeps the mesh
        found = split(te.scaling(DELAYED, te.dense), x)
    alike(found, wanted)
    assert all(np.array_equal(one[0], one[1]) for one in found)
    with pytest.raises(ArgumentError, match="axis_names") if check else nullcontext():
        apart = split(te.scaling(DELAYED, te.dense), x)
        assert not np.array_equal(apart[0][0], apart[0][1])


def test_a_state_of_each_device_stays_its_own() -> None:
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), jax.sharding.PartitionSpec
    states = jax.tree.map(lambda a: jnp.stack([a, a]), te.scaling(DELAYED, te.dense))

    def step(s: Any, x: Any) -> Any:
        own = jax.tree.map(lambda a: a[0], s)
        after = jax.grad(lambda s: te.dense(x, W, recipe=DELAYED, scaling=s).sum())(own)
        return jax.tree.map(lambda a: a[None], after)

    split = jax.shard_map(step, mesh=mesh, in_specs=(spec("data"), spec("data")), out_specs=spec("data"))
    x = X * jnp.arange(1, 5)[:, None, None]
    with te.autocast(mesh_resource=te.MeshResource(dp_resource="data")):
        found = jax.jit(split)(states, x)
    assert not np.array_equal(found.scale_fwd[0], found.scale_fwd[1])


def test_mesh_resources_that_are_refused() -> None:
    mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), jax.sharding.PartitionSpec
    split = jax.shard_map(
        lambda s, x: te.dense(x, W, recipe=DELAYED, scaling=s), mesh=mesh, in_specs=(spec(), spec("data")),
        out_specs=spec("data"),
    )  # fmt: skip
    other = te.MeshResource(dp_resource="batch")
    with te.autocast(mesh_resource=other), pytest.raises(ArgumentError, match=r"'batch'.*inside of \('data',\)"):
        split(te.scaling(DELAYED, te.dense), X)
    with te.autocast(recipe=Float8CurrentScaling(), mesh_resource=other):
        te.dense(X, W)
        te.dense(X, W)
    assert te.explain().count("mesh_resource has no effect on Float8CurrentScaling") == 1


@pytest.mark.parametrize("which", ["x", "kernel", "both", "replicated", "rows of a mesh that is set"])
def test_no_sharding_is_gathered_under_jit_alone(which: str) -> None:
    """With and without gradients, and where the program decides: the layer is refused wherever there are devices."""
    count = min(4, len(jax.devices()))
    mesh, spec = jax.make_mesh((count,), ("data",), (jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec
    place = lambda a, *axes: jax.device_put(a, jax.sharding.NamedSharding(mesh, spec(*axes)))  # noqa: E731
    x = place(X, "data") if which not in ("kernel", "replicated") else place(X)
    w = place(W, None, "data") if which in ("kernel", "both") else place(W)
    around = jax.sharding.set_mesh(mesh) if which.endswith("set") else nullcontext()
    for function in (te.dense, jax.jit(te.dense), jax.jit(jax.grad(lambda x, w: te.dense(x, w).sum(), (0, 1)))):
        with around, pytest.raises(UnsupportedError, match=rf"(?s){count} devices under jax.jit.*jax.shard_map"):
            function(x, w)
