"""Functions of te_jax: the bits of te_core.functional, forward and backward, on the device that JAX has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import te_jax as te  # noqa: E402
from te_jax import record  # noqa: E402

from te_core import ArgumentError  # noqa: E402
from te_core import functional as fn  # noqa: E402
from te_core.functional import arrays  # noqa: E402
from te_core.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe  # noqa: E402
from te_core.runtime import Runtime  # noqa: E402
from te_core.tools.counts import counted  # noqa: E402
from tests import jax_draws, programs  # noqa: E402
from tests.backends import capability, jax_on_gpu, needs_device  # noqa: E402
from tests.threads import together  # noqa: E402

DELAYED = DelayedScaling(amax_history_len=3)
ON_GPU = jax_on_gpu()
MXFP8 = pytest.param(MXFP8BlockScaling(), marks=needs_device(not ON_GPU or capability() >= (10, 0), "sm_100"))
RECIPES = [None, Float8CurrentScaling(), Float8BlockScaling(), MXFP8, DELAYED]
#: cuDNN's attention takes no float32.
WHOLE = jnp.bfloat16 if ON_GPU else jnp.float32
NAMES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


def drawn(*shape: int, seed: int = 0, size: float = 1.0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * size, jnp.float32)


X = drawn(4, 8, 32)
GAMMA, BETA = 1 + drawn(32, seed=1, size=0.1), drawn(32, seed=2, size=0.1)
W, B = drawn(32, 48, seed=3, size=0.2), drawn(48, seed=4)
W1, B1 = drawn(32, 2, 64, seed=5, size=0.2), drawn(2, 64, seed=6, size=0.1)
W2, B2 = drawn(64, 32, seed=7, size=0.2), drawn(32, seed=8, size=0.1)


def host(array: Any) -> Any:
    """The values of what te_core.functional gave."""
    tensor = arrays.read("test", "result", array)
    return (Runtime.cpu() if tensor.device.kind == "cpu" else Runtime.cuda()).numpy(tensor)


def scaling_of(recipe: Recipe | None, function: Any) -> Any:
    return None if recipe is None else te.scaling(recipe, function)


def by_jax(function: Any, wanted: Any, scaling: Any, given: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """(y, the gradients of what was given, the next state), for this gradient of y."""

    def loss(given: Any, scaling: Any) -> Any:
        y = function(*given, scaling=scaling)
        return (y * wanted).sum(), y

    (_, y), (grads, after) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(given, scaling)
    return y, grads, after


def equal(found: Any, wanted: Any) -> None:
    assert np.array_equal(np.asarray(found).reshape(np.shape(wanted)), wanted)


def nearly(found: Any, wanted: Any, tolerance: float) -> None:
    """The same bits, on a GPU up to the order in which another one of its kernels adds."""
    if not ON_GPU:
        return equal(found, wanted)
    found, wanted = (np.asarray(a, np.float32).reshape(np.shape(wanted)) for a in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


CASES: dict[str, Any] = {
    "dense": (
        te.dense,
        fn.linear,
        lambda r, s, x, w, b: te.dense(x, w, b, recipe=r, scaling=s),
        (X, W, B),
        lambda x, w, b: {"x": x, "weight": w.T, "bias": b},
        {},
    ),
    "layernorm_dense": (
        te.layernorm_dense,
        fn.layernorm_linear,
        lambda r, s, x, w, g, b: te.layernorm_dense(x, w, g, b, recipe=r, scaling=s),
        (X, W, GAMMA, BETA),
        lambda x, w, g, b: {"x": x, "weight": w.T, "layer_norm_weight": g, "layer_norm_bias": b},
        {"eps": 1e-6},
    ),
    "layernorm_mlp": (
        te.layernorm_mlp,
        fn.layernorm_mlp,
        lambda r, s, x, g, w1, b1, w2, b2: te.layernorm_mlp(
            x, g, None, [w1, w2], [b1, b2], "rmsnorm", activation_type=("silu", "linear"), recipe=r, scaling=s
        ),
        (X, GAMMA, W1, B1, W2, B2),
        lambda x, g, w1, b1, w2, b2: {
            "x": x, "layer_norm_weight": g, "fc1_weight": w1.reshape(32, 128).T, "fc1_bias": b1.reshape(128),
            "fc2_weight": w2.T, "fc2_bias": b2,
        },
        {"eps": 1e-6, "activation": "swiglu", "normalization": "RMSNorm"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("name", CASES)
def test_equal_bits(name: str, recipe: Recipe | None) -> None:
    """Of three steps, with the states that follow."""
    ours, theirs, call, given, named, options = CASES[name]
    # a product of TF32 has another kernel for a weight [in, out]
    same = equal if recipe is not None else lambda a, b: nearly(a, b, 1e-5)
    state = scaling_of(recipe, ours)
    other = None if state is None else fn.Scaling(recipe, theirs, like=X)
    for step in range(3):
        now = (given[0] * (1 + step), *given[1:])
        y, back = theirs(**named(*now), **options, recipe=recipe, scaling=other)
        dy = drawn(*y.shape, seed=step)
        grads = back(dy)
        if other is not None:
            fn.update(other)
        found, of_jax, state = by_jax(lambda *g, scaling: call(recipe, scaling, *g), dy, state, now)
        same(found, host(y))
        of_jax = named(*of_jax)
        assert of_jax.keys() == grads.keys()
        for key, grad in grads.items():
            same(of_jax[key], host(grad))
        for part in () if other is None else NAMES:
            equal(getattr(state, part), host(getattr(other, part)))


def whole_params(mlp: bool) -> dict[str, Any]:
    """Of attention with four heads of 8 in two groups, or of a layer around it."""
    if not mlp:
        shapes: dict[str, Any] = {"qkv_weight": (64, 32), "qkv_bias": (64,), "proj_weight": (32, 32)}
    else:
        shapes = {
            "layernorm_qkv_layer_norm_weight": (32,), "layernorm_qkv_weight": (64, 32), "proj_weight": (32, 32),
            "layernorm_mlp_layer_norm_weight": (32,), "layernorm_mlp_fc1_weight": (128, 32),
            "layernorm_mlp_fc2_weight": (32, 64), "layernorm_mlp_fc2_bias": (32,),
        }  # fmt: skip
    made = {n: drawn(*shape, seed=i, size=0.3) + ("norm_weight" in n) for i, (n, shape) in enumerate(shapes.items())}
    return jax.tree.map(lambda t: t.astype(WHOLE), made)


@pytest.mark.parametrize("recipe", [None, DELAYED], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("name", ["multihead_attention", "transformer_layer"])
def test_whole_layers(name: str, recipe: Recipe | None) -> None:
    params, x = whole_params(name == "transformer_layer"), drawn(8, 2, 32).astype(WHOLE)
    options: dict[str, Any] = {"num_attention_heads": 4, "num_gqa_groups": 2}
    if name == "transformer_layer":
        options |= {"normalization": "RMSNorm", "activation": "swiglu"}
    ours, theirs = getattr(te, name), getattr(fn, name)
    state = scaling_of(recipe, ours)
    other = None if state is None else fn.Scaling(recipe, theirs, like=x)
    for step in range(2):
        y, back = theirs(x, **params, **options, recipe=recipe, scaling=other)
        dy = drawn(*y.shape, seed=step).astype(WHOLE)
        grads = back(dy)
        if other is not None:
            fn.update(other)
        call = lambda x, p, scaling: ours(x, p, recipe=recipe, scaling=scaling, **options)  # noqa: E731
        found, (dx, of_params), state = by_jax(call, dy, state, (x, params))
        equal(found, host(y))
        for key, grad in grads.items():
            equal(dx if key == "x" else of_params[key], host(grad))
        for part in () if other is None else NAMES:
            equal(getattr(state, part), host(getattr(other, part)))


def test_parts_of_a_layer_drop_by_themselves() -> None:
    params, x = whole_params(True), drawn(8, 2, 32).astype(WHOLE)
    options: dict[str, Any] = {"num_attention_heads": 4, "num_gqa_groups": 2, "normalization": "RMSNorm"}
    options |= {"activation": "swiglu", "hidden_dropout": 0.5, "attention_dropout": 0.1}
    one, again, other = (te.transformer_layer(x, params, seed=jax.random.key(i), **options) for i in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


@pytest.mark.parametrize("shape", [((1, 2), (0, 1)), ((-2, -1), (0, 1))])
def test_several_contracting_dimensions(shape: Any) -> None:
    y = te.dense(drawn(5, 4, 8), drawn(4, 8, 3, 6, seed=1), contracting_dims=shape)
    x, w = (np.asarray(a) for a in (drawn(5, 4, 8), drawn(4, 8, 3, 6, seed=1)))
    np.testing.assert_allclose(y, np.tensordot(x, w, 2), rtol=2e-3, atol=2e-2)  # TF32 on a GPU


def test_norms_and_activations() -> None:
    y, back = fn.layernorm(X, GAMMA, BETA, eps=1e-6)
    found, grads, _ = by_jax(lambda x, g, b, scaling: te.layernorm(x, g, b, "layernorm"), X, None, (X, GAMMA, BETA))
    equal(found, host(y))
    for got, wanted in zip(grads, back(X).values(), strict=True):
        equal(got, host(wanted))
    equal(te.layernorm(X, GAMMA, None, "rmsnorm"), host(fn.rmsnorm(X, GAMMA, eps=1e-6)[0]))
    equal(te.activation(X.reshape(4, 8, 2, 16), ("gelu", "linear")), host(fn.activation(X, activation="geglu")[0]))
    equal(te.activation(X, "relu"), host(fn.activation(X, activation="relu")[0]))
    equal(te.activation(X[..., None, :], ("gelu",)), host(fn.activation(X, activation="gelu")[0]))


def test_router() -> None:
    """Maps by names and numbers, gradients of the chosen and of all experts, and of the auxiliary loss."""
    logits, bias, choose = drawn(12, 16), drawn(16, seed=1, size=0.1), te.fused_topk_with_score_function
    given: dict[str, Any] = {"topk": 4, "scaling_factor": 2.5, "num_groups": 4, "group_topk": 2}
    (probs, routing), back = fn.router_topk(logits, bias, **given, score_function="sigmoid")
    grads = back((probs, None))["logits"]
    for form in (te.RoutingMapFormat.BYTEMAP, "bytemap", 0):
        options = {**given, "score_function": te.ScoreFunction.SIGMOID, "routing_map_format": form}

        def loss(x: Any, options: Any = options) -> Any:
            found, chosen = choose(x, expert_bias=bias, **options)
            return (found**2 / 2).sum(), (found, chosen)

        found, (got, chosen) = jax.jit(jax.grad(loss, has_aux=True))(logits)
        assert chosen.dtype == bool
        for one, other in ((found, grads), (got, probs), (chosen, routing)):
            equal(one, host(other))
    bits = choose(logits, 4, score_function="softmax", routing_map_format="bitmap_u8")[1]
    equal(bits, host(fn.router_topk(logits, topk=4, routing_map_format="bitmap_u8")[0][1]))
    (scores, routing), back = fn.router_scores(logits, topk=4)
    counts, total = jnp.arange(16), jnp.full((1,), 12, jnp.int32)
    wanted, back_loss = fn.router_aux_loss(scores, counts, total, num_experts=16, topk=4, coeff=0.1)
    grads = back((back_loss(jnp.ones(1))["probs"], None))["logits"]

    def balance(x: Any) -> Any:
        found, _ = choose(x, 4, compute_aux_scores=True, scaling_factor=3)
        return te.fused_moe_aux_loss(found, counts, 4, 0.1)

    value, found = jax.jit(jax.value_and_grad(balance))(logits)
    assert value.shape == ()
    equal(value, host(wanted).reshape(()))
    equal(found, host(grads))


ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {},
    "none": {"attn_mask_type": "no_mask"},
    "window": {"window_size": (3, 0)},
    "padding": {
        "attn_mask_type": "padding_causal",
        "sequence_descriptor": te.SequenceDescriptor.from_seqlens(((3, 16), (3, 16))),
    },
    "packed": {
        "attn_mask_type": "padding_causal",
        "sequence_descriptor": te.SequenceDescriptor.from_seqlens((9, 7)),
        "qkv_layout": "t3hd",
    },
    "pairs": {"qkv_layout": "bshd_bs2hd", "scaling_factor": 0.3},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    options, dtype = dict(ATTENTION[name]), jnp.bfloat16
    layout = options.get("qkv_layout", "bshd_bshd_bshd")
    packed = layout.startswith("t")
    q, k, v = (drawn(*((16,) if packed else (2, 16)), 4, 32, seed=i).astype(dtype) for i in range(3))
    lengths = options.get("sequence_descriptor")
    more: dict[str, Any] = {}
    if lengths is not None:
        cu = jnp.asarray([0, *np.cumsum(lengths.seqlens[0])], jnp.int32)
        more = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu} | ({"max_seqlen_q": 16, "max_seqlen_kv": 16} if packed else {})
    y, back = fn.attention(
        q, k, v, qkv_format="thd" if packed else "bshd", attn_mask_type=options.get("attn_mask_type", "causal"),
        window_size=options.get("window_size"), softmax_scale=options.get("scaling_factor"), **more,
    )  # fmt: skip
    dy = drawn(*y.shape, seed=9).astype(dtype)
    grads = back(dy)

    def function(q: Any, k: Any, v: Any, scaling: Any) -> Any:
        qkv = {"t3hd": lambda: (jnp.stack([q, k, v], -3),), "bshd_bs2hd": lambda: (q, jnp.stack([k, v], -3))}
        parts = qkv.get(layout, lambda: (q, k, v))()
        return te.fused_attn(parts, **options).reshape(y.shape)

    found, of_jax, _ = by_jax(function, dy, None, (q, k, v))
    equal(found, host(y))
    for got, wanted in zip(of_jax, grads.values(), strict=True):
        nearly(got, host(wanted), 0.02)


def test_dropout_follows_the_key() -> None:
    q = drawn(2, 16, 4, 32).astype(jnp.bfloat16)
    one, again, other = (
        np.asarray(te.fused_attn((q, q, q), seed=jax.random.key(i), dropout_probability=0.5)) for i in (1, 1, 2)
    )
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    still = te.fused_attn((q, q, q), dropout_probability=0.5, is_training=False)
    assert np.array_equal(still, te.fused_attn((q, q, q)))


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), DELAYED])
def test_quantize(recipe: Recipe) -> None:
    x = drawn(32, 128)
    scale = jnp.full(1, 2.0) if recipe is DELAYED else None
    q = jax.jit(lambda x: te.quantize(x, recipe, scale=scale))(x)
    assert q.data.shape == x.shape and q.data.dtype == jnp.float8_e4m3fn
    values = np.asarray(jax.jit(te.dequantize)(q))
    assert 0 < np.abs(values - np.asarray(x)).max() < 0.3
    if recipe is DELAYED:
        assert q.scale_inv == 0.5


# ------------------------------------------------------------------------------------------------ transformations


def mlp(p: Any, scaling: Any, x: Any, recipe: Any = DELAYED) -> Any:
    return te.layernorm_mlp(
        x, p["g"], None, [p["w1"], p["w2"]], [None, None], "rmsnorm", activation_type=("silu", "linear"),
        recipe=recipe, scaling=scaling,
    )  # fmt: skip


def loss_of(p: Any, scaling: Any, x: Any, recipe: Any = DELAYED) -> Any:
    return (mlp(p, scaling, x, recipe) ** 2).mean()


P = {"g": GAMMA, "w1": W1, "w2": W2}


def alike(a: Any, b: Any) -> None:
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(left, right)


def test_eager_is_compiled() -> None:
    state = te.scaling(DELAYED, te.layernorm_mlp)
    step = jax.value_and_grad(loss_of, argnums=(0, 1))
    alike(step(P, state, X), jax.jit(step)(P, state, X))


def test_layers_by_scan_and_remat() -> None:
    """Three layers in a loop, computed again in backward: the gradients of three layers in a row."""
    ps, states = (
        jax.tree.map(lambda a: jnp.stack([a, a * 0.5, -a]), t) for t in (P, te.scaling(DELAYED, te.layernorm_mlp))
    )

    def layer(x: Any, own: Any) -> Any:
        return x + mlp(*own, x)

    def looped(ps: Any, states: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, own: (jax.checkpoint(layer)(x, own), None), x, (ps, states))[0] ** 2).mean()

    def plain(ps: Any, states: Any, x: Any) -> Any:
        for i in range(3):
            x = layer(x, jax.tree.map(lambda a: a[i], (ps, states)))  # noqa: B023
        return (x**2).mean()

    for _ in range(2):
        found, wanted = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(ps, states, X) for f in (looped, plain))
        assert np.allclose(found[0], wanted[0])
        alike(found[1][1], wanted[1][1])
        for a, b in zip(jax.tree.leaves(found[1][0]), jax.tree.leaves(wanted[1][0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        states = found[1][1]


def test_a_layer_used_twice_adds_its_maxima() -> None:
    state = te.scaling(DELAYED, te.dense)
    use = lambda s, x: te.dense(x, W, recipe=DELAYED, scaling=s).sum()  # noqa: E731
    once, other = (jax.grad(use)(state, x).amax_history_fwd for x in (X, 2 * X))
    both = jax.grad(lambda s: use(s, X) + use(s, 2 * X))(state)
    np.testing.assert_allclose(both.amax_history_fwd, once + other)
    assert np.array_equal(both.scale_fwd[:2], np.float32(448) / np.asarray(once + other)[-1, :2])


def test_what_no_gradient_is_taken_of() -> None:
    """The weight alone, nothing at all, and one branch of a cond."""
    state = te.scaling(DELAYED, te.dense)
    use = lambda w, s, x: te.dense(x, w, recipe=DELAYED, scaling=s)  # noqa: E731
    full = jax.grad(lambda w, s, x: use(w, s, x).sum(), argnums=(0, 1, 2))(W, state, X)
    alike(jax.grad(lambda w, s: use(w, s, X).sum(), argnums=(0, 1))(W, state), full[:2])
    assert np.array_equal(use(W, state, X), jax.jit(use)(W, state, X))
    branch = jax.grad(lambda s: jax.lax.cond(False, lambda: use(W, s, X).sum(), lambda: 0.0))(state)
    assert np.array_equal(use(W, branch, X), use(W, state, X))  # a state of zeros is a new one


def test_states_may_be_donated() -> None:
    step = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)), donate_argnums=1)
    kept = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))
    ours = theirs = te.scaling(DELAYED, te.layernorm_mlp)
    ours = jax.tree.map(jnp.copy, ours)
    for _ in range(3):
        (_, (_, ours)), (_, (_, theirs)) = step(P, ours, X), kept(P, theirs, X)
        alike(ours, theirs)


def test_steps_copy_nothing_take_no_memory_and_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_JAX_HANDLER", "python")  # what C does is not counted
    step, state = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)), donate_argnums=1), None
    state = jax.tree.map(jnp.copy, te.scaling(DELAYED, te.layernorm_mlp))
    _, (_, state) = jax.block_until_ready(step(P, state, X))
    with counted() as counts:
        for _ in range(50):
            _, (_, state) = step(P, state, X)
        jax.block_until_ready(state)
    assert (counts.to_device, counts.to_host, counts.allocations, counts.waits) == (0, 0, 0, 0)
    assert (counts.launches > 0) == ON_GPU


def test_threads() -> None:
    step, state = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1))), te.scaling(DELAYED, te.layernorm_mlp)
    wanted = step(P, state, X)
    for found in together(*[lambda: [step(P, state, X) for _ in range(5)]] * 8):
        for one in found:
            alike(one, wanted)


def test_explain() -> None:
    jax.block_until_ready(jax.jit(te.dense)(X[:3], W))
    assert "linear forward on" in te.explain() and "bytes of temporaries" in te.explain()
    on_cpu = jax.device_put((X, W), jax.devices("cpu")[0])
    te.dense(*on_cpu, recipe=MXFP8BlockScaling())
    assert "XLA transposes kernels for MXFP8BlockScaling" in te.explain()


def test_autocast() -> None:
    wanted = te.dense(X, W, recipe=Float8CurrentScaling())
    with te.autocast(recipe=Float8CurrentScaling()):
        assert np.array_equal(te.dense(X, W), wanted)
        with te.autocast(enabled=False):
            assert np.array_equal(te.dense(X, W), te.dense(X, W, recipe=None))
    assert not np.array_equal(te.dense(X, W), wanted)
    compiled = jax.jit(te.dense)
    plain = compiled(X, W)
    with te.autocast(recipe=Float8CurrentScaling()):
        assert np.array_equal(compiled(X, W), wanted)  # traced again
    assert np.array_equal(compiled(X, W), plain)


# -------------------------------------------------------------------------------------------------- refused, wrong


@pytest.mark.parametrize(
    ("name", "call", "value"),
    [
        ("epsilon", lambda e: te.layernorm(X, GAMMA, None, "rmsnorm", epsilon=e), 1e-5),
        ("scaling_factor", lambda e: te.fused_attn((X, X, X), scaling_factor=e), 0.3),
        ("window_size", lambda n: te.fused_attn((X, X, X), window_size=(n, 0)), 3),
    ],
)
def test_numbers_are_known_while_jax_traces(name: str, call: Any, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{name}.*known while"):
        jax.jit(call)(value)


@pytest.mark.skipif(ON_GPU, reason="hardware: a GPU cannot tell without waiting")
def test_lengths_that_lead_out_of_the_arrays() -> None:
    q = drawn(2, 16, 4, 32)
    wrong = te.SequenceDescriptor.from_seqlens(jnp.asarray([3, 1000], jnp.int32))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="cu_seqlens"):
        jax.block_until_ready(jax.jit(lambda q: te.fused_attn((q, q, q), None, wrong, attn_mask_type="padding"))(q))


def test_an_error_in_a_call_is_an_error_of_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_JAX_HANDLER", "python")  # of the library in C: tests/core/test_xla_handler.py
    step = jax.jit(lambda x: te.dense(x, W[:, :40]))
    step(X)

    def broken(*arguments: Any) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(record.Work, "run", broken)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="on purpose"):
            step(X).block_until_ready()
    known = dict(record._works)
    record._works.clear()
    try:
        with pytest.raises(
            (ValueError, jax.errors.JaxRuntimeError), match=r"(?s)does not know.*trace the function again"
        ):
            step(X).block_until_ready()
    finally:
        record._works.update(known)
    assert np.array_equal(step(X), te.dense(X, W[:, :40]))


@pytest.mark.more
def test_random_calls() -> None:
    assert jax_draws.run(40, 3)["right"] > 20


_CACHED = """
import jax, jax.numpy as jnp, te_jax as te
from te_core.recipe import Float8CurrentScaling
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
x, w = jnp.arange(32.0).reshape(4, 8), jnp.ones((8, 16))
step = jax.jit(jax.grad(lambda x: (te.dense(x, w, recipe=Float8CurrentScaling()) ** 2).sum()))
print(float(step(x).sum()))
"""


def test_a_second_process_takes_the_program_from_the_disk(tmp_path: Path) -> None:
    code = _CACHED.format(folder=str(tmp_path))
    ran = [programs.python(code, path=str(programs.ROOT / "bindings" / "jax"), fresh=True) for _ in range(2)]
    assert [r.returncode for r in ran] == [0, 0], ran[1].stderr[-2000:]
    assert ran[0].stdout == ran[1].stdout and any(tmp_path.iterdir())


@pytest.mark.more
def test_the_example_learns() -> None:
    path = programs.ROOT / "examples" / "jax_mlp.py"
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0 and len(re.findall(r"loss \d", ran.stderr)) == 10, ran.stderr


@pytest.mark.parametrize("dtype", [jnp.bfloat16] if ON_GPU else [jnp.bfloat16, jnp.float32], ids=lambda d: d.__name__)
def test_one_program_has_all_sizes_of_groups(dtype: Any) -> None:
    """Rows, gradients, zeros behind the last group; against a plain product with each row's kernel."""

    def wanted(x: Any, kernel: Any, bias: Any, sizes: Any) -> Any:
        of = jnp.repeat(jnp.arange(3), sizes, total_repeat_length=len(x))
        y = jnp.einsum("tk,tkn->tn", x, kernel[of]) + bias[of]
        return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], y, 0)

    def both(function: Any) -> Any:
        def run(x: Any, kernel: Any, bias: Any, sizes: Any) -> Any:
            y, back = jax.vjp(lambda *given: function(*given, sizes), x, kernel, bias)
            return y, *back(dy.astype(y.dtype))

        return run

    traced = jax.jit(both(lambda x, kernel, bias, sizes: te.grouped_dense(x, kernel, sizes, bias=bias)))
    given = drawn(24, 32), drawn(3, 32, 16, seed=1), drawn(3, 16, seed=2)
    given, dy = tuple(a.astype(dtype) for a in given), drawn(24, 16, seed=3).astype(dtype)
    unit = 2.0**-7 if dtype is jnp.bfloat16 else 2.0**-20
    for sizes in ([9, 0, 15], [24, 0, 0], [3, 4, 5]):
        found = traced(*given, jnp.array(sizes))
        exact = both(wanted)(*[a.astype(jnp.float32) for a in given], jnp.array(sizes))
        for a, b in zip(found, exact, strict=True):
            assert a.dtype == dtype and jnp.abs(a.astype(jnp.float32) - b).max() <= unit * (2 + jnp.abs(b).max()), sizes
    assert traced._cache_size() == 1
    y, back = fn.grouped_linear(np.asarray(given[0], "f"), [*np.asarray(given[1], "f").mT.copy()], m_splits=[9, 0, 15])
    if dtype is jnp.float32:
        bare = te.grouped_dense(given[0], given[1], np.array([9, 0, 15]))
        np.testing.assert_allclose(bare, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=lambda r: type(r).__name__)
def test_groups_in_fp8(recipe: Any) -> None:
    """One program for all sizes; each group as a dense product of its rows in the same recipe."""
    dy = drawn(40, 64, seed=3).astype(jnp.bfloat16)
    x, kernel = (a.astype(jnp.bfloat16) for a in (drawn(40, 32), drawn(3, 32, 64, seed=1)))

    @jax.jit
    def run(x: Any, kernel: Any, sizes: Any) -> Any:
        y, back = jax.vjp(lambda x, kernel: te.grouped_dense(x, kernel, sizes, recipe=recipe), x, kernel)
        return y, *back(dy)

    for sizes in ([9, 0, 31], [40, 0, 0], [3, 4, 5]):
        y, dx, dkernel = (np.asarray(a, "f") for a in run(x, kernel, jnp.array(sizes)))
        ends = [0, *np.cumsum(sizes).tolist()]
        for e, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
            if start == stop:
                assert not dkernel[e].any()
                continue
            alone, back = jax.vjp(lambda a, b: te.dense(a, b, recipe=recipe), x[start:stop], kernel[e])
            found = y[start:stop], dx[start:stop], dkernel[e]
            for got, exact in zip(found, (alone, *back(dy[start:stop])), strict=True):
                wanted = np.asarray(exact, "f")
                assert np.abs(got - wanted).max() <= (2.0**-6 if ON_GPU else 0) * np.abs(wanted).max()
        assert not y[ends[-1] :].any() and not dx[ends[-1] :].any()
    assert run._cache_size() == 1
