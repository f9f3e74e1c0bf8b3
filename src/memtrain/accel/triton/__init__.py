"""Triton kernels for CUDA devices: training, and rollouts without autograd. Needs Triton.

A recurrent step is a chain of small products, whose time depends on the number of kernels, so
`rollout_*.py` run a Transformer block in two to five kernels. Norms are fused into the product that
reads their result, bias and GELU into the one before them, residuals into the one that precedes the
sum; several short sequences share a tile of attention. Products are computed in bf16 and summed in
fp32; the residual stream is bf16, as under autocast.
"""

HEAD_DIMS = (32, 64)
"""The sizes of heads that the attention kernels support."""
