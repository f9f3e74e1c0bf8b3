"""Benchmarks: the time of a step here, on the fast path and on the plain reference.

Models train on random tokens, because only seconds and bytes matter. The reference is the same
mathematics in plain PyTorch: no compilation, no captured graphs, none of our kernels.
"""
