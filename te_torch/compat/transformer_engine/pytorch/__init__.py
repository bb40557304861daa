"""The folder of `transformer_engine.pytorch` (te_torch/compat/contents.py)."""
