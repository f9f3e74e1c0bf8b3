"""metrics.jsonl, and progress for people."""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from memtrain.errors import MemtrainError
from memtrain.train.metrics import LineReporter, MetricsFile, Pace, TerminalReporter


def line(step: int) -> dict:
    return {"stage": "smt", "step": step, "total_steps": step}


def test_lines_come_back_in_order(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.read() == []
    for step in range(3):
        metrics.append(line(step))
    assert [record["step"] for record in metrics.read()] == [0, 1, 2]


def test_cutting_back_forgets_what_came_after_even_half_a_line(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    length = metrics.length()
    metrics.append(line(2))
    with metrics.path.open("a") as file:
        file.write('{"step": 3, "lo')
    metrics.cut(length)
    metrics.append(line(4))
    assert [record["step"] for record in metrics.read()] == [1, 4]


def test_syncing_forces_the_lines_to_disk(tmp_path: Path, monkeypatch):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    metrics.sync()
    assert metrics.path.stat().st_ino in synced


def test_cutting_back_to_the_end_leaves_every_byte(tmp_path: Path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    before = metrics.path.read_bytes()
    assert metrics.cut(metrics.length()) == "" and metrics.path.read_bytes() == before


@pytest.mark.parametrize("text", ["7", "[]", "{}", '{"stage": "smt", "step": "1"}'])
def test_lines_that_are_no_metrics_are_refused_by_number(tmp_path: Path, text: str):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(line(1))
    with metrics.path.open("a") as file:
        file.write(text + "\n")
    with pytest.raises(MemtrainError, match="line 2 has no stage or no step"):
        metrics.read()


def test_a_log_gets_plain_lines_with_rate_and_time_left():
    out = io.StringIO()
    reporter = LineReporter(Console(file=out, width=200), seconds=0.0)
    reporter.stage("smt", 0, 100)
    reporter.advance(50, {"loss": 0.25, "gradient_norm_cell": 3.0})
    line = out.getvalue()
    assert line.startswith("smt  50/100") and "steps/s" in line and "left 0:" in line
    assert "loss 0.250" in line and "norm" not in line


def test_brackets_are_said_as_they_are():
    out = io.StringIO()
    for reporter in (LineReporter, TerminalReporter):
        reporter(Console(file=out, width=200)).say("[/x.cc:1] closed [enforce fail]")
    assert out.getvalue() == 2 * "[/x.cc:1] closed [enforce fail]\n"


def test_a_log_is_not_flooded_but_hears_the_end():
    out = io.StringIO()
    reporter = LineReporter(Console(file=out, width=200), seconds=3600.0)
    reporter.stage("smt", 0, 100)
    for step in range(1, 101):
        reporter.advance(step, {"loss": 1.0})
    assert out.getvalue().count("\n") == 1 and "100/100" in out.getvalue()


def test_a_terminal_gets_a_bar_with_time_left():
    out = io.StringIO()
    reporter = TerminalReporter(Console(file=out, width=160, force_terminal=True))
    reporter.stage("dmt", 0, 10)
    reporter.advance(10, {"loss": 0.5})
    reporter.close()
    text = out.getvalue()
    assert "dmt" in text and "10/10" in text and "left" in text and "loss 0.500" in text


def test_a_stage_that_goes_on_beyond_its_steps_has_no_time_left():
    forecast = Pace(10, 20).at(25)
    assert forecast.steps == 25 and forecast.left == 0


def test_the_rate_is_that_of_late_whatever_came_before(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pace = Pace(50, 1000)
    now[0] += 40.0  # compiling
    assert pace.at(51).rate == 1 / 40
    for step in range(52, 300):  # then two steps a second, for 124 seconds
        now[0] += 0.5
        rate = pace.at(step).rate
    assert rate == pytest.approx(2.0, rel=0.02)
    assert pace.at(299).left == pytest.approx(701 / 2, rel=0.02)
    now[0] += 1000.0  # the lid was closed
    for step in range(300, 2 * 1200 + 300):
        now[0] += 0.5
        rate = pace.at(step).rate
    assert rate == pytest.approx(2.0, rel=0.02)
    assert len(pace.marks) < 1300
    now[0] = 0.0  # a clock that was set back says nothing
    assert pace.at(step).rate == 0
