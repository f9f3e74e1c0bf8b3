"""A Transformer stack without autograd in two to five kernels a block, for rollouts.

One recurrent step is a chain of small products: what counts is how many kernels stand in the
chain. Norms are folded into the product that reads them, bias and GELU into the one that makes
them, residuals into the one that ends them; many short sequences share a tile of attention.
Products are taken in bf16 and summed in fp32; the residual stream is bf16, as under autocast.
"""
