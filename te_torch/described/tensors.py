"""What the arguments of quantized tensors and of quantizers are."""

TEXT = """
rowwise: Whether the copy that is quantized along the last dimension is made.
columnwise: Whether the copy that is quantized along the first dimension is made.
Quantizer.set_usage.rowwise: Whether the rowwise copy is made from now on. None leaves it as it is.
Quantizer.set_usage.columnwise: Whether the columnwise copy is made from now on. None leaves it as it is.
get_scale_shape.columnwise: Whether the columnwise copy's scales are meant.
fp8_dtype: Type of the values: DType.kFloat8E4M3 or DType.kFloat8E5M2.
fp4_dtype: Type of the values: DType.kFloat4E2M1.
QuantizedTensor.dtype, make_empty.dtype, create_metadata.dtype, to_dtype.dtype: Type that the tensor presents as.
dtype: Type of the result. None keeps the one that there is.
Float8Tensor.dtype: Type that the tensor presents as.
IdentityQuantizer.dtype: Type that values are kept in. None is their own.
fake_dtype: Type that the tensor presents as. None is float32, or the tensor's `dtype`.
shape: Shape of the values.
view.shape: New shape, of as many values and with the same last side.
device: Where memory is. None is the current CUDA device, or the CPU where there is no GPU.
requires_grad: Whether the tensor requires a gradient.
pin_memory: Whether buffers of the CPU are pinned.
quantizer: Quantizer that quantizes this tensor anew. None makes one of the format.
held: Buffers of the format by name, as its class lists them.
rowwise_data: Values of the rowwise copy, uint8. None where there is no such copy.
columnwise_data: Values of the columnwise copy, uint8. None where there is no such copy.
get_data_tensors.rowwise_data: Whether the rowwise data are returned.
rowwise_scale_inv: Scales of the rowwise copy, by which values are multiplied to dequantize. None without that
    copy.
columnwise_scale_inv: Scales of the columnwise copy. None without that copy.
amax_rowwise: Largest absolute value of the rowwise copy, float32. None without that copy.
amax_columnwise: Largest absolute value of the columnwise copy, float32. None without that copy.
is_2D_scaled: Whether blocks are 128 x 128 tiles, and not 1 x 128 pieces.
data_format: Accepted; there is one layout.
with_gemm_swizzled_scales: Whether scales lie as the GEMM reads them.
row_scaled_nvfp4: Whether each row has a float32 scale of its own.
nvfp4_use_4over6: Whether each block chooses between the largest values 6 and 4.
nvfp4_e4m3_max: Largest block scale: 448 or 256.
data: Values, uint8, of the tensor's shape.
data_transpose: Transposed values, uint8. None where they are not there.
fp8_scale_inv: Scale by which values are multiplied to dequantize, float32 [1].
hp_data: Values in high precision.
rowwise_storage: Storage of the rowwise copy, or None.
columnwise_storage: Storage of the columnwise copy, or None.
rowwise_quantizer: Quantizer of the rowwise copy.
columnwise_quantizer: Quantizer of the columnwise copy.
columnwise_source: What the columnwise copy is made of: "original", or "rowwise_dequantized" values.
scale: Number that values are multiplied by before the cast, float32 [1], on the device.
amax: Where the largest absolute value is noted, float32 [1], on the device.
Float8CurrentScalingQuantizer.scale, Float8CurrentScalingQuantizer.amax: Older argument, without effect.
Float8CurrentScalingQuantizer.device: Accepted; memory follows the tensor that is quantized.
use_existing_amax: Older argument, without effect.
with_amax_reduction: Whether the maximum is that of all processes of `amax_reduction_group`.
NVFP4Quantizer.with_amax_reduction: False where there are several processes: a reduced maximum is refused.
force_pow_2_scales: Whether scales are powers of two.
block_scaling_dim: 1 for 1 x 128 pieces, 2 for 128 x 128 tiles.
with_2d_quantization: Whether scales are those of square tiles, so that both copies have the same values.
with_rht: Whether the columnwise copy is made of values after the random Hadamard transform.
with_post_rht_amax: Accepted: that copy's maximum is always the one after the transform.
with_random_sign_mask: Whether the transform has its fixed random signs. False is allowed without the transform
    only.
tensor: Tensor to be read.
Quantizer.calibrate.tensor: Tensor in high precision whose statistics are noted.
Quantizer.quantize.tensor: Tensor to be quantized, of at least one dimension.
Quantizer.quantize.out: Quantized tensor whose buffers are written. None makes a tensor.
Quantizer.quantize.dtype: Type that the result presents as. None is that of `tensor`.
Quantizer.onnx_dequantize.tensor: What `onnx_quantize` gave.
quantize_.tensor: New values.
make_like.tensor: Tensor whose buffers are shared.
make_like.shape: Shape that it presents. None is its own.
create_tensor_from_data.scale_inv, scale_inv: Scales of the values, uint8 (E8M0).
internal: Whether a storage is made, and not a torch tensor.
inp: Tensor whose shape is looked at.
src: Tensor whose values are taken.
dst: Quantized tensor whose buffers are written.
noop_flag: float32 [1] on the device: where it is 1 nothing is written. None always writes.
tensors: Tensors, in their order.
restore_from_saved.tensors: What `prepare_for_saving` returned as its second result.
QuantizedTensorStorage.restore_from_saved.tensors: Saved tensors; what this storage does not take is returned.
HybridQuantizedTensorStorage.restore_from_saved.tensors: Saved tensors; what this storage does not take is
    returned.
IdentityTensorStorage.restore_from_saved.tensors: Saved tensors; what this storage does not take is returned.
prepare_for_saving.tensors: Tensors, storages and None, as backward shall get them.
saved_tensors: `ctx.saved_tensors`.
return_saved_tensors: Whether the saved tensors that were left over are returned, too.
ctx: Context of an autograd function whose `tensor_objects` is that second result.
memory_format: Accepted as torch's; values are dense.
other: Tensor of the shape to expand to.
Float8Quantizer.take_amax_of.other: Quantizer whose noted maximum is taken over.
all_gather_outputs: What FSDP2 gathered.
metadata: What `fsdp_pre_all_gather` said of it.
param_dtype: Type that FSDP2 computes in.
fsdp_post_all_gather.out, QuantizedTensor.fsdp_post_all_gather.out: Tensor that is filled anew. None makes one.
gathered: Buffers of all ranks.
meta: What the extraction of the buffers said of them.
non_blocking: Whether a copy to another device may still be on its way at return.
rowwise_usage: True makes sure that the rowwise copy is there, False drops it, None leaves it.
columnwise_usage: True makes sure that the columnwise copy is there, False drops it, None leaves it.
module_type: What kind of module it is, such as "linear".
tensor_type: Which operand, such as "input", "weight" or "grad_output".
QuantizerRole.name: Name of the module.
amax_reduction_group: Process group over which the maximum is reduced. None is all processes.
dim: Which side of the shape. None is all of it.
QuantizedTensor.device: Where the tensor presents to be. None is where its buffers are.
stride: Strides that the tensor presents. None is those of a dense tensor.
storage_offset: Offset that the tensor presents.
"""
