"""Sums that come a few sequences at a time."""

import pytest
import torch

from conftest import VOCAB, random_batch, random_tokens, seeded, tiny_rnn
from memtrain.evaluation.scores import DriftAccumulator, Score, ScoreAccumulator
from memtrain.shapes import IGNORE_INDEX

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def test_only_asked_positions_count():
    batch = random_batch(3, 5, asked=0.3)
    asked = batch.targets != IGNORE_INDEX
    right = torch.nn.functional.one_hot(batch.targets.clamp(min=0), VOCAB).float()
    for sign, accuracy in ((9.0, 1.0), (-9.0, 0.0)):
        logits = (sign * right).where(asked[..., None], 0).flatten(0, 1)
        tally = ScoreAccumulator(5, CPU)
        tally.add(lambda _, logits=logits: logits, normal(3, 5, 2, 16), batch.targets)
        assert tally.score().accuracy == accuracy
        assert int(tally.asked.sum()) == int(asked.sum())


def test_a_score_of_nothing_is_zero():
    tally = ScoreAccumulator(3, CPU)
    targets = torch.full((2, 3), IGNORE_INDEX)
    rnn = tiny_rnn()
    with torch.no_grad():
        tally.add(rnn.predict, normal(2, 3, 2, 16), targets)
    assert tally.score() == Score(nats=0.0, accuracy=0.0)


def test_drift_is_a_share_of_the_variance_over_sequences_and_steps():
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


def test_memories_that_never_vary_give_no_infinite_share():
    rnn, inputs, constant = tiny_rnn(), random_tokens(2, 3), torch.ones(2, 3, 2, 16)
    apart = DriftAccumulator(3, CPU)
    with torch.no_grad():
        apart.add(rnn, inputs, normal(2, 3, 2, 16), constant)
    assert torch.tensor(apart.drift().unexplained).isfinite().all()
