"""Optimizers that update all tensors of a group in one launch, and the functions on lists of tensors below them."""

from te_torch import not_built
from te_torch.optimizers.adam import FusedAdam
from te_torch.optimizers.clip import clip_by_norm
from te_torch.optimizers.convert import from_torch_adamw, to_torch_adamw
from te_torch.optimizers.multi_tensor import (
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_adam_param_remainder,
    multi_tensor_applier,
    multi_tensor_compute_scale_and_scale_inv,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from te_torch.optimizers.sgd import FusedSGD

__all__ = [
    "FusedAdam", "FusedSGD", "MultiTensorApply", "clip_by_norm", "from_torch_adamw", "multi_tensor_adam",
    "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_adam_param_remainder",
    "multi_tensor_applier", "multi_tensor_compute_scale_and_scale_inv", "multi_tensor_l2norm", "multi_tensor_scale",
    "multi_tensor_scale_tensor", "multi_tensor_sgd", "multi_tensor_unscale_l2norm", "to_torch_adamw",
]  # fmt: skip

#: Of our own: not in the documented module of this name.
OURS = ("clip_by_norm", "from_torch_adamw", "to_torch_adamw")

__getattr__ = not_built.getter(__name__, "pytorch.optimizers")
