"""The folder of `transformer_engine.pytorch.cpp_extensions` (te_torch/compat/contents.py)."""
