"""The rollouts of DMT that need few sequential steps: carried memories, and Picard's sweeps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from conftest import (
    ENCODERS,
    gradients,
    random_batch,
    receives_gradient,
    recorded,
    seeded,
    tiny_cell,
    tiny_rnn,
    tiny_teacher,
)
from memtrain.config import DMTConfig, Retrieval, RunConfig, SMTConfig
from memtrain.config.stages import Rollout
from memtrain.errors import MemtrainError
from memtrain.evaluation.cost import CountedCell, recurrent_depth, sequential_ops
from memtrain.objectives.dmt import DMT
from memtrain.objectives.from_labels import DMTFromLabels
from memtrain.recipes import recipe
from memtrain.shapes import IGNORE_INDEX, Batch
from memtrain.training.run import Interrupted, Run
from memtrain.training.step import check_batch_sizes
from run_testing import StopAt, assert_same_weights, comparable

LENGTH, TAKEN, ROWS = 7, 3, 4
PARTS = 3
"""Training steps that a sequence of 7 takes, 3 steps at a time."""


def carried(encoder: str = "causal", cell: Any = None, **options: Any) -> DMT:
    options = {"rollout": "carried", "segment": TAKEN} | options
    return DMT(tiny_teacher(encoder), tiny_rnn(cell), DMTConfig(**options))


class Row:
    """A row of a carried batch, followed by hand."""

    def __init__(self, row: int, objective: DMT) -> None:
        self.row, self.objective = row, objective
        self.left = 1 + row % PARTS
        self.batch: Batch | None = None
        self.memory, self.step = torch.empty(0), 0

    def advance(self, new: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Three steps: the squared errors and the readout's losses."""
        rnn, teacher = self.objective.rnn, self.objective.teacher
        if self.batch is None or self.left == 0:
            self.left = self.left or PARTS
            self.batch = new.map(lambda tensor: tensor[self.row : self.row + 1].clone())
            self.memory, self.step = rnn.empty_memory(1), 0
        errors, losses = [], []
        for step in range(self.step, min(self.step + TAKEN, LENGTH)):
            self.memory = rnn.cell(self.memory, self.batch.inputs[:, step])
            label = teacher.encode(self.batch.inputs[:, : step + 1])[:, -1].detach()
            errors.append((self.memory - label).square().mean())
            if self.batch.targets[0, step] != IGNORE_INDEX:
                logits = rnn.predict(self.memory.detach())
                losses.append(F.cross_entropy(logits, self.batch.targets[:, step]))
        self.memory, self.step, self.left = self.memory.detach(), self.step + TAKEN, self.left - 1
        return errors, losses


class TestCarried:
    @pytest.mark.parametrize("encoder", ENCODERS)
    def test_losses_and_gradients_equal_those_of_rows_followed_by_hand(self, encoder: str):
        objective = carried(encoder)
        rows = [Row(row, objective) for row in range(ROWS)]
        cell = list(objective.rnn.cell.parameters())
        for number in range(3 * PARTS):
            batch = random_batch(ROWS, LENGTH, seed=10 * number)
            found = objective(batch, seeded(number))
            by_row = [row.advance(batch) for row in rows]
            dynamics = torch.stack([error for errors, _ in by_row for error in errors]).mean()
            readout = torch.stack([loss for _, losses in by_row for loss in losses]).mean()
            assert_close(found.parts["dynamics"], dynamics.detach(), rtol=1e-5, atol=1e-7)
            assert_close(found.parts["readout"], readout.detach(), rtol=1e-5, atol=1e-7)
            expected = gradients(objective.config.dynamics_weight * dynamics, cell)
            for one, other in zip(gradients(found.total, cell), expected, strict=True):
                assert_close(one, other, rtol=1e-4, atol=1e-6)

    def test_sequences_end_at_different_steps_and_all_are_read_to_the_end(self):
        objective, ends = carried(), []
        for number in range(1 + 2 * PARTS):
            objective(random_batch(ROWS, LENGTH, seed=number), seeded())
            ends.append((objective.kept_tensors()["left"] == 0).tolist())
        assert ends[0] == [True, False, False, True]
        assert ends[1] == [False, True, False, False]
        assert ends[2] == [False, False, True, False]
        assert ends[PARTS:] == (ends[:PARTS] * 3)[: len(ends) - PARTS]

    def test_labels_may_be_fewer_and_are_at_every_step_in_turn(self):
        objective, calls = carried(label_stride=3), []
        objective.teacher.encode = recorded(calls, objective.teacher.encode)
        for number in range(30):
            objective(random_batch(ROWS, 9), seeded(number))
        labelled = [steps for _, steps, _ in calls]
        assert {step for steps in labelled for step in steps.flatten().tolist()} == set(range(9))
        assert all(steps.shape == (ROWS, 1) for steps in labelled)

    def test_a_memory_that_is_not_finite_ends_its_sequence(self):
        objective = carried()
        objective(random_batch(ROWS, LENGTH), seeded())
        objective.kept_tensors()["memory"][2] = float("nan")
        objective(random_batch(ROWS, LENGTH, seed=5), seeded())
        kept = objective.kept_tensors()
        assert kept["memory"].isfinite().all()
        assert kept["next"].tolist() == [TAKEN, 2 * TAKEN, TAKEN, TAKEN]

    def test_rollouts_from_the_teachers_memory_begin_after_it(self):
        objective = carried(empty_start=0.0, rollout_length=3)
        batch = random_batch(ROWS, 12)
        objective(batch, seeded(1))
        kept = objective.kept_tensors()
        first = kept["next"] - TAKEN
        assert (first > 0).any()
        with torch.no_grad():
            for row, step in enumerate(first.tolist()):
                memory = objective.teacher.encode(batch.inputs[row : row + 1, :step])[:, -1]
                for token in batch.inputs[row, step : step + TAKEN]:
                    memory = objective.rnn.cell(memory, token[None])
                assert_close(kept["memory"][row], memory[0], rtol=1e-5, atol=1e-6)

    def test_credit_passes_a_segment_and_depth_does_not_depend_on_the_length(self):
        counted = carried(cell=CountedCell(tiny_cell()))
        assert recurrent_depth(counted(random_batch(2, 8), seeded()).total) == TAKEN

        def depth(length: int, **options: Any) -> int:
            objective = carried(**options)
            return sequential_ops(lambda: objective(random_batch(2, length), seeded()).total)

        assert depth(8) == depth(32)
        assert depth(32, rollout="unrolled") > 2 * depth(8, rollout="unrolled") > 2 * depth(8)

    def test_the_readouts_loss_does_not_reach_the_cell_and_the_teacher_gets_no_gradient(self):
        objective = carried(dynamics_weight=0.0)
        total = objective(random_batch(3, 6), seeded()).total
        assert receives_gradient(total, objective.rnn.readout)
        assert not receives_gradient(total, objective.rnn.cell)
        objective = carried(decode_weight=1.0)
        total = objective(random_batch(3, 6), seeded()).total
        assert receives_gradient(total, objective.rnn.cell)
        assert not receives_gradient(total, objective.teacher.encoder)

    def test_labels_of_the_data_are_carried_with_their_sequence(self):
        teacher, config = tiny_teacher("causal"), DMTConfig(rollout="carried", segment=TAKEN)
        rnn = tiny_rnn()
        taught, labelled = DMT(teacher, rnn, config), DMTFromLabels(rnn, config)
        for number in range(PARTS + 1):
            batch = random_batch(ROWS, LENGTH, seed=number)
            with torch.no_grad():
                memories = teacher.encode(batch.inputs)
            expected = taught(batch, seeded(number))
            found = labelled(Batch(batch.inputs, batch.targets, memories), seeded(number))
            assert_close(found.total, expected.total, rtol=1e-5, atol=1e-7)

    def test_another_shape_of_the_batch_is_refused(self):
        objective = carried()
        objective(random_batch(ROWS, LENGTH), seeded())
        with pytest.raises(MemtrainError, match=r"tokens=\(5, 7\): must have the shape .*\(4, 7\)"):
            objective(random_batch(5, LENGTH), seeded())
        objective.keep_tensors({})
        objective(random_batch(5, LENGTH), seeded())


class TestPicard:
    def test_with_as_many_sweeps_as_steps_it_equals_the_unrolled_rollout(self):
        batch, losses = random_batch(3, 6), []
        kinds: list[dict[str, Any]] = [{"rollout": "picard", "sweeps": 6}, {"rollout": "unrolled"}]
        for options in kinds:
            objective = DMT(tiny_teacher("causal"), tiny_rnn(), DMTConfig(**options))
            loss = objective(batch, seeded()).total
            losses.append((loss, gradients(loss, objective.rnn.parameters())))
        assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("sweeps", [1, 3])
    def test_each_memory_is_some_steps_from_a_memory_of_the_teacher(self, sweeps: int):
        objective = DMT(
            tiny_teacher("causal"), tiny_rnn(), DMTConfig(rollout="picard", sweeps=sweeps)
        )
        batch = random_batch(2, 8)
        errors = []
        with torch.no_grad():
            labels = objective.teacher.encode(batch.inputs)
            for step in range(8):
                # The loss compares one more step.
                before = step - 1 - sweeps
                memory = labels[:, before] if before >= 0 else objective.rnn.empty_memory(2)
                for token in batch.inputs[:, max(0, before + 1) : step + 1].unbind(1):
                    memory = objective.rnn.cell(memory, token)
                errors.append((memory - labels[:, step]).square().mean())
        found = objective(batch, seeded()).parts["dynamics"]
        assert_close(found, torch.stack(errors).mean(), rtol=1e-5, atol=1e-7)

    def test_depth_does_not_depend_on_the_length(self):
        objective = DMT(tiny_teacher("causal"), tiny_rnn(), DMTConfig(rollout="picard", sweeps=4))
        depths = [
            sequential_ops(lambda length=length: objective(random_batch(2, length), seeded()).total)
            for length in (8, 32)
        ]
        assert depths[0] == depths[1]


def short(rollout: Rollout) -> RunConfig:
    config = recipe("retrieval")
    smt = SMTConfig(steps=2, batch_size=4, timesteps=0, future_length=8)
    dmt = DMTConfig(steps=11, batch_size=6, rollout=rollout, segment=4)
    log = replace(config.log, every=1, evaluate_every=5, evaluate_sequences=8)
    return replace(config, smt=smt, dmt=dmt, log=log)


@pytest.mark.parametrize("rollout", ["carried", "picard"])
def test_a_resumed_run_is_bit_exact(rollout: Rollout, tmp_path: Path):
    whole = Run.create(short(rollout), tmp_path / "whole").train()
    with pytest.raises(Interrupted):
        Run.create(short(rollout), tmp_path / "cut").train(StopAt("dmt", 5))
    resumed = Run.open(tmp_path / "cut").train()
    assert_same_weights(whole, resumed)
    assert comparable(whole) == comparable(resumed)


def test_a_step_of_carried_rollouts_counts_as_many_operations_at_any_length(tmp_path: Path):
    depth = []
    for length in (16, 32):
        config = short("carried")
        config = replace(config, data=Retrieval(sequence_length=length))
        run = Run.create(config, tmp_path / str(length)).train()
        stage = run.progress.stages[1]
        depth.append(stage.sequential_ops_a_step)
        assert stage.tokens == 11 * 6 * 4  # of a drawn sequence a step reads one segment
    assert depth[0] == depth[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout": "carried", "through_time": True}, "through_time=True with rollout=carried"),
        ({"rollout": "carried", "batch_size": 8, "accumulate": 2}, "accumulate=2 with rollout"),
        ({"sweeps": 3}, "sweeps=3: belongs to rollout=picard"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_contradict_each_other_are_refused(options: dict, message: str):
    with pytest.raises(MemtrainError, match=message):
        DMTConfig(**options)


def test_several_processes_are_refused_before_training():
    with pytest.raises(MemtrainError, match=r"dmt\.rollout=carried: .* in one process, not in 2"):
        check_batch_sizes(short("carried"), processes=2)
