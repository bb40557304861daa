"""What the arguments of functions and contexts are: precision, checkpoints, graphs, experts, losses, reports."""

TEXT = """
enabled: Whether the context changes anything.
autocast.enabled: Whether modules inside run in low precision. False runs them in high precision, also inside an
    enabled one.
fp8_autocast.enabled: Whether modules inside run in low precision. False runs them in high precision.
make_graphed_callables.enabled: Whether the modules run in low precision; a tuple says it for each. None is
    False.
calibrating: Whether modules only note the largest values from which delayed scaling starts, with enabled=False.
make_graphed_callables.calibrating: `calibrating` of the capture's `autocast`. None is False.
recipe: Recipe by which values are quantized. None is the recipe of `get_default_recipe()`: MXFP8 on a GPU that
    multiplies it, current scaling on other GPUs of compute capability 12 and above, delayed scaling elsewhere.
convert.recipe: Recipe that the report says the meaning of, for each layer. None says nothing; the swap is the
    same.
prepare_state.recipe: Recipe that the model is to train under.
linear_cross_entropy.recipe: Recipe without a history (current scaling, block scaling, MXFP8, NVFP4) by which
    the products run. None runs them in high precision.
amax_reduction_group: Process group over which the largest values of delayed scaling are reduced. None is all
    processes.
_graph: Whether scales stay as they are when the context ends; for captures.
strict: Whether it is an error if something cannot be computed as the recipe asks.
emulate: Whether formats that the device cannot multiply are dequantized and multiplied in float32: exact and
    slow.
check_finite: Whether every cast counts NaNs and infinities, for `nonfinite_report`.
misnamed: Nothing: other names are refused, with the right one.
fp8_recipe: Older name of `recipe`. None is the recipe of `get_default_recipe()`.
fp8_group: Older name of `amax_reduction_group`.
fp8_enabled: Older name of `enabled`.
fp8_calibrating: Older name of `calibrating`.
fp8_weight_caching: Older name of `cache_quantized_params`.
preserve_high_precision_init_val: Whether each quantized parameter keeps its initial values on the CPU, for
    `get_high_precision_init_val()`.
return_reason: Whether the reason is returned, too: (available, reason), with "" where it is.
function: Module or function that is run again in backward.
checkpoint.args: Arguments of the function.
checkpoint.kwargs: Arguments of the function by name, and options of torch.utils.checkpoint.
distribute_saved_activations: Whether each rank of `tp_group` keeps its part only of the first tensor.
checkpoint.get_rng_state_tracker: Function that returns the RNG tracker whose streams are set back, too. None:
    none but those of all `CudaRNGStatesTracker`s, which always are.
checkpoint.tp_group: Process group over which saved tensors are spread. None is all processes.
use_reentrant: Which of torch's two kinds of checkpoint it is. `distribute_saved_activations` needs True.
modules: Module, or a tuple of modules, to be captured.
sample_args: Tuple of tensors that a module is captured with, or a tuple of such tuples. Later calls have the
    same shapes.
sample_kwargs: The same of arguments by name. None is none.
num_warmup_iters: How many times each module runs before the capture.
allow_unused_input: Whether an input without a gradient is allowed.
cache_quantized_params: Whether quantized weights are kept between microbatches; each call then says
    `is_first_microbatch`. None is False.
_order: Schedule of a pipeline: chunk i forward is i, backward is -i, both from 1 on. None: modules run one
    after another.
_num_layers_per_chunk: Layers of each chunk of `_order`. None divides them evenly.
pool: Memory pool of torch.cuda for the graphs. None makes one.
retain_graph_in_backward: Whether backward may run twice for one forward.
_reuse_graph_input_output_buffers: Whether microbatches that never overlap in `_order` share memory.
clone_param_grads_on_return: Whether gradients of parameters are copied out of the graph's memory.
pre_warmup_hook: Function without arguments that runs before the warm-up. None runs nothing.
post_warmup_hook: Function without arguments that runs after the warm-up. None runs nothing.
capture_time_hooks: For each module a dict {kind: {id: hook(module)}} that runs in warm-up and capture, outside
    of graphs.
get_cpu_offload_context.num_layers: How many layers of a pass leave the device.
scaled_init_method_normal.num_layers: Number of layers that write to the residual stream.
model_layers: How many layers a pass has. For `get_cpu_offload_context` 1 lets the first pass find out; else
    None does.
offload_activations: Whether what layers save for backward leaves the device.
offload_weights: Whether weights leave the device, too.
double_buffering: Whether a layer comes back one layer earlier.
manual_synchronization: Whether the caller moves layers by a `ManualOffloadSynchronizer`, which is a third
    result.
retain_pinned_cpu_buffers: Whether buffers of the host are kept from pass to pass, for which shapes may not
    change.
offload_stream: CUDA stream of the copies, with `manual_synchronization`. None makes one.
rules: What travels, and how. None is the rules of `get_cpu_offload_context`'s defaults.
state: The pass that the layer belongs to.
index: Number of the layer in the pass.
layer_id: Number of the layer in the pass, from 0 on.
OffloadSynchronizer.sync.tensor: Output of the layer, which is returned. None notices the layer's backward by
    what it reads.
mark_not_offload.tensors: Tensors that stay on the device; None among them is skipped.
measure_saved.model: Model whose layers are told apart.
model: Model whose layers are looked at.
convert.model: Model whose layers are swapped, in place.
include_head: True converts the projection on a vocabulary, too.
prepare_state.model: Model whose modules get entries, in place.
plain_state_dict.model: Model whose state is read.
plain_state_dict.dtype: Type of all floating-point entries but FP8 state. None keeps each one's own.
filter: Function `filter(name, module) -> bool` that says which layers are swapped. None swaps all.
dry_run: Whether nothing is changed and only the report is made.
saved: What `measure_saved` counted for this model. None leaves the column out.
reset: Whether counts begin anew afterwards.
kind: Class of the norm, or its full name "package.module.Class".
like: Class of ours that computes the same: `RMSNorm` or `LayerNorm`.
register_norm.eps: Name of the attribute that holds it, or a number. None tries the usual names.
register_norm.weight: Name of the norm's weight.
moe_permute.inp, moe_permute_with_probs.inp, moe_permute_and_pad_with_probs.inp: Tokens [tokens, features].
moe_unpermute.inp: Rows [rows, features], in the order of the permutation.
moe_sort_chunks_by_index.inp, moe_sort_chunks_by_index_with_probs.inp: Rows [rows, features].
routing_map: With a mask [tokens, experts], not 0 where a token goes to an expert; with "index" expert ids,
    int32 [tokens, top k].
num_out_tokens: Number of rows of the result. -1 drops nothing; with a mask the host then waits for the number.
max_token_num: Accepted; changes nothing.
map_type: What the map is: "mask" or "index".
moe_unpermute.probs: Older name of `merging_probs`.
probs: Probabilities [tokens, experts], of any float type.
moe_sort_chunks_by_index_with_probs.probs: Probability of each row [rows].
tokens_per_expert: How many tokens the mask sends to each expert [experts].
moe_permute_and_pad_with_probs.align_size: The rows of each expert become a multiple of this number.
split_sizes: Rows of each chunk, integers [chunks].
sorted_index: Order of the chunks, integers [chunks].
row_id_map: The map that the permutation returned.
merging_probs: Weights of the rows, [tokens, experts], or float32 [tokens, top k] with "index". None adds rows
    up as they are.
restore_shape: Shape of the result, with a mask. None is [tokens, features].
pad_offsets: What `moe_permute_and_pad_with_probs` returned beside the map. None where nothing was padded.
logits: Logits of the experts [.., experts].
topk: Number of experts of each token.
use_pre_softmax: Whether softmax is over all experts, and not over the chosen ones; nothing for other scores.
num_groups: Number of groups of experts, side by side, with `group_topk`. None elsewhere.
group_topk: Number of groups of which experts are chosen. None or 0 chooses among all.
scaling_factor: Factor of the probabilities. None is 1.
score_function: What makes scores of logits: "softmax", "sigmoid" or "sqrtsoftplus".
expert_bias: Addend of the scores by which experts are chosen, float32 [experts], not with softmax. It gets no
    gradient. None adds none.
routing_map_format: How the map is stored: a `RoutingMapFormat`, its number, or "bytemap" or "bitmap_u8".
topk_indices: Tensor [.., topk] of int16, int32 or int64 for the numbers of the chosen experts. None gives a map.
qb_histogram: Counts of quantile balancing, int32 [experts, bins], that are added to. None counts none.
qb_bin_bounds: Lower and upper bound of the bins, float32 [2]. None has none.
qb_histogram_mode: "two_kernel" or "fused_atomic", which do the same here. None without a histogram.
fused_moe_aux_loss.probs: Scores [tokens, columns], a multiple of `num_experts`.
fused_moe_aux_loss.tokens_per_expert: How many tokens each expert gets [columns].
total_num_tokens: Number of all tokens, or an int64 tensor that holds it.
num_experts: Number of experts.
coeff: Factor of the loss.
hidden: Input of the last product [.., K].
linear_cross_entropy.weight: Weight of the last product [V, K]; with `group` this rank's rows.
linear_cross_entropy.bias: Bias of the last product [V]. None adds none.
target: Class of each token, integers of the shape of the input without its last dimension.
parallel_cross_entropy.inp: Logits [.., V]; with `dist_process_group` this rank's columns. Has to be given.
ignore_index, ignore_idx: Target whose tokens do not count.
label_smoothing: Share of the target's weight that is spread over all classes, from 0 to 1.
z_loss: Factor of logsumexp(logits)^2, which is added for each token.
reduction: "mean", "sum", or "none" for the loss of each token.
linear_cross_entropy.group: Process group over which classes are spread. None: every class is here.
chunk: For how many rows logits are there at a time. None chooses by the memory that they take.
reduce_loss: Whether the mean over tokens is returned, [1].
dist_process_group: Process group over which classes are spread, in the order of ranks. None: every class is
    here.
is_cg_capturable: Accepted; a CUDA graph may hold it in any case.
_input: Older name of `inp`.
in_place: Whether the gradient takes the memory of the logits, which nobody else may need then.
initialize_ub.shape: [tokens, hidden] of the whole input: the most that overlaps.
initialize_ub.tp_size: Number of ranks of the tensor-parallel group.
initialize_ub.dtype: Type of the activations in high precision.
use_fp8: Older form of `quantization_modes`.
quantization_modes: List of `UserBufferQuantizationMode`, in which calls GEMMs overlap. None is what `use_fp8`
    says.
ub_cfgs: Options of GEMMs by name ("qkv_fprop", "proj_dgrad", ...), a dict for all modes or a list with one for
    each. None uses the usual methods.
bootstrap_backend: "gloo", "mpi" or "nccl"; ranks exchange nothing by it. None chooses none.
with_cublasmp: False, the only one allowed: overlap runs in this library's own kernels.
CudaRNGStatesTracker.add.name: Name of the new stream.
CudaRNGStatesTracker.fork.name: Name of the stream.
CudaRNGStatesTracker.device: Device that draws. None is the current CUDA device, or the CPU where there is no
    GPU.
seed: Number that the stream begins with; every stream of a tracker has another.
states: Streams by name, as `get_states()` gave them.
interleave_size: Rows of a block.
interleave_glu_tensor.tensor: Tensor [gate; linear] of an even number of blocks along its first dimension.
deinterleave_glu_tensor.tensor: Tensor whose first dimension has blocks of gate and linear in turn.
GroupedLinear.state_dict.args: Arguments of torch.nn.Module.state_dict.
GroupedLinear.state_dict.options: Arguments of torch.nn.Module.state_dict, by name.
numerator: Number to be divided.
denominator: Number to divide by.
round_up_to_nearest_multiple.value: Number that is rounded up.
multiple: Number of which the result is a multiple.
val: Value of every element.
sigma: Standard deviation.
msg: Name of the range.
attention_scores: Scores [.., s_q, s_kv].
canonicalize_device.device: Device, or its name. None is where modules are made by default.
canonicalize_dtype.dtype: Type. None is torch's default dtype.
canonicalize_process_group.group: Process group. None is all processes.
cast_if_needed.dtype: Type of the result.
cast_if_needed.tensor: Tensor to be cast.
check_dim_for_fp8_exec.tensor: Tensor whose sizes are looked at.
assert_dim_for_fp8_exec.tensors: Tensors whose sizes are looked at.
clear_tensor_data.tensors: Tensors whose memory is freed; None among them is skipped.
mixed_x_layer: Tensor to be split.
split_dim: Dimension along which it is split.
split_size_or_sections: Size of the parts, or a list of sizes.
Documented.fast_setattr.name: Name of the attribute.
Documented.fast_setattr.value: New value of the attribute.
MarkedModule.register_parameter.name: Name of the parameter.
MarkedModule.register_parameter.param: The parameter, or None.
"""
