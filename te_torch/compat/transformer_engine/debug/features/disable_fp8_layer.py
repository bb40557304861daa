"""te_torch.debug.features.disable_fp8_layer under its documented name."""

from te_torch.debug.features.disable_fp8_layer import DisableFP8Layer as DisableFP8Layer
