"""The defaults of te_jax are those of transformer_engine.jax, as its code has them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
import te_jax as te  # noqa: E402
import te_jax.flax as modules  # noqa: E402
from flax import linen as nn  # noqa: E402

zeros, ENCODER, SCALED = nn.initializers.zeros, modules.TransformerLayerType.ENCODER, te.SoftmaxType.SCALED
NORM = 'layernorm_type="layernorm", epsilon=1e-6, zero_centered_gamma=False, scale_init=None, scale_axes=("embed",), '
NORM += 'ln_bias_init=zeros, ln_bias_axes=("embed",), '
ADAPTATION = "low_rank_adaptation_dim=32, low_rank_adaptation_alpha=None, "
TURNED = 'rotary_pos_emb_windows=(1, 10000), rotary_pos_emb_group_method="consecutive", '
SCOPE = 'low_rank_adaptation_scope="none", ' + ADAPTATION
SCORES = 'window_size=None, softmax_type="vanilla", score_mod=None, score_mod_bprop=None'
NAMED = "transpose_batch_sequence=False, quantization_checkpoint_name=None"

#: The fields of modules, in their order.
FIELDS = {
    "LayerNorm": 'epsilon=1e-6, layernorm_type="layernorm", zero_centered_gamma=False, scale_init=None, '
    'scale_axes=("embed",), bias_init=zeros, bias_axes=("embed",), dtype=jnp.float32',
    "DenseGeneral": "features, kernel_init=None, kernel_axes=(), use_bias=True, bias_init=zeros, bias_axes=(), "
    f"enable_low_rank_adaptation=False, {ADAPTATION} axis=-1, dtype=jnp.float32, input_axes=(), {NAMED}",
    "LayerNormDenseGeneral": f"features, enable_layernorm=True, {NORM} kernel_init=None, kernel_axes=(), "
    "use_bias=False, bias_init=zeros, bias_axes=(), return_layernorm_output=False, enable_low_rank_adaptation=False, "
    f"{ADAPTATION} axis=-1, dtype=jnp.float32, layernorm_input_axes=None, dot_input_axes=None, depth_scaling=None, "
    f"{NAMED}",
    "LayerNormMLP": f"intermediate_dim=2048, enable_layernorm=True, {NORM} kernel_init=None, "
    'kernel_axes_1=("embed", "act", "mlp"), kernel_axes_2=("mlp", "embed"), use_bias=False, bias_init=zeros, '
    'bias_axes_1=("act", "mlp"), bias_axes_2=("embed",), return_layernorm_output=False, activations=("gelu",), '
    'activation_params=None, intermediate_dropout_rng_name="dropout", intermediate_dropout_rate=0.0, '
    f"intermediate_hidden_dropout_dims=(), enable_low_rank_adaptation=False, {ADAPTATION} axis=-1, dtype=jnp.float32, "
    "layernorm_input_axes=None, dot_1_input_axes=None, dot_2_input_axes=None, ffn1_ckpt_name='ffn1', "
    f"ffn2_ckpt_name='ffn2', {NAMED}",
    "DotProductAttention": "head_dim, num_attention_heads, num_gqa_groups=None, attention_dropout=0.0, "
    'attn_mask_type="causal", attn_bias_type=None, dtype=None, dropout_rng_name="dropout", float32_logits=False, '
    'qkv_layout="bshd_bshd_bshd", scale_factor=None, transpose_batch_sequence=None, window_size=None, '
    'max_segments_per_seq=1, context_parallel_causal_load_balanced=False, context_parallel_axis="", '
    'context_parallel_strategy="DEFAULT", context_checkpoint_name="context", softmax_type="vanilla", score_mod=None, '
    "score_mod_bprop=None",
    "MultiHeadAttention": "head_dim, num_attention_heads, num_gqa_groups=None, attention_dropout=0.0, "
    'dropout_rng_name="dropout", input_layernorm=True, layernorm_type="layernorm", layernorm_epsilon=1e-6, '
    "return_layernorm_output=False, zero_centered_gamma=False, kernel_init=None, use_bias=False, bias_init=zeros, "
    f'attn_mask_type="causal", attn_bias_type=None, enable_rotary_pos_emb=False, {TURNED} {SCOPE} dtype=jnp.float32, '
    "fuse_qkv_params=True, transpose_batch_sequence=None, enable_sequence_parallel=False, scale_attn_logits=False, "
    f"scaled_query_init=True, float32_logits=False, {SCORES}",
    "RelativePositionBiases": "num_buckets, max_distance, num_attention_heads, "
    'embedding_init=nn.linear.default_embed_init, embedding_axes=("heads", "relpos_buckets"), dtype=jnp.float32',
    "TransformerLayer": "hidden_size=512, mlp_hidden_size=2048, num_attention_heads=8, num_gqa_groups=None, "
    'layernorm_type="layernorm", layernorm_epsilon=1e-6, zero_centered_gamma=False, hidden_dropout=0.1, '
    "hidden_dropout_dims=(), attention_dropout=0.1, intermediate_dropout=0.0, intermediate_dropout_dims=(), "
    'dropout_rng_name="dropout", mha_kernel_init=None, mlp_kernel_init=None, mlp_activations=("gelu",), '
    "mlp_activation_params=None, use_bias=False, bias_init=zeros, apply_residual_connection_post_layernorm=False, "
    "output_layernorm=False, float32_attention_logits=False, layer_type=ENCODER, self_attn_mask_type='causal', "
    "self_attn_bias_type=None, enable_relative_embedding=True, relative_embedding=None, enable_rotary_pos_emb=False, "
    f"{TURNED} {SCOPE} dtype=jnp.float32, drop_path=0.0, fuse_qkv_params=True, transpose_batch_sequence=False, "
    f"enable_sequence_parallel=False, scale_attn_logits=False, scaled_query_init=True, {SCORES}",
    "Softmax": "scale_factor=1.0, softmax_type=SCALED",
}
#: What modules are called with.
CALLED = {
    "LayerNorm": "x", "DenseGeneral": "inputs", "LayerNormDenseGeneral": "inputs",
    "LayerNormMLP": "inputs, deterministic=False", "Softmax": "inputs, mask=None, bias=None",
    "DotProductAttention": "query, key=None, value=None, sequence_descriptor=None, bias=None, *, deterministic=False, "
    "mask=None",
    "MultiHeadAttention": "inputs_q, inputs_kv, mask=None, bias=None, *, decode=False, deterministic=False",
    "RelativePositionBiases": "q_seqlen, k_seqlen, bidirectional=True",
    "TransformerLayer": "inputs, encoded=None, attention_mask=None, encoder_decoder_mask=None, deterministic=False, "
    "decode=False, max_decode_length=None",
}  # fmt: skip
#: The functions, up to the arguments that are te_jax's own. Arguments that have no default there may have one here.
FUNCTIONS = {
    "dense": "x, kernel, bias=None, *, contracting_dims=((-1,), (0,))",  # ((1,), (0,)) there, where x is a matrix
    "layernorm": "x, gamma, beta, norm_type, zero_centered_gamma=False, epsilon=1e-6",
    "layernorm_dense": "x, kernel, gamma, beta, bias=None, norm_type='layernorm', zero_centered_gamma=False, "
    "epsilon=1e-6",
    "layernorm_mlp": "x, gamma, beta, kernels, biases, norm_type, zero_centered_gamma=False, epsilon=1e-6, *, "
    'activation_type=("gelu",)',
    "activation": "x, activation_type",
    "fused_topk_with_score_function": "logits, topk, use_pre_softmax=False, num_groups=-1, group_topk=-1, "
    "scaling_factor=1.0, score_function=te.ScoreFunction.SOFTMAX, expert_bias=None, compute_aux_scores=False, "
    "routing_map_format=te.RoutingMapFormat.BYTEMAP",
    "fused_moe_aux_loss": "probs, tokens_per_expert, topk, coeff",
    "softmax": "logits, mask=None, scale_factor=1.0, softmax_type=SCALED",
    "fused_attn": "qkv, bias=None, sequence_descriptor=None, seed=None, attn_bias_type=None, attn_mask_type='causal', "
    "qkv_layout='bshd_bshd_bshd', softmax_type='vanilla', scaling_factor=None, dropout_probability=0.0, "
    "is_training=True, max_segments_per_seq=1, window_size=None, *, softmax_offset=None",
    "autocast": "enabled=None, recipe=None, mesh_resource=None",  # False there; None is False without a recipe
    "MeshResource": "dp_resource=None, tp_resource=None, tpsp_resource=None, fsdp_resource=None, pp_resource=None, "
    "cp_resource=None, ep_resource=None",
}  # fmt: skip
OURS = {
    "recipe", "scaling", "seed", "strict", "parent", "name", "self",
    "transpose_batch_sequence",  # of LayerNorm
}  # fmt: skip


def listed(text: str) -> dict[str, Any]:
    found = eval(f"lambda {text}: 0", globals())
    return {name: (p.default, p.kind) for name, p in inspect.signature(found).parameters.items()}


def present(function: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    found = inspect.signature(function).parameters
    return {n: (p.default, p.kind) for n, p in found.items() if n in wanted or n not in OURS}


@pytest.mark.parametrize("name", [*FIELDS, *(n for n in FUNCTIONS if n not in FIELDS)])
def test_defaults_are_those_of_the_documented_code(name: str) -> None:
    if name in FUNCTIONS:
        wanted = listed(FUNCTIONS[name])
        assert list(present(getattr(te, name), wanted).items()) == list(wanted.items())
        return
    module = getattr(modules, name)
    for function, text in ((module, FIELDS[name]), (module.__call__, CALLED[name])):
        wanted = listed(text)
        assert list(present(function, wanted).items()) == list(wanted.items())


def test_the_table_has_all_modules() -> None:
    classes = {n for n in modules.__all__ if dataclasses.is_dataclass(getattr(modules, n))}
    assert classes == set(FIELDS) == set(CALLED)


def test_what_is_left_out_is_computed_so() -> None:
    """Biases of DenseGeneral; one result without a norm; no dropout between products; no recipe without one named."""
    x = jnp.ones((2, 8, 64))
    shapes = jax.eval_shape(modules.DenseGeneral(3).init, jax.random.key(0), x)
    assert set(shapes["params"]) == {"kernel", "bias"}
    for module in (modules.LayerNormDenseGeneral(3), modules.LayerNormMLP(16)):
        assert jax.eval_shape(lambda x, m=module: m.init_with_output(jax.random.key(0), x)[0], x)[1] is None
    layer = modules.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    jax.eval_shape(layer.apply, jax.eval_shape(layer.init, jax.random.key(0), x), x)  # asks for no random stream
    with te.autocast(mesh_resource=te.MeshResource(), strict=True):
        assert "_overwrite_with_gradient" not in jax.eval_shape(layer.init, jax.random.key(0), x)
    with te.autocast(enabled=True):
        assert "_overwrite_with_gradient" in jax.eval_shape(layer.init, jax.random.key(0), x)


def test_a_default_that_is_passed_is_as_good_as_one_left_out() -> None:
    for name, text in FIELDS.items():
        passed = {n: d for n, (d, _) in listed(text).items() if d is not inspect.Parameter.empty}
        needed = {n: 4 for n, (d, _) in listed(text).items() if d is inspect.Parameter.empty}
        assert getattr(modules, name)(**needed, **passed) == getattr(modules, name)(**needed)
    q = jnp.ones((1, 8, 4, 16))
    other = modules.DotProductAttention(16, 4, dtype=jnp.float32, qkv_layout="BSHD_BSHD_BSHD", window_size=[3, 0])
    assert (other.apply({}, q, q, q) == te.fused_attn((q, q, q), window_size=(3, 0))).all()
    te.fused_attn((q, q, q), softmax_type="off_by_one")
    with pytest.raises(ValueError, match="dtype=bfloat16 with a query of float32"):
        modules.DotProductAttention(16, 4, dtype=jnp.bfloat16).apply({}, q, q, q)
