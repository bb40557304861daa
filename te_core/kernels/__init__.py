"""CUDA kernels: sources (*.cu, common/*.cuh) and the one loader that compiles, caches and launches them."""

from te_core.kernels.loader import Kernel, get

__all__ = ["Kernel", "get"]
