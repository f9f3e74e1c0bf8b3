"""Kernels in Gluon for NVIDIA's Hopper and the shapes where most of the time goes: attention of a
teacher's encoder, and a block of the cell or the readout when very many rows are generated.

Gluon is Triton's lower language: what is brought when, and what runs beside what, is written here
and not left to a compiler. It changes from one Triton to the next, so nothing imports these but
what has asked `heads.on_hopper` or `many.on_hopper`.
"""
