"""Progress for people: what is shown, where, and that it fits."""

import io
import os
import re
import sys
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from memtrain.evaluation.evaluate import ByPosition, Evaluation, Score
from memtrain.training import console
from memtrain.training.console import ETA, LineReporter, TerminalReporter, drawing, make_reporter

METRICS = {
    "loss": 8.274,
    "decode": 2.543,
    "dynamics": 0.012,
    "uniformity": -1.177,
    "next": 3.247,
    "gradient_norm_cell": 3.0,
}


def scored(rnn: float, teacher: float | None) -> Evaluation:
    """An evaluation of which only the scores matter."""
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
    )


def drawn(width: int, steps: int = 3000, *, evaluated: bool = True) -> str:
    """The line that a terminal of this width shows in the middle of a stage."""
    out = io.StringIO()
    terminal = Console(file=out, width=width, force_terminal=True)
    reporter = TerminalReporter(terminal)
    reporter.stage("smt", 0, steps)
    if evaluated:
        reporter.evaluated(steps // 2, scored(1.25, 1.2), "pixel")
    reporter.advance(steps // 2, METRICS)
    reporter.shown.forecast = console.Forecast(20.1, steps, 754.0)
    reporter.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line][-1]


# ------------------------------------------------------------------------------------- terminals


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140, 200])
@pytest.mark.parametrize("steps", [40, 3000, 1_000_000])
def test_a_line_fits_the_terminal_and_keeps_the_important_parts(width: int, steps: int):
    line = drawn(width, steps)
    assert len(line.rstrip()) < width
    assert line.startswith("smt ") and f" {steps // 2}/{steps}  left 12:34  " in line
    assert "  loss 8.274" in line and (steps > 3000 or "━" in line)
    assert len(drawn(30, steps).rstrip()) <= 30  # too narrow for all, but one line it is


def test_wider_terminals_show_more():
    assert "━" * 8 in drawn(60) and "held-out" not in drawn(60)
    assert "━" * 8 in drawn(80) and "held-out 1.250" in drawn(80)
    assert "held-out 1.250 (teacher 1.200)" in drawn(81)
    assert "held-out 1.250 nats per pixel (teacher 1.200)" in drawn(100)
    assert "20.1 steps/s" in drawn(120) and "decode" not in drawn(100)
    assert "decode 2.543" in drawn(80, evaluated=False)
    assert "next 3.247" in drawn(200) and "norm" not in drawn(200)
    assert drawn(200).count("━") == 24


def test_a_finished_stage_shows_its_duration_once():
    out = io.StringIO()
    reporter = TerminalReporter(Console(file=out, width=80, force_terminal=True))
    for name in ("smt", "dmt"):  # like the demo: one stage, an evaluation, the other
        reporter.stage(name, 0, 10)
        reporter.advance(10, {"loss": 0.5})
        reporter.close()
    assert "10/10  took 0:00  " in out.getvalue() and "loss 0.500" in out.getvalue()
    assert "smt" not in out.getvalue().split("dmt", 1)[1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudoterminal")
def test_a_real_terminal_of_80_columns_never_wraps(monkeypatch):
    import fcntl
    import pty
    import struct
    import termios

    (reading, writing), shown = pty.openpty(), ""
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    for name in ("JPY_PARENT_PID", "COLUMNS", "GIT_PAGER", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    with os.fdopen(writing, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        reporter = make_reporter()
        assert isinstance(reporter, TerminalReporter)
        reporter.progress.console._width = None  # ignore the environment of the tests
        reporter.stage("smt", 0, 3000)
        reporter.evaluated(1500, scored(1.25, None), "byte")
        reporter.advance(1500, METRICS)
        reporter.close()
    with suppress(OSError):  # raised by a pseudoterminal without writers
        while part := os.read(reading, 2**16):
            shown += part.decode()
    os.close(reading)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    assert max(map(len, lines)) < 80
    assert "1500/3000" in shown and "held-out 1.250 nats per byte" in shown and "left" in shown


# ------------------------------------------------------------------------------ logs, notebooks


def test_a_log_gets_a_line_for_each_evaluation():
    out = io.StringIO()
    reporter = LineReporter(Console(file=out, width=80), seconds=3600.0)
    reporter.stage("dmt", 0, 100)
    reporter.evaluated(50, scored(1.234, 1.2), "character")
    reporter.advance(50, METRICS)
    reporter.evaluated(60, scored(0.5, None), "target")
    assert out.getvalue().splitlines() == [
        "dmt  step 50: held-out 1.234 nats per character (teacher 1.200)",
        "dmt  step 60: held-out 0.500 nats per target",
    ]


def test_lines_of_a_log_are_not_longer_than_a_page():
    out = io.StringIO()
    reporter = LineReporter(Console(file=out, width=80), seconds=0.0)
    reporter.stage("smt", 0, 1_000_000)
    reporter.advance(500_000, METRICS)
    (line,) = out.getvalue().splitlines()
    assert len(line) <= 100 and "loss 8.274  decode 2.543" in line and "steps/s" in line


@pytest.mark.parametrize(
    "environment",
    [{"JPY_PARENT_PID": "7"}, {"TERM": "xterm-color", "GIT_PAGER": "cat"}, {"TERM": "dumb"}],
)
def test_a_command_started_by_a_notebook_prints_lines(monkeypatch, environment: dict[str, str]):
    """`!memtrain train`: its stderr is a terminal, which shows every refresh as a new line."""
    for name in ("JPY_PARENT_PID", "GIT_PAGER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True))
    assert isinstance(make_reporter(), TerminalReporter)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert isinstance(make_reporter(), LineReporter)


def test_a_kernel_prints_lines_to_its_cell(monkeypatch, capsys):
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    reporter = make_reporter()
    assert isinstance(reporter, LineReporter)
    reporter.say("a cell")
    assert capsys.readouterr().out == "a cell\n"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    make_reporter().say("a script")
    assert capsys.readouterr().err == "a script\n"


def test_image_generation_shows_its_progress(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    terminal = Console(file=out, width=80, force_terminal=True)
    monkeypatch.setattr(
        console,
        "make_reporter",
        lambda *, transient: TerminalReporter(terminal, transient=transient),
    )
    with drawing(64, 32) as listen:
        listen(np.zeros((64, 16), np.int64))
        assert "64 pictures" in out.getvalue()
    assert "16/32" in out.getvalue() and "loss" not in out.getvalue()


def test_quick_image_generation_leaves_a_log_empty(capsys):
    with drawing(1, 32) as listen:
        for _ in range(2):
            listen(np.zeros((1, 16), np.int64))
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_plain_lines_with_rate_and_time_left():
    out = io.StringIO()
    reporter = LineReporter(Console(file=out, width=200), seconds=0.0)
    reporter.stage("smt", 0, 100)
    reporter.advance(50, {"loss": 0.25, "gradient_norm_cell": 3.0})
    line = out.getvalue()
    assert line.startswith("smt  50/100  left 0:") and "steps/s" in line
    assert "loss 0.250" in line and "norm" not in line


def test_brackets_are_printed_literally():
    out = io.StringIO()
    for reporter in (LineReporter, TerminalReporter):
        reporter(Console(file=out, width=200)).say("[/x.cc:1] closed [enforce fail]")
    assert out.getvalue() == 2 * "[/x.cc:1] closed [enforce fail]\n"


def test_a_log_is_not_flooded_but_has_the_last_step():
    out = io.StringIO()
    reporter = LineReporter(Console(file=out, width=200), seconds=3600.0)
    reporter.stage("smt", 0, 100)
    for step in range(1, 101):
        reporter.advance(step, {"loss": 1.0})
    assert out.getvalue().count("\n") == 1 and "100/100" in out.getvalue()


def test_time_left_is_not_negative_beyond_the_last_step():
    forecast = ETA(10, 20).at(25)
    assert forecast.steps == 25 and forecast.left == 0


def test_the_rate_is_that_of_recent_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pace = ETA(50, 1000)
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
