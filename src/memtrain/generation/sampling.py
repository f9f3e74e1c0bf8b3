"""Rolling an RNN out: read given tokens, write tokens of its own."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.errors import MemtrainError
from memtrain.models.rnn import RNN
from memtrain.models.sampler import Sampler


@torch.no_grad()
def read(
    rnn: RNN, inputs: Int[Tensor, "B T"], memory: Float[Tensor, "B M D"] | None = None
) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "B T M D"]]:
    """Logits and memories after each given token, from the empty memory unless given another."""
    memories = rnn.unroll(inputs, memory)
    return rnn.predict(memories), memories


def write(
    rnn: RNN,
    prompt: Int[Tensor, "B P"],
    length: int,
    generator: torch.Generator,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    allowed: int = 0,
) -> Int[Tensor, "B L"]:
    """Sample `length` tokens after the prompt, each fed back as the next input.

    Args:
        rnn: the network; it starts from the empty memory.
        prompt: what it reads first, at least one token.
        length: how many tokens to sample.
        generator: the only source of chance; where the model is, it spares copies.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep only the k likeliest tokens (0: all).
        top_p: keep the likeliest tokens that together have this probability.
        allowed: only tokens below this number may be written (0: all).
    """
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, allowed=allowed)
    # Nobody listens, so in large pieces: at each, an engine has to look at the weights again.
    pieces = write_chunks(rnn, prompt, length, generator, sampler, chunk=256)
    return torch.cat(list(pieces), dim=1)


def write_chunks(
    rnn: RNN,
    prompt: Int[Tensor, "B P"],
    length: int,
    generator: torch.Generator,
    sampler: Sampler,
    chunk: int = 16,
) -> Iterator[Int[Tensor, "B K"]]:
    """What `write` returns, in pieces of `chunk` tokens as they are written.

    Tokens stay on the device. All that is read back, once for each piece, is whether there was
    anything to sample from.

    Raises:
        MemtrainError: the logits or the memory are NaN; that piece is not yielded.
    """
    if prompt.shape[1] < 1:
        raise MemtrainError("prompt: must hold at least one token")
    if length < 1:
        raise MemtrainError(f"length={length}: must be at least 1")
    with torch.no_grad():
        memory = _read_prompt(rnn, prompt)
        _refuse_nan(rnn.predict(memory).softmax(dim=-1), "logits")
    for first in range(0, length, chunk):
        with torch.no_grad():  # not around the yield: the caller's code is the caller's
            uniforms = _chances(min(chunk, length - first), len(prompt), generator)
            written, memory = rnn.write(memory, uniforms.to(prompt.device), sampler)
            _refuse_nan(memory, "memory")
        yield written


def _refuse_nan(values: Float[Tensor, "..."], what: str) -> None:
    """A sampler would take token 0 wherever nothing is a number."""
    if values.isnan().any():
        raise MemtrainError(
            f"{what}: not finite, there is nothing to sample from; the model's weights are damaged "
            "or its training diverged: take an earlier checkpoint"
        )


def _chances(steps: int, rows: int, generator: torch.Generator) -> Float[Tensor, "T B"]:
    """Numbers in [0, 1), always drawn 16 steps at a time: a seed gives the same tokens in small
    pieces and in large ones."""
    sizes = [16] * (steps // 16) + [steps % 16] * (steps % 16 > 0)
    drawn = [torch.rand(n, rows, generator=generator, device=generator.device) for n in sizes]
    return torch.cat(drawn)


def _read_prompt(rnn: RNN, prompt: Int[Tensor, "B P"], steps: int = 256) -> Float[Tensor, "B M D"]:
    """The memory of a prompt of any length; only a few steps' memories are held at once."""
    memory = rnn.empty_memory(len(prompt))
    for part in prompt.split(steps, dim=1):
        memory = rnn.unroll(part, memory)[:, -1]
    return memory
