"""Precision debugging: which layer, which GEMM and which tensor loses the precision (docs/guides/14-a-bad-loss.md).

`inspect` looks at the tensors of every GEMM, `bisect` names the GEMMs that spoil a result.
"""

from te_torch.debug.bisection import Bisection, Culprit, bisect
from te_torch.debug.inspection import Inspection, inspect
from te_torch.debug.report import Report, Series
from te_torch.debug.state import TEDebugState, set_weight_tensor_tp_group_reduce
from te_torch.described import describe_debug

__all__ = [
    "Bisection", "Culprit", "Inspection", "Report", "Series", "TEDebugState", "bisect", "inspect",
    "set_weight_tensor_tp_group_reduce",
]  # fmt: skip

describe_debug(globals()[name] for name in __all__)
