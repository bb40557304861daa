"""The folder of `transformer_engine.pytorch.attention` (te_torch/compat/contents.py)."""
