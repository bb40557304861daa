"""Modules of flax Linen over te_jax's functions, with the names and the parameters of transformer_engine.jax.flax."""

try:
    import flax as _flax  # noqa: F401
except ImportError as error:
    from te_core import hints
    from te_core.errors import MissingPackageError

    raise MissingPackageError("te_jax.flax", "no package flax", "flax 0.12 or later", hints.install("flax")) from error

from te_jax.flax.attention import DotProductAttention, MultiHeadAttention, RelativePositionBiases
from te_jax.flax.base import extend_logical_axis_rules
from te_jax.flax.dense import DenseGeneral, LayerNorm, LayerNormDenseGeneral
from te_jax.flax.described import describe
from te_jax.flax.mlp import LayerNormMLP
from te_jax.flax.not_built import make_dot_general_cls
from te_jax.flax.softmax import Softmax
from te_jax.flax.transformer import TransformerLayer, TransformerLayerType
from te_jax.layers import SoftmaxType

__all__ = [
    "DenseGeneral",
    "DotProductAttention",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "LayerNormMLP",
    "MultiHeadAttention",
    "RelativePositionBiases",
    "Softmax",
    "SoftmaxType",
    "TransformerLayer",
    "TransformerLayerType",
    "extend_logical_axis_rules",
    "make_dot_general_cls",
]

describe(globals()[name] for name in __all__)
