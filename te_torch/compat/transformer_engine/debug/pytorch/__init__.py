"""A part of the alias: see te_torch/compat/contents.py."""
