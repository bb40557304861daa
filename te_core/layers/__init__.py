"""Forward and backward of every module as pure functions over operations.

Each layer file has a frozen spec, a named tuple of what is saved (fixed order, tensors only), and

    forward(rt, *inputs, spec, scales)          -> (outputs, saved)
    backward(rt, *output_grads, saved, spec, scales) -> input gradients, in the inputs' order

Backward reads what is saved, the spec and the scaling state, nothing else.
"""
