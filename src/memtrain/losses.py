"""The paper's losses and measures, one pure function per equation, on any tensors.

Leading axes (`*rows`) are free: batch, timesteps, or both. Letters of shapes are in shapes.py.

Example, for a cell and memory labels of your own:

    loss = memtrain.losses.dynamics_loss(cell(memory, token), label)
"""

import math
import operator
from collections.abc import Mapping
from functools import reduce

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.errors import MemtrainError, check_whole, did_you_mean
from memtrain.shapes import (
    IGNORE_INDEX,
    PARAMETERS,
    QUANTILES,
    WHOLE_BATCH,
    BatchShard,
    Likelihood,
    Losses,
)

__all__ = [
    "decode_loss", "value_loss", "dynamics_loss", "uniformity_loss", "total_loss", "squared_error",
    "value_losses", "rollout_drift", "unexplained_variance",
]  # fmt: skip


def decode_loss(
    logits: Float[Tensor, "*rows V"], targets: Int[Tensor, "*rows"], shard: BatchShard = WHOLE_BATCH
) -> Float[Tensor, ""]:
    """L^dec: cross-entropy in nats, the mean over all positions that carry a target.

    Args:
        logits: unnormalized log-probabilities, (*rows, V).
        targets: tokens 0..V-1, (*rows); IGNORE_INDEX (-100) where there is no target.
        shard: exchanges sums with processes that share the batch; leave it out.
    """
    _check_tensor("logits", logits)
    if not isinstance(targets, Tensor) or targets.shape != logits.shape[:-1]:
        raise MemtrainError(
            f"targets={_shape(targets)}: must have the shape of logits without the last axis, "
            f"{tuple(logits.shape[:-1])}; logits are {tuple(logits.shape)}"
        )
    if targets.dtype != torch.long:
        raise MemtrainError(f"targets={targets.dtype}: must be int64; pass targets.long()")
    logits, targets = _exact(logits.flatten(0, -2)), targets.flatten()
    try:
        total = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    except IndexError:  # on a GPU the kernel itself asserts this
        raise wrong_target(targets, logits.shape[1]) from None
    return shard.sum(total) / shard.sum((targets != IGNORE_INDEX).sum()).clamp(min=1)


def wrong_target(targets: Int[Tensor, "*rows"], classes: int) -> MemtrainError:
    """The error for targets of which one is no class."""
    outside = (targets != IGNORE_INDEX) & ((targets < 0) | (targets >= classes))
    return MemtrainError(
        f"targets={int(targets[outside][0])}: must be 0..{classes - 1}, the classes of logits, or "
        f"{IGNORE_INDEX} where there is no target"
    )


def value_loss(
    outputs: Float[Tensor, "*rows V"],
    targets: Float[Tensor, "*rows Y"],
    likelihood: Likelihood = "gaussian",
    shard: BatchShard = WHOLE_BATCH,
) -> Float[Tensor, ""]:
    """L^dec of numbers: the mean of `value_losses` over all target numbers that are not NaN.

    Args:
        outputs: parameters of the predicted distributions, (*rows, Y · P); see `value_losses`.
        targets: numbers, (*rows, Y); NaN where there is no target.
        likelihood: gaussian, student-t or quantile.
        shard: exchanges sums with processes that share the batch; leave it out.
    """
    losses = value_losses(outputs, targets, likelihood)
    return shard.sum(losses.sum()) / shard.sum((~targets.isnan()).sum()).clamp(min=1)


def value_losses(
    outputs: Float[Tensor, "*rows V"],
    targets: Float[Tensor, "*rows Y"],
    likelihood: Likelihood = "gaussian",
) -> Float[Tensor, "*rows Y"]:
    """The loss of each target number, 0 where it is NaN.

    For gaussian (parameters: mean, log of the deviation) and student-t (mean, log of the scale, and
    a number that softplus maps to the degrees of freedom above 2) it is the negative log-likelihood
    in nats. For quantile it is the pinball loss, the mean over 13 levels.
    """
    for name, value in (("outputs", outputs), ("targets", targets)):
        _check_tensor(name, value)
    if likelihood not in PARAMETERS:
        raise MemtrainError(f"likelihood={likelihood!r}: {did_you_mean(likelihood, PARAMETERS)}")
    needed = (*targets.shape[:-1], targets.shape[-1] * PARAMETERS[likelihood])
    if tuple(outputs.shape) != needed:
        raise MemtrainError(
            f"outputs={_shape(outputs)}: must be {needed}: {PARAMETERS[likelihood]} parameters of "
            f"{likelihood} for each number of targets, {_shape(targets)}"
        )
    outputs = _exact(outputs).unflatten(-1, (targets.shape[-1], -1))  # (*rows, Y, P)
    missing = targets.isnan()
    wanted = _exact(targets).where(~missing, 0)
    if likelihood == "quantile":
        levels = outputs.new_tensor(QUANTILES)
        error = wanted[..., None] - outputs
        losses = torch.maximum(levels * error, (levels - 1) * error).mean(-1)
    else:
        mean, scale = outputs[..., 0], log_scale(outputs[..., 1])
        z = (wanted - mean) * (-scale).exp()
        if likelihood == "gaussian":
            losses = 0.5 * z.square() + scale + 0.5 * math.log(2 * math.pi)
        else:
            freedom = degrees_of_freedom(outputs[..., 2])
            half = (freedom + 1) / 2
            constant = torch.lgamma(freedom / 2) - torch.lgamma(half)
            constant = constant + 0.5 * (freedom * math.pi).log()
            losses = constant + scale + half * torch.log1p(z.square() / freedom)
    return losses.where(~missing, 0)


LOG_SCALE_LIMIT = 7.0
"""Predicted deviations are between exp(-7) and exp(7) times the data's."""


def log_scale(raw: Tensor) -> Tensor:
    """The log of a predicted scale, softly limited: an exact prediction has no finite loss."""
    return LOG_SCALE_LIMIT * torch.tanh(raw / LOG_SCALE_LIMIT)


def degrees_of_freedom(raw: Tensor) -> Tensor:
    """The degrees of freedom of a predicted t distribution: above 2, so that it has a variance."""
    return 2 + F.softplus(raw)


def dynamics_loss(
    predicted: Float[Tensor, "*rows M D"],
    memory: Float[Tensor, "*rows M D"],
    weight: Float[Tensor, "*rows"] | None = None,
    shard: BatchShard = WHOLE_BATCH,
) -> Float[Tensor, ""]:
    """L^dyn: mean squared error over every dimension of the memory.

    Args:
        predicted: memories after a step of the cell, (*rows, M, D).
        memory: the labels, (*rows, M, D); gradients reach them too unless they are detached.
        weight: weights of the rows, (*rows); the loss is a weighted mean.
        shard: exchanges sums with processes that share the batch; leave it out.
    """
    squared = squared_error(predicted, memory)
    if weight is None:
        weight = torch.ones_like(squared)
    elif not isinstance(weight, Tensor) or weight.shape != squared.shape:
        raise MemtrainError(
            f"weight={_shape(weight)}: must have one number per memory, {tuple(squared.shape)}"
        )
    return shard.sum((squared * weight).sum()) / shard.sum(weight.sum()).clamp(min=1e-12)


def uniformity_loss(
    memory: Float[Tensor, "*rows M D"],
    samples: int = 512,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ""]:
    """L^unif: log of the mean Gaussian potential between memory tokens of unit length.

    0 when all memories are equal, about -4 when they cover the sphere evenly. Pairs of a token with
    itself and the empty memory are excluded; the paper's equation keeps the former and omits the
    scaling.

    Args:
        memory: (*rows, M, D).
        samples: the largest number of memory tokens to compare; more are sampled down.
        generator: samples them; by default torch's global one.
    """
    _check_tensor("memory", memory)
    check_whole("samples", samples, 0)
    if samples < 2:
        raise MemtrainError(f"samples={samples}: must be at least 2; the loss compares pairs")
    # Small distances vanish in bf16.
    with torch.autocast(memory.device.type, enabled=False):
        tokens = _exact(memory.flatten(0, -2))
        return _uniformity(tokens, samples, generator or torch.default_generator)


def total_loss(parts: Mapping[str, tuple[float, Float[Tensor, ""]]]) -> Losses:
    """The sum of named parts, each with its weight.

    Example: `total_loss({"decode": (1.0, decode), "dynamics": (0.1, dynamics)}).total.backward()`
    """
    if not parts:
        raise MemtrainError("parts={}: must have at least one loss, as name: (weight, loss)")
    for name, part in parts.items():
        if not isinstance(part, tuple) or len(part) != 2:
            raise MemtrainError(
                f"parts: {name} is a {type(part).__name__}; must be (weight, loss), as "
                f"{{{name!r}: (1.0, loss)}}"
            )
    weighted = [weight * loss for weight, loss in parts.values()]
    return Losses(
        reduce(operator.add, weighted), {name: loss.detach() for name, (_, loss) in parts.items()}
    )


def squared_error(
    predicted: Float[Tensor, "*rows M D"], memory: Float[Tensor, "*rows M D"]
) -> Float[Tensor, "*rows"]:
    """The squared error of each memory, the mean over its M·D numbers."""
    for name, value in (("predicted", predicted), ("memory", memory)):
        _check_tensor(name, value)
    if predicted.shape != memory.shape:
        raise MemtrainError(
            f"predicted={_shape(predicted)}: must have the shape of memory, {tuple(memory.shape)}; "
            "a cell returns memories of the shape that it gets, (B, M, D)"
        )
    return (_exact(predicted) - _exact(memory)).square().mean(dim=(-1, -2))


def rollout_drift(
    memories: Float[Tensor, "B T M D"], labels: Float[Tensor, "B T M D"]
) -> Float[Tensor, " T"]:
    """delta_t: the mean squared error at each step of a rollout.

    Args:
        memories: of the RNN, rolled out: `rnn.unroll(tokens)`.
        labels: of the teacher after the same tokens: `teacher.encode(tokens)`.
    """
    return _by_step(memories, labels).mean(0)


def unexplained_variance(
    memories: Float[Tensor, "B T M D"], labels: Float[Tensor, "B T M D"]
) -> Float[Tensor, " T"]:
    """1 - R^2 at each step: the drift as a share of the labels' variance over sequences and steps.

    0 if the rollout equals the labels, 1 if it is no nearer to them than their mean is.
    """
    drift, flat = rollout_drift(memories, labels), labels.flatten(0, 1).double()
    variance = variance_of(flat.sum(0), flat.square().sum(0), len(flat))
    return drift / variance.to(drift.dtype)


def variance_of(
    sums: Float[Tensor, "M D"], squares: Float[Tensor, "M D"], count: int
) -> Float[Tensor, ""]:
    """The mean variance of a memory's numbers from sums over `count` memories."""
    return (squares / count - (sums / count).square()).mean().clamp(min=1e-12)


def _by_step(
    memories: Float[Tensor, "B T M D"], labels: Float[Tensor, "B T M D"]
) -> Float[Tensor, "B T"]:
    if isinstance(memories, Tensor) and memories.dim() != 4:
        raise MemtrainError(
            f"memories={_shape(memories)}: must be (B, T, M, D), as rnn.unroll(tokens) gives them"
        )
    return squared_error(memories, labels)


def _uniformity(
    tokens: Float[Tensor, "N D"], samples: int, generator: torch.Generator
) -> Float[Tensor, ""]:
    if len(tokens) > samples:
        uniform = torch.rand(len(tokens), generator=generator, device=generator.device)
        tokens = tokens[uniform.topk(samples).indices.to(tokens.device)]
    there = tokens.any(dim=-1)  # the empty memory has no direction
    pairs = there[:, None] & there & ~torch.eye(len(tokens), dtype=torch.bool, device=there.device)
    tokens = F.normalize(tokens, dim=-1)
    squared_distance = 2 - 2 * tokens @ tokens.T
    potential = (-2 * squared_distance).exp().where(pairs, 0).sum() / pairs.sum().clamp(min=1)
    return potential.clamp(min=1e-12).log().where(pairs.any(), 0)


def _exact(value: Tensor) -> Tensor:
    """The value in fp32 at least: a sum of many numbers of 16 bits is not exact."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _check_tensor(name: str, value: object) -> None:
    """Refuse anything but floats of at least two axes."""
    if not isinstance(value, Tensor):
        raise MemtrainError(
            f"{name}={type(value).__name__}: must be a torch.Tensor; torch.tensor(...) makes one"
        )
    if not value.is_floating_point() or value.dim() < 2:
        raise MemtrainError(
            f"{name}={_shape(value)} of {value.dtype}: must hold floats and have at least 2 axes"
        )


def _shape(value: object) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
