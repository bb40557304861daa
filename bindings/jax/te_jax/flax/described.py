"""What the fields and the arguments of the modules are; `describe` writes it into their docstrings."""

from te_core.described import Describer

TEXT = """
parent: Module that this one is part of; flax sets it.
name: Name of the module's parameters in the tree of its parent. None numbers the modules of a class.
dtype: Type of the parameters. Inputs keep theirs.
DotProductAttention.dtype: The dtype of the query, or None.
rules: Pairs (name of an axis, mesh axis), which go before the rules of the modules.
arguments: Anything; the call is refused.
options: Anything; the call is refused.
layernorm_type: "layernorm" or "rmsnorm".
epsilon: Number that is added to the variance, or to the mean square, before the square root.
layernorm_epsilon: Number that is added to the variance, or to the mean square, before the square root.
zero_centered_gamma: Whether the norm's weight is stored as its distance from 1, so that it begins at 0.
scale_init: Initializer of the norm's weight. None is ones, or zeros with zero_centered_gamma.
scale_axes: Names of the dimensions of the norm's weight, for sharding.
ln_bias_init: Initializer of the norm's bias.
ln_bias_axes: Names of the dimensions of the norm's bias, for sharding.
bias_init: Initializer of biases.
bias_axes: Names of the dimensions of the bias, for sharding.
bias_axes_1: Names of the dimensions of the first bias, for sharding.
bias_axes_2: Names of the dimensions of the second bias, for sharding.
kernel_init: Initializer of weights. None draws with a variance of 1 / number of inputs.
kernel_axes: Names of the dimensions of the weight, for sharding.
kernel_axes_1: Names of the dimensions of the first weight, for sharding.
kernel_axes_2: Names of the dimensions of the second weight, for sharding.
mha_kernel_init: Initializer of the weights around attention. None is that of `MultiHeadAttention`.
mlp_kernel_init: Initializer of the weights of the MLP. None is that of `LayerNormMLP`.
use_bias: Whether products have biases.
features: Size of the output, or sizes of several dimensions of it.
axis: Dimension of the input that is summed over, or several.
LayerNormMLP.axis: -1, the only one allowed.
LayerNormDenseGeneral.axis: Dimension of the input that is summed over; one, if there is a norm.
enable_layernorm: Whether a norm stands before the first product.
input_layernorm: Whether a norm stands before the projections.
return_layernorm_output: Whether the norm's output is the second result, in the place of None.
depth_scaling: Number that the output is divided by. None is 1.
intermediate_dim: Size between the two products.
activations: Names of activations; with several, their results are multiplied. "linear" changes nothing.
mlp_activations: Names of activations of the MLP; with several, their results are multiplied.
activation_params: None, the only one allowed.
mlp_activation_params: None, the only one allowed.
hidden_size: Size of the last dimension of inputs and outputs.
mlp_hidden_size: Size between the two products of the MLP.
head_dim: Width of a head.
num_attention_heads: Number of heads of the queries.
num_gqa_groups: Number of heads of keys and values, which divides that of the queries. None is as many.
attn_mask_type: Which keys are hidden: "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right" or
    "padding_causal_bottom_right".
self_attn_mask_type: `attn_mask_type` of the attention of tokens to each other.
attn_bias_type: "no_bias" or "post_scale_bias". None follows from whether a bias is given.
self_attn_bias_type: `attn_bias_type` of the attention of tokens to each other.
qkv_layout: How queries, keys and values lie, such as "bshd_bshd_bshd" or "bs3hd".
scale_factor: Factor of the scores.
DotProductAttention.scale_factor: Factor of the scores. None is 1 / sqrt(head_dim).
scale_attn_logits: Whether scores are divided by sqrt(head_dim).
scaled_query_init: Whether the weights of the queries begin divided by sqrt(head_dim).
float32_logits: Without effect: scores are always float32.
float32_attention_logits: Without effect: scores are always float32.
window_size: How many keys to the left and to the right of its own place a query sees; -1 is no bound. None bounds
    nothing.
softmax_type: What softmax divides by: "vanilla", "off_by_one" or "learnable".
Softmax.softmax_type: Which scores count: a `SoftmaxType`.
max_segments_per_seq: 1, the only one allowed: packed sequences have their own layouts.
context_parallel_causal_load_balanced: False, the only one allowed: the tokens of a sequence are not divided.
context_parallel_axis: "", the only one allowed: the tokens of a sequence are not divided.
context_parallel_strategy: "DEFAULT", the only one allowed: the tokens of a sequence are not divided.
context_checkpoint_name: "context", the only one allowed: the output is called "te_jax.fused_attn" in policies of
    jax.checkpoint.
score_mod: None, the only one allowed.
score_mod_bprop: None, the only one allowed.
quantization_checkpoint_name: None, the only one allowed: `te_jax.checkpoint_names` are the names in policies of
    jax.checkpoint.
ffn1_ckpt_name: "ffn1", the only one allowed: `te_jax.checkpoint_names` are the names in policies of jax.checkpoint.
ffn2_ckpt_name: "ffn2", the only one allowed: `te_jax.checkpoint_names` are the names in policies of jax.checkpoint.
fuse_qkv_params: Whether one weight makes queries, keys and values, where they are made of the same array.
enable_rotary_pos_emb: Whether queries and keys are turned by their places' angles.
rotary_pos_emb_windows: Shortest and longest wavelength of these angles, over 2 pi.
rotary_pos_emb_group_method: Which channels are turned together: "consecutive" (neighbours) or "alternate" (of the
    two halves of a head).
enable_relative_embedding: Whether scores have a bias by the distance of their tokens.
relative_embedding: Module that makes this bias. None makes a `RelativePositionBiases`.
num_buckets: How many distances are told apart.
max_distance: Distance from which on all have one bias.
embedding_init: Initializer of the biases.
embedding_axes: Names of the dimensions of the biases, for sharding.
hidden_dropout: Probability that a value is dropped behind attention and behind the MLP.
hidden_dropout_dims: Dimensions along which these are dropped together.
attention_dropout: Probability that a weight of attention is dropped.
intermediate_dropout: Probability that a value behind the activation is dropped.
intermediate_dropout_dims: Dimensions along which these are dropped together.
intermediate_dropout_rate: Probability that a value behind the activation is dropped.
intermediate_hidden_dropout_dims: Dimensions along which these are dropped together.
dropout_rng_name: Name of the random stream of dropout in `rngs`.
intermediate_dropout_rng_name: Name of the random stream of this dropout in `rngs`.
drop_path: Probability that attention, or the MLP, is left out for a whole sequence.
layer_type: Whether the layer also attends to the output of an encoder.
apply_residual_connection_post_layernorm: Whether the output of a norm, not its input, is added behind attention and
    behind the MLP.
output_layernorm: Whether a norm stands behind the layer, in the place of the one before attention.
low_rank_adaptation_scope: "none", the only one allowed: add the two small products in a module of your own.
enable_low_rank_adaptation: False, the only one allowed: add the two small products in a module of your own.
low_rank_adaptation_dim: Without effect.
low_rank_adaptation_alpha: Without effect.
enable_sequence_parallel: False, the only one allowed.
input_axes: (), the only one allowed: arrays are divided by jax.shard_map.
layernorm_input_axes: None, the only one allowed: arrays are divided by jax.shard_map.
dot_input_axes: None, the only one allowed: arrays are divided by jax.shard_map.
dot_1_input_axes: None, the only one allowed: arrays are divided by jax.shard_map.
dot_2_input_axes: None, the only one allowed: arrays are divided by jax.shard_map.
transpose_batch_sequence: Whether inputs are [length, batch, ...].
LayerNorm.transpose_batch_sequence: Without effect.
DenseGeneral.transpose_batch_sequence: Without effect.
LayerNormDenseGeneral.transpose_batch_sequence: Without effect.
LayerNormMLP.transpose_batch_sequence: Without effect.
x: Input [..., features].
inputs: Input [..., in], float32, bfloat16 or float16.
Softmax.__call__.inputs: Scores [batch, heads, queries, keys].
TransformerLayer.__call__.inputs: Tokens [batch, length, hidden_size].
inputs_q: Array [batch, length, in] that queries are made of.
inputs_kv: Array that keys and values are made of; the same object as `inputs_q` for attention to itself.
query: Queries [batch, length, heads, head_dim], or what `qkv_layout` says.
key: Keys. None where `qkv_layout` has them in `query`.
value: Values. None where `qkv_layout` has them in another array.
sequence_descriptor: Lengths of the sequences (`te_jax.SequenceDescriptor`), or a mask. None takes `mask`.
mask: Array [batch, 1, queries, keys], True where a key is not seen. None pads nothing.
Softmax.__call__.mask: Boolean mask that broadcasts to the scores, True where no score counts. Needed for
    "scaled_masked", None elsewhere.
attention_mask: `mask` of the attention of tokens to each other.
encoder_decoder_mask: `mask` of the attention to `encoded`.
encoded: Output of an encoder, which a decoder attends to and needs. None for an encoder.
bias: Addend of the scores, which broadcasts to [batch, heads, queries, keys]. None adds none.
deterministic: Whether nothing is dropped.
decode: False, the only one allowed: the module keeps no keys.
max_decode_length: None, the only one allowed.
q_seqlen: Number of queries.
k_seqlen: Number of keys.
bidirectional: Whether keys behind a query have biases of their own.
"""

describe = Describer(TEXT).describe
