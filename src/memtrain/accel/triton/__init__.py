"""Triton kernels for training on CUDA devices. Importing them needs Triton."""
