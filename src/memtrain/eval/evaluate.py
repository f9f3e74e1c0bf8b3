"""How good a run is on held-out sequences: teacher and RNN, with and without the teacher's help."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from memtrain.data.task import Task
from memtrain.eval.rollout import read
from memtrain.nn.rnn import RNN
from memtrain.nn.teacher import Teacher
from memtrain.objectives.losses import decode_loss, drift, unexplained_variance
from memtrain.shapes import IGNORE_INDEX

EVALUATION_SEED = 2**31 - 1
"""Evaluations draw from a generator of their own and leave training's untouched."""


@dataclass(frozen=True, slots=True)
class Score:
    """Loss and accuracy over all positions that carry a target."""

    nats: float
    accuracy: float

    @property
    def bits(self) -> float:
        return self.nats / math.log(2)


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the RNN's memory is from the teacher's."""

    rollout: list[float]
    """delta_t: mean squared error at each step of a rollout from the empty memory."""
    unexplained: list[float]
    """1 - R^2 at each step of that rollout."""
    one_step: float
    """Mean squared error of single steps from the teacher's memories."""
    one_step_unexplained: float
    """1 - R^2 of single steps."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All figures of one look at a model."""

    sequences: int
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


def evaluate(
    task: Task,
    rnn: RNN,
    teacher: Teacher | None,
    *,
    sequences: int,
    device: torch.device,
    seed: int = EVALUATION_SEED,
) -> Evaluation:
    """Score a model on held-out sequences, always the same ones for the same seed."""
    training = rnn.training
    rnn.eval()
    try:
        with torch.no_grad():
            return _evaluate(task, rnn, teacher, sequences, device, seed)
    finally:
        rnn.train(training)


def _evaluate(
    task: Task,
    rnn: RNN,
    teacher: Teacher | None,
    sequences: int,
    device: torch.device,
    seed: int,
) -> Evaluation:
    batch = task.held_out(sequences, torch.Generator().manual_seed(seed)).to(device)
    inputs, targets = batch.inputs, batch.targets
    logits, memories = read(rnn, inputs)
    start = (inputs.shape[1] - 1) // 2
    later = slice(start + 1, None)
    teacher_score = from_teacher = after_start = apart = None
    if teacher is not None:
        labels = encode_in_chunks(teacher, inputs)
        predicted = teacher.predict(labels.flatten(0, 1)).unflatten(0, inputs.shape)
        teacher_score = score(predicted, targets)
        if inputs.shape[1] > 1:
            taught, _ = read(rnn, inputs[:, later], labels[:, start])
            from_teacher = score(taught, targets[:, later])
            after_start = score(logits[:, later], targets[:, later])
        apart = measure_drift(rnn, inputs, memories, labels)
    return Evaluation(
        sequences=len(inputs),
        targets=int((targets != IGNORE_INDEX).sum()),
        rnn=score(logits, targets),
        teacher=teacher_score,
        rnn_from_teacher=from_teacher,
        rnn_after_start=after_start,
        start=start,
        drift=apart,
    )


def score(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Score:
    """Nats and accuracy at the positions that carry a target."""
    asked = targets != IGNORE_INDEX
    right = (logits.argmax(dim=-1) == targets) & asked
    accuracy = float(right.sum() / asked.sum().clamp(min=1))
    return Score(float(decode_loss(logits, targets)), accuracy)


def measure_drift(
    rnn: RNN,
    inputs: Int[Tensor, "B T"],
    memories: Float[Tensor, "B T M D"],
    labels: Float[Tensor, "B T M D"],
) -> Drift:
    """Drift of a rollout from the empty memory, and of single steps along the teacher's path."""
    empty = rnn.empty_memory(len(inputs))[:, None].to(labels.dtype)
    before = torch.cat([empty, labels[:, :-1]], dim=1)
    stepped = rnn.cell(before.flatten(0, 1), inputs.flatten()).unflatten(0, inputs.shape)
    return Drift(
        rollout=drift(memories, labels).tolist(),
        unexplained=unexplained_variance(memories, labels).tolist(),
        one_step=float(drift(stepped, labels).mean()),
        one_step_unexplained=float(unexplained_variance(stepped, labels).mean()),
    )


def encode_in_chunks(
    teacher: Teacher, inputs: Int[Tensor, "B T"], windows: int = 8192
) -> Float[Tensor, "B T M D"]:
    """The memories of every step, a bounded number of windows at a time."""
    rows = max(1, windows // inputs.shape[1])
    return torch.cat([teacher.encode(chunk) for chunk in inputs.split(rows)])
