"""The folder of `transformer_engine.common` (te_torch/compat/contents.py)."""
