"""Where memories lie: two principal directions, found in memories of sampled sequences."""

import base64
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.data.codec import TokenCodec
from memtrain.errors import MemtrainError
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Sampler

SEQUENCES = 8
SAMPLED_STEPS = 256
"""Tokens that are sampled of each sequence, at most."""
POINTS = 768
"""Memories that the directions are found from, and that are drawn in the background."""


@dataclass(frozen=True, slots=True)
class Plane:
    """The two directions of largest variance of some points."""

    centre: Float[Tensor, " D"]
    axes: Float[Tensor, "2 D"]
    explained: tuple[float, float]
    """The fraction of the variance along each."""

    def project(self, points: Float[Tensor, "N D"]) -> Float[Tensor, "N 2"]:
        return (points - self.centre) @ self.axes.T


def fit_plane(points: Float[Tensor, "N D"]) -> Plane:
    """Principal components, from the smaller of the two products of the centred points."""
    centre = points.mean(dim=0)
    centred = (points - centre).double()
    rows, columns = centred.shape
    if rows < columns:
        values, vectors = torch.linalg.eigh(centred @ centred.T)
        axes = vectors[:, -2:].T @ centred
    else:
        values, vectors = torch.linalg.eigh(centred.T @ centred)
        axes = vectors[:, -2:].T
    if len(axes) < 2:
        axes = torch.cat([torch.zeros(2 - len(axes), columns, dtype=axes.dtype), axes])
    axes = axes.flip(0)
    axes = axes / axes.norm(dim=1, keepdim=True).clamp(min=1e-12)
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    axes = axes * torch.where(largest < 0, -1.0, 1.0)  # either sign would do: always the same
    total = float(values.clamp(min=0).sum()) or 1.0
    found = [max(0.0, float(value)) / total for value in values.flip(0)[:2]]
    first, second, *_ = [*found, 0.0]
    return Plane(centre, axes.float(), (first, second))


@torch.no_grad()
def sample_memories(
    rnn: RNN, codec: TokenCodec
) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T M D"]]:
    """Sequences sampled from the empty memory, always the same ones, and the memory after each
    token. They include the start token, or that of the class."""
    length = SAMPLED_STEPS if codec.picture is None else min(SAMPLED_STEPS, codec.picture.length)
    token = torch.full((SEQUENCES,), codec.start_token)
    if codec.classes:
        token = torch.from_numpy(codec.writable + codec.sample_classes(SEQUENCES, 0))
    uniforms = torch.rand(length, SEQUENCES, generator=torch.Generator().manual_seed(0))
    choose, memory = Sampler(allowed=codec.writable), rnn.empty_memory(SEQUENCES)
    tokens, memories = [], []
    for uniform in uniforms:
        logits, memory = rnn.step(memory, token)
        if logits.isnan().any():
            raise MemtrainError(
                "--html: the network's logits are not finite; its weights are damaged or its "
                "training diverged: take an earlier checkpoint"
            )
        tokens.append(token)
        memories.append(memory)
        token = choose(logits, uniform)
    return torch.stack(tokens, dim=1), torch.stack(memories, dim=1)


def describe_memories(memories: Float[Tensor, "B T M D"]) -> dict[str, Any]:
    """The planes of whole memories and of each memory token, as the page's script reads them."""
    points = memories.flatten(0, 1)
    points = points[torch.linspace(0, len(points) - 1, min(POINTS, len(points))).long()]
    whole = fit_plane(points.flatten(1))
    tokens = [fit_plane(one) for one in points.unbind(1)]
    clouds = [plane.project(one) for plane, one in zip(tokens, points.unbind(1), strict=True)]
    return {
        "whole": _describe(whole, whole.project(points.flatten(1))),
        "tokens": [_describe(*both) for both in zip(tokens, clouds, strict=True)],
        "largest": float(points.abs().flatten()[:: max(1, points.numel() // 2**20)].quantile(0.99))
        or 1.0,
    }


def _describe(plane: Plane, cloud: Float[Tensor, "N 2"]) -> dict[str, Any]:
    return {
        "centre": base64_of(plane.centre),
        "axes": base64_of(plane.axes),
        "explained": [round(value, 4) for value in plane.explained],
        "cloud": base64_of(cloud),
    }


def base64_of(value: Tensor) -> str:
    """Numbers of 32 bits as base64, little-endian."""
    return base64.b64encode(value.contiguous().numpy().astype("<f4").tobytes()).decode()
