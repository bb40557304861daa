"""te_torch.debug.features.log_tensor_stats under its documented name."""

from te_torch.debug.features.log_tensor_stats import LogTensorStats as LogTensorStats
