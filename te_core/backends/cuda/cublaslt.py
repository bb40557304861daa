"""cuBLASLt as this project uses it: the numbers of its enums, and a dozen functions.

The functions come from `nvmath.bindings.cublasLt` (0.1 us a call, releases the GIL), or from ctypes where nvmath
is not installed (0.5 to 1.5 us a call). Both take the same arguments, all of them plain integers: handles,
addresses, sizes. Loaded at first use; the library is the one `te_core.libraries` chooses.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import byref, c_int, c_int64, c_size_t, c_uint64, c_void_p
from importlib import import_module
from importlib.util import find_spec
from threading import RLock
from types import ModuleType
from typing import Any

from te_core import dtypes, libraries
from te_core.dtypes import DType

# cublasComputeType_t
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77

#: cudaDataType_t of our types.
DATA_TYPES: dict[DType, int] = {
    dtypes.float32: 0,
    dtypes.float16: 2,
    dtypes.bfloat16: 14,
    dtypes.float8_e4m3: 28,
    dtypes.float8_e5m2: 29,
    dtypes.float4_e2m1: 33,
}
R_32F = 0

# cublasLtMatmulDescAttributes_t
POINTER_MODE, TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD = 2, 3, 4, 7, 8, 11, 12
A_SCALE_POINTER, B_SCALE_POINTER, FAST_ACCUM, BIAS_DATA_TYPE, A_SCALE_MODE, B_SCALE_MODE = 17, 18, 25, 26, 31, 32

# cublasLtPointerMode_t: alpha and beta are read on the device, when the product runs
POINTERS_ON_DEVICE = 1

#: cublasLtMatmulMatrixScale_t by (scaling, tiled). The square tiles of mxfp8 and nvfp4 are stored piece by piece.
SCALE_MODES = {
    ("block", False): 4,
    ("block", True): 5,
    ("mxfp8", False): 2,
    ("mxfp8", True): 2,
    ("nvfp4", False): 1,
    ("nvfp4", True): 1,
}

# cublasLtEpilogue_t
DEFAULT, BIAS, GELU, GELU_BIAS, GELU_AUX, GELU_AUX_BIAS = 1, 4, 32, 36, 160, 164
DGELU, BGRADB = 192, 512
EPILOGUE_NAMES = {
    DEFAULT: "none",
    BIAS: "BIAS",
    GELU: "GELU",
    GELU_BIAS: "GELU_BIAS",
    GELU_AUX: "GELU_AUX",
    GELU_AUX_BIAS: "GELU_AUX_BIAS",
    DGELU: "DGELU",
    BGRADB: "BGRADB",
}

# cublasLtMatmulPreferenceAttributes_t
PREF_WORKSPACE, PREF_REDUCTION_MASK, PREF_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
# cublasLtReductionScheme_t
REDUCE_IN_PLACE, REDUCE_COMPUTE_TYPE = 1, 2

#: cublasLtMatmulAlgoConfigAttributes_t that say which kernel an algorithm is.
ALGORITHM_ATTRIBUTES = {"id": 0, "tile": 1, "split_k": 2, "reduction": 3, "stages": 6, "cluster": 8}

ALGO_BYTES = 64
RESULT_BYTES = 96  # algo[64], workspace u64, status i32, waves f32, reserved

#: Statuses that mean "not this combination": INVALID_VALUE, ARCH_MISMATCH, NOT_SUPPORTED.
REFUSALS = (7, 8, 15)


class CublasLtError(RuntimeError):
    """A call of the ctypes fallback that did not succeed (nvmath raises one of its own with the same field)."""

    def __init__(self, call: str, status: int = 0) -> None:
        self.status = status
        super().__init__(f"{call} returned status {status}" if status else call)  # 0: `call` is the message


class CtypesBindings:
    """nvmath's functions, by ctypes: matmul_desc_create is cublasLtMatmulDescCreate. Names and arguments as there."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        lib.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
        lib.cublasLtMatmulDescSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
        lib.cublasLtMatmulPreferenceSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
        lib.cublasLtMatrixLayoutCreate.argtypes = [c_void_p, c_int, c_uint64, c_uint64, c_int64]
        lib.cublasLtMatmulAlgoGetHeuristic.argtypes = [c_void_p] * 7 + [c_int, c_void_p, c_void_p]
        lib.cublasLtMatmulAlgoCheck.argtypes = [c_void_p] * 8
        lib.cublasLtMatmulAlgoConfigGetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t, c_void_p]
        lib.cublasLtGetVersion.restype = c_size_t
        for name in ("MatmulDescDestroy", "MatrixLayoutDestroy", "MatmulPreferenceDestroy"):
            getattr(lib, f"cublasLt{name}").argtypes = [c_void_p]

    def get_version(self) -> int:
        """The library's version, 130100 for 13.1.0."""
        return int(self._lib.cublasLtGetVersion())

    def __getattr__(self, name: str) -> Callable[..., int | None]:
        """A function at its first use; one that creates something gives it."""
        # By attribute: a library's items are new functions each time, which have no argument types.
        called, makes = f"cublasLt{name.title().replace('_', '')}", name.endswith("create")
        function = getattr(self._lib, called)

        def call(*args: int) -> int | None:
            made = c_void_p()
            status = function(byref(made), *args) if makes else function(*args)
            if status:
                raise CublasLtError(called, status)
            return (made.value or 0) if makes else None

        setattr(self, name, call)
        return call


_bindings: Any = None
_lock = RLock()


def bindings() -> Any:
    """nvmath's module, or `CtypesBindings` where it is not installed."""
    global _bindings
    if _bindings is None:
        with _lock:
            library = libraries.load("cublasLt")  # first: nvmath then finds this copy in the process
            if _bindings is None:
                try:
                    _bindings = _import_nvmath()
                except ImportError:
                    _bindings = CtypesBindings(library)
    return _bindings


def _import_nvmath() -> Any:
    """nvmath's extension module for cuBLASLt, without the rest of nvmath.

    The package's own __init__ imports torch wherever it is installed, and loads a dozen CUDA libraries: half a
    second, and a framework in a process that did not ask for one. The extension needs none of it, so it is
    imported below empty stand-ins of its parent packages, which are then removed: a later `import nvmath` is whole.
    """
    if "nvmath" in sys.modules:
        return import_module("nvmath.bindings.cublasLt")
    stand_ins = []
    try:
        for name in ("nvmath", "nvmath.bindings"):
            spec = find_spec(name)  # of the second: below the first's stand-in
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError(f"no package {name}")
            sys.modules[name] = stand_in = ModuleType(name)
            stand_in.__path__ = list(spec.submodule_search_locations)
            stand_ins.append(name)
        return import_module("nvmath.bindings.cublasLt")
    finally:
        for name in stand_ins:
            del sys.modules[name]


def set_value(lt: Any, desc: int, attribute: int, value: int, nbytes: int = 4) -> None:
    """Set a small integer attribute of an operation descriptor."""
    number = c_int64(value)  # little-endian: the low bytes are the value at any width
    lt.matmul_desc_set_attribute(desc, attribute, ctypes.addressof(number), nbytes)


def set_preference(lt: Any, preference: int, attribute: int, value: int, nbytes: int = 4) -> None:
    """Set an integer search preference."""
    number = c_int64(value)
    lt.matmul_preference_set_attribute(preference, attribute, ctypes.addressof(number), nbytes)


def describe(algo: int) -> dict[str, int]:
    """Which kernel an algorithm (an address of ALGO_BYTES) is, in cuBLASLt's own numbers."""
    lt, found, written = bindings(), {}, c_uint64(0)
    for name, attribute in ALGORITHM_ATTRIBUTES.items():
        value = c_int64(0)
        size = 2 if name == "cluster" else 4
        try:
            lt.matmul_algo_config_get_attribute(
                algo, attribute, ctypes.addressof(value), size, ctypes.addressof(written)
            )
        except Exception as error:  # nvmath's error type; an algorithm need not have every property
            if getattr(error, "status", None) is None:
                raise
            continue
        found[name] = value.value
    return found
