"""The features of the namespace `transformer_engine`: a folder for `feature_dirs` of nvdlfw_inspect.api.initialize.

Each file beside this one describes one of them. Loading the folder registers all (`load.py`), importing a file none.
"""
