"""Attention: `DotProductAttention` over its backends, and `explain`, which says which one computes what."""

from te_torch.attention.dot_product import DotProductAttention, explain
from te_torch.described import describe

__all__ = ["DotProductAttention", "explain"]

describe((DotProductAttention, explain))
