"""What the arguments of te_jax's public names are; `describe` writes it into their docstrings."""

from te_core.described import Describer
from te_core.layers.table import OPTIONS

TEXT = """
x: Input [..., in], float32, bfloat16 or float16.
activation.x: Input [..., activations, hidden], or [..., activations * hidden].
quantize.x: Array [..., columns], float32, bfloat16 or float16.
kernel: Weight [in, out]; out may be several dimensions.
bias: Addend of the outputs, of the kernel's last dimensions. None adds none.
fused_attn.bias: Addend of the scores, which broadcasts to [batch, heads, queries, keys]. None adds none.
contracting_dims: Dimensions that are summed over: the last ones of x, and the first ones of the kernel.
recipe: Recipe by which operands are quantized. None is the recipe of the `te_jax.autocast` around the call;
    without one everything runs in high precision.
autocast.recipe: Recipe of the calls inside that name none. None is `DelayedScaling()` with enabled=True.
scaling.recipe: Recipe whose state is made. None makes none, as does a recipe without a history.
quantize.recipe: Recipe whose rule for activations is used. None is the recipe of the `te_jax.autocast` around
    the call; one of the two has to be there.
scaling: State of a recipe with a history, which `te_jax.scaling` makes; such a recipe needs it. None for other
    recipes.
seed: Key of jax.random for dropout and stochastic rounding, another one in each step. None where nothing is
    drawn.
gamma: Factor of each feature of the norm [in].
beta: Addend of each feature of the norm [in]: needed for "layernorm", None for "rmsnorm".
norm_type: "layernorm" or "rmsnorm".
epsilon: Number that is added to the variance, or to the mean square, before the square root.
activation_type: Name of the activation, or a tuple of it and "linear" for a gated one: gelu, silu, relu,
    quick_gelu or squared_relu.
kernels: The two weights: [in, activations, hidden] or [in, activations * hidden], and [hidden, out].
biases: The two biases, [activations, hidden] and [out], or None for one. None adds none.
params: Weights and biases by name, as arrays; the names are those of te_core.functional.
options: Options of the layer by name, as te_core.functional has them.
grouped_dense.x: Input [rows, in], float32, bfloat16 or float16, the rows sorted by group.
grouped_dense.kernel: Weights [groups, in, out].
group_sizes: Rows of each group, integers [groups].
grouped_dense.contracting_dims: ((1,), (1,)), the only one allowed.
grouped_dense.bias: Addends [groups, out]. None adds none.
grouped_dense.recipe: Current or block scaling; None multiplies in high precision.
logits: Scores [batch, heads, queries, keys].
fused_topk_with_score_function.logits: Logits [tokens, experts].
topk: Number of experts of each token.
use_pre_softmax: Whether softmax is over all experts, and not over the chosen ones.
num_groups: Number of groups of experts, side by side, with `group_topk`. -1 elsewhere.
group_topk: Number of groups of which experts are chosen. -1 chooses among all.
fused_topk_with_score_function.scaling_factor: Factor of the probabilities.
score_function: What makes scores of logits: a `ScoreFunction`, or its value.
expert_bias: Addend of the scores by which experts are chosen, float32 [experts], with sigmoid. It gets no
    gradient. None adds none.
compute_aux_scores: Whether all experts get scores, for the auxiliary loss.
routing_map_format: How the map is stored: a `RoutingMapFormat`, its number, or "bytemap" or "bitmap_u8".
probs: Scores [tokens, experts].
tokens_per_expert: How many tokens each expert gets [experts].
coeff: Factor of the loss.
mask: Boolean mask that broadcasts to the scores, True where no score counts. Needed for "scaled_masked", None
    elsewhere.
scale_factor: Factor of the scores.
softmax_type: Which scores count: a `SoftmaxType`, or its value.
fused_attn.softmax_type: What softmax divides by: an `AttnSoftmaxType`, or its value.
qkv: Tuple of one, two or three arrays, as `qkv_layout` says.
sequence_descriptor: Lengths of the sequences, with a padding mask or packed layouts. None elsewhere.
attn_bias_type: "no_bias" or "post_scale_bias". None follows from `bias`.
attn_mask_type: What is hidden: an `AttnMaskType`, or its value.
qkv_layout: How queries, keys and values lie: a `QKVLayout`, or its value.
scaling_factor: Factor of the scores. None is 1 / sqrt(width of a key).
dropout_probability: Probability that a weight of attention is dropped.
is_training: Whether weights are dropped.
max_segments_per_seq: 1, the only one allowed: packed sequences have their own layouts.
softmax_offset: Addend of each head's denominator, float32 [heads], for a learnable softmax. None has none.
enabled: Whether calls inside that name no recipe are quantized. None: they are if `recipe` is named.
mesh_resource: Mesh axes over which states take their maxima. None is that of the `te_jax.autocast` around.
strict: Whether it is an error if something cannot be computed as asked, such as attention that cuDNN refuses.
dp_resource: Mesh axis along which the batch is divided. None: none is.
tp_resource: Mesh axis along which heads and hidden channels are divided. None: none is.
tpsp_resource: Mesh axis along which these and tokens are divided. None: none is.
fsdp_resource: Mesh axis along which parameters are divided. None: none is.
pp_resource: None, the only one allowed: layers are not divided.
cp_resource: None, the only one allowed: sequences are not divided.
ep_resource: None, the only one allowed: experts are not divided.
seqlens: (lengths of the queries' sequences, lengths of the keys'), int32 [batch] each.
from_seqlens.seqlens: Lengths int32 [batch], or a pair of them: of the queries' sequences and of the keys'.
scale: float32 [1] of a recipe with a history, which needs it. None for other recipes.
q: What `quantize` gave.
dtype: Type of the values.
function: Function of te_jax that takes the state, such as `dense`.
axis_names: Mesh axes over which maxima are taken, so that all devices of a `jax.shard_map` keep one state.
Quantized.block: Array of bytes with the values and the scales.
Quantized.kind: How it is quantized.
tree_unflatten.kind: How it is quantized.
tree_unflatten.parts: The array of bytes alone.
arrays: The four arrays of the state, in the order of their names.
rule: How the state is updated, and whose it is.
operation: Name of the call, for errors.
given: Arrays of the call, by name.
"""

describe = Describer({name: option.about for name, option in OPTIONS.items()}, TEXT).describe
