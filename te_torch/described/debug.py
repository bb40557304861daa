"""What the arguments of precision debugging are."""

TEXT = """
model: Model whose layers are looked at.
layers: Which layers: a regular expression, several, or a function of the name. None is all.
gemms: Which products: of "fprop", "dgrad" and "wgrad". None is all.
tensors: Which tensors: of "activation", "weight", "gradient", "output", "dgrad" and "wgrad", and of attention.
    None is all.
freq: Every so many steps are looked at.
start_step: First step that is looked at.
end_step: Last step that is looked at. None has no end.
group: Process group over which statistics are reduced at each `step()`. None: each process has its own.
step_fn: Function `step_fn(model) -> loss` that runs the model in its `autocast`, and does the same each time.
level: "gemm" switches the products of a layer one by one, "layer" all together.
compare: What is compared: "loss" or "gradients". None is gradients where there are some, else the loss.
tolerance: What a good result may be off by, as a share. None finds what stands out of what healthy products
    lose.
restore: Optimizers and schedulers whose state is set back before each run.
progress: Whether each run is told on stderr.
path: File to write to.
title: Title of the page.
folder: Folder to write the pictures to.
enabled: Whether statistics of weights are those of the whole tensor-parallel group.
verdict: "found", "nothing", "everything" or "elsewhere".
culprits: The products that spoil the result.
off: What the result was off by, and what it is with the culprits in high precision.
compared: "loss" or "gradients".
runs: How many times the step ran.
of: How many sets of products could be switched.
layer: Name of the layer.
Culprit.gemms: Products of the layer.
without: What the result is off by if all culprits but this one are in high precision.
Series.gemms: Products that read or made the tensor.
tensor: Which tensor it is.
kind, cast: How it is quantized. None: it is not.
count: Number of elements in each step.
amax: Largest absolute value in each step.
underflow: Percentage of elements that became 0, in each step.
overflow: Percentage of elements beyond the largest that the scale can hold, in each step.
snr: Signal to noise of the cast in dB, in each step.
scale: What values are multiplied by, in each step; of several the smallest.
nonfinite: Number of NaNs and infinities in each step.
order: Place of the layer in the order in which layers ran.
steps: Numbers of the steps that were looked at.
series: What was seen of each tensor.
unseen: Layers that were asked for and did not run.
blind: How many steps were looked at in vain.
points: Pairs (product, tensor) that are looked at.
when: (freq, start_step, end_step).
rt: Runtime that the product runs on.
number: Number of the product among those that are looked at. None: it is not.
point: Pair (product, tensor).
value: Tensor in high precision.
out: What it was quantized to. None: it was not.
module: Module whose products are meant.
made: Function `made(number of the product, inspector that it has)` that makes an inspector.
"""
