"""`DisableFP8GEMM`: the older name of `DisableQuantizationGEMM`."""

from te_torch.debug.features.disable_quantization_gemm import DisableQuantizationGEMM


class DisableFP8GEMM(DisableQuantizationGEMM):
    """The older name of DisableQuantizationGEMM."""

    older = "DisableFP8GEMM", "DisableQuantizationGEMM"
