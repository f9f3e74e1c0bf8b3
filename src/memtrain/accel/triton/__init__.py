"""Triton kernels for CUDA devices. Nothing here is imported where there is none."""
