"""Precision debugging: which layer, which GEMM and which tensor loses the precision (docs/debugging.md)."""

from te_torch.debug.state import TEDebugState as TEDebugState
from te_torch.debug.state import set_weight_tensor_tp_group_reduce as set_weight_tensor_tp_group_reduce
