"""The folder of `transformer_engine.__path__` while te_torch.compat is installed, and this the file of its `__file__`.

What the name holds is made in te_torch/compat/contents.py; here lie files that programs look for by their path.
"""
