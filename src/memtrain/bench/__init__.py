"""Benchmarks: how long a step takes here, fast path and plain reference side by side.

What is trained is noise, since only seconds and bytes count. The reference is the same
mathematics as plain PyTorch runs it: no compilation, no captured graphs, no kernels of our own.
"""
