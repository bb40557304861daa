"""What the arguments of the operations are."""

TEXT = """
rt: Runtime that it runs on; all tensors are on its device.
x: Tensor to be read.
activation_forward.x: Input [M, N].
activation_backward.x: Input of the forward [M, N].
norm_forward.x: Input [M, N].
norm_backward.x: Input of the forward [M, N].
quantize_grouped.x: Rows of all groups [T, K].
unpermute.x: Rows [rows, H].
unpermute_backward.x: Rows of the forward [rows, H].
permute.x: Tokens [tokens, H].
softmax_forward.x: Scores [b, h, sq, sk].
dy: Gradient of the output.
kind: Activation, such as "gelu" or "swiglu".
norm_forward.kind: "LayerNorm" or "RMSNorm".
norm_backward.kind: "LayerNorm" or "RMSNorm".
clamp: Numbers of clamped_swiglu. None are the usual ones.
cast: How the result is quantized (`Cast`). None quantizes nothing.
quantize.cast: How x is quantized (`Cast`).
keep: Whether the result in high precision is given beside the quantized one.
column_sum: Vector [N], float or of x's type, that is set to column sums. None computes none.
rule: Numbers of the step.
tensors: The tensors of each parameter.
amax_many.tensors: Tensors of one type.
quantize_many.tensors: Matrices of one width and type.
a: First operand.
b: Second operand.
context_sum.b: Second operand. None copies the first.
attention_merge.b: Output over other keys. None is none.
gemm_route.a: Format, or type, of the first operand.
gemm_route.b: Format, or type, of the second operand.
place: Device that multiplies.
out: Where the result is written. None allocates it.
gemm_grouped.out: Where the result is written.
gemm_quantized.out: Where the result is written.
column_sum.out: Vector [N] that is set.
count_nonfinite.out: int64 [2], which is raised.
context_sum.out: Where the result is written.
attention_merge.out: Where the result is written.
rank_sum.out: Where the result is written, [m, n].
attention_backward.out: Output of the forward.
attention_fp8_backward.out: Output of the forward.
attention_sink_grad.out: Output of the forward.
q: Queries, in the format that `spec` says.
dequantize.q: Quantized matrix.
statistics.q: x quantized, which is compared with x. None compares nothing.
k: Keys, in the format that `spec` says.
v: Values, in the format that `spec` says.
KVCache.k: Memory of the keys.
KVCache.v: Memory of the values.
pages: Table of pages, int32 [rows, pages]. None for a cache without pages.
stats: Statistics of the softmax, float32.
attention_forward.stats: Whether statistics for backward are wanted, or where they are written.
attention_fp8_forward.stats: Whether statistics for backward are wanted, or where they are written.
attention_merge.stats: Where statistics are written, float32. None writes none.
spec: What is computed (`AttentionSpec`).
terms: What else takes part: lengths, mask, bias, slopes, sink, random numbers, pages.
loss_facts.terms: Options of the loss.
loss_values.terms: Options of the loss.
loss_gradient.terms: Options of the loss.
grads: Where the gradients of q, k and v are written. None allocates them.
bias_grad: Whether the gradient of the bias is wanted.
scales: Scales of what is quantized.
scale_pairs.scales: Up to four scales, float32 [1] each.
grad_dtype: FP8 type of the gradients.
a_stats: Statistics of a.
b_stats: Statistics of b. None where there is no b.
form: Format in which heads and tokens lie: "sbhd", "bshd" or "thd".
softmax: "vanilla", "off-by-one" or "learnable".
sink: Addend of each head's denominator, float32 [h]. None has none.
attention_sink_grad.sink: Addend of each head's denominator, float32 [h].
bias: Vector that is added to every row. None adds none.
gemm_grouped.bias: Vectors [N], one for each group. None adds none.
residual: Matrix that the result is added to. None adds nothing.
p: Probability that an element is dropped.
rng: Seed and offset of the draws, int64 [2] on the device. None where nothing is drawn.
context_draws.rng: Seed and offset, int64 [2] on the device.
site: Number that tells the draws of one call apart.
sizes: Rows of each chunk, int32 on the device.
gemm_grouped.sizes: Rows of each group, numbers of the host. None where `offsets` says it.
offsets: Running sums of the rows of the groups, int32 on the device. None where `sizes` says it.
order: Order of the chunks.
rows: Number of rows of the result.
context_rows.parts: Number of parts that a sequence is in.
cols: Number of columns of the result.
numbers: How many pairs are wanted.
cu_seqlens: Running sums of the lengths, int32 [b + 1]. None where sequences are not packed.
context_lengths.cu_seqlens: Running sums of the lengths, int32 [b + 1].
cu_seqlens_padded: Running sums of the padded lengths, int32 [b + 1]. None where nothing is padded.
context_mark.cu_seqlens_padded: Running sums of the padded lengths, int32 [b + 1].
size: Number of ranks.
spans: Which chunks of the sequences, and where they lie (`Span`).
chunk: Half of a rank's tokens in a row, of dense formats. 0 for packed sequences.
t: Heads, or tokens, to be moved.
how: "heads_to_ranks", "ranks_to_heads", "sequence_to_ranks" or "ranks_to_sequence".
parts: float32 [n, h], the rows that are compared.
rank_sum.parts: The summands [ranks, m, n].
heads: Number of heads.
context_max.heads: Number of heads of the result. None is those of the parts.
first: Head that the parts begin with.
trans_a: Whether a is read transposed.
trans_b: Whether b is read transposed.
a_scale: Scale by which a's values are multiplied. None where it has none.
b_scale: Scale by which b's values are multiplied. None where it has none.
epilogue: "gelu" or "dgelu". None does nothing.
aux: Values before "gelu", which are written, or which "dgelu" reads. None writes none.
a_sum: Vector [M] that is set to the sum of a over K. None computes none.
out_sum: Vector [N] that is set to column sums of the result, with "dgelu". None computes none.
out_dtype: Type of the result. None is that of the operands, or of the weight of a norm.
accumulate: Whether the product is added to what `out` holds.
split_accumulator: Whether partial sums of FP8 products are added up in float32: exact, and slower.
tf32: Whether float32 operands are multiplied in TF32.
a_format: Format of a, where it has a scale for each block. None where it has none.
b_format: Format of b, where it has a scale for each block. None where it has none.
a_amax: Largest absolute value of a, for nvfp4. None elsewhere.
b_amax: Largest absolute value of b, for nvfp4. None elsewhere.
turned: "b" or "out", which says how the product relates to another one that has the same bits. None relates to
    none.
emulate: Whether formats that the device cannot multiply are dequantized and multiplied in float32.
strict: Whether it is an error to compute in another way than the formats ask.
a_columnwise: Whether the columnwise copy of a is read.
b_columnwise: Whether the columnwise copy of b is read.
experts: Expert of each token and slot, int32 [tokens, slots].
new_k: New keys.
new_v: New values.
cache: Memory of the cache (`KVCache`).
cu_new: Running sums of the new tokens, int32 [b + 1].
cu_cached: Running sums of the tokens in the cache, the new ones included, int32 [b + 1].
moves: int32 [n, 3]: (row to, row from, tokens).
longest: Most tokens of a move.
eps: Number that is added to the variance, or to the mean square.
logits: Scores of the classes [M, V].
target: Class of each row, int64 or int32 [M].
known: Facts of all ranks, float32 [ranks, M, 3]. None finds them in the same pass.
grad: Factor of the gradient, float32 [M] or [1]. None is 1.
facts: Facts of all ranks, float32 [ranks, M, 3].
loss_gradient.facts: Where facts of the rows are written, without `known`. None allocates them.
total: How the losses come to one number: "sum", "mean" over rows that count, or "mean of some", whose part is
    here.
routing: Mask [tokens, experts], not 0 where a token goes to an expert.
starts: First row of each expert, int32 [experts + 1]. None looks for it.
mask_row_map.starts: Where the first row of each expert is written, int32 [experts + 1]. None writes it nowhere.
gamma: Weight of the norm [N].
beta: Bias of the norm [N]. None for RMSNorm.
mean: Means of the rows that forward gave. None for RMSNorm.
rstd: Inverse standard deviations of the rows that forward gave.
zero_centered: Whether gamma is stored as its distance from 1.
sm_margin: How many multiprocessors the kernel leaves free.
norm_backward.add: Gradient that is added to dx. None adds none.
branch: What x is added to first (`Branch`): residual + dropout(x + bias) is written, and is what is normed.
    None norms x.
lists: Lists of tensors, each of one type.
each: Whether the norm of each tensor is given, too.
scale: Factor.
norm_many.scale: Factor of the tensors, float32 [1]. None is 1.
scale_many.scale: Factor, a number or float32 [1] on the device.
swizzle_scales.scale: Scales [R, C] of a copy, one byte each.
groups: Number of heads of keys and values.
head_dims: Channels of a query or key, and of a value.
mask: Mask, not 0 where something is hidden.
softmax_forward.mask: Mask, bool or uint8, not 0 where a score is hidden. None hides nothing.
padding_order.mask: Mask [b, s] or [b, .., s], not 0 where padding is.
row_map: Map of rows, as `mask_row_map`, `index_row_map` or `chunk_row_map` gave it.
probs: Probability of each token and expert. None moves none.
pad_offsets: How many rows of padding come before each expert's rows. None is none.
fill: Whether rows that nobody gets become zeros.
states: States of delayed scaling (`ScalingState`).
algo: How the amax follows from the history: "max" or "most_recent".
splits: Rows of the groups, numbers of the host.
casts: How each is quantized (`Cast`).
column_sums: Vectors that are set to the column sums of each group. None computes none.
outs: Where the results are written. None allocates them.
scale_many.outs: Where the results are written.
dtype: Type of the result.
columnwise: Whether the columnwise copy is read.
dequantize.columnwise: Whether the columnwise copy is read. None reads the rowwise one where it is there.
freqs: Angles, float32 [positions, 1, 1, channels].
fmt: Format in which tokens lie: "sbhd", "bshd" or "thd".
interleaved: Whether angles turn neighbouring channels, and not those of the two halves.
start_positions: Position of each sequence's first token, int32 [b]. None is 0.
cp_size: Number of ranks that a sequence is spread over.
cp_rank: Number of this rank among them.
backward: Whether heads are turned back.
qkv: Packed projection.
q_freqs: Angles of the queries. None turns none.
k_freqs: Angles of the keys. None turns none.
interleaved_groups: Whether a row lies group by group, and not queries before keys before values.
dq: Gradient of the queries. None where there are none.
dk: Gradient of the keys.
dv: Gradient of the values.
plan: What `plan_update` gave.
sources: Tensors to be multiplied.
flag: int32 [1] that becomes 1 where a source is not finite. None looks for nothing.
places: Where inverses go to, too; None for one that goes nowhere else.
y: Output of the forward.
share: What forward gave as the sink's part. None without a sink.
band: Which keys a query sees (`Band`).
cu_seqlens_q: Running sums of the lengths of the queries' sequences, int32 [b + 1]. None: all are whole.
cu_seqlens_kv: Running sums of the lengths of the keys' sequences, int32 [b + 1]. None: all are whole.
record: Statistics that are merged into, a float64 vector.
transposed: Whether `scale` is held as [C, R].
tokens: Number of tokens of the result.
weights: Factors of the rows. None is 1.
unpermute_backward.weights: Factors of the rows.
gates: Probabilities of the copies: rows of 0 are left out. None leaves none out.
row_probs: Probability of each row, which is brought back, too. None brings none.
"""
