"""Kernels in Gluon for NVIDIA's Hopper and the one shape where most of a teacher's time goes.

Gluon is Triton's lower language: what is brought when, and what runs beside what, is written here
and not left to a compiler. It changes from one Triton to the next, so nothing imports these but
what has asked `heads.on_hopper`.
"""
