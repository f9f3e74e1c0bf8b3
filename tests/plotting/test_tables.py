"""Advice on scores."""

import math

import pytest

from memtrain.evaluation.evaluate import ByPosition, Drift, Evaluation, Score
from memtrain.evaluation.ngram import Baseline
from memtrain.plotting.tables import advice_on

IMPROVING = [("smt", 2.0), ("dmt", 1.95), ("dmt", 1.9)]
"""Evaluations while training: each one's stage, and the RNN's nats."""


def result(
    rnn: float, teacher: float | None, *counts: float, one_step: float = 0.01, end: float = 0.3
) -> Evaluation:
    """Scores, and the drift of single steps and at the end of a rollout."""
    return Evaluation(
        sequences=1,
        length=2,
        targets=1,
        rnn=Score(rnn, 0.5),
        teacher=None if teacher is None else Score(teacher, 0.5),
        rnn_from_teacher=None,
        rnn_after_start=None,
        start=0,
        drift=None if teacher is None else Drift([0.0], [one_step, end], 0.0, one_step),
        by_position=ByPosition([0, 2], [rnn], None, None, None),
        baselines=[Baseline(f"counts, order {i}", nats, nats, 9) for i, nats in enumerate(counts)],
    )


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((1.9, 1.8, 3.4, 1.7), "A table of counts (counts, order 1) is better"),
        ((1.9, 1.8, 3.4, 1.7), "--smt.steps"),
        ((1.9, None, 1.7), "--bptt.steps"),
        ((1.75, 1.68, 1.7), "The RNN is 0.070 nats above its teacher: single steps are right"),
        ((1.9, 1.6, 3.0), "The RNN is 0.300 nats above its teacher"),
        ((0.3, 0.0), "DMT was still improving: more steps of it (--dmt.steps) may help"),
    ],
)
def test_weak_scores_come_with_advice(scores, expected: str):
    assert expected in advice_on(result(*scores), IMPROVING)


@pytest.mark.parametrize(
    ("history", "drift", "expected"),
    [
        (IMPROVING, {}, "more steps of it (--dmt.steps) may help"),
        ([("smt", 2.0), ("dmt", 1.9)], {}, "more steps of it (--dmt.steps) may help"),
        ([("smt", 1.7), ("dmt", 1.6), ("dmt", 1.9)], {}, "has risen, from 1.600 to 1.900: --best"),
        ([("smt", 1.6), ("dmt", 1.9)], {}, "has risen, from 1.600 to 1.900"),
        ([("smt", 2.0), ("smt", 1.9)], {}, "DMT (--dmt.steps), which trains rollouts, has not"),
        (IMPROVING, {"one_step": 0.4}, "does not follow the teacher's memory even for one step"),
        ([], {"one_step": 0.4}, "--cell.width"),
    ],
)
def test_advice_depends_on_losses_and_drift(history, drift: dict[str, float], expected: str):
    assert expected in advice_on(result(1.9, 1.5, **drift), history)


@pytest.mark.parametrize(
    ("history", "drift"),
    [
        ([], {}),  # its training is unknown
        ([("smt", 2.0), ("dmt", 1.9), ("dmt", 1.9)], {}),  # DMT no longer helps
        ([("dmt", 1.9)], {}),
        ([*IMPROVING, ("bptt", 1.9)], {}),
        (IMPROVING, {"end": 0.011}),  # rollouts are as good as single steps
    ],
)
def test_no_advice_without_a_known_cause(history, drift: dict[str, float]):
    assert advice_on(result(1.9, 1.5, **drift), history) == ""


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
def test_good_scores_get_no_advice(scores):
    assert advice_on(result(*scores), IMPROVING) == ""


def test_scores_and_evaluations_are_one_line():
    one = result(1.9, 1.5)
    assert repr(one.rnn) == "Score(nats=1.9000, bits=2.7411, accuracy=0.5000)"
    assert repr(one) == "<Evaluation of 1 sequences of 2, nats: rnn=1.9000 teacher=1.5000>"
    assert one._repr_html_().count("<tr>") == 3 and "<td>1.5000</td>" in one._repr_html_()
