"""The reference backend: NumPy on the CPU, bit-exact in FP8. Slow beside a GPU, but right. See backend.py."""
