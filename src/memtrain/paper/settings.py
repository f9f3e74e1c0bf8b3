"""The settings of the synthetic figure: five tasks, two sweeps each, their chance levels, and the
configs of their runs."""

from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from memtrain.config import (
    Arithmetic,
    Copy,
    DataConfig,
    DMTConfig,
    Recall,
    Retrieval,
    RunConfig,
    Stack,
    model_shapes,
)
from memtrain.data.task import build_task
from memtrain.paper.base import Setup
from memtrain.paper.configs import authors_details, synthetic

DECODED = 64
"""Timesteps of a sequence at which SMT trains the decoder, at most."""


class Setting(NamedTuple):
    """A task with all its values."""

    task: str
    name: str
    """Unique within the task."""
    data: DataConfig
    memory_tokens: int = 0
    """0: the scale's."""
    memory_dim: int = 0
    """0: the models' width."""

    @property
    def length(self) -> int:
        return build_task(self.data).sequence_length

    @property
    def full_name(self) -> str:
        return f"{self.task}, {self.name}"

    @property
    def needle_anywhere(self) -> bool:
        """Not the authors' task: drawn as a second curve, not counted."""
        return isinstance(self.data, Retrieval) and self.data.needle_within == 1


class Sweep(NamedTuple):
    """The settings of one panel by the swept value, from easy to hard."""

    label: str
    settings: dict[Any, Setting]
    second: dict[Any, Setting]
    """A second curve in the same panel, at some of the values."""


def retrieval(length: int, noise: float = 0.0, within: float = 0.5) -> Setting:
    name = f"T={length}{f', noise {noise:g}' if noise else ''}"
    data = Retrieval(sequence_length=length, noise=noise, needle_within=within)
    return Setting("retrieval", f"{name}, needle anywhere" if within == 1 else name, data)


def copy(length: int, tokens: int = 0, width: int = 0) -> Setting:
    memory = f", memory {tokens} x {width}" if tokens else ""
    data = Copy(sequence_length=length, vocab_size=9)
    return Setting("copy", f"T={length}{memory}", data, tokens, width)


def stack(length: int, depth: int) -> Setting:
    data = Stack(sequence_length=length, vocab_size=5, depth=depth)
    return Setting("stack", f"T={length}, depth {depth}", data)


def recall(pairs: int, length: int, symbols: int) -> Setting:
    data = Recall(
        pairs=pairs,
        key_length=length,
        value_length=length,
        key_symbols=symbols,
        value_symbols=symbols,
    )
    return Setting("recall", f"{pairs} pairs of length {length}", data)


def arithmetic(share: float, examples: int, modulus: int) -> Setting:
    largest = round(share * modulus)
    data = Arithmetic(vocab_size=modulus, difficulty=largest, examples=examples)
    return Setting("arithmetic", f"range {largest} of {modulus}, {examples} examples", data)


class Values(NamedTuple):
    """The swept values of a scale, and for each sweep the value of the other field."""

    lengths: tuple[int, ...] = (16, 32, 64, 128, 256)
    """Of retrieval and stack."""
    anywhere: tuple[int, ...] = (32, 64, 128)
    noises: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8)
    noise_length: int = 64
    copy_lengths: tuple[int, ...] = (8, 16, 32, 64, 128)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16)
    tokens_length: int = 64
    token_width: int = 16
    """So narrow that their number matters."""
    depths: tuple[int, ...] = (2, 5, 10, 20, 40)
    depth: int = 10
    depths_length: int = 128
    pairs: tuple[int, ...] = (2, 4, 8, 16, 32)
    key_lengths: tuple[int, ...] = (1, 2, 3, 4, 6)
    """Of keys and of values."""
    some_pairs: int = 8
    symbols: int = 32
    ranges: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 1.0)
    """Shares of V from which a and b are drawn."""
    range: float = 0.25
    examples: tuple[int, ...] = (4, 8, 16, 32, 64)
    some_examples: int = 16
    modulus: int = 31


SMOKE_VALUES = Values(
    lengths=(6, 8),
    anywhere=(),
    noises=(0.0, 0.5),
    noise_length=8,
    copy_lengths=(6, 8),
    tokens=(1, 2),
    tokens_length=8,
    token_width=8,
    depths=(2, 3),
    depth=3,
    depths_length=8,
    pairs=(2, 3),
    key_lengths=(1, 2),
    some_pairs=3,
    symbols=4,
    ranges=(0.5, 1.0),
    range=0.5,
    examples=(3, 4),
    some_examples=4,
    modulus=11,
)
CPU_VALUES = SMOKE_VALUES._replace(
    lengths=(8, 16),
    noise_length=16,
    copy_lengths=(8, 16),
    tokens=(1, 4),
    tokens_length=16,
    depths=(2, 4),
    depth=4,
    depths_length=16,
    pairs=(2, 4),
    some_pairs=4,
    symbols=8,
    ranges=(0.25, 0.5),
    range=0.25,
    examples=(4, 8),
    some_examples=8,
)


def sweeps_of(setup: Setup) -> dict[str, tuple[Sweep, Sweep]]:
    """The two sweeps of each task; a setting that both have is one."""
    at = setup.pick(smoke=SMOKE_VALUES, cpu=CPU_VALUES, gpu=Values(), paper=Values())

    def sweep(label: str, settings: dict[Any, Setting]) -> Sweep:
        return Sweep(label, settings, {})

    return {
        "retrieval": (
            Sweep(
                "sequence length",
                {T: retrieval(T) for T in at.lengths},
                {T: retrieval(T, within=1.0) for T in at.anywhere},
            ),
            sweep(
                f"label noise (T={at.noise_length})",
                {noise: retrieval(at.noise_length, noise) for noise in at.noises},
            ),
        ),
        "copy": (
            sweep("sequence length", {T: copy(T) for T in at.copy_lengths}),
            sweep(
                f"memory tokens of {at.token_width} (T={at.tokens_length})",
                {M: copy(at.tokens_length, M, at.token_width) for M in at.tokens},
            ),
        ),
        "stack": (
            sweep(
                f"sequence length (depth {at.depth})", {T: stack(T, at.depth) for T in at.lengths}
            ),
            sweep(
                f"depth (T={at.depths_length})", {d: stack(at.depths_length, d) for d in at.depths}
            ),
        ),
        "recall": (
            sweep("pairs", {n: recall(n, 1, at.symbols) for n in at.pairs}),
            sweep(
                f"key, value length ({at.some_pairs} pairs)",
                {n: recall(at.some_pairs, n, at.symbols) for n in at.key_lengths},
            ),
        ),
        "arithmetic": (
            sweep(
                f"range / V ({at.some_examples} examples)",
                {share: arithmetic(share, at.some_examples, at.modulus) for share in at.ranges},
            ),
            sweep(
                f"examples (range {at.range:g} V)",
                {n: arithmetic(at.range, n, at.modulus) for n in at.examples},
            ),
        ),
    }


@cache
def settings_of(setup: Setup) -> list[Setting]:
    """Every setting once: the first of each task, then the second of each, and so on."""
    columns = []
    for sweeps in sweeps_of(setup).values():
        names = {one.name: one for sweep in sweeps for one in sweep.settings.values()}
        names |= {one.name: one for sweep in sweeps for one in sweep.second.values()}
        columns.append(names.values())
    return [one for row in zip_longest(*columns) for one in row if one is not None]


# ------------------------------------------------------------------------------------- guesses


def chance(data: DataConfig) -> float:
    """The accuracy without a memory of what belongs together.

    In recall: any value of the sequence instead of the key's. Elsewhere: the best guess from the
    last token alone.
    """
    if isinstance(data, Recall):
        return 1 / data.pairs + (1 - 1 / data.pairs) / data.value_symbols
    if isinstance(data, Arithmetic):
        return arithmetic_accuracy(data.vocab_size, data.difficulty, data.examples)[0]
    assert isinstance(data, Retrieval | Copy | Stack)
    return 1 / (data.vocab_size - 1)


def best_accuracy(data: DataConfig) -> float:
    """The best possible accuracy: labels may be noise, and the first examples leave y open."""
    if isinstance(data, Retrieval):
        return 1 - data.noise + data.noise / (data.vocab_size - 1)
    if isinstance(data, Arithmetic):
        return arithmetic_accuracy(data.vocab_size, data.difficulty, data.examples)[1]
    return 1.0


@cache
def arithmetic_accuracy(modulus: int, largest: int, examples: int) -> tuple[float, float]:
    """The best accuracy from x alone, and from all examples so far, over 512 sequences.

    The best prediction is the commonest y among the rules (a, b) that fit all examples before.
    """
    random = np.random.default_rng(0)
    a, b = (each.ravel() for each in np.indices((largest, largest)))  # (R,)
    x = random.integers(modulus, size=(512, examples))
    rule = random.integers(largest**2, size=512)
    fits, rows, hits = np.ones((len(a), 512), bool), np.arange(512), []
    for step in x.T:
        y = (a[:, None] * step + b[:, None]) % modulus  # (R, 512)
        votes = np.bincount((rows * modulus + y).ravel(), fits.ravel(), 512 * modulus)
        votes = votes.reshape(512, modulus)
        hits.append((votes.max(axis=1) / votes.sum(axis=1)).mean())
        fits &= y == y[rule, rows]
    return float(hits[0]), float(np.mean(hits))


# ------------------------------------------------------------------------------------- configs


def size_class(length: int) -> int:
    """0 to 3, from short to long sequences."""
    return sum(length > limit for limit in (40, 80, 140))


def steps_of(setup: Setup, length: int) -> tuple[int, int]:
    """Steps of SMT and of DMT."""
    gpu = ((2500, 750), (3500, 1000), (4000, 1000), (4000, 1000))[size_class(length)]
    return setup.pick(smoke=(12, 6), cpu=(900, 450), gpu=gpu, paper=(20_000, 1500))


def smt_config(setup: Setup, setting: Setting, rate: float, seed: int, noise: float) -> RunConfig:
    steps, _ = steps_of(setup, setting.length)
    config = synthetic(setup, setting.data, learning_rate=rate, steps=steps, seed=seed)
    width, heads, head_dim, layers, tokens = setup.pick(
        smoke=(16, 2, 8, (2, 1, 1), 2),
        cpu=(64, 4, 16, (2, 1, 1), 4),
        gpu=(128, 4, 32, (6, 2, 4), 8),
        paper=(256, 8, 64, (8, 4, 8), 16),
    )
    models = model_shapes(
        encoder="bidirectional" if setup.scale == "paper" else "causal",
        width=width,
        heads=heads,
        head_dim=head_dim,
        layers=layers,
        memory_tokens=setting.memory_tokens or tokens,
        memory_dim=setting.memory_dim,
        **authors_details(setup),
    )
    decoded = setup.pick(smoke=2, cpu=8, gpu=DECODED, paper=0)
    sequences = setup.pick(smoke=16, cpu=256, gpu=512, paper=1024)
    return replace(
        config,
        **models,
        smt=replace(config.smt, decode_timesteps=decoded, memory_noise=noise),
        dmt=DMTConfig(),
        log=replace(config.log, evaluate_sequences=sequences),
    )


def dmt_config(setup: Setup, setting: Setting, rate: float, fields: dict[str, Any]) -> DMTConfig:
    """DMT after SMT at `rate`. The paper's has a tenth of SMT's rate, as the authors' code.

    With the decoder's loss it is a third on short sequences, and on long ones a tenth, since more
    spoils what SMT has learnt; the decoder then reads 32 memories per sequence.
    """
    length = setting.length
    part = 3 if "decode_weight" in fields and size_class(length) < 2 else 10
    stride = max(1, length // 32) if "decode_weight" in fields else 1
    return DMTConfig(
        steps=steps_of(setup, length)[1],
        learning_rate=rate / part,
        label_stride=stride,
        future_length=256,
        **fields,
    )
