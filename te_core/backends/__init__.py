"""The operations on each kind of device: cuda, cpu (NumPy reference), meta (shapes only)."""
