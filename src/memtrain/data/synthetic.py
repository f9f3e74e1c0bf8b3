"""The paper's five synthetic tasks (appendix, "Synthetic Tasks"), and three of state tracking.

Each task samples from its generator, then renders the sample with a deterministic function that the
paper's worked examples test. In addition to the letters of `shapes.py`:

| letter | meaning                          |
| ------ | -------------------------------- |
| P      | key-value pairs in a sequence    |
| K, L   | symbols in a key, in a value     |
| E      | examples (x, y) in a sequence    |
"""

from collections.abc import Callable
from dataclasses import replace
from math import factorial
from string import ascii_letters
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from memtrain.config import (
    S5,
    Arithmetic,
    Copy,
    ModularArithmetic,
    Parity,
    Recall,
    Retrieval,
    Stack,
)
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.shapes import IGNORE_INDEX, Batch

MAX_RANKED_KEYS = 4096
"""With more possible keys, sampling distinct ones needs host synchronisation, so it stays on the
CPU."""


class SyntheticTask(Task):
    """A task sampled on its generator's device, so that a CUDA graph of a step can include it."""

    _device = torch.device("cpu")
    config: Any

    def of_length(self, length: int) -> Task:
        return TASKS[type(self.config)](replace(self.config, sequence_length=length))

    @property
    def device(self) -> torch.device:
        return self._device

    def to(self, device: torch.device) -> Task:
        if device.type == "cuda":
            self._device = device
        return self


# ------------------------------------------------------------------------------------ retrieval


def retrieval_targets(inputs: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The target at the last position is the token after the first 0."""
    marker = (inputs == 0).int().argmax(1, keepdim=True)  # (B, 1); of equals, the first
    targets = torch.full_like(inputs, IGNORE_INDEX)
    targets[:, -1:] = inputs.gather(1, marker + 1)
    return targets


@final
class RetrievalTask(SyntheticTask):
    """x = [3,4,0,2,1,3,1,0] -> y = [·,·,·,·,·,·,·,2]"""

    def __init__(self, config: Retrieval):
        self.config = config
        self.vocab_size = config.vocab_size
        self.sequence_length = config.sequence_length
        self.noise = config.noise
        # At most T-3, so that the token after the marker is never the query.
        within = round(config.needle_within * config.sequence_length)
        self.needle_positions = max(1, min(within, config.sequence_length - 2))

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        length = self.sequence_length
        drawn = {"generator": generator, "device": generator.device}
        inputs = torch.randint(1, self.vocab_size, (count, length), **drawn)
        marker = torch.randint(self.needle_positions, (count, 1), **drawn)
        inputs.scatter_(1, marker, 0)
        inputs[:, -1] = 0
        targets = retrieval_targets(inputs)
        # Sampled even without noise: a seed then gives the same inputs at every noise level.
        noisy = torch.rand(count, **drawn) < self.noise
        noise = torch.randint(1, self.vocab_size, (count,), **drawn)
        targets[:, -1] = torch.where(noisy, noise, targets[:, -1])
        return Batch(inputs, targets)


# ----------------------------------------------------------------------------------------- copy


def copy_batch(strings: Int[Tensor, "B L"]) -> Batch:
    """Read the strings, then predict them in reverse while reading zeros."""
    return Batch(
        inputs=torch.cat([strings, torch.zeros_like(strings)], 1),
        targets=torch.cat([torch.full_like(strings, IGNORE_INDEX), strings.flip(1)], 1),
    )


@final
class CopyTask(SyntheticTask):
    """x = [3,4,1,2,0,0,0,0] -> y = [·,·,·,·,2,1,4,3]"""

    def __init__(self, config: Copy):
        self.config = config
        self.vocab_size = config.vocab_size
        self.sequence_length = config.sequence_length

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        shape = (count, self.sequence_length // 2)
        drawn = {"generator": generator, "device": generator.device}
        return copy_batch(torch.randint(1, self.vocab_size, shape, **drawn))


# ---------------------------------------------------------------------------------------- stack


def stack_targets(inputs: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The target at every pop (0) is the symbol it removes; the stack must not be empty then."""
    pop = inputs == 0
    # The slot of the stack that an operation fills or empties.
    slot = torch.where(pop, -1, 1).cumsum(1) - (~pop).long()
    # On one slot pushes and pops alternate: sorted by slot, then time, a pop follows its push.
    order = slot.argsort(dim=1, stable=True)
    operation = inputs.gather(1, order)
    answer = torch.where(operation == 0, operation.roll(1, dims=1), IGNORE_INDEX)
    return torch.empty_like(inputs).scatter_(1, order, answer)


@final
class StackTask(SyntheticTask):
    """x = [1,0,2,3,0,1,0,0] -> y = [·,1,·,·,3,·,1,2]"""

    def __init__(self, config: Stack):
        self.config = config
        self.vocab_size = config.vocab_size
        self.sequence_length = config.sequence_length
        self.depth = config.depth

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        shape = (count, self.sequence_length)
        drawn = {"generator": generator, "device": generator.device}
        symbols = torch.randint(1, self.vocab_size, shape, **drawn)
        # A free walk, folded between 0 and the depth: the step is forced where the stack is empty
        # or full and a fair coin elsewhere.
        walk = (2 * torch.randint(2, shape, **drawn) - 1).cumsum(1)
        height = self.depth - (walk % (2 * self.depth) - self.depth).abs()
        push = height.diff(dim=1, prepend=height.new_zeros(count, 1)) > 0
        inputs = torch.where(push, symbols, 0)
        return Batch(inputs, stack_targets(inputs))


# --------------------------------------------------------------------------------------- recall


def recall_batch(
    keys: Int[Tensor, "B P K"], values: Int[Tensor, "B P L"], query: Int[Tensor, " B"]
) -> Batch:
    """Read all pairs, then key `query`; predict its value from the key's last symbol on."""
    rows = torch.arange(len(query), device=query.device)
    key, answer = keys[rows, query], values[rows, query]  # (B, K), (B, L)
    pairs = torch.cat([keys, values], 2).flatten(1)  # (B, P * (K + L))
    blanks = torch.zeros_like(answer[:, 1:])
    inputs = torch.cat([pairs, key, blanks], 1)
    targets = torch.full_like(inputs, IGNORE_INDEX)
    targets[:, -answer.shape[1] :] = answer
    return Batch(inputs, targets)


def key_count(config: Recall) -> int:
    """The number of possible keys."""
    return config.key_symbols**config.key_length


def draw_distinct_keys(
    config: Recall, count: int, generator: torch.Generator, *, rank: bool = False
) -> Int[Tensor, "B P K"]:
    """Sample the keys of each sequence without replacement, as strings over 0..key_symbols-1.

    With `rank` no decision on the host depends on the sample, however many keys there are.
    """
    symbols, length = config.key_symbols, config.key_length
    drawn = {"generator": generator, "device": generator.device}
    if rank or key_count(config) <= 4 * config.pairs:
        ranks = torch.rand(count, key_count(config), dtype=torch.float64, **drawn)
        numbers = ranks.argsort(1)[:, : config.pairs, None]  # (B, P, 1)
        return numbers // symbols ** torch.arange(length, device=numbers.device) % symbols
    # Too many to enumerate, perhaps beyond int64. Resampling repeats until none is left keeps all
    # choices of distinct keys equally likely, because only equality is compared. A key repeats
    # with probability below 1/4, so the loop is short.
    keys = torch.randint(symbols, (count, config.pairs, length), **drawn)
    unsure = torch.arange(count, device=keys.device)
    while len(unsure):
        some = keys[unsure]
        same = (some[:, :, None] == some[:, None]).all(-1)  # (N, P, P)
        repeats = same.tril(-1).any(-1)  # (N, P): equal to an earlier key
        some[repeats] = torch.randint(symbols, (int(repeats.sum()), length), **drawn)
        keys[unsure] = some
        unsure = unsure[repeats.any(1)]
    return keys


@final
class RecallTask(SyntheticTask):
    """x = [b,1,a,3,d,2,a] -> y = [·,·,·,·,·,·,3]

    Token 0 is the blank; then come the keys' symbols, then the values'.
    """

    def __init__(self, config: Recall):
        self.vocab_size = 1 + config.key_symbols + config.value_symbols
        pair_length = config.key_length + config.value_length
        self.sequence_length = (config.pairs + 1) * pair_length - 1
        self.config = config

    def of_length(self, length: int) -> Task:
        """With fewer pairs."""
        size = self.config.key_length + self.config.value_length
        pairs, rest = divmod(length + 1, size)
        if rest or pairs < 2:
            possible = ", ".join(str(size * count - 1) for count in (2, 3, 4))
            raise MemtrainError(
                f"sequences of {length} tokens: every pair of a key and a value takes {size}, the "
                f"query {size - 1}; possible are {possible}, ..."
            )
        return RecallTask(replace(self.config, pairs=pairs - 1))

    def to(self, device: torch.device) -> Task:
        return super().to(device) if key_count(self.config) <= MAX_RANKED_KEYS else self

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        config = self.config
        drawn = {"generator": generator, "device": generator.device}
        rank = generator.device.type != "cpu"
        keys = 1 + draw_distinct_keys(config, count, generator, rank=rank)
        shape = (count, config.pairs, config.value_length)
        values = torch.randint(config.value_symbols, shape, **drawn)
        query = torch.randint(config.pairs, (count,), **drawn)
        return recall_batch(keys, 1 + config.key_symbols + values, query)

    def describe(self, inputs: list[int], targets: list[int]) -> str:
        """As in the paper: letters for keys, numbers from 1 for values."""
        if self.config.key_symbols > len(ascii_letters):
            return super().describe(inputs, targets)
        letters = ascii_letters[: self.config.key_symbols]
        names = ["_", *letters, *map(str, range(1, self.config.value_symbols + 1))]
        answers = " ".join("·" if y == IGNORE_INDEX else names[y] for y in targets)
        return f"x  {' '.join(names[x] for x in inputs)}\ny  {answers}"


# ----------------------------------------------------------------------------------- arithmetic


def arithmetic_batch(
    x: Int[Tensor, "B E"], a: Int[Tensor, " B"], b: Int[Tensor, " B"], vocab_size: int
) -> Batch:
    """For each example, read x and predict y = (a x + b) mod V, then read that y."""
    y = (a[:, None] * x + b[:, None]) % vocab_size
    return Batch(
        inputs=torch.stack([x, y], 2).flatten(1),  # (B, 2E)
        targets=torch.stack([y, torch.full_like(y, IGNORE_INDEX)], 2).flatten(1),
    )


@final
class ArithmeticTask(SyntheticTask):
    """x = [x0,y0,x1,y1,...] -> y = [y0,·,y1,·,...]"""

    def __init__(self, config: Arithmetic):
        self.vocab_size = config.vocab_size
        self.sequence_length = 2 * config.examples
        self.config = config

    def of_length(self, length: int) -> Task:
        """With fewer examples."""
        if length % 2:
            raise MemtrainError(f"sequences of {length} tokens: must be even, pairs of x and y")
        return ArithmeticTask(replace(self.config, examples=length // 2))

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        config = self.config
        drawn = {"generator": generator, "device": generator.device}
        x = torch.randint(config.vocab_size, (count, config.examples), **drawn)
        a, b = torch.randint(config.difficulty, (2, count), **drawn)
        return arithmetic_batch(x, a, b, config.vocab_size)


# ---------------------------------------------------------- parity, modular arithmetic and S5


@final
class ParityTask(SyntheticTask):
    """x = [1,0,1,1,0] -> y = [1,1,0,1,1]"""

    vocab_size = 2

    def __init__(self, config: Parity):
        self.config = config
        self.sequence_length = config.sequence_length

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        shape = (count, self.sequence_length)
        bits = torch.randint(2, shape, generator=generator, device=generator.device)
        return Batch(bits, bits.cumsum(1) % 2)


def modular_targets(
    inputs: Int[Tensor, "B T"], modulus: int, operations: str
) -> Int[Tensor, "B T"]:
    """The value of the expression after each token, operation · modulus + number, from 0 on."""
    # Every operation is v -> (factor · v + term) mod m, a plain one per token.
    number = inputs % modulus
    operation = inputs // modulus
    factor, term = torch.ones_like(number), torch.zeros_like(number)
    for place, symbol in enumerate(operations):
        here = operation == place
        if symbol == "*":
            factor = torch.where(here, number, factor)
        else:
            term = torch.where(here, number if symbol == "+" else -number, term)
    value = torch.zeros_like(number[:, 0])
    values = []
    for times, plus in zip(factor.unbind(1), term.unbind(1), strict=True):
        value = (times * value + plus) % modulus
        values.append(value)
    return torch.stack(values, dim=1)


@final
class ModularArithmeticTask(SyntheticTask):
    """x = [+3,*4,-1] -> y = [3,2,1], modulo 5"""

    def __init__(self, config: ModularArithmetic):
        self.vocab_size = len(config.operations) * config.modulus
        self.sequence_length = config.sequence_length
        self.config = config

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        shape, config = (count, self.sequence_length), self.config
        drawn = {"generator": generator, "device": generator.device}
        inputs = torch.randint(self.vocab_size, shape, **drawn)
        return Batch(inputs, modular_targets(inputs, config.modulus, config.operations))

    def describe(self, inputs: list[int], targets: list[int]) -> str:
        """Operations with their numbers, and the values below them."""
        modulus, operations = self.config.modulus, self.config.operations
        read = [f"{operations[x // modulus]}{x % modulus}" for x in inputs]
        values = (str(y).rjust(len(x)) for x, y in zip(read, targets, strict=True))
        return f"x  {' '.join(read)}\ny  {' '.join(values)}"


def s5_targets(inputs: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The number of the order of five items after each operation, sorted orders counted from 0."""
    items = torch.arange(5, device=inputs.device).expand(len(inputs), 5)
    orders = []
    for swaps in (inputs == 0)[..., None].unbind(1):  # (B, 1)
        first, second, rest = items[:, :1], items[:, 1:2], items[:, 2:]
        swapped = torch.cat([second, first, rest], 1)
        items = torch.where(swaps, swapped, items.roll(-1, dims=1))
        orders.append(items)
    order = torch.stack(orders, 1)  # (B, T, 5)
    # An item's digit: how many smaller ones stand behind it. Each digit has a factorial's weight.
    digits = [(order[..., i + 1 :] < order[..., i, None]).sum(-1) for i in range(4)]
    return torch.stack([digit * factorial(4 - i) for i, digit in enumerate(digits)]).sum(0)


@final
class S5Task(SyntheticTask):
    """x = [0,1,0] -> y = [24,9,51]: items 01234 become 10234, 02341, 20341."""

    vocab_size = factorial(5)

    def __init__(self, config: S5):
        self.config = config
        self.sequence_length = config.sequence_length

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        shape = (count, self.sequence_length)
        inputs = torch.randint(2, shape, generator=generator, device=generator.device)
        return Batch(inputs, s5_targets(inputs))


TASKS: dict[type, Callable[..., Task]] = {
    Retrieval: RetrievalTask,
    Copy: CopyTask,
    Stack: StackTask,
    Recall: RecallTask,
    Arithmetic: ArithmeticTask,
    Parity: ParityTask,
    ModularArithmetic: ModularArithmeticTask,
    S5: S5Task,
}
"""The task of each config."""
