"""The benchmark cases, on random tokens."""

from dataclasses import dataclass, replace

import torch

from memtrain.config import BPTTConfig, DMTConfig, RunConfig, SMTConfig, TeacherConfig, model_shapes
from memtrain.data.task import Task
from memtrain.errors import MemtrainError
from memtrain.recipes.sizes import size_named
from memtrain.shapes import Batch

SUITES = ("smt", "dmt", "generate", "bptt")
FOREVER = 10**6
"""Steps of a stage that is timed but never finished."""


class Noise(Task):
    """Windows of a stream of random tokens, sampled on the device like those of real streams."""

    stream = True

    def __init__(self, vocab_size: int = 256, length: int = 256, tokens: int = 2**20) -> None:
        self.vocab_size, self.sequence_length = vocab_size, length
        self._tokens = torch.randint(vocab_size, (tokens,), dtype=torch.uint8)

    @property
    def device(self) -> torch.device:
        return self._tokens.device

    def to(self, device: torch.device) -> "Noise":
        self._tokens = self._tokens.to(device)
        return self

    def windows(self, length: int, empty_start_rows: int = 0) -> "Noise":
        task = Noise(self.vocab_size, length, 1)
        task._tokens = self._tokens
        return task

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        last = len(self._tokens) - self.sequence_length
        begin = torch.randint(last, (count, 1), generator=generator, device=generator.device)
        span = torch.arange(self.sequence_length + 1, device=self.device)
        window = self._tokens[begin.to(self.device) + span].long()
        return Batch(window[:, :-1], window[:, 1:])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step to time."""

    suite: str
    label: str
    batch: int
    tokens: int
    """Tokens read or generated per step."""
    config: RunConfig


def cases(suite: str, size: str) -> list[Case]:
    """The cases of a suite."""
    base, length = models(size), 32 if size == "tiny" else 256
    batch = {"dmt": 4, "bptt": 8} if size == "tiny" else {"dmt": 32, "bptt": 128}
    if suite == "smt":
        return [smt_case(base, "SMT step")]
    if suite == "dmt":
        return [
            dmt_case(base, f"DMT step, {label}", batch["dmt"], length, stride)
            for stride, label in ((16, "1 label in 16"), (1, "all labels"))
        ]
    if suite == "bptt":
        return [
            bptt_case(base, "BPTT step", batch["bptt"], length),
            bptt_case(base, "BPTT step, recomputed", batch["bptt"], length, round(length**0.5)),
        ]
    if suite == "generate":
        return [
            _case(suite, "generate", count, 1, base)
            for count in ((1, 32) if size == "tiny" else (1, 128, 2048))
        ]
    raise MemtrainError(f"suite={suite!r}: must be one of {', '.join(SUITES)}, all, growth")


def models(size: str) -> RunConfig:
    """The paper's models, those of size medium, or tiny ones for a CPU."""
    if size == "medium":
        medium = size_named(size)
        return RunConfig(
            name="bench",
            teacher=medium.teacher,
            cell=medium.cell,
            smt=SMTConfig(steps=FOREVER, batch_size=medium.batch_size),
        )
    if size == "paper":
        return RunConfig(
            name="bench",
            teacher=TeacherConfig(padding="void"),
            smt=SMTConfig(steps=FOREVER, batch_size=128),
        )
    return RunConfig(
        name="bench",
        **model_shapes(
            padding="void",
            context_length=32,
            width=32,
            layers=(2, 1, 2),
            heads=2,
            head_dim=16,
            memory_tokens=4,
        ),
        smt=SMTConfig(steps=FOREVER, batch_size=16, future_length=8),
    )


def smt_case(base: RunConfig, label: str) -> Case:
    window = base.teacher.context_length + base.smt.future_length
    return _case("smt", label, base.smt.batch_size, window, base)


def dmt_case(base: RunConfig, label: str, batch: int, length: int, stride: int) -> Case:
    stage = DMTConfig(
        steps=FOREVER, batch_size=batch, rollout_length=length, empty_start=0.5, label_stride=stride
    )
    return _case("dmt", label, batch, length, replace(base, dmt=stage))


def bptt_case(base: RunConfig, label: str, batch: int, length: int, recompute: int = 0) -> Case:
    stage = BPTTConfig(steps=FOREVER, batch_size=batch, sequence_length=length, recompute=recompute)
    return _case("bptt", label, batch, length, replace(base, bptt=stage))


def _case(suite: str, label: str, batch: int, length: int, config: RunConfig) -> Case:
    return Case(suite=suite, label=label, batch=batch, tokens=batch * length, config=config)
