"""The folder of `transformer_engine.pytorch.optimizers` (te_torch/compat/contents.py)."""
