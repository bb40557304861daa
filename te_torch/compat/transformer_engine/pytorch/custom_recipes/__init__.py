"""The folder of `transformer_engine.pytorch.custom_recipes` (te_torch/compat/contents.py)."""
