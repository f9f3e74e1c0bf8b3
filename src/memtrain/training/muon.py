"""Muon: momentum whose update is a matrix with all singular values near 1 (Jordan et al., 2024).

The mathematics of torch.optim.Muon. That one reads the learning rate on the host, so a CUDA graph
of a step would repeat its first rate; this one keeps rate and decisions on the device.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from memtrain.runs.distributed import spread

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: the steepest slope at 0 that still ends between 0.5 and 1.5."""


class Muon(torch.optim.Optimizer):
    """Muon for matrices of hidden layers.

    Args:
        params: matrices, or groups of them.
        lr: the learning rate; a tensor on the device if steps are captured as a CUDA graph.
        weight_decay: decoupled.
        momentum: of the gradient.
        nesterov: whether the update looks one step of momentum ahead.
        ns_steps: iterations that orthogonalize an update.
        eps: least norm that an update is divided by.
        adjust_lr_fn: match_rms_adamw scales updates to the size of AdamW's, so that both take the
            same learning rate; original scales tall matrices only.
    """

    found_inf: Tensor | None = None
    """Set before a step: where it is 1, weights and momentum stay as they are."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r}: match_rms_adamw or original")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: must be at least 0 and below 1")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps={ns_steps}: must be 1..99")
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov)
        defaults |= dict(ns_steps=ns_steps, eps=eps, adjust_lr_fn=adjust_lr_fn)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient, those of one shape together."""
        assert closure is None
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    sharded = id(matrix) if spread(matrix) else None
                    alike.setdefault((matrix.shape, matrix.dtype, sharded), []).append(matrix)
            for matrices in alike.values():
                self._update(matrices, group)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        weights, before = _stacked(matrices), _stacked(buffers)
        gradient = _stacked([matrix.grad for matrix in matrices if matrix.grad is not None])
        average = before.lerp(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        update = orthogonalized(ahead, group["ns_steps"], group["eps"]).to(weights.dtype)
        rows, columns = matrices[0].shape
        ratio = math.sqrt(max(1, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        after = weights * (1 - group["lr"] * group["weight_decay"]) - update * (group["lr"] * ratio)
        if self.found_inf is not None:
            good = self.found_inf == 0
            average, after = average.where(good, before), after.where(good, weights)
        for place, new in ((buffers, average), (matrices, after)):
            torch._foreach_copy_(place, list(new) if len(place) > 1 else [new])


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0]


def orthogonalized(
    update: Float[Tensor, "*N A B"], steps: int = 5, eps: float = 1e-7
) -> Float[Tensor, "*N A B"]:
    """U V' of the singular values U S V', about, by Newton-Schulz iterations in bf16."""
    a, b, c = COEFFICIENTS
    add = torch.addmm if update.dim() == 2 else torch.baddbmm
    tall = update.shape[-2] > update.shape[-1]
    x = update.bfloat16().mT if tall else update.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)  # singular values of at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
