"""The folder of `transformer_engine.pytorch.tensor.storage` (te_torch/compat/contents.py)."""
