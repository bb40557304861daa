"""The folder of `transformer_engine.pytorch.ops` (te_torch/compat/contents.py)."""
