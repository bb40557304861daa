"""te_torch.debug.features.disable_fp8_gemm under its documented name."""

from te_torch.debug.features.disable_fp8_gemm import DisableFP8GEMM as DisableFP8GEMM
