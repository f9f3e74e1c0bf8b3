"""Schedules of the learning rate: linear, wsd, a floor, and what is refused."""

import pytest

from memtrain.config import DMTConfig, StageConfig
from memtrain.errors import MemtrainError
from memtrain.training.schedule import learning_rate, lengths_over


def rates(**fields) -> list[float]:
    stage = StageConfig(steps=100, learning_rate=1.0, warmup=0.1, **fields)
    return [learning_rate(stage, step) for step in range(100)]


def test_linear_falls_to_its_floor():
    found = rates(schedule="linear", floor=0.1)
    assert found[9] == found[10] == 1.0
    assert found[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert found[99] == pytest.approx(0.1 + 0.9 / 90)
    assert found[10:] == sorted(found[10:], reverse=True)


def test_cosine_ends_at_its_floor():
    found = rates(schedule="cosine", floor=0.2)
    assert found[55] == pytest.approx(0.6) and found[99] == pytest.approx(0.2, abs=1e-3)
    assert min(found[10:]) > 0.2


def test_wsd_is_stable_and_falls_at_the_end():
    found = rates(schedule="wsd", decay=0.2)
    assert set(found[9:81]) == {1.0} and found[90] == pytest.approx(0.5)
    assert found[99] == pytest.approx(0.05)
    assert rates(schedule="wsd", decay=0.0)[10:] == [1.0] * 90


def test_a_clock_moves_every_schedule():
    stage = StageConfig(steps=100, learning_rate=1.0, warmup=0.0, schedule="linear", seconds=9.0)
    assert learning_rate(stage, 10, elapsed=0.5) == pytest.approx(1 - 49 / 99)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"floor": 0.1}, "floor=0.1: a constant schedule does not fall; set schedule"),
        ({"floor": 2.0, "schedule": "linear"}, "floor=2.0: must be between 0 and 1"),
        ({"decay": 0.3, "schedule": "cosine"}, "decay=0.3: belongs to schedule=wsd"),
        ({"decay": 0.9, "warmup": 0.5, "schedule": "wsd"}, "their sum must be at most 1"),
        ({"optimizer": "nadam"}, "must be adamw or muon, or a class as module:Class"),
        ({"optimizer": "torch.optim:SGD", "betas": (0.5, 0.5)}, "are AdamW's"),
        ({"optimizer_options": {"lr": 1.0}}, "lr has its own field; set learning_rate"),
        ({"optimizer_options": {"betas": 1.0}}, "betas has its own field"),
        ({"patience": -1}, "patience=-1: must be at least 0"),
        ({"curriculum": ((0, 2),)}, "curriculum=0 2: 0 tokens for 2 steps; both must be at least"),
        ({"curriculum": ((4, 0),)}, "curriculum=4 0: 4 tokens for 0 steps; both must be at least"),
        ({"curriculum": ((8, 2), (8, 2))}, "curriculum=8 2 8 2: its lengths must rise"),
        ({"curriculum": ((8, 2), (4, 2))}, "curriculum=8 2 4 2: its lengths must rise"),
        ({"curriculum": ((4, 5), (8, 5))}, "takes 10 steps of steps=10, .*; raise steps"),
    ],
)
def test_wrong_schedules_and_optimizers_are_refused(fields: dict, words: str):
    with pytest.raises(MemtrainError, match=words):
        StageConfig(steps=10, **fields)


def test_a_curriculum_moves_on_after_its_steps_or_by_the_clock():
    stage = StageConfig(steps=100, curriculum=((4, 10), (8, 20)), seconds=9.0)
    assert [lengths_over(stage, step) for step in (0, 9, 10, 29, 30, 99)] == [0, 0, 1, 1, 2, 2]
    assert [lengths_over(stage, 5, part) for part in (0.0, 0.09, 0.1, 0.3)] == [0, 0, 1, 2]
    assert lengths_over(StageConfig(steps=100), 50) == 0


def test_dmt_takes_every_schedule():
    assert DMTConfig(schedule="wsd", decay=0.5).schedule == "wsd"
