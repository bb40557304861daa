"""The folder of `transformer_engine.pytorch.tensor` (te_torch/compat/contents.py)."""
