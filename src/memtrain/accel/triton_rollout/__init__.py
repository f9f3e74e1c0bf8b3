"""A Transformer stack without autograd in two to five kernels per block, for rollouts.

A recurrent step is a chain of small products, whose time depends on the number of kernels. Norms
are fused into the product that reads their result, bias and GELU into the one before them,
residuals into the one that precedes the sum; several short sequences share a tile of attention.
Products are computed in bf16 and summed in fp32; the residual stream is bf16, as under autocast.
"""
