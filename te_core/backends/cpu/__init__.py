"""The reference backend: NumPy on the CPU, bit-exact in FP8. Slow beside a GPU, but right.

A file holds the functions of the ops file of the same name; `codec.py` is how narrow types are read and written,
`executor.py` the scratch memory. Threads may call at once: scratch belongs to the calling thread.
"""

from te_core.backend import Backend

backend = Backend("cpu")
