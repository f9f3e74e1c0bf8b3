"""SMT and DMT from labels: the same losses as with a frozen teacher that makes these labels."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from conftest import ENCODERS, gradients, random_batch, seeded, tiny_rnn, tiny_teacher
from memtrain.config import DMTConfig, SMTConfig
from memtrain.objectives.dmt import DMT
from memtrain.objectives.from_labels import DMTFromLabels, SMTFromLabels, memories_at
from memtrain.objectives.smt import SMT
from memtrain.shapes import Batch


def labelled(encoder: str, rows: int = 5, length: int = 9) -> tuple[Any, Batch]:
    """A teacher, and a batch with its memories."""
    teacher, batch = tiny_teacher(encoder), random_batch(rows, length)
    with torch.no_grad():
        memories = teacher.encode(batch.inputs)
    return teacher, Batch(batch.inputs, batch.targets, memories)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(
    "options",
    [
        {"timesteps": 0},
        {"timesteps": 1},
        {"timesteps": 4, "decode_timesteps": 2},
        {"timesteps": 0, "learn_start": False},
        {"timesteps": 0, "start_weight": 5.0, "memory_noise": 0.3},
        {"timesteps": 0, "dynamics_steps": 3, "normalize_dynamics": True},
        {"timesteps": 0, "dynamics_steps": 3, "dynamics_labels": "last", "own_starts": 0.5},
    ],
    ids=str,
)
def test_the_dynamics_loss_equals_that_of_smt_with_a_frozen_teacher(encoder: str, options: Any):
    teacher, batch = labelled(encoder)
    config, rnn = SMTConfig(train_teacher=False, **options), tiny_rnn()
    expected = SMT(teacher, rnn, config)(batch, seeded(3))
    found = SMTFromLabels(rnn, config)(batch, seeded(3))
    assert_close(found.parts["dynamics"], expected.parts["dynamics"], rtol=1e-5, atol=1e-7)
    cell = list(rnn.cell.parameters())
    for one, other in zip(
        gradients(found.total, cell), gradients(expected.total, cell), strict=True
    ):
        assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"empty_start": 0.4, "rollout_length": 4},
        {"label_stride": 3, "segment": 2, "readout_stride": 2},
        {"through_time": True},
    ],
    ids=str,
)
def test_dmt_from_labels_equals_dmt(encoder: str, options: Any):
    teacher, batch = labelled(encoder)
    config, rnn = DMTConfig(**options), tiny_rnn()
    expected = DMT(teacher, rnn, config)(batch, seeded(3))
    found = DMTFromLabels(rnn, config)(batch, seeded(3))
    for name, value in expected.parts.items():
        assert_close(found.parts[name], value, rtol=1e-5, atol=1e-7)


def test_training_steps_from_labels_equal_those_of_a_frozen_teacher():
    teacher, batch = labelled("causal")
    config, weights = SMTConfig(train_teacher=False, timesteps=0), []
    for make in (lambda rnn: SMT(teacher, rnn, config), lambda rnn: SMTFromLabels(rnn, config)):
        rnn = tiny_rnn()
        objective, generator = make(rnn), seeded(1)
        optimizer = torch.optim.SGD(rnn.cell.parameters(), lr=1.0)
        for _ in range(5):
            optimizer.zero_grad()
            objective(batch, generator).total.backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in rnn.cell.parameters()]))
    assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)


def test_the_readouts_loss_does_not_reach_the_cell_and_the_cells_not_the_readout():
    _, batch = labelled("causal")
    rnn = tiny_rnn()
    losses = SMTFromLabels(rnn, SMTConfig(train_teacher=False, dynamics_weight=0.0))(
        batch, seeded()
    )
    assert not any(g.any() for g in gradients(losses.total, rnn.cell.parameters()))
    assert any(g.any() for g in gradients(losses.total, rnn.readout.parameters()))
    losses = SMTFromLabels(rnn, SMTConfig(train_teacher=False, decode_weight=0.0))(batch, seeded())
    assert not any(g.any() for g in gradients(losses.total, rnn.readout.parameters()))


def test_step_minus_one_is_the_empty_memory():
    _, batch = labelled("causal")
    steps = torch.tensor([[-1, 0, 8]]).expand(5, -1)
    found = memories_at(batch, steps)
    assert batch.memories is not None
    assert not found[:, 0].any()
    assert torch.equal(found[:, 1:], batch.memories[:, [0, 8]])
