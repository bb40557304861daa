"""What the arguments of `te_core.functional` are, but for options of layers: their table says that."""

TEXT = """
x: Input, an array of any library that speaks DLPack. The result is of the same library and type.
rope.t: Queries or keys.
weight: Weight, [out, in] unless `turned` says otherwise. With a recipe of any float type, or quantized before.
layernorm.weight: Factor of each feature.
rmsnorm.weight: Factor of each feature.
grouped_linear.weight: Sequence of weights, one for each group.
bias: Addend of each output feature. None adds none.
layernorm.bias: Addend of each feature.
bias_dropout_add.bias: Addend of each feature. None adds none.
grouped_linear.bias: Sequence of biases, one for each group. None adds none.
layer_norm_weight: Factor of each feature of the norm.
layer_norm_bias: Addend of each feature of the norm: needed for LayerNorm, None for RMSNorm.
fc1_weight: Weight of the first product; a gated activation has twice as many rows.
fc1_bias: Bias of the first product. None adds none.
fc2_weight: Weight of the second product.
fc2_bias: Bias of the second product. None adds none.
qkv_weight: Weight of queries, keys and values.
qkv_bias: Bias of that projection. None adds none.
proj_weight: Weight of the projection behind attention.
proj_bias: Bias of the projection behind attention. None adds none.
layernorm_qkv_layer_norm_weight: Factor of each feature of the norm before attention.
layernorm_qkv_layer_norm_bias: Addend of each feature of that norm: needed for LayerNorm, None for RMSNorm.
layernorm_qkv_weight: Weight of queries, keys and values.
layernorm_qkv_bias: Bias of that projection. None adds none.
layernorm_mlp_layer_norm_weight: Factor of each feature of the norm before the MLP.
layernorm_mlp_layer_norm_bias: Addend of each feature of that norm: needed for LayerNorm, None for RMSNorm.
layernorm_mlp_fc1_weight: Weight of the MLP's first product; a gated activation has twice as many rows.
layernorm_mlp_fc1_bias: Bias of the MLP's first product. None adds none.
layernorm_mlp_fc2_weight: Weight of the MLP's second product.
layernorm_mlp_fc2_bias: Bias of the MLP's second product. None adds none.
residual: What the input is added to before the norm; the sum is returned as the last output. None adds nothing.
bias_dropout_add.residual: What the result is added to. None adds nothing.
residual_bias: Bias that is added to the input together with `residual`. None adds none.
q: Queries.
k: Keys, of as many heads as there are groups.
v: Values, of as many heads as there are groups.
core_attention_bias: What is added to the scores, for "post_scale_bias", which needs it. None elsewhere.
alibi_slopes: Slopes for "alibi", which needs them. None elsewhere.
softmax_offset: Addend of each head's denominator, for a "learnable" softmax, which needs it. None elsewhere.
softmax.softmax_offset: Addend of each head's denominator. None has none.
cu_seqlens_q: Running sums of the lengths of the sequences, [batch + 1], beginning with 0: for padding masks and
    "thd". None elsewhere.
cu_seqlens_kv: The same of keys and values, needed beside `cu_seqlens_q`. None without it.
cu_seqlens_q_padded: Where each query sequence begins in memory, with "thd". None: they follow one another.
cu_seqlens_kv_padded: The same of keys and values. None: they follow one another.
attention_mask: Mask for "arbitrary", not 0 where something is hidden. None for the other types.
mask: Mask, not 0 where something is hidden. None hides nothing.
rotary_pos_emb: Angles of rotary position embedding. None turns nothing.
freqs: Angles, float32 [positions, 1, 1, channels]; channels behind these pass through.
rope.cu_seqlens: Running sums of the lengths of packed sequences, for "thd". None elsewhere.
start_positions: Position of each sequence's first token, [batch]. None is 0.
routing_map: With a mask, not 0 where a token goes to an expert; with "index" the experts of each token.
probs: Probability of each token and expert, which move along with the rows. None moves none.
row_id_map: The map that `moe_permute` gave.
logits: Logits of the experts of each token.
expert_bias: Addend of the scores by which experts are chosen, not with softmax. None adds none.
qb_bin_bounds: Lower and upper bound of the bins of the histogram, which it needs. None without one.
router_aux_loss.probs: Scores of each token and expert, those of several sequences side by side.
tokens_per_expert: How many tokens each expert gets.
total_num_tokens: Number of all tokens, an array of one integer.
merging_probs: Factors by which the rows of a token are added up. None adds them up as they are.
m_splits: How many rows each group has, a list or an array of integers whose sum is the number of rows.
recipe: Recipe by which operands of products are quantized, such as `Float8CurrentScaling()`. None runs in high
    precision.
scaling: State of a recipe with a history (`Scaling`), which it needs. None for other recipes.
needs: Names of the arguments whose gradients are wanted; an empty one keeps nothing for backward. None is all
    that have one.
quantized: Weights that were quantized before, by their names. None quantizes in each call.
seed: Number of the random draws of dropout and stochastic rounding, another one in each call: an integer, two,
    or an array. None where nothing is drawn.
rt: Runtime that says where the call runs. None is where the library of the first array works.
Scaling.recipe: Recipe whose state it is.
Scaling.function: Function of this package whose products have the state, such as `linear`.
Scaling.like: Array whose library and device the state's arrays have.
Scaling.gemms: Number of weights of `grouped_linear`. None for the other functions.
Scaling.load.values: {name: array} of all arrays, as `arrays()` gave them.
quantize.x: Weight, a dense matrix of float32, bfloat16 or float16.
quantize.recipe: Recipe whose rule for weights is used. It has to quantize.
quantize.scaling: State of the layer that the weight is of, for a recipe with a history. None for other recipes.
quantize.name: Name of the weight in its layer.
dequantize.q: What `quantize` gave.
dequantize.dtype: Type of the values.
dequantize.like: Array whose library the result is of. None gives a `te_core.Tensor`.
update.scalings: States of layers.
Function.name: Name of the layer in the table.
Function.__call__.given: Arguments by place.
Function.__call__.named: Arguments by name, as the signature of each function says.
Back.__call__.dy: Gradient of y, or a tuple where there are several outputs: None for one behind the first that
    was not used.
Back.__call__.into: {weight: array} that gradients are written to. None makes arrays.
Back.__call__.accumulate: Whether gradients are added to what is in `into`.
Back.__call__.keep: Whether backward may be called again.
function: Function whose backward it is.
where: Where the call ran.
kept: What forward kept. None where nothing was.
tensors: Tensors of the call by name; None where one is left out.
options: Options of the call by name.
precision: What the recipe comes to. None for high precision.
settled: All options of the layer by name.
given: Options that the call was given, by name.
made: The layer's call.
Named.wanted.needs: Names of the arguments whose gradients are wanted. None is all that have one.
"""
