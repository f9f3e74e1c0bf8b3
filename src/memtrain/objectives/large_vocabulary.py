"""The cross-entropy of a large vocabulary, without holding all logits.

Logits (positions, V) of 2,000 positions and 100,000 tokens take 0.8 GB, and their gradient as much
again. Here the product with the output matrix, the loss and its gradients are computed for a chunk
of positions at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from memtrain.losses import wrong_target
from memtrain.models.attention import AttentionReadout
from memtrain.models.layers import refuse_second_derivatives
from memtrain.models.teacher import Decoder
from memtrain.shapes import IGNORE_INDEX, Space, Values

LOGITS_AT_ONCE = {"cpu": 2**23, "cuda": 2**26}
"""Up to this many logits (positions x V) are computed at once; more in chunks of this many.

On a CPU core the two ways take equal time at 2**23, which is a batch of the paper's size with its
256 tokens. Larger tensors are slower, because the allocator returns their memory to the system
(keep_freed_memory in accel/engine.py): a step of SMT with 2**24 logits takes 24 % less time in two
chunks. Smaller chunks make the sums over a large output matrix slow: with 100,000 tokens of width
256 half as many logits took 18 % longer. A GPU needs larger products; its number, 256 MiB of
logits, is not measured.
"""


def has_many_logits(positions: int, space: Space, device: torch.device) -> bool:
    """Whether the logits of this many positions are computed in chunks."""
    return not isinstance(space, Values) and positions > positions_at_once(space, device)


def positions_at_once(vocab_size: int, device: torch.device) -> int:
    """How many positions' logits are computed at once."""
    return max(1, LOGITS_AT_ONCE.get(device.type, LOGITS_AT_ONCE["cpu"]) // vocab_size)


@dataclass(frozen=True, slots=True)
class LargeLogits:
    """Logits (*rows, V) that are too many to hold, as what they are computed from."""

    hidden: Float[Tensor, "*rows W"]
    decoder: Decoder | AttentionReadout
    """Its head makes logits of the hidden states."""

    def __getitem__(self, index: tuple[slice, ...]) -> "LargeLogits":
        return LargeLogits(self.hidden[index], self.decoder)

    def cross_entropy(self, targets: Int[Tensor, "*rows"]) -> Float[Tensor, ""]:
        """The sum over all targets, in nats."""
        compute: Callable[[nn.Linear, Tensor], Tensor] = partial(summed_loss, targets=targets)
        return self.decoder.with_head(compute, self.hidden)


def summed_loss(
    head: nn.Linear, hidden: Float[Tensor, "*rows W"], targets: Int[Tensor, "*rows"]
) -> Float[Tensor, ""]:
    """The cross-entropy of head(hidden), summed over all positions that carry a target.

    It equals F.cross_entropy(head(hidden).float(), targets, reduction="sum"), also under autocast.
    """
    device, weight, bias = hidden.device.type, head.weight, head.bias
    autocast = torch.is_autocast_enabled(device)
    kind = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    inputs = (hidden.flatten(0, -2), weight, bias)
    # In forward(), gradients are off, and needs_input_grad is set under no_grad() too.
    wanted = tuple(
        torch.is_grad_enabled() and one is not None and one.requires_grad for one in inputs
    )
    try:
        with torch.autocast(device, enabled=False):  # casts are made once, not per chunk
            return _SummedLoss.apply(*inputs, targets.flatten(), kind, wanted)
    except IndexError:  # on a GPU the kernel itself asserts this
        raise wrong_target(targets, head.out_features) from None


class _SummedLoss(torch.autograd.Function):
    """The gradients are computed with the loss: logits are made once, and backward only scales."""

    @staticmethod
    def forward(
        ctx,
        hidden: Float[Tensor, "N W"],
        weight: Float[Tensor, "V W"],
        bias: Float[Tensor, " V"] | None,
        targets: Int[Tensor, " N"],
        kind: torch.dtype,
        wanted: tuple[bool, bool, bool],
    ) -> Float[Tensor, ""]:
        matrix, offset = weight.to(kind), None if bias is None else bias.to(kind)
        # Sums over chunks are in fp32 at least.
        exact = torch.promote_types(kind, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        of_bias = torch.zeros_like(weight[:, 0], dtype=exact) if wanted[2] else None
        rows = positions_at_once(len(weight), hidden.device)
        for first in range(0, len(hidden), rows):
            chunk = slice(first, first + rows)
            x, target = hidden[chunk].to(kind), targets[chunk]
            logs = F.linear(x, matrix, offset).to(exact).log_softmax(dim=1)
            total += F.nll_loss(logs, target, ignore_index=IGNORE_INDEX, reduction="sum")
            if not any(wanted):
                continue
            # The gradient of a logit is its probability, less 1 for the target.
            there = (target != IGNORE_INDEX)[:, None]
            gradient = logs.exp_()
            gradient[torch.arange(len(x), device=x.device), target.where(there[:, 0], 0)] -= 1
            gradient = gradient.to(kind)
            # Positions without a target are left out of the small factor of each product.
            if of_hidden is not None:
                of_hidden[chunk] = (gradient @ matrix).where(there, 0)
            if of_weight is not None and kind == exact:
                of_weight.addmm_(gradient.T, x.where(there, 0))
            elif of_weight is not None:
                of_weight += gradient.T @ x.where(there, 0)
            if of_bias is not None:
                of_bias += there[:, 0].to(exact) @ gradient.to(exact)
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        if of_bias is not None and bias is not None:
            of_bias = of_bias.to(bias.dtype)
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx, scale: Float[Tensor, ""]) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("the loss of many logits", "take fewer positions at a time")
        gradients = (one if one is None else one * scale.to(one) for one in ctx.saved_tensors)
        return (*gradients, None, None, None)
