"""What is said about scores."""

import math

import pytest

from memtrain.eval.counts import Baseline
from memtrain.eval.evaluate import ByPosition, Evaluation, Score
from memtrain.tables import what_is_missing


def result(rnn: float, teacher: float | None, *counts: float) -> Evaluation:
    return Evaluation(
        sequences=1,
        length=2,
        targets=1,
        rnn=Score(rnn, 0.5),
        teacher=None if teacher is None else Score(teacher, 0.5),
        rnn_from_teacher=None,
        rnn_after_start=None,
        start=0,
        drift=None,
        by_position=ByPosition([0, 2], [rnn], None, None, None),
        baselines=[Baseline(f"counts, order {i}", nats, nats, 9) for i, nats in enumerate(counts)],
    )


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((1.9, 1.8, 3.4, 1.7), "A table of counts (counts, order 1) is better"),
        ((1.9, 1.8, 3.4, 1.7), "--smt.steps"),
        ((1.9, None, 1.7), "--bptt.steps"),
        (
            (1.75, 1.68, 1.7),
            "The RNN is 0.070 nats above its teacher: more steps of DMT (--dmt.steps)",
        ),
        ((1.9, 1.6, 3.0), "The RNN is 0.300 nats above its teacher"),
        ((0.3, 0.0), "The RNN is 0.300 nats above its teacher"),
    ],
)
def test_weak_scores_come_with_what_helps(scores, expected: str):
    assert expected in what_is_missing(result(*scores))


@pytest.mark.parametrize(
    "scores",
    [
        (1.6, 1.55, 1.7),
        (1.6, None, 1.7),
        (1.6, None),
        (0.001, 0.0001),
        (1.5, 1.6, 1.55),
        (math.nan, math.nan, 1.7),
    ],
)
def test_of_good_scores_nothing_is_said(scores):
    assert what_is_missing(result(*scores)) == ""
