"""te_torch.debug.features.log_fp8_tensor_stats under its documented name."""

from te_torch.debug.features.log_fp8_tensor_stats import LogFp8TensorStats as LogFp8TensorStats
