"""The folder of `transformer_engine.pytorch.attention.dot_product_attention` (te_torch/compat/contents.py)."""
