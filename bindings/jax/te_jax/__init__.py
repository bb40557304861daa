"""te_core for JAX: low-precision layers as functions of JAX arrays, under jit, grad, scan, remat and shard_map."""

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as missing:
    from te_core import hints
    from te_core.errors import MissingPackageError

    raise MissingPackageError(
        "import te_jax", str(missing), "JAX 0.10 or later, which needs Python 3.11", hints.install("jax")
    ) from missing

from te_jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor, fused_attn
from te_jax.context import MeshResource, autocast
from te_jax.described import describe
from te_jax.grouped import grouped_dense
from te_jax.layers import (
    SoftmaxType,
    activation,
    dense,
    layernorm,
    layernorm_dense,
    layernorm_mlp,
    multihead_attention,
    softmax,
    transformer_layer,
)
from te_jax.quantizing import Quantized, dequantize, quantize
from te_jax.record import explain
from te_jax.router import RoutingMapFormat, ScoreFunction, fused_moe_aux_loss, fused_topk_with_score_function
from te_jax.rules import checkpoint_names
from te_jax.state import Scaling, scaling

__all__ = [
    "AttnBiasType", "AttnMaskType", "AttnSoftmaxType", "MeshResource", "QKVLayout", "Quantized",
    "RoutingMapFormat", "Scaling", "ScoreFunction", "SequenceDescriptor", "SoftmaxType", "activation", "autocast",
    "checkpoint_names", "dense", "dequantize", "explain", "fused_attn", "fused_moe_aux_loss",
    "fused_topk_with_score_function", "grouped_dense", "layernorm", "layernorm_dense", "layernorm_mlp",
    "multihead_attention", "quantize", "scaling", "softmax", "transformer_layer",
]  # fmt: skip

describe(globals()[name] for name in __all__)
