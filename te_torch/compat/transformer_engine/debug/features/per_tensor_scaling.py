"""te_torch.debug.features.per_tensor_scaling under its documented name."""

from te_torch.debug.features.per_tensor_scaling import PerTensorScaling as PerTensorScaling
