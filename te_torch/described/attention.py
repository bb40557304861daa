"""What the arguments of attention are: constructors, forward, KV caches, angles, and packed sequences over ranks."""

TEXT = """
num_attention_heads: Number of heads of the queries, over all ranks.
kv_channels: Channels of a head. None is hidden_size / num_attention_heads.
DotProductAttention.kv_channels: Channels of a head, or two numbers: of queries and keys, and of values.
attention_dropout: Probability that a weight of attention is dropped while training.
qkv_format: How queries, keys and values lie: "sbhd" [s, b, heads, d], "bshd" [b, s, heads, d] or "thd" [t,
    heads, d] of packed sequences, which need cu_seqlens.
InferenceParams.step.qkv_format: How `new_k` and `new_v` lie. None is the format that the constructor was given.
forward.qkv_format: Format of this call. None is the constructor's.
attn_input_format: How the input lies: "sbhd" [s, b, H], "bshd" [b, s, H] or "thd" [t, H] of packed sequences.
attn_mask_type: What is hidden: "no_mask", "causal", "padding", "padding_causal", "causal_bottom_right",
    "padding_causal_bottom_right" or "arbitrary".
forward.attn_mask_type: Mask of this call. None is the constructor's.
self_attn_mask_type: Mask of self attention, by the names that `DotProductAttention` has for `attn_mask_type`.
forward.self_attn_mask_type: Mask of self attention in this call. None is the constructor's.
enc_dec_attn_mask_type: Mask of cross attention, by the same names.
forward.enc_dec_attn_mask_type: Mask of cross attention in this call. None is the constructor's.
forward.window_size: The window of this call, (left, right). None is the constructor's.
enc_dec_window_size: `window_size` of cross attention. None bounds nothing.
forward.enc_dec_window_size: The window of cross attention in this call. None is the constructor's.
forward.bottom_right_diagonal: The same of this call. None is the constructor's.
enc_dec_bottom_right_diagonal: `bottom_right_diagonal` of cross attention. None follows from the mask's name.
forward.enc_dec_bottom_right_diagonal: The same of cross attention in this call. None is the constructor's.
attention_type: "self", or "cross" where keys and values are made of `encoder_output`.
layer_number: Number of the layer in its model, from 1 on; KV caches are found by it. None is 1.
allocate_memory.layer_number, step.layer_number, convert_paged_to_nonpaged.layer_number: Number of the layer.
softmax_type: "vanilla"; "off-by-one", which adds 1 to the denominator; or "learnable", whose addend is a
    parameter of each head.
return_max_logit: Whether the largest score of each head is returned, too.
cp_group: Process group over which sequences are spread (context parallelism), a mesh of one dimension, or [a2a
    group, p2p group] for "a2a+p2p". None: sequences are whole on every rank.
get_batch_on_this_cp_rank.cp_group: Process group over which sequences are spread. None is all processes.
cp_global_ranks: Global ranks of that group, which are compared with it. None compares nothing.
cp_stream: Second CUDA stream of a ring's steps. None lets the library make its own.
cp_comm_type: How the ranks exchange keys and values: "p2p" (ring), "all_gather", "a2a" (heads for sequence) or
    "a2a+p2p".
query_layer: Queries, in the format's shape. None where `qkv_layer` is given.
key_layer: Keys, of as many heads as there are groups. None where `qkv_layer` or `kv_layer` is given.
value_layer: Values, of as many heads as there are groups. None where `qkv_layer` or `kv_layer` is given.
qkv_layer: Queries, keys and values as one tensor. None where they are given apart.
kv_layer: Keys and values as one tensor. None where they are given apart.
qkv_interleave_dim: Which dimension of a packed tensor tells queries, keys and values apart: -3 (such as bs3hd)
    or -2 (such as bsh3d).
attention_mask: Boolean mask, True where something is hidden: [b, 1, 1, s] of padding, a pair of these for
    queries and keys, or [.., s_q, s_kv] for "arbitrary". None where no mask, or cu_seqlens, says it.
attention_mask_func.attention_mask: Boolean mask that broadcasts to the scores, True where something is hidden.
enc_dec_attn_mask: `attention_mask` of cross attention. None where there is none.
cu_seqlens_q: Running sums of the lengths of the query sequences, int32 [b + 1], beginning with 0. None where no
    padding mask or packed format asks for them.
cu_seqlens_kv: The same of keys and values. None where no padding mask or packed format asks for them.
cu_seqlens_q_padded: Where each query sequence begins in memory, with padding between sequences. None: they
    follow one another.
cu_seqlens_kv_padded: The same of keys and values. None: they follow one another.
max_seqlen_q: Length of the longest query sequence. None computes it, for which the host waits for a GPU.
max_seqlen_kv: Length of the longest sequence of keys. None computes it, for which the host waits for a GPU.
checkpoint_core_attention: Whether backward computes attention again, and only q, k and v are kept.
core_attention_bias_type: What is added to the scores: "no_bias", "pre_scale_bias", "post_scale_bias" or
    "alibi".
core_attention_bias: Bias that broadcasts to [b, heads, s_q, s_kv], for "pre_scale_bias" and "post_scale_bias".
    None for the other types.
alibi_slopes: Slopes of "alibi", float32 [heads] or [b, heads]. None is the usual powers of two.
fast_zero_fill: Accepted; changes nothing.
inference_params: KV cache (`InferenceParams`) to which keys and values are appended. None uses those of this
    call alone.
pad_between_seqs: False: packed sequences follow one another, whatever the padded sums say. None and True: they
    begin where these say.
DotProductAttention.forward.fp8_output: Whether the output is an FP8 tensor, under a recipe with `fp8_mha`.
bf16_backward: Whether backward of attention in FP8 runs in high precision; changes nothing without FP8.
num_splits: In how many parts FlashAttention 3 and 4 cut the keys. Other backends allow 1 only.
score_mod: Function `score_mod(graph, score, tensors)` that changes scores as operations of a cuDNN graph. None
    changes nothing.
score_mod_bprop: The same for its gradient. None lets cuDNN derive it.
score_mod_tensors: Tensors that `score_mod` reads, by name. None is none.
score_mod_bprop_tensors: Tensors that `score_mod_bprop` reads, by name. None is none.
torch_score_mod: Function `f(score, b, h, q_idx, kv_idx) -> score` of torch tensors, which autograd
    differentiates. None changes nothing.
DotProductAttention.explain.args: What `forward` would be called with.
DotProductAttention.explain.options: What `forward` would be called with, by name.
explain.options: Arguments of the constructor and of `forward` of DotProductAttention, by name.
q: Queries [.., heads, channels].
k: Keys [.., groups, channels].
v: Values [.., groups, channels].
key: What a call depends on, as a plan has it.
hidden_states: Input, of the shape that the format says, [.., hidden_size].
encoder_output: What keys and values of cross attention are made of, in the format of the input. None for self
    attention.
rotary_pos_emb: Angles of rotary position embedding, or a pair for queries and keys. None turns nothing.
input_layernorm: Whether a norm stands before the projection.
fuse_qkv_params: Whether queries, keys and values share one weight; needed for `fuse_wgrad_accumulation` and for
    `quantized_model_init`.
qk_norm_type: Norm of queries and keys before attention: "L2Normalization", "RMSNorm" or "LayerNorm". None has
    none.
qk_norm_eps: `eps` of that norm.
qk_norm_before_rope: Whether that norm comes before the angles.
hidden_dropout: Probability that an element is dropped before it is added to the residual stream, while
    training.
apply_residual_connection_post_layernorm: Whether the residual is the output of the norm, and not its input.
output_layernorm: Whether the norm stands behind the layer's output, and not before attention.
parallel_attention_mlp: Whether attention and MLP read the same input and are added together.
layer_type: "encoder", or "decoder" with cross attention.
drop_path_rate: Probability that a sample leaves out a whole part of the layer, while training.
TransformerLayer.seq_length: Length of the whole sequence: with `sequence_parallel` the layer checks its rows
    against it. None checks nothing.
max_batch_size: How many sequences there are at most.
max_sequence_length: How many tokens a sequence has at most.
num_heads_kv: Number of heads of keys and values on this rank. None, with `head_dim_k` and `dtype` None: the
    older form, which learns sizes from the first keys.
head_dim_k: Channels of a key.
head_dim_v: Channels of a value. None is `head_dim_k`.
InferenceParams.dtype: Type of the cache: float32, bfloat16 or float16. None for the older form only.
is_paged: Whether the cache consists of pages.
total_num_pages: Number of pages: max_batch_size * max_sequence_length / page_size. None without pages.
page_size: Tokens of a page, which divide max_sequence_length. None without pages.
max_ctx_len: Most tokens that a sequence brings in one step. None is allowed for "sbhd" and "bshd".
InferenceParams.qkv_format: How the keys and values of a step lie: "bshd", "sbhd" or "thd".
custom_cache_manager: Object that keeps the cache in the place of ours. None makes one.
step_dict: {sequence id: number of new tokens}, in the order of the batch's rows.
new_k: New keys of the layer, in the format.
new_v: New values of the layer, in the format.
InferenceParams.step_of.module: The attention that steps.
form: Format of new_k and new_v.
dim: Channels of a head.
rotary_percent: Share of the channels that are turned.
seq_len_interpolation_factor: Factor that positions are divided by, together with
    `pretrained_max_position_embeddings`. None leaves positions as they are.
pretrained_max_position_embeddings: Length that the model was trained with. None leaves positions as they are.
rotary_base: Base of the angles.
max_seq_len: Number of positions.
offset: First position.
t: Tensor with sequences along `seq_dim`.
seq_dim: Dimension of the tokens.
context_part.group: Process group, mesh of one dimension, or [a2a group, p2p group]. None: all of `t` is
    returned.
context_whole.group: Process group, mesh of one dimension, or [a2a group, p2p group]. None: `t` is returned.
cu_seqlens_padded: Running sums of the padded lengths, int32 [b + 1]. Where it may be None there is one
    sequence.
cu_seqlens: Running sums of the lengths, int32 [b + 1], beginning with 0.
thd_cp_rank_order_to_sequence_order.cu_seqlens: Running sums of the padded lengths, int32 [b + 1].
thd_sequence_order_to_cp_rank_order.cu_seqlens: Running sums of the padded lengths, int32 [b + 1].
cu_seqlens_padded_on_cp_rank: Running sums of this rank's padded lengths, int32 [b + 1].
divisibility_factor: Each sequence is padded to a multiple of it: 2 * ranks, under sequence parallelism times
    the tensor-parallel ranks.
cp_size: Number of ranks that a sequence is spread over.
cp_rank: Number of this rank among them.
first_half: Whether the tokens of the rank's first chunk count.
second_half: Whether the tokens of the rank's second chunk count.
total_tokens: Number of padded tokens of the batch.
x: Packed tensor with padded sequences along `seq_dim`.
input_ids: Token ids [t] or [1, t] of packed sequences.
labels: Labels, of the same shape.
padding_token_id: Token id of padding.
padding_label_id: Label of padding.
input_ids_padded: Padded token ids, or None.
labels_padded: Padded labels, or None.
position_ids_padded: Padded positions, or None.
qvk_format: "thd", the only one allowed. Dense batches go to `context_part`.
generate_positional_ids_for_cp.dtype: Type of the positions.
"""
