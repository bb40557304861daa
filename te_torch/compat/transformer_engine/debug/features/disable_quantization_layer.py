"""te_torch.debug.features.disable_quantization_layer under its documented name."""

from te_torch.debug.features.disable_quantization_layer import DisableQuantizationLayer as DisableQuantizationLayer
