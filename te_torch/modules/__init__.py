"""The modules, a file each."""
