"""What the arguments of the optimizers and of the functions on lists of tensors are."""

TEXT = """
params: Parameters, or groups of parameters as torch's optimizers take them.
FusedSGD.get_momentums.params: Parameters whose buffers are wanted.
lr: Learning rate.
FusedAdam.lr: Learning rate; with `capturable` it may be a tensor.
betas: Decay of the mean of gradients and of the mean of their squares, each from 0 to below 1.
eps: Number that is added to the square root, 0 or more.
multi_tensor_compute_scale_and_scale_inv.eps: Smallest amax that a scale is made of.
weight_decay: Factor of weight decay, 0 or more.
amsgrad: False, the only one allowed.
bias_correction: Whether the means are corrected for beginning at 0.
adam_w_mode: Whether weight decay is apart from the gradient (AdamW).
capturable: Whether learning rate and step are tensors on the device, so that a CUDA graph may hold `step()`.
master_weights: Whether parameters below float32 have a master copy; needed for quantized parameters.
master_weight_dtype: Type of the masters: float32 or float16.
exp_avg_dtype: Type of the mean of gradients: float32, bfloat16, float16, or uint8 for FP8 E4M3.
exp_avg_sq_dtype: Type of the mean of squares: float32, bfloat16, float16, or uint8 for FP8 E4M3.
use_decoupled_grad: Whether gradients are read from `p.decoupled_grad`.
store_param_remainders: Whether a bfloat16 parameter is the upper half of its float32 master, and only the lower
    half is kept.
FusedAdam.initialize_state.store_param_remainders: The same for this parameter. None is what the constructor was
    given.
set_grad_none: Older argument. None leaves the choice to `zero_grad(set_to_none=...)`.
set_to_none: Whether gradients become None, and not 0. None is what `set_grad_none` said, else True.
momentum: Factor of the momentum, 0 or more.
dampening: Share of the gradient that the momentum leaves out.
nesterov: Whether it is Nesterov's momentum, which needs momentum and no dampening.
wd_after_momentum: Whether weight decay is added behind the momentum.
materialize_master_grads: Accepted; changes nothing.
param_group: Dict with "params", and options of the group.
param: A parameter of this optimizer.
state_name: Name of the state: "exp_avg", "exp_avg_sq" or "master_param".
skip_unscale: Whether the state is returned as it is stored.
unscaled_state: Values in float32.
state_dict: What `state_dict()` gave.
from_torch_adamw.state_dict: State dict of torch.optim.AdamW or Adam.
to_torch_adamw.state_dict: State dict of FusedAdam.
closure: Function that computes the loss again and returns it. None computes nothing.
grad_scaler: `torch.amp.GradScaler` by which gradients are unscaled, with `capturable`. None: they are not
    scaled.
grad_scale: Factor of all gradients, float32 of one element on the device, such as the second result of
    `clip_by_norm`. None is 1.
parameters: Parameters whose gradients count.
max_norm: Largest norm that is allowed.
clip_by_norm.group: Process group over whose parts the norm is summed up, too. None: over none but a DTensor's
    own mesh.
grad: Name of the attribute that holds gradients.
chunk_size: Accepted; kernels choose their own.
noop_flag: int32 [1] on the device: "capturable" functions skip the step where it is not 0; scaling writes 1
    where a value is not finite.
is_infinite: Flag [1] on the device that becomes 1 where a value is not finite.
tensor_lists: Lists of tensors of equal length, in the order that the function says.
multi_tensor_adam_param_remainder.numbers: The numbers of `multi_tensor_adam`, from `lr` on.
multi_tensor_adam_param_remainder.named: The same by name.
beta1: Decay of the mean of gradients.
beta2: Decay of the mean of squares.
step: Number of the step, from 1 on.
mode: 0 puts weight decay into the gradient, 1 is AdamW.
inv_scale: Factor of the gradients, float32 [1] on the device.
scale: Factor of the source.
multi_tensor_sgd.scale: Factor of the gradients.
max_fp8: Largest value of the format.
force_pow_2_scales: Whether scales are powers of two.
per_tensor: Whether the norm of each tensor is returned, too.
wd: Factor of weight decay.
first_run: Whether the momentum begins as the gradient.
op: Function of this module.
noop_flag_buffer: `noop_flag` of that function.
MultiTensorApply.__call__.args: Its further arguments.
"""
