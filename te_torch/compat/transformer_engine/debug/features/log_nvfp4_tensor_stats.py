"""te_torch.debug.features.log_nvfp4_tensor_stats under its documented name."""

from te_torch.debug.features.log_nvfp4_tensor_stats import LogNvfp4TensorStats as LogNvfp4TensorStats
