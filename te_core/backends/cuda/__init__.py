"""The CUDA backend: cuBLASLt, cuDNN, and kernels of our own. One file per operation, named as in `te_core.ops`."""
