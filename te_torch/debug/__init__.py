"""Precision debugging: which layer, which GEMM and which tensor loses the precision (docs/debugging.md)."""
