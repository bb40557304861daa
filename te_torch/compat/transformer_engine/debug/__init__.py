"""A part of the alias: see the folder above. `features` is what `feature_dirs` of nvdlfw_inspect point to."""
