"""What is built of modules and of attention: `MultiheadAttention`, and `TransformerLayer` of that and an MLP."""

from te_torch.transformer.layer import TransformerLayer
from te_torch.transformer.multihead import MultiheadAttention

__all__ = ["MultiheadAttention", "TransformerLayer"]
