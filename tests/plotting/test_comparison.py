"""Runs side by side: what differs, their losses and costs, and when they cannot be compared."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

import memtrain
from conftest import TINY
from memtrain.config import BPTTConfig, DMTConfig, RunConfig, SMTConfig
from memtrain.errors import MemtrainError
from memtrain.plotting.comparison import (
    COSTS,
    compare_runs,
    comparison_tables,
    differing_settings,
    loss_figure,
    short_count,
)
from memtrain.runs.run_folder import held
from memtrain.training.console import Reporter
from memtrain.training.run import Run

OLD = Path(__file__).parents[1] / "fixtures" / "run-9b37a44"


def bptt(**settings) -> RunConfig:
    stage = BPTTConfig(steps=6, batch_size=4, **settings)
    return replace(TINY, smt=SMTConfig(), dmt=DMTConfig(), bptt=stage)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    for name, config in {
        "taught": TINY,
        "slow": bptt(learning_rate=1e-3),
        "quick": bptt(learning_rate=1e-2),
        "other": replace(bptt(), data=replace(TINY.data, sequence_length=8)),
    }.items():
        Run.create(config, folder / name).train(Reporter())
    return folder


def test_losses_and_costs_are_those_of_the_runs(runs: Path):
    table, figure, warnings = memtrain.compare([runs / "slow", str(runs / "quick")])
    assert list(table["run"]) == ["slow", "quick"] and not warnings
    assert list(table["bptt.learning_rate"]) == [1e-3, 1e-2]
    for name, row in zip(("slow", "quick"), table.to_dict("records"), strict=True):
        run = Run.open(runs / name)
        assert row["tokens"] == run.totals()["total_tokens"]
        assert row["rnn"] == run.evaluate(TINY.log.evaluate_sequences).rnn.nats
    assert [axes.get_xlabel() for axes in figure.axes] == list(COSTS.values())
    (last, *_) = figure.axes[0].lines
    assert last.get_label() == "slow" and np.asarray(last.get_ydata())[-1] == table["rnn"][0]


def test_only_settings_that_differ_are_shown(runs: Path):
    found = compare_runs([runs / "slow", runs / "quick"])
    assert found.settings == {"bptt.learning_rate": [1e-3, 1e-2]}


def test_stages_that_one_run_lacks_are_only_named_by_their_steps():
    settings = differing_settings([TINY, bptt(learning_rate=1e-3)])
    assert settings["smt.steps"] == [12, 0] and "smt.learning_rate" not in settings
    assert settings["bptt.learning_rate"] == [3e-4, 1e-3]


def test_the_teacher_has_a_line_of_its_own(runs: Path):
    figure = compare_runs([runs / "taught", runs / "slow"]).figure()
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["taught", "taught, teacher", "slow"]


def test_different_data_is_marked_in_words(runs: Path):
    found = compare_runs([runs / "slow", runs / "other"])
    assert found.warnings[0] == "different data: the losses are not comparable"
    assert "8 of 6, 8 of 8" in found.warnings[1]
    with held(runs / "slow"):
        found = compare_runs([runs / "slow", runs / "quick"])
    assert found.warnings == ["still training: slow"]


def test_runs_of_one_name_are_told_apart_by_their_folders(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "slow", tmp_path / "a" / "slow")
    found = compare_runs([runs / "slow", tmp_path / "a" / "slow"])
    assert found.names == [f"{runs.name}/slow", "a/slow"]


def test_tables_fit_a_terminal_of_80_columns(runs: Path):
    names = ("taught", "slow", "quick", "other")
    console = Console(width=80, record=True, file=io.StringIO())
    for table in comparison_tables(compare_runs([runs / name for name in names])):
        console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and "settings that differ" in text and "0.001" in text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["slow"], "runs=1: name at least two run folders; memtrain runs lists them"),
        (["slow", "slow"], "slow: given twice; leave one out"),
        (["slow", "nothing"], "nothing: no run there; config.json is missing"),
        (["slow", "new"], "new: has no held-out loss yet; memtrain resume"),
        (["slow", "digits"], "nats per pixel, those of .*nats per target; compare runs whose"),
        (["slow", "broken"], "broken: cannot be compared: checkpoint 00000006"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs: Path, tmp_path: Path, names, message):
    shutil.copytree(runs, tmp_path / "runs")
    shutil.copytree(OLD / "digits", tmp_path / "runs" / "digits")
    Run.create(TINY, tmp_path / "runs" / "new")
    shutil.copytree(runs / "slow", tmp_path / "runs" / "broken")
    for path in (tmp_path / "runs" / "broken" / "checkpoints").iterdir():
        (path / "state.json").write_text("{}")
    with pytest.raises(MemtrainError, match=message):
        compare_runs([tmp_path / "runs" / name for name in names])


def test_a_name_instead_of_a_list_is_refused():
    compare = getattr(memtrain.compare, "__wrapped__", memtrain.compare)  # without checked types
    with pytest.raises(MemtrainError, match="folders='runs/a': must be a list"):
        compare("runs/a")


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0"), (950, "950"), (999.7, "1k"), (12_345, "12.3k"), (4.1e6, "4.1M")],
)
def test_counts_are_short(count, text):
    assert short_count(count) == text


@pytest.mark.parametrize("most", [3e3, 2e7])
def test_the_ticks_of_large_counts_do_not_overlap(most: float):
    records = [
        {key: cost for key in COSTS} | {"evaluation": {"rnn": {"nats": 1.0}}}
        for cost in (most / 2000, most / 100, most)
    ]
    figure = loss_figure({"a": records, "b": records[:1]}, "nats")
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        boxes = [tick.label1.get_window_extent() for tick in ticks]
        assert len(boxes) > 2
        assert all(one.x1 < other.x0 for one, other in zip(boxes, boxes[1:], strict=False))
