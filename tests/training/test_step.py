"""The training step: clipping, freezing, numbers that are not finite, saved state."""

import pytest
import torch
from torch import nn

from memtrain.accel.engine import Engine
from memtrain.config import BPTTConfig, EngineConfig, StageConfig
from memtrain.data.task import Task
from memtrain.errors import DivergedError
from memtrain.objectives.base import Objective
from memtrain.runs.progress import StageProgress
from memtrain.shapes import Batch, Losses
from memtrain.training.step import Trainer


class OneToken(Task):
    vocab_size, sequence_length = 2, 1

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(2, (count, 1), generator=generator)
        return Batch(tokens, tokens)


class Pull(Objective):
    """Pulls two modules with gradients of known size; a third is frozen."""

    def __init__(self, force: float = 1.0) -> None:
        super().__init__()
        self.left, self.right, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.force = force

    def trained(self) -> dict[str, nn.Module]:
        return {"left": self.left, "right": self.right}

    def tokens_needed(self) -> int:
        return 1

    def compute(self, batch: Batch, generator: torch.Generator) -> Losses:
        total = self.force * (self.left.weight.sum() + 1e-3 * self.right.weight.sum())
        total = total + self.frozen.weight.sum() + 0 * (self.left.bias + self.right.bias).sum()
        return Losses(total, {"force": total.detach()})


def trainer(objective: Objective, stage: StageConfig) -> Trainer:
    return Trainer(objective, stage, OneToken(), Engine(EngineConfig(device="cpu")), seed=0)


def test_each_group_is_clipped_to_its_own_norm():
    stage = StageConfig(steps=1, clip_norm=0.5)
    objective = Pull(force=1.0)
    gradients = {}
    pulled = trainer(objective, stage)
    original = pulled.optimizer.step

    def spy(*arguments, **options):
        gradients["left"] = objective.left.weight.grad.norm().item()  # type: ignore[union-attr]
        gradients["right"] = objective.right.weight.grad.norm().item()  # type: ignore[union-attr]
        return original(*arguments, **options)

    pulled.optimizer.step = spy  # type: ignore[method-assign]
    with pulled.frozen_rest():
        metrics = pulled.train_step()
    assert gradients["left"] == pytest.approx(0.5, rel=1e-3)  # 4 before
    assert gradients["right"] == pytest.approx(4e-3, rel=1e-3)  # below the limit: untouched
    assert float(metrics["gradient_norm_left"]) == pytest.approx(4.0)


def test_the_saved_optimizer_state_is_complete():
    stage = StageConfig(steps=10, learning_rate=0.1)
    one, other = trainer(Pull(), stage), trainer(Pull(), stage)
    for _ in range(3):
        one.train_step()
    other.load_tensors({name: value.clone() for name, value in one.tensors().items()})
    other.objective.load_state_dict(one.objective.state_dict())
    other.step = one.step
    for trained in (one, other):
        trained.train_step()
    expected, found = one.objective.state_dict(), other.objective.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


class Draws(Pull):
    """Pulls every row of the batch with a force that it draws for the whole batch."""

    def compute(self, batch: Batch, generator: torch.Generator) -> Losses:
        force = torch.randn(self.shard.whole(len(batch.inputs)), 4, generator=generator)
        total = self.shard.sum((self.shard.rows(force) @ self.left.weight).sum())
        total = total + 0 * sum(p.sum() for p in self.parameters())
        return Losses(total, {})


def test_micro_batches_sample_the_same_as_the_whole_batch():
    weights = []
    for accumulate in (1, 2, 4):
        torch.manual_seed(0)
        stage = StageConfig(steps=10, batch_size=8, accumulate=accumulate, learning_rate=0.1)
        taken = trainer(Draws(), stage)
        for _ in range(2):
            taken.train_step()
        weights.append(taken.objective.state_dict()["left.weight"])
    for weight in weights[1:]:
        torch.testing.assert_close(weight, weights[0])


def test_other_parameters_are_frozen_only_during_the_stage():
    objective = Pull()
    pulled = trainer(objective, StageConfig(steps=1))
    before = objective.frozen.weight.clone()
    with pulled.frozen_rest():
        assert not objective.frozen.weight.requires_grad
        pulled.train_step()
        assert objective.frozen.weight.grad is None
    assert objective.frozen.weight.requires_grad
    assert torch.equal(objective.frozen.weight, before)


def test_parameters_that_the_user_froze_stay_frozen():
    objective = Pull()
    objective.left.weight.requires_grad_(False)
    pulled = trainer(objective, StageConfig(steps=1))
    with pulled.frozen_rest():
        pulled.train_step()
    assert not objective.left.weight.requires_grad


def test_tokens_and_steps_are_counted():
    pulled = trainer(Pull(), BPTTConfig(steps=3, batch_size=5))
    for _ in range(3):
        pulled.train_step()
    assert (pulled.step, pulled.tokens) == (3, 15)
    assert pulled.clock.seconds > 0


class Infinite(Pull):
    """One of its losses is not finite."""

    bad = False

    def compute(self, batch: Batch, generator: torch.Generator) -> Losses:
        losses = super().compute(batch, generator)
        return Losses(losses.total * (float("inf") if self.bad else 1), losses.parts)


def skipped(steps: int, in_a_row: int) -> StageProgress:
    return StageProgress("smt", 7, skipped=steps, skipped_in_a_row=in_a_row)


SKIPPING = StageConfig(steps=9, on_nonfinite="skip", skip_limit=2)


def test_a_bad_step_that_is_skipped_changes_neither_weights_nor_moments():
    objective = Infinite()
    skipping = trainer(objective, SKIPPING)
    with skipping.frozen_rest():
        skipping.train_step()
        before = [p.clone() for p in skipping.ordered]
        moments = {name: t.clone() for name, t in skipping.tensors().items() if "adam" in name}
        objective.bad = True
        skipping.train_step()
        after = skipping.tensors()
        assert skipping.check() == skipping.bad_in_a_row == 1
        assert all(map(torch.equal, skipping.ordered, before))
        assert moments and all(torch.equal(after[name], value) for name, value in moments.items())
        objective.bad = False
        skipping.train_step()
    assert (skipping.check(), skipping.bad_in_a_row) == (1, 0)
    assert not any(map(torch.equal, skipping.ordered[:2], before))


def test_bad_steps_of_a_checkpoint_count_at_once():
    resumed = trainer(Pull(), SKIPPING)
    resumed.restore(5, skipped(5, in_a_row=2))
    assert (resumed.check(), resumed.bad_in_a_row) == (5, 2)
    resumed.restore(5, skipped(5, in_a_row=3))  # more than the limit
    with pytest.raises(DivergedError):
        resumed.check()


def test_the_limit_of_bad_steps_in_a_row_survives_a_resume():
    objective = Infinite()
    objective.bad = True
    resumed = trainer(objective, SKIPPING)
    resumed.restore(2, skipped(2, in_a_row=1))
    with resumed.frozen_rest():
        resumed.train_step()
        with pytest.raises(DivergedError):
            resumed.train_step()


def test_the_global_rng_state_is_saved_and_restored():
    first, second = (trainer(Pull(), StageConfig(steps=3)) for _ in range(2))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    saved = first.tensors()
    assert torch.equal(saved["random.torch"], state)
    expected = torch.rand(4)
    second.load_tensors(saved)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.rand(4), expected)
