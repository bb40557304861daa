"""What the arguments of modules are: constructors, and `forward` of those that are no attention."""

TEXT = """
in_features: Size of the last dimension of the input.
out_features: Size of the last dimension of the output.
hidden_size: Size of the last dimension of input and output.
_Norm.hidden_size: Older name of `normalized_shape`.
ffn_hidden_size: Size between the two products of the MLP; a gated activation reads twice as many columns.
normalized_shape: Size of the trailing dimension that is normalized, or a sequence of sizes of the trailing
    dimensions. It has to be given, unless `hidden_size` is.
layernorm_epsilon: `eps` of the normalizations.
sm_margin: How many multiprocessors the norm's kernels leave free; a dict gives each of "forward", "backward"
    and "inference" a number of its own.
bias: Whether there are additive biases, which begin at 0.
GroupedLinear.bias: Whether there are additive biases, which begin at 0. With several tensor-parallel ranks it
    has to be False.
return_bias: Whether the bias is not added but returned beside the output, for a caller that adds it later.
init_method: Function that fills a weight in place, `init_method(weight)`. None is normal(0, 0.023).
output_layer_init_method: `init_method` of the last weight, which writes to the residual stream. None is
    normal(0, 0.023).
params_dtype, _Norm.dtype: Type of the parameters: float32, bfloat16 or float16. None is torch's default dtype.
_Norm.params_dtype: Older name of `dtype`.
device: Where memory is allocated. None is the current CUDA device, or the CPU where there is no GPU. Modules
    can be made on "meta".
name: Name of the module in reports and in the configuration of precision debugging. None numbers the modules in
    the order in which they are made.
num_gemms: How many groups, each with a weight of its own (`weight0`, `weight1`, ...).
Fp8Padding.num_gemms, Fp8Unpadding.num_gemms: How many groups of rows there are.
align_size: The rows of each group become a multiple of this number. None is what the recipe of the first call
    needs.
parameters_split: Names of parameters into which the rows of weight and bias are divided: a list of names for
    equal parts, or a dict of name: rows. The parameters are called `NAME_weight` and `NAME_bias`. None keeps
    one `weight`.
return_layernorm_output_gathered: Whether that output has the tokens of all ranks, under sequence parallelism.
activation: Function between the two products: "gelu", "qgelu", "relu", "srelu" ("squared_relu"), "silu", or
    gated "geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu" and "clamped_swiglu".
activation_params: Numbers of "clamped_swiglu" by name: `limit`, `alpha` and `glu_linear_offset`. None are the
    usual ones.
fuse_wgrad_accumulation: Whether backward adds the weight's gradient to `weight.main_grad`, which a trainer
    allocates, in the place of `weight.grad`.
delay_wgrad_compute: Whether backward leaves weight gradients out until `backward_dw()` is called.
save_original_input: Whether the input itself is kept for backward, which quantizes it again, and not a
    quantized copy: saves memory where another module keeps that input anyway. Not for delayed scaling.
tp_group: Process group over which weights are spread (tensor parallelism). None: none yet; where `tp_size` is
    above 1 `set_tensor_parallel_group` has to give one before the first forward.
tp_size: Number of ranks of `tp_group`. With 1 and a group, the group says it.
parallel_mode: How the weight is spread over the ranks: "column" (of the output features), "row" (of the input
    features), or None, which keeps it whole.
sequence_parallel: Whether the tokens outside of the products are spread over the ranks of `tp_group`. Has no
    effect with one rank.
_Norm.sequence_parallel: What the parameters are marked with, for a trainer that sums their gradients over
    ranks. None marks nothing.
set_parallel_mode: Whether the first weights are spread by columns and the last by rows, over `tp_group`.
get_rng_state_tracker: Function that returns a `CudaRNGStatesTracker`, in whose stream weights are initialised
    and dropout draws. None draws from torch's generator.
rng_tracker_name: Name of the stream of that tracker. None is "model-parallel-rng".
ub_overlap_ag: Whether the all-gather of the input overlaps with the product, after `initialize_ub`.
GroupedLinear.ub_overlap_ag, GroupedLinear.ub_overlap_rs: False, the only one allowed: grouped products do not overlap.
ub_overlap_rs: Whether the reduce-scatter of the output overlaps with the product, after `initialize_ub`.
ub_overlap_rs_dgrad: Whether the reduce-scatter of the input's gradient overlaps with its product, after
    `initialize_ub`.
ub_bulk_dgrad: Whether backward gathers the input while it computes the input's gradient, after `initialize_ub`.
ub_bulk_wgrad: Whether backward scatters the input's gradient while it computes the weight's, after
    `initialize_ub`.
ub_tp_comm_overlap: Whether the `ub_*` flags of this layer count at all.
ub_name: Name of the weight in the configuration of `initialize_ub`: "qkv" or "fc1" (column), "proj" or "fc2"
    (row). None for a module that does not overlap.
GroupedLinear.ub_name: Accepted; grouped products do not overlap.
symmetric_ar_type: How the output of a row-parallel weight is summed up in symmetric memory: "one_shot" or
    "two_shot" ("multimem_all_reduce" is refused). None uses the group's own all-reduce.
single_grouped_weight: Whether the weights of all groups are one parameter `weight` [groups, out, in]. Needs
    NVTE_GROUPED_LINEAR_SINGLE_PARAM=1; else it warns and changes nothing. Checkpoints of either load into the other.
single_grouped_bias: The same of the biases: `bias` [groups, out].
use_grouped_tensor: True warns and changes nothing. None is what NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM
    says.
MoELayer.single_grouped_weight: Whether the weights of all experts are one parameter: torch's engine and optimizers
    take a while for each.
MoELayer.bias: Whether the products of experts have additive biases, which begin at 0.
MoELayer.ffn_hidden_size: Size between the two products of an expert; a gated activation reads twice as many columns.
MoELayer.expert_bias: Whether each expert has an addend of the scores by which experts are chosen, which
    `update_expert_bias()` moves towards even loads. It gets no gradient. Not with softmax.
expert_bias_rate: What `update_expert_bias()` adds or subtracts.
aux_loss_coeff: Factor of the auxiliary loss, which keeps experts in use; 0 has none.
return_aux_loss: Whether forward returns the auxiliary loss beside the output, for a caller that adds it to another.
    Otherwise its gradients are added without that.
shared_ffn_hidden_size: `ffn_hidden_size` of an expert that all tokens go to, whose result is added. None has none.
shared_gate: Whether that result is multiplied by a sigmoid of a projection of the token.
MoELayer.init_method: Function that fills the first weights and the router's in place, `init_method(weight)`. None is
    normal(0, 0.023).
MoELayer.output_layer_init_method: `init_method` of the last weights, which write to the residual stream. None is
    normal(0, 0.023).
MoELayer.activation: Function between the two products of an expert, as of LayerNormMLP.
MoELayer.num_groups: Number of groups of experts, side by side, with `group_topk`. None has no groups.
MoELayer.update_expert_bias.group: Process group whose ranks have other tokens of the same experts. None is this
    rank alone.
seq_length: Accepted for programs of older trainers; changes nothing, as kernels need no warm-up of their own.
micro_batch_size: Accepted like `seq_length`; changes nothing.
inp: Input; its last dimension is the features, and leading dimensions count as one.
GroupedLinear.forward.inp: Input [*, in_features], whose rows are sorted by group.
Fp8Padding.forward.inp: Rows [tokens, features], sorted by group.
Fp8Unpadding.forward.inp: Rows [padded tokens, features], sorted by group.
m_splits: How many rows each group has, as a list or as a tensor of integers; 0 is allowed, and the sum is the
    number of rows.
is_first_microbatch: True in the first microbatch of a step keeps the quantized weight, and False uses what was
    kept. None quantizes the weight in every call.
fp8_output: Whether the output is a quantized tensor, for a consumer that reads one.
fp8_grad: Whether the gradient of the input is a quantized tensor.
out: Buffer for the result, with at least as many rows. None allocates one.
dgrad_out: Buffer for the gradient of `inp`, with at least as many rows. None allocates one.
defer_init: Whether a parameter on the meta device stays there. LayerNorm and RMSNorm: an older argument.
hook: Function without arguments that runs each time `backward_dw()` has added the weight gradients.
length: Length of the histories of maxima from now on.
fwd: Which half: True is forward, False is backward, None is both.
get_quantizer_roles.fwd: Whether roles of forward are asked for, or of backward.
num_quantizers: How many quantizers the caller has room for.
gemm: Number of the product within the module.
fp8_meta_tensors: What `get_fp8_meta_tensors()` gave. None resets the state to its beginning.
"""
