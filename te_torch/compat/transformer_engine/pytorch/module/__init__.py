"""The folder of `transformer_engine.pytorch.module` (te_torch/compat/contents.py)."""
