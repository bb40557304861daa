"""The command `te`, and what its commands run: the training of a small GPT, comparisons, reports of a user's step.

It imports torch only where a command needs it: a mistake in a command is told at once, and `te doctor` runs without.
"""

import os

# Before NumPy is first imported: OpenBLAS's threads would go on polling after each product of the reference
# backend, in the way of torch's own (measured: te_core/backends/cpu/gemm.py).
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
