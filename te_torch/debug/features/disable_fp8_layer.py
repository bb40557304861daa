"""`DisableFP8Layer`: the older name of `DisableQuantizationLayer`."""

from te_torch.debug.features.disable_quantization_layer import DisableQuantizationLayer


class DisableFP8Layer(DisableQuantizationLayer):
    """The older name of DisableQuantizationLayer."""

    older = "DisableFP8Layer", "DisableQuantizationLayer"
