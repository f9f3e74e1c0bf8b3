"""How good a run is on held-out sequences: teacher and RNN, with and without the teacher's help."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.data.task import Task
from memtrain.evaluation.ngram import Baseline, count_baselines
from memtrain.evaluation.scores import (
    Drift,
    DriftAccumulator,
    Score,
    ScoreAccumulator,
    binned_means,
)
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.shapes import IGNORE_INDEX, Batch

EVALUATION_SEED = 2**31 - 1
"""Evaluations draw from a generator of their own and leave training's untouched."""


BINS = 32
"""Losses against the position are means over at most this many bins."""
FLOATS = {"cuda": 2**30, "cpu": 2**26}
"""Numbers in the memories of the sequences that are looked at together."""
COUNTED = {"cuda": 2**30, "cpu": 2**26}
"""Training tokens that the count models read at most."""


@dataclass(frozen=True, slots=True)
class ByPosition:
    """Nats a target against the position in the sequence, means over bins.

    A bin without a target has None, and so has `rnn_from_teacher` up to its start.
    """

    edges: list[int]
    """Bin i holds the positions from edges[i] up to, not with, edges[i + 1]."""
    rnn: list[float | None]
    teacher: list[float | None] | None
    rnn_from_teacher: list[float | None] | None
    unexplained: list[float | None] | None
    """1 - R^2 of the rollout from the empty memory."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All figures of one look at a model."""

    sequences: int
    length: int
    """Tokens in a sequence."""
    targets: int
    rnn: Score
    """Rolled out from the empty memory over the whole sequence."""
    teacher: Score | None
    """The encoder's memory at every step, read by the decoder."""
    rnn_from_teacher: Score | None
    """Rolled out from the teacher's memory at `start`, scored on the targets after it."""
    rnn_after_start: Score | None
    """The rollout from the empty memory, scored on the same targets as `rnn_from_teacher`."""
    start: int
    """The step whose memory the teacher hands over."""
    drift: Drift | None
    by_position: ByPosition
    baselines: list[Baseline] = field(default_factory=list)
    """Count models on the same targets, if asked for."""

    def __repr__(self) -> str:
        names = " ".join(f"{name}={score.nats:.4f}" for name, score in self._scores().items())
        return f"<Evaluation of {self.sequences} sequences of {self.length}, nats: {names}>"

    def _repr_html_(self) -> str:
        """A table of the scores, for notebooks."""
        rows = "".join(
            f"<tr><th>{name}</th><td>{one.nats:.4f}</td><td>{one.accuracy:.4f}</td></tr>"
            for name, one in self._scores().items()
        )
        title = f"{self.sequences} held-out sequences of {self.length}"
        return f"<table><tr><th>{title}</th><th>nats</th><th>accuracy</th></tr>{rows}</table>"

    def _scores(self) -> dict[str, Score]:
        scores = {
            "rnn": self.rnn,
            "teacher": self.teacher,
            "rnn_from_teacher": self.rnn_from_teacher,
            "rnn_after_start": self.rnn_after_start,
        }
        return {name: score for name, score in scores.items() if score is not None}


def evaluate(
    task: Task,
    rnn: RNN,
    teacher: Teacher | None,
    *,
    sequences: int,
    device: torch.device,
    seed: int = EVALUATION_SEED,
    baselines: bool = False,
) -> Evaluation:
    """Score a model on held-out sequences, always the same ones for the same seed.

    Sequences are looked at a few at a time, so memory does not grow with their number.

    Args:
        task: what is asked.
        rnn: the network.
        teacher: its teacher, if it has one.
        sequences: how many, fewer if the data has fewer.
        device: where the models are.
        seed: which ones.
        baselines: also score count models, if the task has a corpus to count.
    """
    training = rnn.training
    rnn.eval()
    try:
        with torch.no_grad():
            batch = task.held_out(sequences, torch.Generator().manual_seed(seed)).to(device)
            return _evaluate(batch, rnn, teacher, _baselines(task, batch) if baselines else [])
    finally:
        rnn.train(training)


def _evaluate(
    batch: Batch, rnn: RNN, teacher: Teacher | None, baselines: list[Baseline]
) -> Evaluation:
    inputs, targets = batch.inputs, batch.targets
    count, length = inputs.shape
    start = (length - 1) // 2
    own, taught, handed = (ScoreAccumulator(length, inputs.device) for _ in range(3))
    apart = DriftAccumulator(length, inputs.device)
    size = rnn.empty_memory(1).numel()
    rows = max(1, FLOATS.get(inputs.device.type, FLOATS["cpu"]) // (length * size))
    for part, asked in zip(inputs.split(rows), targets.split(rows), strict=True):
        memories = rnn.unroll(part)
        own.add(rnn.predict, memories, asked)
        if teacher is None:
            continue
        labels = encode_in_chunks(teacher, part)
        taught.add(teacher.predict, labels, asked)
        apart.add(rnn, part, memories, labels)
        if length > 1:
            later = rnn.unroll(part[:, start + 1 :], labels[:, start])
            handed.add(rnn.predict, later, asked[:, start + 1 :], start + 1)
    compared = teacher is not None and length > 1
    return Evaluation(
        sequences=count,
        length=length,
        targets=int((targets != IGNORE_INDEX).sum()),
        rnn=own.score(),
        teacher=taught.score() if teacher else None,
        rnn_from_teacher=handed.score() if compared else None,
        rnn_after_start=own.score(start + 1) if compared else None,
        start=start,
        drift=apart.drift() if teacher else None,
        by_position=_by_position(length, own, taught, handed, apart, teacher is not None),
        baselines=baselines,
    )


def _by_position(
    length: int,
    own: ScoreAccumulator,
    taught: ScoreAccumulator,
    handed: ScoreAccumulator,
    apart: DriftAccumulator,
    both: bool,
) -> ByPosition:
    width = -(-length // BINS)
    edges = [*range(0, length, width), length]
    unexplained = None
    if both:
        every = torch.tensor(apart.drift().unexplained, dtype=torch.float64)
        unexplained = binned_means(every, torch.ones_like(every), width)
    return ByPosition(
        edges=edges,
        rnn=own.binned(width),
        teacher=taught.binned(width) if both else None,
        rnn_from_teacher=handed.binned(width) if both else None,
        unexplained=unexplained,
    )


def _baselines(task: Task, batch: Batch) -> list[Baseline]:
    corpus = task.corpus()
    if corpus is None or task.spelling is None:
        return []
    sequences, targets = batch.targets, batch.targets
    if task.spelling.start_written:  # then the first input is data too, only not asked for
        sequences = torch.cat([batch.inputs[:, :1], sequences], dim=1)
        targets = F.pad(targets, (1, 0), value=IGNORE_INDEX)
    place = corpus.tokens.device
    limit = COUNTED.get(place.type, COUNTED["cpu"])
    return count_baselines(corpus, sequences.to(place), targets.to(place), limit)


def encode_in_chunks(
    teacher: Teacher, inputs: Int[Tensor, "B T"], windows: int = 8192
) -> Float[Tensor, "B T M D"]:
    """The memories of every step, a bounded number of windows at a time.

    A memory depends on no more than `teacher.reach` tokens, so a long sequence is encoded a
    stretch at a time, each with the tokens that it reaches back to.
    """
    length = inputs.shape[1]
    stretch = min(length, 256, windows)
    rows = max(1, windows // stretch)
    return torch.cat([_encode_long(teacher, part, stretch) for part in inputs.split(rows)])


def _encode_long(
    teacher: Teacher, inputs: Int[Tensor, "B T"], stretch: int
) -> Float[Tensor, "B T M D"]:
    memories = []
    for first in range(0, inputs.shape[1], stretch):
        begin = max(0, first - teacher.reach)
        part = inputs[:, begin : first + stretch]
        steps = torch.arange(first - begin, part.shape[1], device=inputs.device)
        memories.append(teacher.encode(part, steps.expand(len(part), -1)))
    return torch.cat(memories, dim=1)
