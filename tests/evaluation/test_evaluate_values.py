"""Held-out scores of numbers."""

import json
import math

import pytest
import torch

import memtrain
from memtrain.errors import MemtrainError
from memtrain.evaluation.evaluate import evaluate
from memtrain.evaluation.scores import Score
from memtrain.files import strict_json
from memtrain.losses import value_loss
from memtrain.models.likelihood import Distribution, normal_crps, sample_crps
from memtrain.plotting.figures import save_evaluation_figure, training_figure
from memtrain.training.console import ETA, Shown
from series_testing import AutoRegression, Linear, Season, small_models


@pytest.mark.parametrize("likelihood", ["gaussian", "student-t", "quantile"])
def test_teacher_and_rnn_are_scored_with_missing_numbers(likelihood):
    task = Season(likelihood, missing=0.1)
    teacher, rnn = small_models(task.values)
    result = evaluate(task, rnn, teacher, sequences=16, seed=3, baselines=True)
    batch = task.held_out(16, torch.Generator().manual_seed(3))
    with torch.no_grad():
        own = rnn(batch.inputs)
        taught = teacher.predict(teacher.encode(batch.inputs).flatten(0, 1)).view(own.shape)
    for outputs, score in ((own, result.rnn), (taught, result.teacher)):
        assert score is not None and score.accuracy is None and score.bits is None
        loss = float(value_loss(outputs, batch.targets, likelihood))
        assert score.nats == pytest.approx(loss, rel=1e-4)
        mean = Distribution.of(outputs, task.values).mean()
        mse = float((mean - batch.targets).square().nanmean())
        assert score.mse == pytest.approx(mse, rel=1e-4)
        assert score.column_mse == {"load": pytest.approx(100 * mse, rel=1e-4)}
        assert score.crps is not None and 0 < score.crps < math.sqrt(mse)
        assert score.column_crps == {"load": pytest.approx(10 * score.crps)}
    assert result.targets == int((~batch.targets.isnan()).sum()) < 16 * 36
    assert result.drift is not None and len(result.drift.rollout) == 36
    assert result.rnn_from_teacher is not None and result.rnn_after_start is not None
    assert result.spread is not None and result.by_position.rnn[0] is not None
    assert [one.name for one in result.baselines] == ["naive", "seasonal-naive"]
    assert result.loss_name == ("pinball loss" if likelihood == "quantile" else "nats")


def test_the_crps_of_a_right_model_is_that_of_the_noise():
    task = AutoRegression()
    rnn = Linear(torch.tensor([[0.8]]), deviation=0.5)
    score = evaluate(task, rnn, sequences=400).rnn
    nats = 0.5 + math.log(0.5) + 0.5 * math.log(2 * math.pi)
    assert score.nats == pytest.approx(nats, abs=0.02)
    assert score.mse == pytest.approx(0.25, rel=0.05)
    assert score.crps == pytest.approx(0.5 / math.sqrt(math.pi), rel=0.03)
    assert score.column_mse is None


def test_the_formula_of_the_crps_equals_that_of_samples():
    generator = torch.Generator().manual_seed(0)
    samples = 1 + 2 * torch.randn(20_000, 3, generator=generator)
    targets = torch.tensor([0.5, 4.0, math.nan])
    exact = normal_crps(torch.ones(3), torch.full((3,), 2.0), targets)
    torch.testing.assert_close(
        sample_crps(samples, targets), exact, rtol=0.02, atol=0, equal_nan=True
    )


def test_results_are_printed_and_saved_with_honest_names(tmp_path):
    task = Season("quantile")
    teacher, rnn = small_models(task.values)
    result = evaluate(task, rnn, teacher, sequences=8, baselines=True)
    assert "pinball loss: rnn=" in repr(result) and "\n" not in repr(result)
    assert "mse=" in repr(result.rnn) and "accuracy" not in repr(result.rnn)
    html = result._repr_html_()
    assert "<th>pinball loss</th><th>MSE</th><th>CRPS</th>" in html
    plain = json.loads(strict_json(result.to_json()))
    assert plain["loss_name"] == "pinball loss" and plain["rnn"]["accuracy"] is None
    assert plain["rnn"]["column_mse"]["load"] > 0
    shown = Shown("smt", 1, 2, ETA(1, 2))
    shown.note(result, task.unit)
    assert "pinball loss per value (teacher" in shown.held_out_words()[-1]
    save_evaluation_figure(result, tmp_path / "evaluation.png", "run", task.unit)
    assert (tmp_path / "evaluation.png").exists()
    lines = [
        {"stage": "smt", "step": step, "total_steps": step, "decode": -1.0, "evaluation": plain}
        for step in (1, 2)
    ]
    figure = training_figure(lines, "run", "value", task.loss_name)
    assert all(axes.get_ylabel() == "pinball loss per value" for axes in figure.axes)


def test_tokens_keep_their_fields():
    assert repr(Score(math.log(2), 0.5)) == "Score(nats=0.6931, bits=1.0000, accuracy=0.5000)"
    from memtrain.config import Stack
    from memtrain.data.task import build_task

    task = build_task(Stack(sequence_length=8, vocab_size=5, depth=3))
    cell = memtrain.make_cell("gru", vocab_size=task.vocab_size, memory_tokens=2, memory_dim=16)
    rnn = memtrain.RNN(
        cell, vocab_size=task.vocab_size, width=16, decoder_layers=1, heads=2, head_dim=8
    )
    plain = evaluate(task, rnn, sequences=4).to_json()
    assert list(plain["rnn"]) == ["nats", "accuracy", "bits"] and "loss_name" not in plain


def test_a_task_of_other_numbers_is_refused():
    rnn = Linear(torch.eye(2))
    with pytest.raises(
        MemtrainError, match="task: it has 1 numbers to 1 .* the rnn 2 numbers to 2"
    ):
        evaluate(AutoRegression(), rnn)
