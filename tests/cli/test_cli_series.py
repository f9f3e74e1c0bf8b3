"""memtrain eval and generate of a run whose sequences are numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import refused
from matplotlib.image import imread

import memtrain
from memtrain.cli import generate as generate_module
from memtrain.cli import main
from memtrain.config import LogConfig, PretrainConfig, SMTConfig
from memtrain.errors import MemtrainError
from memtrain.training.run import Run
from series_testing import MEMORY, Season


class Held(memtrain.Reporter):
    """Keeps the evaluations during training."""

    def __init__(self) -> None:
        self.seen = []

    def evaluated(self, step, evaluation, unit) -> None:
        self.seen.append((evaluation.rnn.nats, evaluation.loss_name, unit))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of a series, trained for two steps."""
    folder = tmp_path_factory.mktemp("series") / "season"
    config = memtrain.recipe("digits")
    sizes: dict[str, Any] = dict(width=16, heads=2, head_dim=8)
    config = replace(
        config,
        name="season",
        teacher=memtrain.TeacherConfig(
            **sizes, encoder="causal", encoder_layers=1, decoder_layers=1, context_length=4
        ),
        cell=memtrain.CellConfig(kind="gru", **MEMORY),
        pretrain=PretrainConfig(steps=0),
        smt=SMTConfig(steps=2, batch_size=4, future_length=3),
        dmt=replace(config.dmt, steps=0),
        log=LogConfig(evaluate_sequences=4),
    )
    reporter = Held()
    Run.create(config, folder, task=Season()).train(reporter)
    assert reporter.seen and reporter.seen[-1][1:] == ("nats", "value")
    return folder


def open_run(folder: Path) -> Run:
    return Run.open(folder, task=Season())


@pytest.fixture
def opened(folder: Path, monkeypatch) -> Path:
    """The run, whose task the commands find."""
    opened = Run.open
    monkeypatch.setattr(Run, "open", lambda path, **options: opened(path, task=Season()))
    monkeypatch.setattr(generate_module, "_load", lambda options: Run.open(options.run))
    return folder


def test_metrics_and_the_run_hold_scores_of_numbers(folder: Path):
    run = open_run(folder)
    scored = [line["evaluation"] for line in run.metrics.read() if "evaluation" in line]
    assert scored[-1]["rnn"]["mse"] > 0 and scored[-1]["teacher"]["crps"] > 0
    result = run.evaluate(4, baselines=True)
    assert result.rnn.column_mse is not None and len(result.baselines) == 2
    forecasts = run.evaluate_forecasts(5, origins=3, count=4)
    assert forecasts.horizon == 5 and set(forecasts.methods) >= {"RNN", "naive"}
    assert {axes.get_ylabel() for axes in run.plot().axes} >= {"nats per value"}
    cases = run.task.forecast_cases(2, 3, 20)  # type: ignore
    inputs = cases.inputs.clone()
    inputs[..., :1] = run.task.format.unscale_targets(inputs[..., :1])  # type: ignore
    found = memtrain.forecast(run, inputs, 3, known=cases.known, count=5)
    assert found.columns == ("load",) and found.paths.shape == (5, 2, 3, 1)


def test_eval_prints_scores_forecasts_and_figures(opened: Path, capsys):
    assert main(["eval", str(opened), "--sequences", "4", "--origins", "6", "--horizon", "8"]) == 0
    printed = capsys.readouterr().out
    for part in ("nats per value", "CRPS", "in the data's units", "seasonal-naive"):
        assert part in printed
    assert "forecasts of 8 steps from 6 held-out origins" in printed
    assert "bits" not in printed and "accuracy" not in printed
    assert "forecasts-8.png" in printed
    assert imread(opened / "figures" / "forecasts-8.png").ndim == 3
    assert main(["eval", str(opened), "--sequences", "4", "--origins", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["forecasts"]["horizon"] == 12 and record["loss_name"] == "nats"
    assert record["forecasts"]["methods"]["naive"]["columns"]["load"]["mae"] > 0


def test_generate_forecasts_from_held_out_origins(opened: Path, capsys, tmp_path: Path):
    assert main(["generate", str(opened), "--length", "7"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == opened / "samples" / "forecast-7-seed0.png" and path.exists()
    csv = tmp_path / "ahead.csv"
    assert main(["generate", str(opened), "--count", "2", "--out", str(csv)]) == 0
    lines = csv.read_text().splitlines()
    assert len(lines) == 1 + 2 * 12 and lines[1].split(",")[2] == "load"


def test_options_that_make_no_sense_are_refused(opened: Path, capsys):
    for options in (
        ("--prompt", "once"),
        ("--given", "0.5"),
        ("--image", "x.png"),
        ("--temperature", "0.5"),
        ("--top-k", "3"),
        ("--top-p", "0.9"),
    ):
        line = refused(capsys, "generate", str(opened), *options)
        assert f"{options[0]}: this model forecasts numbers" in line
    line = refused(capsys, "generate", str(opened), "--out", "x.txt")
    assert "--out x.txt: forecasts are saved as .csv, .npz, .png" in line
    assert "--horizon=0: must be at least 1" in refused(
        capsys, "eval", str(opened), "--horizon", "0"
    )


def test_forecasts_of_tokens_are_refused(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = memtrain.recipe("digits")
    run = Run.create(config, "digits")
    with pytest.raises(MemtrainError, match="its sequences are tokens, not numbers"):
        run.evaluate_forecasts(3)
