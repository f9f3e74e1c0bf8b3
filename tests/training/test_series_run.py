"""Runs on series of numbers: commands, resume, and loading without the data."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import memtrain
from conftest import TINY, seeded
from memtrain.cli import main
from memtrain.config import LogConfig, RunConfig, Series
from memtrain.data.series import SeriesTask
from memtrain.data.series_format import SeriesFormat
from memtrain.errors import MemtrainError
from memtrain.runs.progress import read_progress
from memtrain.shapes import Batch, Values
from memtrain.training.console import Reporter
from memtrain.training.label import label_run
from memtrain.training.run import Interrupted, Run
from run_testing import StopAt, assert_same_weights

SHORT = ["--data.window", "8", "--smt.steps", "2", "--smt.batch-size", "4"]
DMT = ["--dmt.steps", "2", "--dmt.batch-size", "4"]


def write(path: Path, rows: int = 120) -> Path:
    lines = [f"{row},{(row * 7) % 24},{row % 3 == 0:d}" for row in range(rows)]
    path.write_text("\n".join(["hour,y,promo", *lines]))
    return path


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = write(tmp_path / "x.csv")
    data = Series(path=str(path), targets="y", known="promo", time="hour", window=8, season=24)
    log = LogConfig(every=1, evaluate_every=5, checkpoint_every=5)
    return replace(TINY, name="x", data=data, log=log)


@pytest.mark.parametrize(("stage", "step"), [("smt", 7), ("dmt", 3), ("bptt", 2)])
def test_an_interrupted_run_is_bit_exact(config, tmp_path, stage, step):
    whole = Run.create(config, tmp_path / "whole").train(Reporter())
    run = Run.create(config, tmp_path / "stopped")
    with pytest.raises(Interrupted):
        run.train(StopAt(stage, step))
    resumed = Run.open(tmp_path / "stopped").train(Reporter())
    assert_same_weights(whole, resumed)


def test_a_run_loads_without_its_file(config, tmp_path):
    run = Run.create(config, tmp_path / "run").train(Reporter())
    assert isinstance(run.task, SeriesTask) and run.series == run.task.format
    assert run.series is not None and run.series.targets == ("y",) and run.series.season == 24
    inputs = run.task.held_out(3, seeded()).inputs
    Path(config.data.path).unlink()
    rnn = memtrain.load_rnn(tmp_path / "run")
    assert rnn.series == run.series and rnn.spelling is None
    assert rnn.space == Values(features=2, targets=1)
    torch.testing.assert_close(rnn(inputs), run.rnn.eval()(inputs))
    with pytest.raises(MemtrainError, match=r"x\.csv: no such file"):
        Run.open(tmp_path / "run")


@pytest.mark.parametrize("likelihood", ["student-t", "quantile"])
def test_other_likelihoods_load_too(config, tmp_path, likelihood):
    data = replace(config.data, likelihood=likelihood)
    short = replace(config, data=data, smt=replace(config.smt, steps=2), dmt=type(config.dmt)())
    run = Run.create(short, tmp_path / "run").train(Reporter(), until="smt")
    rnn = memtrain.load_rnn(tmp_path / "run")
    assert isinstance(rnn.space, Values) and rnn.space == run.task.space
    assert rnn.space.likelihood == likelihood


def test_a_changed_file_is_refused_in_words(config, tmp_path):
    Run.create(config, tmp_path / "run").train(Reporter(), until="smt")
    path = Path(config.data.path)
    text = path.read_text()
    path.write_text(text.replace("5,11,", "5,12,"))
    with pytest.raises(MemtrainError, match="is not the data that .* learned from, its numbers"):
        Run.open(tmp_path / "run")
    path.write_text(text.replace("\n", "\r\n"))  # the same numbers
    assert not Run.open(tmp_path / "run").finished


PENDULUM = Values(features=3, targets=2, likelihood="student-t")


class Pendulum(memtrain.Task):
    """An angle that follows the action known beforehand."""

    values = PENDULUM
    sequence_length = 6

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        state = torch.randn(count, 7, 3, generator=generator).cumsum(1) / 4
        return Batch(state[:, :-1], state[:, 1:, :2])


def test_a_task_of_numbers_of_ones_own_loads_without_it(tmp_path):
    Run.create(TINY, tmp_path / "built-in", task=Pendulum()).train(Reporter())
    cell = memtrain.wrap(torch.nn.GRUCell(8, 8), values=PENDULUM)
    run = Run.create(TINY, tmp_path / "wrapped", task=Pendulum(), cell=cell).train(Reporter())
    assert run.series is None and run.progress.values == asdict(PENDULUM)
    for folder, own in (("built-in", None), ("wrapped", cell)):
        rnn = memtrain.load_rnn(tmp_path / folder, cell=own)
        assert rnn.space == PENDULUM and rnn.series is None
        assert rnn(torch.zeros(2, 4, 3)).shape == (2, 4, PENDULUM.outputs)


def test_a_run_is_opened_with_the_same_task_of_numbers_only(tmp_path):
    class Stronger(Pendulum):
        def sample(self, count: int, generator: torch.Generator) -> Batch:
            return super().sample(count, generator).map(lambda numbers: 1.5 * numbers)

    Run.create(TINY, tmp_path / "run", task=Pendulum())
    assert Run.open(tmp_path / "run", task=Pendulum()).task.values == PENDULUM
    with pytest.raises(MemtrainError, match="training sequences differ"):
        Run.open(tmp_path / "run", task=Stronger())


def test_progress_without_the_new_fields_is_read(config, tmp_path):
    run = Run.create(config, tmp_path / "run")
    plain = run.progress.to_json()
    assert plain["values"] == asdict(Values(features=2)) and plain["series"]["targets"] == ("y",)
    old = {key: value for key, value in plain.items() if key not in ("values", "series")}
    assert (found := read_progress(old)).values is None and found.series is None
    assert "values" not in found.to_json() and "series" not in found.to_json()
    with pytest.raises(MemtrainError, match=r"progress\.series: must be an object or null"):
        read_progress(old | {"series": 3})


def test_what_is_for_tokens_is_refused_in_words(config, tmp_path):
    run = Run.create(config, tmp_path / "run").train(Reporter(), until="smt")
    with pytest.raises(MemtrainError, match="its sequences are numbers, and a label file holds"):
        label_run(run, tmp_path / "labels.safetensors")
    with pytest.raises(MemtrainError, match="only networks of tokens are exported"):
        memtrain.export(run, "x", tmp_path)


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.csv")
    write(tmp_path / "copy.csv")
    write(tmp_path / "other.csv", rows=130)
    columns = ["--data.targets", "y", "--data.known", "promo", "--data.time", "hour"]
    train = ["train", "series", "--data", "x.csv", *columns, "--data.season", "24", *SHORT, *DMT]
    assert main(train) == 0
    run = Run.open("runs/series")
    assert isinstance(run.config.data, Series) and run.config.data.season == 24
    assert run.config.cell.kind == memtrain.recipe("series").cell.kind
    assert isinstance(memtrain.load_rnn("runs/series").series, SeriesFormat)
    assert main([*train, "--resume"]) == 0
    assert main(["resume", "runs/series"]) == 0
    again = [*train, "--resume"]
    again[3] = "copy.csv"
    assert main(again) == 0
    again[3] = "other.csv"
    capsys.readouterr()
    assert main(again) == 2
    assert "data=other.csv: the run learns from x.csv" in capsys.readouterr().err
    bptt = ["train", "series", "--data", "x.csv", *columns, *SHORT[:2], "--method", "bptt"]
    assert main([*bptt, "--bptt.steps", "2", "--cell.kind", "lstm"]) == 0
    assert Run.open("runs/series-bptt").stages == ["bptt"]
    capsys.readouterr()
    for arguments, message in (
        (["train", "series"], "memtrain train series --data FILE --data.targets y"),
        (["train", "series", "x.csv"], "did you mean --data x.csv?"),
        (["train", "series", "--data", "no.csv"], "no.csv: no such file"),
        (["train", "series", "--data", "x.csv", "--size", "tiny"], "series has one size"),
        (
            ["train", "series", "--data", "x.csv", "--data.target", "y"],
            "did you mean --data.targets",
        ),
        (["train", "series", "--data", "x.csv", "--data.targets", "z"], "has no such column"),
        (["train", "series", "--data", "x.csv", "--data.window", "99"], "windows of 95 steps"),
        (["train", "series", "--data", "x.csv", "--data.held-out", "2"], "between 0 and 1"),
        (["train", "series", "--data", "x.csv", "--data.time-gap"], "needs the times"),
        (["train", "digits", "--data", "x.csv"], "labels and series take --data"),
        (["data", "series"], "is read directly"),
        (["data", "x.csv"], "memtrain train series --data FILE"),
        (["label", "runs/series"], "its sequences are numbers"),
    ):
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_help_shows_the_columns(capsys):
    with pytest.raises(SystemExit):
        main(["train", "series", "--help"])
    shown = capsys.readouterr().out
    assert "--data.targets TEXT" in shown and "--method" in shown and "--size" not in shown


def test_a_csv_is_still_read_as_text(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.csv").write_text("text,y\n" + "some words,1\n" * 200)
    assert main(["data", "x.csv", "--out", "prepared"]) == 0
    assert "train text --data prepared" in capsys.readouterr().out


def test_a_run_forecasts_from_the_command_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.csv")
    roles = ["--data.time", "hour", "--data.known", "promo", "--data.season", "6"]
    assert main(["train", "series", "--data", "x.csv", *roles, *SHORT, *DMT]) == 0
    assert main(["eval", "runs/series", "--origins", "3", "--horizon", "4"]) == 0
    assert "forecasts of 4 steps from 3 held-out origins" in capsys.readouterr().out
    assert main(["generate", "runs/series", "--length", "5", "--out", "forecast.csv"]) == 0
    assert (tmp_path / "forecast.csv").read_text().startswith("row,step,column,mean")
