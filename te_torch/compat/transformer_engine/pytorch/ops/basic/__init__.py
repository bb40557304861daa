"""The folder of `transformer_engine.pytorch.ops.basic` (te_torch/compat/contents.py)."""
