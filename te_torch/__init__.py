"""te_torch: the module API on PyTorch. The documented names, nothing else."""

from te_torch.autocast import autocast, fp8_autocast, get_default_recipe
from te_torch.checkpoint_state import plain_state_dict, prepare_state
from te_torch.modules.grouped_linear import GroupedLinear
from te_torch.modules.layernorm_linear import LayerNormLinear
from te_torch.modules.layernorm_mlp import LayerNormMLP
from te_torch.modules.linear import Linear
from te_torch.modules.norm import LayerNorm, RMSNorm

__all__ = [
    "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm", "autocast", "fp8_autocast",
    "get_default_recipe", "plain_state_dict", "prepare_state",
]  # fmt: skip
