"""te_core: a framework-agnostic runtime for low-precision Transformer layers.

Imports NumPy and ml_dtypes only; CUDA libraries are loaded at first use of a CUDA runtime.
"""

from te_core.dlpack import from_dlpack
from te_core.errors import ArgumentError, LibraryError, UnsupportedError
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.tensor import Tensor, from_numpy

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Cast",
    "LibraryError",
    "QuantizedTensor",
    "Runtime",
    "Tensor",
    "UnsupportedError",
    "from_dlpack",
    "from_numpy",
]
