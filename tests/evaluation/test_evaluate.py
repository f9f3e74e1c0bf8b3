"""Held-out scores and drift."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor, nn
from torch.testing import assert_close

import memtrain.evaluation.evaluate as evaluate_module
from conftest import (
    ENCODERS,
    TINY,
    VOCAB,
    random_batch,
    random_tokens,
    seeded,
    tiny_rnn,
    tiny_teacher,
)
from memtrain.config import Digits, Retrieval, Stack, Stream
from memtrain.data.prepare import prepare_images
from memtrain.data.task import Task, build_task
from memtrain.errors import MemtrainError
from memtrain.evaluation import scores
from memtrain.evaluation.evaluate import (
    DriftAccumulator,
    Evaluation,
    Score,
    ScoreAccumulator,
    encode_in_chunks,
    evaluate,
)
from memtrain.evaluation.ngram import count_baselines
from memtrain.models.build import build_rnn
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.plotting.figures import save_evaluation_figure
from memtrain.shapes import IGNORE_INDEX, Batch

CPU = torch.device("cpu")
LENGTH = 8
BOTH = pytest.mark.parametrize("encoder", ENCODERS)


@pytest.fixture
def task() -> Task:
    return build_task(Stack(sequence_length=LENGTH, vocab_size=VOCAB, depth=3))


def evaluated(task: Task, rnn: RNN, teacher: Teacher | None, sequences: int = 16, **options):
    return evaluate(task, rnn, teacher, sequences=sequences, device=CPU, **options)


def held_out(task: Task, seed: int, sequences: int = 16) -> Batch:
    return task.held_out(sequences, seeded(seed))


def by_hand(pairs: list[tuple[Tensor, int]]) -> tuple[float, float]:
    """Nats and accuracy of (logits, target) pairs."""
    nats, right = [], 0
    for logits, target in pairs:
        values = logits.tolist()
        nats.append(math.log(sum(math.exp(v) for v in values)) - values[target])
        right += values.index(max(values)) == target
    return sum(nats) / len(nats), right / len(nats)


@torch.no_grad()
def rolled_out(rnn: RNN, batch: Batch, memories: Tensor, first: int) -> list[tuple[Tensor, int]]:
    """Logits and target wherever there is a target, row by row from the given memories."""
    pairs = []
    for row in range(len(batch.inputs)):
        memory = memories[row : row + 1]
        for t in range(first, LENGTH):
            logits, memory = rnn.step(memory, batch.inputs[row, t : t + 1])
            if batch.targets[row, t] != IGNORE_INDEX:
                pairs.append((logits[0], int(batch.targets[row, t])))
    return pairs


def assert_score(found: Score | None, expected: tuple[float, float | None]) -> None:
    assert found is not None
    assert (found.nats, found.accuracy) == pytest.approx(expected, abs=1e-5)


class TestScores:
    def test_rnn_is_scored_on_its_rollout_from_the_empty_memory(self, task):
        rnn, batch = tiny_rnn(), held_out(task, seed=3)
        result = evaluated(task, rnn, None, seed=3)
        pairs = rolled_out(rnn, batch, rnn.empty_memory(16), 0)
        assert_score(result.rnn, by_hand(pairs))
        assert result.targets == len(pairs) > 16
        assert result.sequences == 16
        assert result.rnn.accuracy is not None and 0 < result.rnn.accuracy < 1

    @BOTH
    def test_teacher_is_scored_on_its_memory_at_every_step(self, task, encoder):
        teacher, batch = tiny_teacher(encoder), held_out(task, seed=3)
        result = evaluated(task, tiny_rnn(), teacher, seed=3)
        pairs = []
        with torch.no_grad():
            for row in range(16):
                for t in range(LENGTH):
                    if batch.targets[row, t] != IGNORE_INDEX:
                        memory = teacher.encode(batch.inputs[row : row + 1, : t + 1])[:, -1]
                        pairs.append((teacher.predict(memory)[0], int(batch.targets[row, t])))
        assert_score(result.teacher, by_hand(pairs))

    @BOTH
    def test_rnn_from_the_teachers_memory_is_scored_on_later_targets(self, task, encoder):
        rnn, teacher, batch = tiny_rnn(), tiny_teacher(encoder), held_out(task, seed=3)
        result = evaluated(task, rnn, teacher, seed=3)
        assert result.start == 3
        with torch.no_grad():
            handed = teacher.encode(batch.inputs[:, :4])[:, -1]
            own = rnn.unroll(batch.inputs[:, :4])[:, -1]
        assert_score(result.rnn_from_teacher, by_hand(rolled_out(rnn, batch, handed, 4)))
        assert_score(result.rnn_after_start, by_hand(rolled_out(rnn, batch, own, 4)))

    def test_without_a_teacher_only_the_rnn_is_scored(self, task):
        rnn = tiny_rnn()
        alone = evaluated(task, rnn, None)
        assert alone.teacher is alone.rnn_from_teacher is alone.rnn_after_start is None
        assert alone.drift is None
        assert alone.rnn == evaluated(task, rnn, tiny_teacher()).rnn

    def test_bits_are_nats_over_log_2(self):
        assert Score(nats=math.log(8), accuracy=0.0).bits == pytest.approx(3)


class TestChance:
    def test_the_same_seed_gives_the_same_result_and_another_seed_another(self, task):
        rnn, teacher = tiny_rnn(), tiny_teacher()
        assert evaluated(task, rnn, teacher) == evaluated(task, rnn, teacher)
        assert evaluated(task, rnn, teacher, seed=1) != evaluated(task, rnn, teacher, seed=2)

    def test_the_generators_of_training_are_left_untouched(self, task):
        rnn, teacher, training = tiny_rnn(), tiny_teacher(), seeded(4)
        before = torch.get_rng_state(), training.get_state()
        evaluated(task, rnn, teacher)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(training.get_state(), before[1])


class TestModes:
    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    def test_training_mode_of_the_rnn_is_restored(self, task, training):
        rnn = tiny_rnn().train(training)
        evaluated(task, rnn, tiny_teacher())
        assert all(module.training is training for module in rnn.modules())

    def test_a_part_in_evaluation_mode_stays_in_it(self, task):
        rnn = tiny_rnn().train()
        rnn.cell.eval()
        evaluated(task, rnn, None)
        assert rnn.training and rnn.readout.training
        assert not any(module.training for module in rnn.cell.modules())

    def test_dropout_is_off_during_evaluation(self, task):
        class Dropping(nn.Module):
            memory_tokens, memory_dim = 2, 16

            def __init__(self, cell: nn.Module) -> None:
                super().__init__()
                self.cell, self.drop = cell, nn.Dropout(0.5)

            def forward(self, memory, token):
                return self.drop(self.cell(memory, token))

        rnn = tiny_rnn()
        dropping = RNN(Dropping(rnn.cell), rnn.readout).train()
        assert evaluated(task, dropping, None) == evaluated(task, rnn, None)

    def test_no_gradients_are_left(self, task):
        rnn, teacher = tiny_rnn(), tiny_teacher()
        evaluated(task, rnn, teacher)
        assert all(p.grad is None for m in (rnn, teacher) for p in m.parameters())


class Oracle(nn.Module):
    """Looks its next memory up among the teacher's, `error` away in every dimension."""

    memory_tokens, memory_dim = 2, 16

    def __init__(self, teacher: Teacher, inputs: Tensor, error: float) -> None:
        super().__init__()
        with torch.no_grad():
            labels = teacher.encode(inputs)
        empty = torch.zeros_like(labels[:, :1])
        self.before = torch.cat([empty, labels[:, :-1]], dim=1).flatten(0, 1).flatten(1)
        self.token = inputs.flatten()
        self.after = labels.flatten(0, 1)
        self.error = error

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        distance = torch.cdist(memory.flatten(1), self.before)
        distance = distance.masked_fill(token[:, None] != self.token, float("inf"))
        return self.after[distance.argmin(1)] + self.error


@BOTH
class TestDrift:
    def oracle(self, task: Task, encoder: str, error: float) -> tuple[Evaluation, Teacher]:
        teacher = tiny_teacher(encoder)
        rnn = tiny_rnn(Oracle(teacher, held_out(task, seed=3).inputs, error))
        rnn.readout.load_state_dict(teacher.decoder.state_dict())
        return evaluated(task, rnn, teacher, seed=3), teacher

    def test_drift_is_zero_for_a_cell_that_returns_the_teachers_memories(self, task, encoder):
        result, _ = self.oracle(task, encoder, error=0.0)
        assert result.drift is not None and result.teacher is not None
        assert result.drift.rollout == pytest.approx([0.0] * LENGTH, abs=1e-9)
        assert result.drift.unexplained == pytest.approx([0.0] * LENGTH, abs=1e-9)
        assert result.drift.one_step == pytest.approx(0, abs=1e-9)
        assert result.drift.one_step_unexplained == pytest.approx(0, abs=1e-9)
        # It also answers what the teacher answers, with and without a handed-over memory.
        assert_score(result.rnn, (result.teacher.nats, result.teacher.accuracy))
        assert result.rnn_after_start is not None
        after = (result.rnn_after_start.nats, result.rnn_after_start.accuracy)
        assert_score(result.rnn_from_teacher, after)

    def test_drift_is_the_square_of_a_constant_error(self, task, encoder):
        result, teacher = self.oracle(task, encoder, error=0.01)
        assert result.drift is not None
        assert result.drift.rollout == pytest.approx([1e-4] * LENGTH, rel=1e-2)
        assert result.drift.one_step == pytest.approx(1e-4, rel=1e-2)
        with torch.no_grad():
            labels = teacher.encode(held_out(task, seed=3).inputs)
        variance = float(labels.flatten(0, 1).var(dim=0, correction=0).mean())
        share = 1e-4 / variance
        assert result.drift.unexplained == pytest.approx([share] * LENGTH, rel=1e-2)
        assert result.drift.one_step_unexplained == pytest.approx(share, rel=1e-2)

    def test_one_step_starts_from_the_teachers_memory_and_a_rollout_from_its_own(
        self, task, encoder
    ):
        rnn, teacher, inputs = tiny_rnn(), tiny_teacher(encoder), held_out(task, seed=3).inputs
        drift = evaluated(task, rnn, teacher, seed=3).drift
        assert drift is not None
        with torch.no_grad():
            labels = teacher.encode(inputs)
            memory, steps, rollout = rnn.empty_memory(16), [], []
            for t in range(LENGTH):
                before = rnn.empty_memory(16) if t == 0 else labels[:, t - 1]
                steps.append((rnn.cell(before, inputs[:, t]) - labels[:, t]).square().mean())
                memory = rnn.cell(memory, inputs[:, t])
                rollout.append((memory - labels[:, t]).square().mean())
        assert drift.one_step == pytest.approx(float(torch.stack(steps).mean()), rel=1e-4)
        assert drift.rollout == pytest.approx([float(value) for value in rollout], rel=1e-4)


@BOTH
@pytest.mark.parametrize("padding", ["mask", "void"])
@pytest.mark.parametrize("windows", [5, 12, 17, 1000])
def test_memories_made_in_chunks_equal_those_made_at_once(encoder, windows, padding):
    """Longer than any memory reaches back: two layers of 8, or a window of 8."""
    teacher, inputs = tiny_teacher(encoder, padding=padding), random_tokens(3, 40)
    with torch.no_grad():
        assert_close(encode_in_chunks(teacher, inputs, windows), teacher.encode(inputs))


def test_smaller_evaluation_batches_give_the_same_scores(task, monkeypatch):
    rnn, teacher = tiny_rnn(), tiny_teacher()
    whole = evaluated(task, rnn, teacher)
    monkeypatch.setitem(evaluate_module.FLOATS, "cpu", 3 * LENGTH * 32)
    monkeypatch.setattr(evaluate_module, "ROWS", 7)
    monkeypatch.setattr(scores, "ROWS", 7)
    pieces = evaluated(task, rnn, teacher)
    assert flat(pieces.to_json()) == pytest.approx(flat(whole.to_json()), rel=1e-5)


def flat(value: Any) -> list[float]:
    """All numbers of nested records, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in flat(item)]
    return [] if value is None else [float(value)]


class TestByPosition:
    def test_bins_are_means_of_the_losses_in_them(self, monkeypatch):
        monkeypatch.setattr(evaluate_module, "BINS", 3)
        task = build_task(Stack(sequence_length=LENGTH, vocab_size=VOCAB, depth=3))
        rnn, teacher, batch = tiny_rnn(), tiny_teacher(), held_out(task, seed=3)
        curves = evaluated(task, rnn, teacher, seed=3).by_position
        assert curves.edges == [0, 3, 6, 8]
        with torch.no_grad():
            predicted = teacher.predict(teacher.encode(batch.inputs).flatten(0, 1))
            predicted = predicted.unflatten(0, batch.inputs.shape)
            logits, _ = rnn.read(batch.inputs)
        for found, given in ((curves.rnn, logits), (curves.teacher, predicted)):
            assert found is not None
            for place, (first, end) in enumerate(zip(curves.edges, curves.edges[1:], strict=False)):
                valid = batch.targets[:, first:end] != IGNORE_INDEX
                pairs = list(
                    zip(given[:, first:end][valid], batch.targets[:, first:end][valid], strict=True)
                )
                expected, _ = by_hand([(row, int(target)) for row, target in pairs])
                assert found[place] == pytest.approx(expected, abs=1e-5)

    def test_positions_without_target_or_rollout_have_no_mean(self):
        task = build_task(Retrieval(sequence_length=6, vocab_size=VOCAB))
        result = evaluated(task, tiny_rnn(), tiny_teacher())
        curves = result.by_position
        assert curves.rnn[:-1] == [None] * 5 and curves.rnn[-1] == pytest.approx(result.rnn.nats)
        alone = evaluated(task, tiny_rnn(), None).by_position
        assert alone.teacher is alone.unexplained is alone.rnn_from_teacher is None

    def test_drift_bins_are_means_of_the_drift(self, task, monkeypatch):
        monkeypatch.setattr(evaluate_module, "BINS", 2)
        result = evaluated(task, tiny_rnn(), tiny_teacher())
        assert result.drift is not None
        every = result.drift.unexplained
        assert result.by_position.unexplained == pytest.approx(
            [sum(every[:4]) / 4, sum(every[4:]) / 4]
        )


def test_count_models_are_scored_on_the_same_targets_if_there_is_a_corpus(task):
    assert evaluated(task, tiny_rnn(), None, baselines=True).baselines == []
    digits = build_task(Digits())
    torch.manual_seed(0)
    rnn = build_rnn(TINY, digits.vocab_size)
    result = evaluated(digits, rnn, None, sequences=50, baselines=True)
    zeroth, left, around = (baseline.nats for baseline in result.baselines)
    assert math.log(17) > zeroth > left > around > 1
    assert all(baseline.fitted_tokens == 1527 * 64 for baseline in result.baselines)
    assert evaluated(digits, rnn, None, sequences=50).baselines == []


@pytest.mark.parametrize("images", [1, 2])
def test_count_models_of_images_with_classes_see_pixels_only(tmp_path, images: int):
    pixels = np.random.default_rng(0).integers(0, 2, (60, 4, 4), np.uint8).cumsum(axis=2) * 60
    np.save(tmp_path / "a.npy", pixels.astype(np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(60) % 3)
    options = {"levels": 5, "held_out": 0.3}
    found = []
    for labels in (False, True):
        folder = tmp_path / f"store-{labels}"
        prepare_images(tmp_path / "a.npy", folder, labels=labels, **options)
        length = 16 * images + (images - 1) if labels else 16 * images
        task = build_task(Stream(path=str(folder), evaluate_length=length))
        torch.manual_seed(0)
        rnn = build_rnn(TINY, task.vocab_size)
        found.append(evaluated(task, rnn, None, sequences=9, baselines=True))
    plain, labelled = found
    assert labelled.targets == 9 * 16 * images  # every pixel, and no class
    whole = count_baselines(*_pixels_of(tmp_path / "store-True", images))
    assert [one.nats for one in labelled.baselines] == pytest.approx([one.nats for one in whole])
    assert [one.fitted_tokens for one in labelled.baselines] == [
        one.fitted_tokens for one in plain.baselines
    ]


def _pixels_of(folder: Path, images: int) -> tuple:
    """The corpus without classes, and the held-out images that `evaluated` takes."""
    task = build_task(Stream(path=str(folder), evaluate_length=17 * images - 1))
    batch = task.held_out(9, seeded(evaluate_module.EVALUATION_SEED))
    pixels = batch.targets[batch.targets != IGNORE_INDEX].view(9, -1)
    corpus = task.corpus()
    assert corpus is not None and corpus.document_length == 16
    return corpus, pixels, pixels


def test_a_figure_is_drawn_with_and_without_a_teacher(task, tmp_path):
    for teacher in (None, tiny_teacher()):
        path = tmp_path / "deep" / f"{teacher is None}.png"
        save_evaluation_figure(evaluated(task, tiny_rnn(), teacher), path, "stack", "target")
        assert imread(path).shape[0] > 300


@BOTH
def test_short_sequences_are_scored_too(encoder):
    class Echo(Task):
        vocab_size, sequence_length = VOCAB, 1

        def sample(self, count, generator):
            inputs = torch.randint(VOCAB, (count, 1), generator=generator)
            return Batch(inputs, inputs)

    result = evaluated(Echo(), tiny_rnn(), tiny_teacher(encoder))
    assert result.rnn_from_teacher is None
    assert result.teacher is not None
    assert result.targets == 16


def test_a_task_with_one_target_per_sequence_has_as_many_targets_as_sequences():
    task = build_task(Retrieval(sequence_length=6, vocab_size=VOCAB))
    assert evaluated(task, tiny_rnn(), tiny_teacher(), sequences=10).targets == 10


CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def test_only_positions_with_a_target_count():
    batch = random_batch(3, 5, target_rate=0.3)
    valid = batch.targets != IGNORE_INDEX
    right = torch.nn.functional.one_hot(batch.targets.clamp(min=0), VOCAB).float()
    for sign, accuracy in ((9.0, 1.0), (-9.0, 0.0)):
        logits = (sign * right).where(valid[..., None], 0).flatten(0, 1)
        tally = ScoreAccumulator(5, CPU, VOCAB)
        tally.add(lambda _, logits=logits: logits, normal(3, 5, 2, 16), batch.targets)
        assert tally.score().accuracy == accuracy
        assert int(tally.targets.sum()) == int(valid.sum())


def test_a_score_without_targets_is_zero():
    tally = ScoreAccumulator(3, CPU, VOCAB)
    targets = torch.full((2, 3), IGNORE_INDEX)
    rnn = tiny_rnn()
    with torch.no_grad():
        tally.add(rnn.predict, normal(2, 3, 2, 16), targets)
    assert tally.score() == Score(nats=0.0, accuracy=0.0)


def test_drift_is_a_fraction_of_the_variance_over_sequences_and_steps():
    rnn, inputs = tiny_rnn(), random_tokens(7, 4)
    labels, memories = normal(7, 4, 2, 16), normal(7, 4, 2, 16, seed=1)
    apart = DriftAccumulator(4, CPU)
    with torch.no_grad():
        for part in (slice(0, 3), slice(3, 7)):
            apart.add(rnn, inputs[part], memories[part], labels[part])
    found = apart.drift()
    squared = (memories - labels).square().mean(dim=(0, 2, 3))
    variance = labels.flatten(0, 1).var(dim=0, correction=0).mean()
    assert found.rollout == pytest.approx(squared.tolist(), rel=1e-5)
    assert found.unexplained == pytest.approx((squared / variance).tolist(), rel=1e-5)


def test_constant_memories_give_a_finite_fraction():
    rnn, inputs, constant = tiny_rnn(), random_tokens(2, 3), torch.ones(2, 3, 2, 16)
    apart = DriftAccumulator(3, CPU)
    with torch.no_grad():
        apart.add(rnn, inputs, normal(2, 3, 2, 16), constant)
    assert torch.tensor(apart.drift().unexplained).isfinite().all()


def test_skipped_sequences_are_left_out_and_the_others_follow():
    task = build_task(Digits())
    rnn = build_rnn(dataclasses.replace(TINY, data=Digits()), task.vocab_size)
    parts = [evaluated(task, rnn, None, 8, skip=skip) for skip in (0, 8)]
    whole = evaluated(task, rnn, None, 16)
    assert sum(part.targets for part in parts) == whole.targets
    weighted = sum(part.rnn.nats * part.targets for part in parts) / whole.targets
    assert weighted == pytest.approx(whole.rnn.nats)
    assert parts[0].rnn.nats != parts[1].rnn.nats
    with pytest.raises(MemtrainError, match="skip=-1: must be at least 0"):
        evaluated(task, rnn, None, 8, skip=-1)


def test_skipping_all_held_out_sequences_is_refused():
    task = build_task(Digits())
    rnn = build_rnn(dataclasses.replace(TINY, data=Digits()), task.vocab_size)
    with pytest.raises(MemtrainError, match="skip=10000: no held-out sequences are left"):
        evaluated(task, rnn, None, 8, skip=10_000)
