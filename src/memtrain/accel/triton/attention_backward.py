"""Attention over heads whose queries and keys are turned: the backward pass.

What comes out is the gradient of the projection before it was turned: gradients are turned back as
they are written. The reference is autograd over `nn.blocks.Attention.forward`.
"""

from torch import Tensor

from memtrain.accel.triton.attention_heads import Heads, on_hopper
from memtrain.accel.triton.attention_long_backward import run_long_backward
from memtrain.accel.triton.attention_short_backward import LONGEST, run_short_backward


def run_backward(
    heads: Heads,
    gradients: Heads,
    out: Tensor,
    log_sum: Tensor,
    out_gradient: Tensor,
    cosine: Tensor,
    sine: Tensor,
    first: int,
    causal: bool,
) -> None:
    """Fill the gradients of heads before they were turned, laid out as the heads are."""
    given = heads, gradients, out, log_sum, out_gradient, cosine, sine, first
    if on_hopper(heads, causal):
        import memtrain.accel.hopper.attention_backward as attention_backward

        attention_backward.run_backward(*given)
    elif max(heads.queries, heads.keys) <= LONGEST:
        run_short_backward(*given, causal)
    else:
        run_long_backward(*given, causal)
