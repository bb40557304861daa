"""Registers the features: nvdlfw_inspect runs every file of the folders in `feature_dirs`, and this one acts."""

from te_torch.debug.registering import register

register()
