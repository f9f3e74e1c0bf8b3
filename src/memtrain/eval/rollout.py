"""Rolling an RNN out: read given tokens, write tokens of its own."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.errors import MemtrainError
from memtrain.nn.rnn import RNN


@torch.no_grad()
def read(
    rnn: RNN, inputs: Int[Tensor, "B T"], memory: Float[Tensor, "B M D"] | None = None
) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "B T M D"]]:
    """Logits and memories after each given token, from the empty memory unless given another."""
    memories = rnn.unroll(inputs, memory)
    return rnn.predict(memories), memories


@torch.no_grad()
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
        generator: the only source of chance.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep only the k likeliest tokens (0: all).
        top_p: keep the likeliest tokens that together have this probability.
        allowed: only tokens below this number may be written (0: all).
    """
    if prompt.shape[1] < 1:
        raise MemtrainError("prompt: must hold at least one token")
    if length < 1:
        raise MemtrainError(f"length={length}: must be at least 1")
    if temperature < 0:
        raise MemtrainError(f"temperature={temperature}: must be at least 0")
    if not 0 < top_p <= 1:
        raise MemtrainError(f"top_p={top_p}: must be above 0 and at most 1")
    if top_k < 0:
        raise MemtrainError(f"top_k={top_k}: must be at least 0")
    if allowed < 0:
        raise MemtrainError(f"allowed={allowed}: must be at least 0")
    memory = rnn.unroll(prompt)[:, -1]
    written: list[Tensor] = []
    while True:
        logits = rnn.predict(memory)
        if allowed:
            logits = logits[:, :allowed]
        written.append(sample_token(logits, generator, temperature, top_k, top_p))
        if len(written) == length:
            return torch.stack(written, dim=1)
        memory = rnn.cell(memory, written[-1])


def sample_token(
    logits: Float[Tensor, "B V"],
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Int[Tensor, " B"]:
    """One token a row."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        best = logits.topk(top_k)
        logits = torch.full_like(logits, float("-inf")).scatter(-1, best.indices, best.values)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probability = ordered.softmax(dim=-1)
        # The first token always stays: what stands before it has probability 0.
        dropped = probability.cumsum(dim=-1) - probability >= top_p
        logits = logits.scatter(-1, order, ordered.masked_fill(dropped, float("-inf")))
    probability = logits.softmax(dim=-1)
    chosen = torch.multinomial(probability.to(generator.device), 1, generator=generator)
    return chosen[:, 0].to(logits.device)
