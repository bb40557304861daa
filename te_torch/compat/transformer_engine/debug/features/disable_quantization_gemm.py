"""te_torch.debug.features.disable_quantization_gemm under its documented name."""

from te_torch.debug.features.disable_quantization_gemm import DisableQuantizationGEMM as DisableQuantizationGEMM
