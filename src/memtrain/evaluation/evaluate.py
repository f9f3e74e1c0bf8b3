"""Score a model on held-out sequences: the teacher, and the RNN with and without its help."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from memtrain.data.task import Task
from memtrain.errors import MemtrainError, check_whole
from memtrain.evaluation.memories import Spread, SpreadAccumulator
from memtrain.evaluation.naive import naive_baselines, series_format
from memtrain.evaluation.ngram import Baseline, count_baselines
from memtrain.evaluation.scores import (
    ROWS,
    Score,
    ScoreAccumulator,
    ValueScoreAccumulator,
    binned_means,
)
from memtrain.losses import squared_error, variance_of
from memtrain.models.layers import evaluation_mode
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.shapes import IGNORE_INDEX, Batch, Inputs, count_targets, describe_space

EVALUATION_SEED = 2**31 - 1
"""Evaluations have their own generator and leave the RNG state of training untouched."""


BINS = 32
"""Losses by position are means over at most this many bins."""
FLOATS = {"cuda": 2**30, "cpu": 2**26}
"""Floats in the memories of the sequences that are scored together."""
COUNTED = {"cuda": 2**30, "cpu": 2**26}
"""Training tokens that the n-gram models count at most."""


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
class ByPosition:
    """The loss (`Evaluation.loss_name`) per target by position in the sequence, means over bins.

    None in a bin without a target, and in `rnn_from_teacher` before its start.
    """

    edges: list[int]
    """Bin i holds the positions edges[i] <= t < edges[i + 1]."""
    rnn: list[float | None]
    teacher: list[float | None] | None
    rnn_from_teacher: list[float | None] | None
    unexplained: list[float | None] | None
    """1 - R^2 of the rollout from the empty memory."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All metrics of one evaluation."""

    sequences: int
    length: int
    """Tokens or steps per sequence."""
    targets: int
    """Tokens or numbers that were to be predicted."""
    rnn: Score
    """Rolled out from the empty memory over the whole sequence."""
    teacher: Score | None
    """The encoder's memory at every step, decoded by the decoder."""
    rnn_from_teacher: Score | None
    """Rolled out from the teacher's memory at `start`, or from the data's label, scored on the
    targets after it."""
    rnn_after_start: Score | None
    """The rollout from the empty memory, scored on the same targets as `rnn_from_teacher`."""
    start: int
    """The step whose memory the RNN takes over from the teacher."""
    drift: Drift | None
    by_position: ByPosition
    baselines: list[Baseline] = field(default_factory=list)
    """N-gram models on the same targets, or naive forecasts of numbers, if requested."""
    spread: Spread | None = None
    """Of the teacher's memories, or of the RNN's if it has no teacher."""
    loss_name: str = "nats"
    """What `Score.nats` is: nats, or pinball loss if quantiles of numbers are predicted."""

    @property
    def of_numbers(self) -> bool:
        """Whether numbers were predicted, and not tokens."""
        return self.rnn.accuracy is None

    def to_json(self) -> dict[str, Any]:
        """All metrics as plain data, without the fields that only numbers or texts have if these
        are none."""
        plain = asdict(self)
        unused = () if self.of_numbers else ("mse", "crps", "column_mse", "column_crps")
        unused += ("bits_per_byte",) if self.rnn.bits_per_byte is None else ()
        for record in (*plain["baselines"], *(plain[name] for name in self._scores())):
            for name in unused:
                record.pop(name, None)
        if not self.of_numbers:
            del plain["loss_name"]
        return plain

    def __repr__(self) -> str:
        names = " ".join(f"{name}={score.nats:.4f}" for name, score in self._scores().items())
        of = f"{self.sequences} sequences of {self.length}"
        return f"<Evaluation of {of}, {self.loss_name}: {names}>"

    def _repr_html_(self) -> str:
        """A table of the scores, for notebooks."""
        names = {"nats": self.loss_name, "mse": "MSE", "crps": "CRPS"}
        if not self.of_numbers:
            names = {"nats": "nats", "accuracy": "accuracy"}
        rows = ""
        for name, score in self._scores().items():
            cells = "".join(f"<td>{getattr(score, field):.4f}</td>" for field in names)
            rows += f"<tr><th>{name}</th>{cells}</tr>"
        heads = "".join(f"<th>{head}</th>" for head in names.values())
        title = f"{self.sequences} held-out sequences of {self.length}"
        return f"<table><tr><th>{title}</th>{heads}</tr>{rows}</table>"

    def _scores(self) -> dict[str, Score]:
        scores = {
            "rnn": self.rnn,
            "teacher": self.teacher,
            "rnn_from_teacher": self.rnn_from_teacher,
            "rnn_after_start": self.rnn_after_start,
        }
        return {name: score for name, score in scores.items() if score is not None}


class DriftAccumulator:
    """Accumulates memory drift per position, and the variance of the teacher's memories."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.rollout, self.stepped = torch.zeros(2, length, dtype=torch.float64, device=device)
        self.label_sum: Tensor | float = 0.0
        self.label_squares: Tensor | float = 0.0
        self.rows = 0

    def add(
        self,
        rnn: RNN,
        inputs: Inputs,
        memories: Float[Tensor, "B T M D"],
        labels: Float[Tensor, "B T M D"],
    ) -> None:
        """Compare a rollout from the empty memory, and single steps from the teacher's memories."""
        empty = rnn.empty_memory(len(inputs))[:, None].to(labels.dtype)
        before = torch.cat([empty, labels[:, :-1]], dim=1).flatten(0, 1)
        parts = zip(before.split(ROWS), inputs.flatten(0, 1).split(ROWS), strict=True)
        steps = [rnn.unroll_last(token[:, None], part).float() for part, token in parts]
        labels = labels.float()
        stepped = torch.cat(steps).view(labels.shape)
        self.rollout += squared_error(memories, labels).sum(0, dtype=torch.float64)
        self.stepped += squared_error(stepped, labels).sum(0, dtype=torch.float64)
        self.label_sum = self.label_sum + labels.sum(dim=(0, 1), dtype=torch.float64)
        self.label_squares = self.label_squares + labels.double().square().sum(dim=(0, 1))
        self.rows += len(inputs)

    def drift(self) -> Drift:
        """The drift; 1 - R^2 is its share of the labels' variance over sequences and steps."""
        assert isinstance(self.label_sum, Tensor) and isinstance(self.label_squares, Tensor)
        total = self.rows * len(self.rollout)
        variance = float(variance_of(self.label_sum, self.label_squares, total))
        rollout, stepped = self.rollout / self.rows, float(self.stepped.mean() / self.rows)
        return Drift(
            rollout=rollout.tolist(),
            unexplained=(rollout / variance).tolist(),
            one_step=stepped,
            one_step_unexplained=stepped / variance,
        )


def evaluate(
    task: Task,
    rnn: RNN,
    teacher: Teacher | None = None,
    *,
    sequences: int = 256,
    device: torch.device | None = None,
    seed: int = EVALUATION_SEED,
    baselines: bool = False,
    skip: int = 0,
) -> Evaluation:
    """Score a model on held-out sequences, always the same ones for the same seed.

    Sequences are scored a few at a time, so memory use does not grow with their number. Scores of
    numbers are in the units of the task's sequences, which a series scales; `Score.column_mse` and
    `Score.column_crps` are in the data's units.

    Args:
        task: the source of the sequences.
        rnn: the network.
        teacher: its teacher, if it has one.
        sequences: how many, fewer if the data has fewer.
        device: the models' device; by default where the RNN is.
        seed: selects the sequences.
        baselines: also score n-gram models, if the task has a corpus to count; of numbers, the
            last observed one, and the one a season before.
        skip: leave out this many sequences before them, on which something was chosen.

    Raises:
        MemtrainError: an argument is something else.
    """
    for name, thing, kind in (("task", task, Task), ("rnn", rnn, RNN)):
        if not isinstance(thing, kind):
            raise MemtrainError(
                f"{name}={type(thing).__name__}: must be a memtrain.{kind.__name__}; a run is "
                "evaluated by run.evaluate()"
            )
    if not isinstance(teacher, Teacher | None):
        raise MemtrainError(f"teacher={type(teacher).__name__}: must be a memtrain.Teacher or None")
    for name, number, least in (
        ("sequences", sequences, 1), ("skip", skip, 0), ("seed", seed, -(2**63)),
    ):  # fmt: skip
        check_whole(name, number, least)
    if task.space != rnn.space:
        if task.values is None and rnn.vocab_size:
            found = f"its vocab_size={task.vocab_size}, that of the rnn is {rnn.vocab_size}"
        else:
            found = f"it has {describe_space(task.space)}, the rnn {describe_space(rnn.space)}"
        raise MemtrainError(f"task: {found}; they must be equal")
    device = rnn.readout.head.weight.device if device is None else device
    with evaluation_mode(rnn), torch.no_grad():
        batch = task.held_out(skip + sequences, torch.Generator().manual_seed(seed))
        batch = batch.map(lambda tensor: tensor[skip:]).to(device) if skip else batch.to(device)
        if not len(batch.inputs):
            raise MemtrainError(f"skip={skip}: no held-out sequences are left; skip fewer")
        found = _baselines(task, batch) if baselines else []
        return _evaluate(task, batch, rnn, teacher, found)


def _evaluate(
    task: Task, batch: Batch, rnn: RNN, teacher: Teacher | None, baselines: list[Baseline]
) -> Evaluation:
    inputs, targets = batch.inputs, batch.targets
    count, length = inputs.shape[:2]
    start = (length - 1) // 2
    size = task.target_bytes(targets) if task.values is None else None
    size = None if size is None else size.sum(0)
    own, taught, handed = (_accumulator(task, length, inputs.device, size) for _ in range(3))
    drifts, spread = DriftAccumulator(length, inputs.device), SpreadAccumulator(count)
    floats = length * rnn.empty_memory(1).numel()
    rows = max(1, FLOATS.get(inputs.device.type, FLOATS["cpu"]) // floats)
    for first in range(0, count, rows):
        some = batch.map(lambda tensor, at=first: tensor[at : at + rows])
        part, target, labels = some.inputs, some.targets, some.memories
        memories = rnn.unroll(part)
        own.add(rnn.predict, memories, target)
        if teacher is not None:
            labels = encode_in_chunks(teacher, part)
            taught.add(teacher.predict, labels, target)
        if labels is None:
            spread.add(memories)
            continue
        drifts.add(rnn, part, memories, labels)
        spread.add(labels)
        if length > 1:
            later = rnn.unroll(part[:, start + 1 :], labels[:, start])
            handed.add(rnn.predict, later, target[:, start + 1 :], start + 1)
    labelled = teacher is not None or batch.memories is not None
    compared = labelled and length > 1
    drift = drifts.drift() if labelled else None
    width = -(-length // BINS)
    by_position = ByPosition(
        edges=[*range(0, length, width), length],
        rnn=own.binned(width),
        teacher=taught.binned(width) if teacher else None,
        rnn_from_teacher=handed.binned(width) if labelled else None,
        unexplained=_binned(drift.unexplained, width) if drift else None,
    )
    return Evaluation(
        sequences=count,
        length=length,
        targets=int(count_targets(targets).sum()),
        rnn=own.score(),
        teacher=taught.score() if teacher else None,
        rnn_from_teacher=handed.score() if compared else None,
        rnn_after_start=own.score(start + 1) if compared else None,
        start=start,
        drift=drift,
        by_position=by_position,
        baselines=baselines,
        spread=spread.spread(),
        loss_name=task.loss_name,
    )


def _accumulator(
    task: Task, length: int, device: torch.device, text_bytes: Float[Tensor, " T"] | None
) -> ScoreAccumulator | ValueScoreAccumulator:
    if task.values is None:
        return ScoreAccumulator(length, device, task.vocab_size, text_bytes)
    return ValueScoreAccumulator(length, device, task.values, series_format(task))


def _binned(values: list[float], width: int) -> list[float | None]:
    every = torch.tensor(values, dtype=torch.float64)
    return binned_means(every, torch.ones_like(every), width)


def _baselines(task: Task, batch: Batch) -> list[Baseline]:
    if task.values is not None:
        return naive_baselines(task, batch)
    corpus = task.corpus()
    if corpus is None or task.spelling is None:
        return []
    sequences, targets = batch.targets, batch.targets
    size = task.target_bytes(targets)
    if task.spelling.start_written:  # then the first input is data too, but not a target
        sequences = torch.cat([batch.inputs[:, :1], sequences], dim=1)
        targets = F.pad(targets, (1, 0), value=IGNORE_INDEX)
    elif task.spelling.classes:  # in the same columns of all rows, and not in the corpus
        kept = (targets != IGNORE_INDEX).all(dim=0)
        sequences, targets = sequences[:, kept], targets[:, kept]
    place = corpus.device
    limit = COUNTED.get(place.type, COUNTED["cpu"])
    found = count_baselines(corpus, sequences.to(place), targets.to(place), limit)
    if size is None:
        return found
    per_target = float(size.mean())
    return [replace(one, bits_per_byte=one.nats / math.log(2) / per_target) for one in found]


def default_sequences(length: int, window: int, device: torch.device) -> int:
    """How many sequences can be scored in seconds.

    Args:
        length: tokens per sequence.
        window: positions that the encoder reads per token; only a GPU reads many quickly.
        device: the models' device.
    """
    tokens, positions = (2**18, 2**28) if device.type == "cuda" else (2**14, 2**20)
    return max(4, min(tokens, positions // window) // length)


def encode_in_chunks(
    teacher: Teacher, inputs: Inputs, windows: int = 8192
) -> Float[Tensor, "B T M D"]:
    """Encode the memories of every step, a bounded number of windows at a time.

    A memory depends on the last `teacher.receptive_field` tokens only, so a long sequence is
    encoded in stretches, each with the tokens before it.
    """
    length = inputs.shape[1]
    stretch = min(length, 256, windows)
    rows = max(1, windows // stretch)
    return torch.cat([_encode_long(teacher, part, stretch) for part in inputs.split(rows)])


def _encode_long(teacher: Teacher, inputs: Inputs, stretch: int) -> Float[Tensor, "B T M D"]:
    memories = []
    for first in range(0, inputs.shape[1], stretch):
        begin = max(0, first - teacher.receptive_field)
        part = inputs[:, begin : first + stretch]
        steps = torch.arange(first - begin, part.shape[1], device=inputs.device)
        memories.append(teacher.encode(part, steps.expand(len(part), -1)))
    return torch.cat(memories, dim=1)
