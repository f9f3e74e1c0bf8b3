"""Helpers of tests with sequences of numbers: a seasonal series, and networks written by hand."""

from typing import Any

import torch
from torch import Tensor, nn

import memtrain
from memtrain.data.series_format import ForecastCases, SeriesFormat
from memtrain.data.task import Task
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Decoder
from memtrain.shapes import Batch, Values

SMALL: dict[str, Any] = {"width": 16, "heads": 2, "head_dim": 8, "decoder_layers": 1}
MEMORY: dict[str, Any] = {"memory_tokens": 2, "memory_dim": 16}


class Season(Task):
    """One series of a season of 12 and noise, beside a known number; the last third is held out.

    `load` is 50 + 10 · the numbers that a model reads.
    """

    unit = "value"

    def __init__(self, likelihood: Any = "gaussian", missing: float = 0.0, rows: int = 600) -> None:
        self.sequence_length = 36
        self.values: Values = Values(features=2, targets=1, likelihood=likelihood)
        self.format = SeriesFormat(
            targets=("load",),
            target_centre=(50.0,),
            target_scale=(10.0,),
            known=("price",),
            known_centre=(0.0,),
            known_scale=(1.0,),
            season=12,
        )
        generator = torch.Generator().manual_seed(5)
        time = torch.arange(rows + 1)
        price = torch.randn(rows + 1, generator=generator)
        noise = 0.2 * torch.randn(rows + 1, generator=generator)
        load = torch.sin(time * (2 * torch.pi / 12)) + 0.3 * price + noise
        load[torch.rand(rows + 1, generator=generator) < missing] = torch.nan
        self._inputs = torch.stack([load[:-1], price[1:]], dim=1)
        self._split = rows * 2 // 3

    def _windows(self, starts: Tensor) -> Batch:
        rows = self._inputs[starts[:, None] + torch.arange(self.sequence_length + 1)]
        return Batch(rows[:, :-1], rows[:, 1:, :1])

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        last = self._split - self.sequence_length - 1
        return self._windows(torch.randint(last, (count,), generator=generator))

    def held_out(self, count: int, generator: torch.Generator) -> Batch:
        last = len(self._inputs) - self.sequence_length
        return self._windows(torch.randint(self._split, last, (count,), generator=generator))

    def forecast_cases(self, count: int, horizon: int, history: int) -> ForecastCases:
        last = torch.linspace(self._split, len(self._inputs) - 1 - horizon, count).long()[:, None]
        future = self._inputs[last + torch.arange(1, horizon + 1)]
        past = self._inputs[last + torch.arange(1 - history, 1)]
        return ForecastCases(past, future[..., 1:], future[..., :1])


class Keep(nn.Module):
    """A cell whose memory is its last input."""

    memory_tokens = 1

    def __init__(self, features: int) -> None:
        super().__init__()
        self.memory_dim = features

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        return token[:, None].to(memory.dtype)


class Linear(RNN):
    """Predicts y[t + 1] = y[t] @ a + u[t + 1] with a given deviation."""

    def __init__(self, a: Tensor, known: bool = False, deviation: float = 1.0) -> None:
        targets = len(a)
        values = Values(features=targets * (2 if known else 1), targets=targets)
        config = memtrain.TeacherConfig(**SMALL)
        super().__init__(
            Keep(values.features), Decoder(config, memory_dim=values.features, values=values)
        )
        self.a, self.known, self.deviation = a, known, deviation

    def predict(self, memory: Tensor) -> Tensor:
        last = memory[..., 0, :]
        mean = last[..., : len(self.a)].nan_to_num(0.0) @ self.a
        if self.known:
            mean = mean + last[..., len(self.a) :]
        raw = torch.full_like(mean, self.deviation).log().div(7).atanh().mul(7)
        return torch.stack([mean, raw], dim=-1).flatten(-2)


class AutoRegression(Task):
    """y[t + 1] = 0.8 y[t] + noise of deviation 0.5."""

    values = Values(features=1)
    sequence_length = 40

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        number = torch.randn(count, generator=generator) * 0.5 / 0.6
        numbers = [number]
        for _ in range(self.sequence_length):
            number = 0.8 * number + 0.5 * torch.randn(count, generator=generator)
            numbers.append(number)
        series = torch.stack(numbers, dim=1)[..., None]
        return Batch(series[:, :-1], series[:, 1:])


def small_models(values: Values) -> tuple[memtrain.Teacher, RNN]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SMALL | {"encoder_layers": 1, "context_length": 4}
    teacher = memtrain.Teacher(values=values, encoder="causal", **MEMORY, **sizes)
    cell = memtrain.make_cell("gru", values=values, **MEMORY)
    return teacher, RNN(cell, teacher)
