"""Triton kernels for training on CUDA devices. Importing them needs Triton."""

HEAD_DIMS = (32, 64)
"""The sizes of heads that the attention kernels support."""
