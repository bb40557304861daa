"""Layers as functions of arrays: NumPy's, CuPy's, torch's, JAX's, and of all that speaks DLPack.

    y, back = te.layernorm_mlp(x, **parameters, recipe=recipe, scaling=scaling)
    grads = back(dy)                             # {"x": ..., "fc1_weight": ...}
    te.update(scaling)

Names are those of te_torch's parameters and options. Memory is x's library's, where it has an allocator.
"""

from te_core.functional.function import DESCRIBER, Back, Function
from te_core.functional.quantizing import dequantize, quantize
from te_core.functional.scaling import Scaling, update

linear = Function("linear")
layernorm = Function("layernorm")
rmsnorm = Function("rmsnorm")
layernorm_linear = Function("layernorm_linear")
layernorm_mlp = Function("layernorm_mlp")
grouped_linear = Function("grouped_linear")
attention = Function("attention")
rope = Function("rope")
softmax = Function("softmax")
activation = Function("activation")
l2_norm = Function("l2_norm")
bias_dropout_add = Function("bias_dropout_add")
moe_permute = Function("moe_permute")
moe_unpermute = Function("moe_unpermute")
router_topk = Function("router_topk")
router_scores = Function("router_scores")
router_aux_loss = Function("router_aux_loss")
multihead_attention = Function("multihead_attention")
transformer_layer = Function("transformer_layer")

__all__ = [
    "Back",
    "Function",
    "Scaling",
    "activation",
    "attention",
    "bias_dropout_add",
    "dequantize",
    "grouped_linear",
    "l2_norm",
    "layernorm",
    "layernorm_linear",
    "layernorm_mlp",
    "linear",
    "moe_permute",
    "moe_unpermute",
    "multihead_attention",
    "quantize",
    "rmsnorm",
    "rope",
    "router_aux_loss",
    "router_scores",
    "router_topk",
    "softmax",
    "transformer_layer",
    "update",
]

DESCRIBER.describe((Back, Function, Scaling, dequantize, quantize, update))
