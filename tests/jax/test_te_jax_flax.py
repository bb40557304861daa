"""Modules of te_jax.flax: the bits of te_jax's functions, the values of plain JAX, and the peer's parameters."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import te_jax as te  # noqa: E402
import te_jax.flax as modules  # noqa: E402
from flax import linen as nn  # noqa: E402
from flax import serialization  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

from te_core import ArgumentError, UnsupportedError, hints  # noqa: E402
from te_core.errors import MissingPackageError  # noqa: E402
from te_core.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling, Recipe  # noqa: E402
from tests.jax.test_te_jax import NAMES, ON_GPU, drawn, equal, nearly  # noqa: E402

KEY, STATES = jax.random.key(0), "_overwrite_with_gradient"
DELAYED = DelayedScaling(amax_history_len=3)
X = drawn(2, 16, 64)
SMALL: dict[str, Any] = {"hidden_size": 64, "mlp_hidden_size": 128, "num_attention_heads": 4}
CALM: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "intermediate_dropout": 0.0}


def near(found: Any, wanted: Any, tolerance: float) -> None:
    found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


def random_like(tree: Any, dtype: Any = None) -> Any:
    """Other values for each parameter: those of init are zeros and ones, which hide where they go."""
    leaves, structure = jax.tree.flatten(tree)
    made = [drawn(*a.shape, seed=i, size=a.shape[0] ** -0.5).astype(dtype or a.dtype) for i, a in enumerate(leaves)]
    return jax.tree.unflatten(structure, made)


# ------------------------------------------------------------------------------------------- te_jax's functions


def _dense(p: Any, s: Any, x: Any) -> Any:
    return te.dense(x, p["kernel"], p["bias"], scaling=s.get("scaling"))


def _norm_dense(p: Any, s: Any, x: Any) -> Any:
    return te.layernorm_dense(x, p["kernel"], p["scale"], p["ln_bias"], scaling=s.get("scaling"))


def _norm_and_dense(p: Any, s: Any, x: Any) -> Any:
    normed = te.layernorm(x, p["scale"], None, "rmsnorm", True, 1e-5)
    return te.dense(normed, p["kernel"], scaling=s.get("scaling")) / 2, normed


def _mlp(p: Any, s: Any, x: Any) -> Any:
    kernels, biases = [p["wi_kernel"], p["wo_kernel"]], [p["wi_bias"], p["wo_bias"]]
    more = {"activation_type": ("silu", "linear"), "scaling": s.get("scaling")}
    return te.layernorm_mlp(x, p["scale"], p["ln_bias"], kernels, biases, "layernorm", **more)


def _parts_of_mlp(p: Any, s: Any, x: Any) -> Any:
    normed = te.layernorm(x, p["scale"], p["ln_bias"], "layernorm")
    inner = te.activation(te.dense(normed, p["wi_kernel"], scaling=s.get("wi_scaling")), ("gelu",))
    return te.dense(inner, p["wo_kernel"], scaling=s.get("wo_scaling")), normed


ALIKE: dict[str, tuple[Any, Any]] = {
    "DenseGeneral": (modules.DenseGeneral((3, 32)), _dense),
    "LayerNormDenseGeneral": (modules.LayerNormDenseGeneral(32), _norm_dense),
    "LayerNormDenseGeneral and its norm": (
        modules.LayerNormDenseGeneral(
            32,
            layernorm_type="rmsnorm",
            zero_centered_gamma=True,
            epsilon=1e-5,
            depth_scaling=2.0,
            return_layernorm_output=True,
        ),
        _norm_and_dense,
    ),  # fmt: skip
    "LayerNormMLP": (modules.LayerNormMLP(64, use_bias=True, activations=("silu", "linear")), _mlp),
    "LayerNormMLP and its norm": (modules.LayerNormMLP(64, return_layernorm_output=True), _parts_of_mlp),
}


@pytest.mark.parametrize("recipe", [None, DELAYED], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("name", ALIKE)
def test_modules_are_te_jaxs_functions(name: str, recipe: Recipe | None) -> None:
    """The bits of outputs, gradients and next states, of two steps."""
    module, function = ALIKE[name]

    def of(call: Any) -> Any:
        def loss(variables: Any, x: Any) -> Any:
            y = call(variables, x)
            return sum((part.astype(jnp.float32) ** 2).sum() for part in jax.tree.leaves(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    with te.autocast(enabled=recipe is not None, recipe=recipe):
        variables = nn.unbox(module.init(KEY, X))
        assert (STATES in variables) == (recipe is DELAYED)
        variables["params"] = random_like(variables["params"])
        by_hand = lambda v, x: function(v["params"], v.get(STATES, {}), x)  # noqa: E731
        for step in range(2):
            (_, y), found = of(module.apply)(variables, X * (1 + step))
            (_, wanted), grads = of(by_hand)(variables, X * (1 + step))
            for a, b in zip(jax.tree.leaves(y), jax.tree.leaves(wanted), strict=True):
                nearly(a, b, 1e-5)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
                nearly(a, b, 1e-5)
            variables |= {n: v for n, v in found[0].items() if n == STATES}
    if recipe is DELAYED:
        for state in jax.tree.leaves(variables[STATES], is_leaf=lambda s: isinstance(s, te.Scaling)):
            assert all(np.all(np.asarray(scale) != 1) for scale in (state.scale_fwd[:2], state.scale_bwd[:1]))


def test_axes_are_moved() -> None:
    module = modules.DenseGeneral(8, axis=(0, -1))
    params = nn.unbox(module.init(KEY, X))["params"]
    assert params["kernel"].shape == (2, 64, 8)
    near(module.apply({"params": params}, X), jnp.einsum("bsk,bkn->sn", X, params["kernel"]), 1e-2 if ON_GPU else 1e-5)


# --------------------------------------------------------------------------------- a layer in plain JAX, by names


def plain_norm(p: Any, x: Any, kind: str, prefix: str = "") -> Any:
    if kind == "rmsnorm":
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["ln_bias"]


def plain_turned(x: Any, pairs: str) -> Any:
    width = x.shape[-1]
    angles = np.arange(x.shape[1])[:, None] / 10000.0 ** (np.arange(0, width, 2) / width)
    a, b = (x[..., ::2], x[..., 1::2]) if pairs == "consecutive" else jnp.split(x, 2, -1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    both = a * cos - b * sin, b * cos + a * sin
    return jnp.stack(both, -1).reshape(x.shape) if pairs == "consecutive" else jnp.concatenate(both, -1)


def plain_attention(p: Any, o: Any, x: Any, encoded: Any, seen: Any, bias: Any, normed: bool) -> tuple[Any, Any]:
    """(y, the norm's output) from [batch, tokens, width]."""
    heads, groups = o["num_attention_heads"], o.get("num_gqa_groups") or o["num_attention_heads"]
    product = lambda name, a: jnp.tensordot(a, p[name]["kernel"], 1) + p[name].get("bias", 0)  # noqa: E731
    z = plain_norm(p["qkv" if "qkv" in p else "query"], x, o.get("layernorm_type", "layernorm")) if normed else x
    of = z if encoded is None else encoded
    if "qkv" in p:
        q, k, v = jnp.moveaxis(product("qkv", z), 2, 0)
    elif "kv" in p:
        q, (k, v) = product("query", z), jnp.moveaxis(product("kv", of), 2, 0)
    else:
        q, k, v = product("query", z), product("key", of), product("value", of)
    q, k, v = (a.reshape(*a.shape[:2], n, -1) for a, n in ((q, heads), (k, groups), (v, groups)))
    if o.get("enable_rotary_pos_emb"):
        q, k = (plain_turned(a, o.get("rotary_pos_emb_group_method", "consecutive")) for a in (q, k))
    k, v = (jnp.repeat(a, heads // groups, 2) for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if o.get("scale_attn_logits") else 1.0)
    weights = jax.nn.softmax(jnp.where(seen, scores + bias, -jnp.inf), -1)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], -1)
    return product("out", y), z


def plain_bias(table: Any, length: int, both_ways: bool) -> Any:
    """T5's buckets, of distances that have one of their own: shorter than 8, or 16."""
    far = np.arange(length)[:, None] - np.arange(length)
    assert length <= (8 if both_ways else 16)
    return table[:, np.abs(far) + 16 * (far < 0) if both_ways else np.maximum(far, 0)][None]


def padding(of_q: list[int], of_kv: list[int], queries: int, keys: int) -> Any:
    """A mask of sequences of these lengths, True where a key is not seen."""
    outside = [np.arange(n) >= np.array(lengths)[:, None] for lengths, n in ((of_q, queries), (of_kv, keys))]
    return (outside[0][:, :, None] | outside[1][:, None])[:, None]


def plain_layer(p: Any, o: Any, x: Any, encoded: Any, mask: Any, cross: Any) -> Any:
    tokens, kind = x.shape[1], o.get("layernorm_type", "layernorm")
    seen = np.tri(tokens, dtype=bool) if mask is None else ~mask
    bias = plain_bias(p["relpos_bias"]["rel_embedding"], tokens, encoded is None) if "relpos_bias" in p else 0.0
    post, after = o.get("apply_residual_connection_post_layernorm"), o.get("output_layernorm")
    y, z = plain_attention(p["attention" if encoded is None else "self_attention"], o, x, None, seen, bias, not after)
    x = y + (z if post else x)
    if encoded is not None:
        y, z = plain_attention(p["encoder_decoder_attention"], o, x, encoded, ~cross, 0.0, True)
        x = y + (z if post else x)
    z = plain_norm(p["mlp"], x, kind)
    inner = jnp.tensordot(z, p["mlp"]["wi_kernel"], 1) + p["mlp"].get("wi_bias", 0)
    act = {"gelu": lambda a: jax.nn.gelu(a, approximate=True), "silu": jax.nn.silu}[
        o.get("mlp_activations", ["gelu"])[0]
    ]
    inner = act(inner[..., 0, :]) * (inner[..., 1, :] if inner.shape[-2] == 2 else 1)
    x = inner @ p["mlp"]["wo_kernel"] + p["mlp"].get("wo_bias", 0) + (z if post else x)
    return plain_norm(p["output_layernorm"], x, kind) if after else x


DECODER = modules.TransformerLayerType.DECODER
LLAMA: dict[str, Any] = {
    "num_gqa_groups": 2, "layernorm_type": "rmsnorm", "mlp_activations": ("silu", "linear"), "scale_attn_logits": True,
    "enable_rotary_pos_emb": True, "enable_relative_embedding": False,
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "encoder": {"use_bias": True, "self_attn_mask_type": "padding"},
    "bf16": {"use_bias": True, "scale_attn_logits": True},
    "llama": LLAMA,
    "decoder": {"use_bias": True, "layer_type": DECODER, "output_layernorm": True},
    "unfused": {
        **LLAMA, "fuse_qkv_params": False, "apply_residual_connection_post_layernorm": True,
        "rotary_pos_emb_group_method": "alternate", "transpose_batch_sequence": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_checkpoint_with_the_peers_names_gives_the_plain_layer(name: str) -> None:
    """Its bytes are flax's msgpack of plain arrays. The plain layer computes in float32."""
    options = {**SMALL, **CALM, **LAYERS[name]}
    module, dtype = modules.TransformerLayer(**options), jnp.bfloat16 if name == "bf16" else jnp.float32
    x, encoded, mask, cross = X[:, :8].astype(dtype), None, None, None
    if name == "decoder":
        encoded, cross = drawn(2, 12, 64, seed=9), padding([8, 8], [12, 7], 8, 12)
    if name == "encoder":
        mask = padding([8, 5], [8, 5], 8, 8)
    turned = (lambda a: a.swapaxes(0, 1)) if options.get("transpose_batch_sequence") else (lambda a: a)
    shapes = nn.unbox(jax.eval_shape(lambda: module.init(KEY, turned(x), encoded, mask, cross)))["params"]
    template = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    stored = serialization.msgpack_serialize(jax.tree.map(np.asarray, random_like(template)))
    params = serialization.from_bytes(template, stored)
    y = jax.jit(lambda p: module.apply({"params": p}, turned(x), encoded, mask, cross))(params)
    assert y.dtype == dtype
    wide = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)  # noqa: E731
    with jax.default_matmul_precision("highest"):
        wanted = plain_layer(wide(params), options, wide(x), wide(encoded), mask, cross)
    read = slice(None) if mask is None else ~mask[:, 0].all(-1)  # what padding gives is nobody's
    near(turned(y)[read], wanted[read], 0.02 if dtype == jnp.bfloat16 else 1e-2 if ON_GPU else 1e-5)
    assert np.isfinite(np.asarray(y, np.float32)).all()


def test_parameters_have_the_peers_names_shapes_and_axes() -> None:
    x = jax.ShapeDtypeStruct((2, 16, 64), jnp.float32)
    options = {**SMALL, "use_bias": True, "mlp_activations": ("gelu", "linear")}

    def table(**more: Any) -> dict[str, Any]:
        both = [x, x] if more.get("layer_type") is DECODER else [x]
        made = jax.eval_shape(modules.TransformerLayer(**options, **more).init, KEY, *both)["params"]
        leaves = jax.tree_util.tree_leaves_with_path(made, is_leaf=lambda a: isinstance(a, nn.LogicallyPartitioned))
        short = {"nvte_w_fsdp": "fsdp", "nvte_w_tp": "tp", "nvte_w_joined": "-", "nvte_w_no_shard": "-"}
        named = {"/".join(str(part.key) for part in path): box for path, box in leaves}
        return {n: (b.value.shape, " ".join(short.get(a, str(a)) for a in b.names)) for n, b in named.items()}

    row, out = ((64,), "-"), {"kernel": ((64, 64), "tp fsdp"), "bias": ((64,), "-")}
    under = lambda name, parts: {f"{name}/{n}": part for n, part in parts.items()}  # noqa: E731
    norm, one = {"scale": row, "ln_bias": row}, {"kernel": ((64, 64), "fsdp tp"), "bias": ((64,), "tp")}
    qkv = {**norm, "kernel": ((64, 3, 64), "fsdp - tp"), "bias": ((3, 64), "- tp")}
    kv = {"kernel": ((64, 2, 64), "fsdp - tp"), "bias": ((2, 64), "- tp")}
    wi = {"wi_kernel": ((64, 2, 128), "fsdp - tp"), "wi_bias": ((2, 128), "- tp")}
    mlp = under("mlp", {**norm, **wi, "wo_kernel": ((128, 64), "tp fsdp"), "wo_bias": row})
    biases = {"relpos_bias/rel_embedding": ((4, 32), "heads relpos_buckets")}
    assert table() == under("attention", {**under("qkv", qkv), **under("out", out)}) | mlp | biases
    cross = {**under("query", {**norm, **one}), **under("kv", kv), **under("out", out)}
    found = table(layer_type=DECODER, enable_relative_embedding=False, output_layernorm=True)
    own = under("qkv", {n: part for n, part in qkv.items() if n not in norm}) | under("out", out)
    wanted = under("self_attention", own) | under("encoder_decoder_attention", cross) | mlp
    assert found == wanted | under("output_layernorm", norm)
    found = table(fuse_qkv_params=False, num_gqa_groups=2, layernorm_type="rmsnorm", softmax_type="learnable")
    few = {"kernel": ((64, 32), "fsdp tp"), "bias": ((32,), "tp")}
    parts = under("query", {**one, "scale": row}) | under("key", few) | under("value", few) | under("out", out)
    parts["DotProductAttention_0/softmax_offset"] = ((1, 4, 1, 1), "None nvte_head None None")
    assert {n: part for n, part in found.items() if n.startswith("attention")} == under("attention", parts)


def test_how_parameters_begin() -> None:
    """Each kernel of a joint one as if it stood alone; that of queries smaller by the root of the heads' width."""
    module = modules.MultiHeadAttention(head_dim=16, num_attention_heads=16, use_bias=True, zero_centered_gamma=True)
    x = drawn(1, 8, 256)
    params = nn.unbox(module.init(KEY, x, x))["params"]
    kernel = np.asarray(params["qkv"]["kernel"])
    near(kernel.std((0, 2)) * 16, [0.25, 1, 1], 0.03)
    assert abs(np.corrcoef(kernel[:, 1].ravel(), kernel[:, 2].ravel())[0, 1]) < 0.02
    assert not params["qkv"]["scale"].any() and not params["qkv"]["bias"].any() and not params["qkv"]["ln_bias"].any()
    assert (nn.unbox(modules.LayerNorm().init(KEY, x))["params"]["scale"] == 1).all()
    mlp = nn.unbox(modules.LayerNormMLP(512, activations=("silu", "linear"), dtype=jnp.bfloat16).init(KEY, x))["params"]
    near(np.asarray(mlp["wi_kernel"], np.float32).std((0, 2)) * 16, [1, 1], 0.03)
    assert mlp["wo_kernel"].dtype == jnp.bfloat16


# ------------------------------------------------------------------------------------------------------ training


def trained(steps: int) -> tuple[TrainState, list[float], Any]:
    model = modules.TransformerLayer(**SMALL, use_bias=True, intermediate_dropout=0.1)
    target = drawn(2, 16, 64, seed=1)

    @jax.jit
    def step(state: TrainState, x: Any, target: Any, key: Any) -> Any:
        loss = lambda v: ((state.apply_fn(v, x, rngs={"dropout": key}) - target) ** 2).mean()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    with te.autocast(enabled=True, recipe=DELAYED):
        state = TrainState.create(apply_fn=model.apply, params=model.init(KEY, X), tx=optax.adamw(3e-3))
        first, losses = state, []
        for number in range(steps):
            state, value = step(state, X, target, jax.random.key(number))
            losses.append(float(value))
    return state, losses, first


@pytest.mark.more
def test_training_with_trainstate_and_delayed_scaling() -> None:
    state, losses, first = trained(10)
    assert losses[-1] < 0.7 * losses[0]
    scalings = jax.tree.leaves(state.params[STATES], is_leaf=lambda s: isinstance(s, te.Scaling))
    assert len(scalings) == 4  # of qkv and out, and of an MLP with dropout between its products
    for scaling in scalings:
        assert (scaling.scale_fwd[:2] != 1).all() and (scaling.amax_history_bwd[1, 0] > 0).all()
    # its msgpack holds the states, and gives them back
    restored = serialization.from_bytes(first, serialization.to_bytes(state))
    assert jax.tree.structure(restored.params) == jax.tree.structure(state.params)
    for a, b in zip(jax.tree.leaves(restored.params), jax.tree.leaves(state.params), strict=True):
        equal(a, b)
    stored = serialization.to_state_dict(scalings[0])
    assert set(stored) == set(NAMES)
    with pytest.raises(ArgumentError, match="(?s)scale_fwd.*Allowed: scale_fwd, amax.*To do: load a checkpoint"):
        serialization.from_state_dict(scalings[0], {"scale_fwd": stored["scale_fwd"]})


def test_a_module_that_is_used_twice_has_one_next_state() -> None:
    """That of te_jax.dense used twice with one state: its maxima are sums, and it is updated once."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            both = modules.DenseGeneral(64, use_bias=False, name="both")
            return both(jnp.tanh(both(x)))

    with te.autocast(recipe=DELAYED):
        variables = nn.unbox(Twice().init(KEY, X))
        assert "Scaling(linear, 1" in nn.tabulate(Twice(), KEY, console_kwargs={"width": 200})(X)
        found = jax.jit(jax.grad(lambda v: (Twice().apply(v, X) ** 2).sum()))(variables)[STATES]["both"]["scaling"]
        dense = lambda x, k, s: te.dense(x, k, scaling=s)  # noqa: E731
        by_hand = jax.jit(jax.grad(lambda k, s: (dense(jnp.tanh(dense(X, k, s)), k, s) ** 2).sum(), argnums=(0, 1)))
        _, wanted = by_hand(variables["params"]["both"]["kernel"], te.scaling(DELAYED, te.dense))
    for a, b in zip(found.arrays, wanted.arrays, strict=True):
        nearly(a, b, 1e-5)


def test_recipes_come_from_the_region() -> None:
    module = modules.LayerNormMLP(64)
    with te.autocast(recipe=DELAYED):
        variables = nn.unbox(module.init(KEY, X))
        fp8 = module.apply(variables, X)[0]
    plain = module.apply({"params": variables["params"]}, X)[0]
    equal(module.apply(variables, X)[0], plain)  # a state is not read where no recipe holds
    error = np.abs(np.asarray(fp8 - plain)).max() / np.abs(np.asarray(plain)).max()
    assert 1e-3 < error < 0.2
    with te.autocast(recipe=Float8CurrentScaling()):
        assert STATES not in module.init(KEY, X)
        assert (module.apply(variables, X)[0] != plain).any()
    with (
        te.autocast(recipe=DELAYED),
        pytest.raises(ArgumentError, match="(?s)no state.*init inside of te_jax.autocast"),
    ):
        module.apply({"params": variables["params"]}, X)
    with te.autocast(recipe=DelayedScaling(amax_history_len=7)), pytest.raises(ArgumentError, match="another recipe"):
        module.apply(variables, X)


@pytest.mark.more
def test_dropout() -> None:
    """Of hidden channels, weights of attention, what is between the products, and whole sequences."""
    none = modules.TransformerLayer(**SMALL, **CALM)
    params = jax.jit(none.init)(KEY, X)
    calm = none.apply(params, X)
    for more in (
        {"hidden_dropout": 0.5, "hidden_dropout_dims": (1,)}, {"attention_dropout": 0.5}, {"intermediate_dropout": 0.5},
        {"drop_path": 0.5},
    ):  # fmt: skip
        module = modules.TransformerLayer(**{**SMALL, **CALM, **more}, dropout_rng_name="noise")
        equal_or_near = (
            equal if "intermediate_dropout" not in more else lambda a, b: near(a, b, 1e-3 if ON_GPU else 1e-5)
        )
        equal_or_near(module.apply(params, X, deterministic=True), calm)
        first, again, other = (module.apply(params, X, rngs={"noise": jax.random.key(n)}) for n in (1, 1, 2))
        equal(first, again)
        assert (first != other).any()
        if "attention_dropout" in more:
            with pytest.raises(ArgumentError, match="no random stream 'noise'.*rngs=.'noise': key"):
                module.apply(params, X)
    kept = (module.apply(params, drawn(64, 2, 64), rngs={"noise": KEY}) == drawn(64, 2, 64)).all((1, 2))
    assert 4 < kept.sum() < 32  # both branches of a sequence with a probability of 1/4


@pytest.mark.more
def test_scan_over_layers_with_remat() -> None:
    """Two layers in nn.scan and nn.remat have the outputs, gradients and next states of two by themselves."""
    layer = modules.TransformerLayer(**SMALL, **CALM, name="layer")

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
            return nn.remat(modules.TransformerLayer)(**SMALL, **CALM, name="layer")(x), None

    stacked = nn.scan(
        Body, variable_axes={"params": 0, STATES: 0}, split_rngs={"params": True}, length=2,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()  # fmt: skip
    with te.autocast(recipe=DELAYED):
        variables = jax.jit(stacked.init)(KEY, X, None)
        box = variables["params"]["layer"]["mlp"]["wi_kernel"]
        assert box.names[0] == "layers" and box.value.shape == (2, 64, 1, 128)
        variables = nn.unbox(variables)
        loss = lambda v: (stacked.apply(v, X, None)[0] ** 2).sum()  # noqa: E731
        one = lambda v, i: jax.tree.map(lambda a: a[i], {n: part["layer"] for n, part in v.items()})  # noqa: E731
        twice = lambda v: (layer.apply(one(v, 1), layer.apply(one(v, 0), X)) ** 2).sum()  # noqa: E731
        value, grads = jax.jit(jax.value_and_grad(loss))(variables)
        wanted, others = jax.jit(jax.value_and_grad(twice))(variables)
    near(value, wanted, 1e-3 if ON_GPU else 1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        near(a, b, 0.03 if ON_GPU else 1e-4)  # XLA fuses sums otherwise, and FP8 rounds some of them otherwise
    assert (grads[STATES]["layer"]["mlp"]["scaling"].scale_bwd[:, ::2] != 1).all()


def test_biases_by_distance() -> None:
    """T5's buckets: distances below 8 have one each, the others' borders lie at powers of the root of 2."""
    borders = [*range(1, 9), 12, 16, 23, 32, 46, 64, 91]
    far = np.arange(100)[:, None] - np.arange(150)
    bucket = np.searchsorted(borders, np.abs(far), "right") + 16 * (far < 0)
    module = modules.RelativePositionBiases(num_buckets=32, max_distance=128, num_attention_heads=2)
    table = jnp.arange(64.0).reshape(2, 32)
    equal(module.apply({"params": {"rel_embedding": table}}, 100, 150)[0], np.asarray(table)[:, bucket])
    borders = [*range(1, 17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    bucket = np.searchsorted(borders, np.maximum(far, 0), "right")
    equal(module.apply({"params": {"rel_embedding": table}}, 100, 150, False)[0], np.asarray(table)[:, bucket])


@pytest.mark.parametrize("kind", list(modules.SoftmaxType))
def test_softmax(kind: modules.SoftmaxType) -> None:
    """Outputs and gradients of jax.nn.softmax."""
    x, bias, dy = (drawn(2, 4, 8, 16, seed=n) for n in range(3))
    hidden = {"scaled": np.zeros((8, 16), bool), "scaled_masked": np.asarray(drawn(2, 1, 8, 16) > 0.5)}
    seen = ~hidden.get(kind.value, ~np.tri(8, 16, dtype=bool))
    mask = hidden["scaled_masked"] if kind == modules.SoftmaxType.SCALED_MASKED else None
    for given in (0.0, bias):
        ours = lambda x, b=given: modules.Softmax(0.5, kind).apply({}, x, mask, b if b is bias else None)  # noqa: E731
        plain = lambda x, b=given: jax.nn.softmax(jnp.where(seen, 0.5 * (x + b), -jnp.inf), -1)  # noqa: E731
        (y, back), (wanted, other) = (jax.vjp(f, x) for f in (ours, plain))
        near(y, wanted, 1e-5)
        near(back(dy)[0], other(dy)[0], 1e-4)


def test_nnx_trains_them() -> None:
    """Through flax's bridge: the gradient of the states is the next states."""
    nnx = pytest.importorskip("flax.nnx")
    module = modules.LayerNormMLP(64)
    with flax.config.temp_flip_flag("always_shard_variable", False), te.autocast(recipe=DELAYED):
        model = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(X)

        @nnx.jit
        def step(model: Any) -> Any:
            loss = lambda model: ((model(X)[0] - X) ** 2).mean()  # noqa: E731
            value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Not(nnx.RngState)))(model)
            grads, states = nnx.split_state(grads, nnx.Param, ...)
            params = jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), grads)
            nnx.update(model, params, states)
            return value

        first, second = step(model), step(model)
    assert second < 0.9 * first and (model.scaling.get_value().scale_bwd[::2] != 1).all()


def test_one_random_stream_of_nnx_is_enough() -> None:
    """As for flax's own dropout: draws for which no stream is named take that of parameters."""
    nnx, q = pytest.importorskip("flax.nnx"), drawn(2, 16, 4, 16)
    with flax.config.temp_flip_flag("always_shard_variable", False), te.autocast(recipe=NVFP4BlockScaling()):
        attention = modules.DotProductAttention(16, 4, attention_dropout=0.5)
        model = nnx.bridge.ToNNX(attention, rngs=nnx.Rngs(0)).lazy_init(q, q, q)
        assert (model(q, q, q) != model(q, q, q)).any()
        if jax.default_backend() != "cpu":  # no Hopper multiplies NVFP4
            return
        model = nnx.bridge.ToNNX(modules.DenseGeneral(64), rngs=nnx.Rngs(0)).lazy_init(X)
        grad = nnx.grad(lambda m: (m(X) ** 2).mean(), argnums=nnx.DiffState(0, nnx.Param))
        one, other = (grad(model)["kernel"].get_value() for _ in range(2))
    assert (one != other).any()  # gradients are rounded by draws


def test_rules_for_axes() -> None:
    with te.autocast(mesh_resource=te.MeshResource(dp_resource="data", tp_resource="model", fsdp_resource="data")):
        rules = modules.extend_logical_axis_rules((("embed", None), ("nvte_w_joined", "mine")))
    axes = jax.sharding.PartitionSpec("nvte_w_fsdp", "nvte_w_joined", "nvte_w_tp")
    assert nn.logical_to_mesh(axes, rules) == jax.sharding.PartitionSpec("data", "mine", "model")
    assert dict(rules)["nvte_w_no_shard"] is None and rules[0] == ("embed", None)


# ----------------------------------------------------------------------------------------------------- refusals


def test_refusals_in_words() -> None:
    layer, q = modules.TransformerLayer(**SMALL, **CALM), drawn(2, 16, 4, 16)
    attend = lambda **o: modules.DotProductAttention(head_dim=16, num_attention_heads=4, **o)  # noqa: E731
    for wrong, said in (
        (lambda: modules.DenseGeneral(8, enable_low_rank_adaptation=True), "DenseGeneral.*adaptation=True.*To do: add"),
        (lambda: modules.TransformerLayer(low_rank_adaptation_scope="all"), "scope='all'.*To do: add"),
        (lambda: modules.MultiHeadAttention(16, 4, enable_sequence_parallel=True), "sequence_parallel=True.*shard_map"),
        (lambda: modules.LayerNormMLP(64, dot_2_input_axes=("a", "b")), "dot_2_input_axes.*shard_map"),
        (lambda: modules.LayerNormMLP(64, activation_params={"limit": 7}), "activation_params.*clamps nothing"),
        (lambda: attend(score_mod=lambda s: s), "score_mod.*To do: pass a bias"),
        (lambda: attend(context_parallel_axis="cp"), "context_parallel_axis.*does not divide"),
        (lambda: layer.init(KEY, X, decode=True), "TransformerLayer.*decode=True.*te_jax.fused_attn"),
        (lambda: modules.MultiHeadAttention(16, 4).init(KEY, X, X, decode=True), "MultiHeadAttention.*decode=True"),
        (modules.make_dot_general_cls, "make_dot_general_cls.*To do: use"),
    ):
        with pytest.raises(UnsupportedError, match=f"(?s){said}"):
            wrong()
    for wrong, said in (
        (lambda: modules.LayerNorm(layernorm_type="norm"), "layernorm_type='norm'.*'rmsnorm'"),
        (lambda: modules.TransformerLayer(layer_type="encoder"), "layer_type='encoder'.*ENCODER"),
        (lambda: modules.TransformerLayer(hidden_size=65), "hidden_size=65.*divide"),
        (lambda: modules.MultiHeadAttention(16, 4, num_gqa_groups=3), "num_gqa_groups=3.*divide"),
        (
            lambda: modules.TransformerLayer(output_layernorm=True, apply_residual_connection_post_layernorm=True),
            "output_layernorm=True.*To do: leave one",
        ),
        (lambda: modules.MultiHeadAttention(15, 4, enable_rotary_pos_emb=True).init(KEY, X, X), "head_dim=15.*even"),
        (lambda: modules.LayerNormMLP(64, activations=(jnp.tanh,)).init(KEY, X), "activation_type.*gelu"),
        (lambda: layer.init(KEY, X[..., :32]), r"inputs \[2, 16, 32\].*64"),
        (lambda: layer.init(KEY, X, X), "encoded given with.*ENCODER"),
        (lambda: modules.TransformerLayer(layer_type=DECODER).init(KEY, drawn(2, 16, 512)), "encoded left out"),
        (lambda: modules.DenseGeneral(8, axis=(-1, 2)).init(KEY, X), r"axis=\(-1, 2\).*each once"),
        (lambda: modules.LayerNormDenseGeneral(8, axis=(1, 2)).init(KEY, X), "axis.*one dimension"),
        (lambda: modules.Softmax(softmax_type="masked"), "softmax_type='masked'.*SCALED_MASKED"),
        (lambda: modules.Softmax().apply({}, q, mask=q), "with a mask.*SCALED_MASKED"),
        (lambda: attend().apply({}, X, X, X), r"query \[2, 16, 64\].*heads, head_dim"),
        (lambda: attend(attn_mask_type="padding").apply({}, q, q, q, jnp.zeros((2, 16))), r"a mask \[2, 16\]"),
        (
            lambda: attend(attn_bias_type="pre_scale_bias").apply({}, q, q, q, bias=q),
            "pre_scale_bias.*correct the bias",
        ),
    ):
        with pytest.raises(ArgumentError, match=f"(?s){said}"):
            wrong()


def test_without_flax() -> None:
    """te_jax imports none of it, and te_jax.flax says what to install."""
    code = "import sys, te_jax; assert not {'flax', 'optax', 'torch', 'cupy'} & set(sys.modules)"
    code += "; sys.modules['flax'] = None; import te_jax.flax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and issubclass(MissingPackageError, ImportError)
    assert "te_jax.flax: got no package flax" in done.stderr and hints.install("flax") in done.stderr


def test_without_jax() -> None:
    """te_jax says what to install, in a way that works here."""
    code = "import sys; sys.modules['jax'] = None; import te_jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "MissingPackageError: import te_jax" in done.stderr
    assert hints.install("jax") in done.stderr
