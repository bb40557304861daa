"""What the arguments of te_core's own names are: memory, runtimes, casts, errors."""

TEXT = """
operation: What was called; or the whole message, if nothing else is given.
got: What came. None with the whole message.
allowed: What is allowed. None with the whole message.
do: What to do. None with the whole message.
where: Part of the model that the error comes from. None asks the adapter.
form: Format of the quantized values, or their dtype for one scale per tensor.
rowwise_in.form: Format of the quantized values.
columnwise_in.form: Format of the quantized values.
QuantizedTensor.form: Format of the quantized values.
rowwise: Whether the copy that is quantized along the last dimension is made.
columnwise: Whether the copy that is quantized along the first dimension is made.
QuantizedTensor.rowwise: The copy that is quantized along the last dimension, with its scales. None where there
    is none.
QuantizedTensor.columnwise: The copy that is quantized along the first dimension, with its scales. None where
    there is none.
scale: Factor of the values, float32 [1] on the device. None works it out from the values' own maximum.
amax: Where the largest absolute value is noted, float32 [1] on the device. None notes nothing.
epsilon: Smallest maximum that a scale is made of.
power_of_two: Whether scales are powers of two.
transform: Whether the columnwise nvfp4 copy is made of values after the random Hadamard transform.
stochastic: Whether nvfp4 values are rounded up or down at random, by their distance.
rng: Seed and offset of these draws, int64 [2] on the device. None where nothing is drawn.
site: Number that tells the draws of one call apart.
four_over_six: "MAE" or "MSE": each nvfp4 block is quantized twice, and the one with the smaller error is kept.
    None quantizes once.
nonfinite: Counts of NaNs and infinities, int64 [2] on the device, which are raised. None counts nothing.
maxima: Maxima in the place of the values' own, float32 [1], for nvfp4 with `transform` [2]. None takes the
    values' own.
scaled_by.maxima: Maxima in the place of the values' own.
shape: Shape, a tuple of sizes.
QuantizedTensor.shape: Shape of the matrix, (rows, columns).
rowwise_in.shape: Shape of the matrix, (rows, columns).
columnwise_in.shape: Shape of the matrix, (rows, columns).
reshape.shape: New shape of as many elements; one size may be -1.
block: Bytes that hold the copy.
QuantizedTensor.block: Memory that holds all of its copies. None where each has its own.
device: Device of the memory.
Runtime.cuda.device: Number of the GPU.
stream: Address of the stream; 0 is the default stream.
from_dlpack.stream: Address of the CUDA stream on which the tensor will be used. None, like 0, is the default
    stream.
allocator: Where memory comes from.
Runtime.cpu.allocator: Where memory comes from. None is NumPy.
Runtime.cuda.allocator: Where memory comes from. None is the driver's pool.
backend: What computes.
dtype: Type of the elements.
Runtime.tensor.dtype: Type of the elements. None is the array's.
from_dlpack.dtype: Type of the elements, where the producer can only export another one of the same width. None
    is the producer's.
view_as.dtype: Type of the same width.
tensor: Tensor of this device.
tensors: Tensors that are used.
name: Name of the stream, or of the scratch memory.
array: NumPy array, or nested lists.
from_numpy.array: NumPy array, or one of ml_dtypes' types.
other: Runtime whose work is waited for.
nbytes: Number of bytes.
zeroed: Whether the memory begins as zeros, which whoever uses it leaves behind.
ptr: Address.
owner: Object that keeps the memory alive.
strides: Strides in elements. None is dense, row by row.
start: First row.
stop: Row behind the last.
producer: Object that speaks DLPack, or a capsule.
calls: {name: te_core.program.Example}.
path: File to write.
"""
