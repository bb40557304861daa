"""The features of te_torch.debug.features under their documented names; nvdlfw_inspect runs every file here."""
