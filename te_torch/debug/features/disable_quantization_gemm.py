"""`DisableQuantizationGEMM`: GEMMs that stay in high precision."""

from te_torch.debug.features.api import OF_GEMMS, Switching


class DisableQuantizationGEMM(Switching):
    """These GEMMs of a layer run in high precision.

    gemms, gemms_struct:  fprop, dgrad, wgrad
    """

    keys = OF_GEMMS
