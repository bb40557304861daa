"""te_core: a framework-agnostic runtime for low-precision Transformer layers.

Imports NumPy and ml_dtypes only; CUDA libraries are loaded at first use of a CUDA runtime.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from te_core.described import Describer as _Describer
from te_core.described.core import TEXT as _TEXT
from te_core.dlpack import from_dlpack
from te_core.errors import ArgumentError, LibraryError, UnsupportedError
from te_core.quantized import Cast, QuantizedTensor
from te_core.runtime import Runtime
from te_core.spelling import getter as _getter
from te_core.tensor import Tensor, from_numpy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__version__ = "0.2.0"

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
    "record",
]


def record(calls: Mapping[str, Any], path: str | Path) -> None:
    """Write a file in which each of the calls (`te_core.program.Example`) is an entry, for a player without Python."""
    _import_module("te_core.program").record(calls, path)  # which brings all layers


_Describer(_TEXT).describe(globals()[_name] for _name in __all__)

if not TYPE_CHECKING:  # a checker would take every name for one of this module's
    __getattr__ = _getter(__name__)
