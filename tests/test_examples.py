"""The files of examples/ run and reach what they state."""

from pathlib import Path
from runpy import run_path

import pytest
import torch

import memtrain

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_plain_loop_solves_its_task_without_the_teacher():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rnn = run_path(str(EXAMPLES / "plain_loop.py"))["rnn"]
        tokens = torch.randint(8, (1000, 10))
    with torch.no_grad():
        right = rnn(tokens)[:, -1].argmax(-1) == tokens[:, 0]
    assert float(right.float().mean()) > 0.98


def test_a_cell_learns_the_states_of_an_oracle_without_a_teacher(tmp_path: Path, capsys):
    assert run_path(str(EXAMPLES / "from_labels.py"))["main"](tmp_path) >= 0.99
    assert "state 1" in capsys.readouterr().out


@pytest.mark.slow
def test_torchs_lstm_is_trained_without_unrolling(tmp_path: Path):
    assert run_path(str(EXAMPLES / "published_cell.py"))["main"](tmp_path / "run") > 0.98


@pytest.mark.slow
def test_dmt_steadies_a_world_model(tmp_path: Path):
    example = run_path(str(EXAMPLES / "world_model.py"))
    task, config = example["Pendulum"](), example["config"](25, 25)
    run = memtrain.Run.create(config, tmp_path / "run", task=task)
    errors = [example["imagined_error"](run.train(until=stage).rnn) for stage in ("smt", "dmt")]
    before, after = (float(error[-20:].mean()) for error in errors)
    assert after < before


@pytest.mark.slow
def test_the_forecasts_beat_the_season_before(tmp_path: Path):
    run = run_path(str(EXAMPLES / "forecast.py"))["main"](tmp_path)
    found = run.evaluate_forecasts(24).methods
    assert found["RNN"].crps < found["seasonal-naive"].crps
    assert found["RNN"].mse < found["seasonal-naive"].mse
