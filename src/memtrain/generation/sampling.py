"""Autoregressive sampling: read a prompt, then sample token by token."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.errors import MemtrainError, check_whole, did_you_mean
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Sampler

READ_STEPS = 256
"""Tokens of a prompt that are read at once; only their memories are held."""


def sample(
    rnn: RNN,
    prompt: Int[Tensor, "B P"],
    length: int,
    generator: torch.Generator,
    **options: Any,
) -> Int[Tensor, "B L"]:
    """Sample `length` tokens after the prompt, each fed back as the next input.

    Args:
        rnn: the network; it starts from the empty memory.
        prompt: read first, at least one token.
        length: number of tokens to sample.
        generator: the only source of randomness; on the model's device it saves copies.
        options: temperature, top_k, top_p and allowed, as of `Sampler`.

    Raises:
        MemtrainError: an argument is not what the model takes, or the logits are NaN.
    """
    if not isinstance(prompt, Tensor) or prompt.shape[1:] != (0,):  # an empty one: refused below
        rnn.check_tokens("prompt", prompt)
    check_whole("length", length, 1)
    if not isinstance(generator, torch.Generator):
        raise MemtrainError(
            f"generator={type(generator).__name__}: must be a torch.Generator; "
            "torch.Generator().manual_seed(0)"
        )
    known = [field.name for field in fields(Sampler)]
    for name in options:
        if name not in known:
            raise MemtrainError(f"{name}={options[name]!r}: {did_you_mean(name, known)}")
    # Large chunks, because nobody waits for them: each makes an engine check the weights again.
    chunks = sample_chunks(rnn, prompt, length, generator, Sampler(**options), chunk=256)
    return torch.cat(list(chunks), dim=1)


def sample_chunks(
    rnn: RNN,
    prompt: Int[Tensor, "B P"],
    length: int,
    generator: torch.Generator,
    sampler: Sampler,
    chunk: int = 16,
    memory: Float[Tensor, "B M D"] | None = None,
) -> Iterator[Int[Tensor, "B K"]]:
    """Yield the result of `sample` in chunks, as they are sampled.

    Given a `memory`, it continues from there, and the prompt may be empty.

    Tokens stay on the device; per chunk, the only value that is read back is whether the memory is
    NaN.

    Raises:
        MemtrainError: the logits or the memory are NaN; that chunk is not yielded.
    """
    if prompt.shape[1] < 1 and memory is None:
        raise MemtrainError("prompt: must hold at least one token")
    if length < 1:
        raise MemtrainError(f"length={length}: must be at least 1")
    with torch.no_grad():
        memory = _read_prompt(rnn, prompt, memory)
        _refuse_nan(rnn.predict(memory).softmax(dim=-1), "logits")
    for first in range(0, length, chunk):
        with torch.no_grad():  # not around the yield, which would reach into the caller's code
            uniforms = _uniforms(min(chunk, length - first), len(prompt), generator)
            tokens, memory = rnn.write(memory, uniforms.to(prompt.device), sampler)
            _refuse_nan(memory, "memory")
        yield tokens


def _refuse_nan(values: Float[Tensor, "..."], name: str) -> None:
    """Refuse NaN, of which a sampler would make token 0."""
    if values.isnan().any():
        raise MemtrainError(
            f"{name}: not finite, there is nothing to sample from; the model's weights are damaged "
            "or its training diverged: take an earlier checkpoint"
        )


def _uniforms(steps: int, rows: int, generator: torch.Generator) -> Float[Tensor, "T B"]:
    """Uniform numbers, always drawn 16 steps at a time: the chunk size does not change them."""
    sizes = [16] * (steps // 16) + [steps % 16] * (steps % 16 > 0)
    drawn = [torch.rand(n, rows, generator=generator, device=generator.device) for n in sizes]
    return torch.cat(drawn)


def _read_prompt(
    rnn: RNN, prompt: Int[Tensor, "B P"], memory: Float[Tensor, "B M D"] | None
) -> Float[Tensor, "B M D"]:
    """The memory after a prompt of any length, from `memory` or the empty one."""
    memory = rnn.empty_memory(len(prompt)) if memory is None else memory
    for part in prompt.split(READ_STEPS, dim=1) if prompt.shape[1] else ():
        memory = rnn.unroll(part, memory)[:, -1]
    return memory
