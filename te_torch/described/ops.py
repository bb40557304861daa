"""What the arguments of `te_torch.ops` are."""

TEXT = """
size: Size of the last dimension.
num_groups: How many groups of rows there are, each with a weight of its own (`weight0`, `weight1`, ...).
shape: New shape; one size may be -1.
dtype: Type of the parameters: float32, bfloat16 or float16. None is torch's default dtype.
GroupedLinear.bias: Whether there are additive biases, which begin at 0.
GroupedLinear.options: `device`, `delay_wgrad_compute`, `single_grouped_weight` and `single_grouped_bias`, as
    te.GroupedLinear has them.
is_op_fuser_grouped_tensor_path_supported.dtype: Type that is computed in.
recipe: Recipe in force. None is none.
tensor_parallel_mode: How the weight is spread over ranks: "column" (of the output features), "row" (of the input
    features), or None, which keeps it whole.
tensor_parallel_group: Process group over which the weight is spread. None is all processes.
tensor_parallel: Whether the bias is spread over ranks.
sequence_parallel: Whether rows are spread over the ranks outside of the product.
process_group: Processes that exchange rows. None is all of them.
reduce_in_backward: Accepted; the gradient goes through as it is.
rng_state_tracker_function: Function that returns an RNG tracker, in whose stream the weight is initialised.
accumulate_into_main_grad: Whether backward adds the weight's gradient to `weight.main_grad`.
scale_bias: Whether biases are multiplied by a number for each row, which is a second extra input.
userbuffers_options: Accepted; products do not overlap with their communication here.
cache_quantized_input: Whether the input is kept in FP8 for backward.
glu_interleave_size: In blocks of how many elements the two halves come in turn. None: one after the other.
activation_recompute_in_mlp: Accepted by ScaledSReLU; changes nothing.
limit: Largest value of the gate, and of the rest either way.
alpha: Factor inside of the sigmoid.
glu_linear_offset: Added to the ungated half.
beta1: Bound of the gate.
beta2: Bound of the rest.
options: The options of the activation that it is like, by name.
scale: Number.
p: Probability that an element is dropped.
in_place: Whether the sum is written into the extra tensor, or into its gradient.
forward: Whether the input is quantized.
backward: Whether its gradient is.
basic_ops: Operations that it fuses, in their order.
input: Input of the first operation.
extra_inputs: Extra inputs that no channel provides, in the order of the operations.
op_kwargs: By operation or its index: keyword arguments of its forward.
basic_op_kwargs: For each basic operation: keyword arguments of its forward.
kwargs: Keyword arguments of `op_forward`.
func: Function of the operations of a chain and `recipe=`, which returns them with some replaced by fused ones.
prepend: Whether it is asked before those that were registered before.
index: Number of the extra input or output, or of the quantizer.
channel: Name by which an extra output and extra inputs of one chain are the same tensor. None: the caller's.
output_to_caller: Whether the caller gets the extra output, too.
mode: "forward" or "backward".
gemm: Number of the group of slots.
requires_grad: Whether backward comes to this operation.
ctx: What this operation keeps for its backward.
basic_op_ctxs: The same of each basic operation.
input_: Input.
grad_output: Gradient of the output.
prev_op_grad_output_quantizer: What the input's gradient may be quantized with. None: it is read plain.
next_op_input_quantizer: What the output may be quantized with. None: it is read plain.
basic_op_extra_inputs: Extra inputs of each basic operation.
basic_op_grad_extra_outputs: Gradients of the extra outputs of each basic operation. None where there is none.
args: Contexts of the basic operations, then the input or the output's gradient.
ScaledSiTUGLU.args: `glu_interleave_size`.
given: What the protocol gives by name.
name: "weight" or "bias".
param: Parameter.
"""
