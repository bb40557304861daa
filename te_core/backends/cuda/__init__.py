"""The CUDA backend: cuBLASLt, cuDNN, and kernels of our own. One file per operation, named as in `te_core.ops`.

Importing them imports no library of CUDA's: those are opened when they are first used.
"""

from te_core.backend import Backend

backend = Backend("cuda")
