import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from memtrain.bench import growth
from memtrain.bench.cases import Case, models
from memtrain.bench.growth import (
    MIDDLE,
    VALUES,
    as_curves,
    points,
    power,
    read_curves,
    time_points,
    to_json,
)
from memtrain.bench.measure import Timing
from memtrain.bench.report import draw_curves, held
from memtrain.cli import main
from memtrain.config import EngineConfig
from memtrain.errors import MemtrainError

CPU = EngineConfig(device="cpu")
POINTS, CASES = 4 * (4 + 3 + 3 + 3), 4 * (4 + 2 + 2 + 2) - 3
"""Four axes meet in one case of each kind, and SMT knows no length."""


def quiet(line: str) -> None:
    pass


def cost(case: Case, peak: bool = True) -> Timing:
    """A time and a memory that grow as they are known to."""
    length = {"smt": 40, "dmt": case.tokens // case.batch, "bptt": case.tokens // case.batch}
    seconds = 1e-3 * length[case.suite]
    return Timing(
        seconds=seconds, start_up=1.0, peak_bytes=int(1e9 * seconds**0.5) if peak else None
    )


@pytest.fixture
def timed_cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The cases that were timed, none of them in earnest."""
    cases: list[Case] = []

    def time_case(case: Case, engine: EngineConfig, seconds: float) -> Timing:
        cases.append(case)
        return cost(case)

    monkeypatch.setattr(growth, "time_case", time_case)
    return cases


@pytest.mark.parametrize("size", ["paper", "tiny"])
def test_one_axis_grows_while_the_others_stay_fixed(size: str):
    base, all_points = models(size), points(size)
    assert len(all_points) == POINTS
    assert MIDDLE[size]["length"] == min(VALUES[size]["length"])
    for point in all_points:
        setting = MIDDLE[size] | {point.axis: point.value}
        config, stage = point.case.config, point.case.config.stages()[point.case.suite]
        assert stage.batch_size == setting["batch"] == point.case.batch
        assert config.cell.memory_tokens == setting["memory tokens"]
        widths = (config.cell.width, config.cell.memory_dim, config.teacher.width)
        assert widths == (setting["width"],) * 3
        if point.case.suite != "smt":
            assert point.case.tokens == setting["batch"] * setting["length"]
            bptt = point.case.suite == "bptt"
            length = config.bptt.sequence_length if bptt else config.dmt.rollout_length
            assert length == setting["length"] == point.length
    # what stays is what the size says, so that all curves meet
    middle = next(point.case.config for point in all_points if point.case.suite == "smt")
    same = replace(middle, smt=replace(middle.smt, batch_size=base.smt.batch_size))
    assert same == base


def test_long_lengths_come_last_and_every_axis_before_them():
    all_points = points("paper")
    lengths = [point.length for point in all_points]
    assert [length for length in dict.fromkeys(lengths)] == [64, 128, 256, 512]
    first_long = lengths.index(256)
    assert {point.axis for point in all_points[:first_long]} == set(VALUES["paper"])
    assert all(point.axis == "length" for point in all_points[first_long:])


def test_each_case_is_timed_once_and_progress_is_reported(timed_cases: list[Case]):
    messages: list[str] = []
    timed = time_points(points("tiny"), CPU, 1e-3, messages.append)
    assert len(timed.points) == POINTS and not timed.left_out
    assert len(timed_cases) == len(messages) == CASES
    assert messages[0] == f"1/{CASES}  SMT, length 8" and "left" not in messages[3]
    assert messages[4] == f"5/{CASES}  DMT, length 16  left 0:00"
    assert messages[-1].startswith(f"{CASES}/{CASES}  recomputed BPTT, length 64")


def test_time_left_is_estimated_from_cases_of_the_same_kind_and_length():
    one, two = (
        next(p for p in points("tiny") if (p.case.label, p.length) == ("BPTT", length))
        for length in (8, 64)
    )
    assert growth._left([two], [(one, 10.0)]) == "  left 1:20"
    dmt = next(p for p in points("tiny") if p.case.label == "DMT")
    assert growth._left([two, dmt], [(one, 10.0)]) == ""


def test_cases_out_of_memory_are_left_out_of_all_their_curves(monkeypatch: pytest.MonkeyPatch):
    bptt = points("tiny")[2].case  # where all axes meet

    def time_case(case: Case, engine: EngineConfig, seconds: float) -> Timing:
        if case == bptt:
            raise torch.OutOfMemoryError
        return cost(case)

    monkeypatch.setattr(growth, "time_case", time_case)
    timed = time_points(points("tiny"), CPU, 1e-3, quiet)
    assert {point.axis for point, _ in timed.left_out} == set(VALUES["tiny"])
    assert {why for _, why in timed.left_out} == {"not enough memory"}
    assert len(timed.points) == POINTS - 4


def stopping(monkeypatch: pytest.MonkeyPatch, after: int, times: int) -> list[Case]:
    """Someone presses Ctrl-C, once or twice, while a case is timed."""
    cases: list[Case] = []

    def time_case(case: Case, engine: EngineConfig, seconds: float) -> Timing:
        cases.append(case)
        if len(cases) == after:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return cost(case)

    monkeypatch.setattr(growth, "time_case", time_case)
    return cases


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("times", "kept"), [(1, 6), (2, 5)])
def test_interrupted_growth_keeps_draws_and_prints_the_timings(
    times: int, kept: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
):
    cases = stopping(monkeypatch, 6, times)
    figure = tmp_path / "new" / "growth.png"
    command = ["bench", "growth", "--device", "cpu", "--figure", str(figure)]
    assert main(command) == 130
    assert len(cases) == 6 and figure.stat().st_size > 10_000
    curves = read_curves(figure.with_suffix(".json"))
    known = {(p.step, p.axis, p.value) for p in curves.points}
    assert len(curves.points) + len(curves.left_out) == POINTS
    assert {one.why for one in curves.left_out} == {"stopped"}
    # the sixth is BPTT at length 16: one Ctrl-C lets it end
    assert (("BPTT", "length", 16) in known) == (kept == 6)
    assert ("SMT", "length", 64) in known and ("BPTT", "batch", 4) in known
    out = capsys.readouterr().out
    assert "length 16" in out and "power of the length in time: SMT 0.00, DMT 1.00" in out
    assert "left out, stopped: recomputed BPTT at length 16, 32, 64; memory tokens 2, 8" in out


@pytest.mark.usefixtures("default_signals")
def test_interrupting_before_the_first_timing_is_reported(monkeypatch: pytest.MonkeyPatch, capsys):
    stopping(monkeypatch, 1, 2)
    assert main(["bench", "growth", "--device", "cpu"]) == 130
    assert capsys.readouterr().err.endswith("memtrain: stopped\n")


def test_failed_case_keeps_the_other_timings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
):
    def time_case(case: Case, engine: EngineConfig, seconds: float) -> Timing:
        if case.config.cell.width == 64:
            raise RuntimeError("no such tile\nmore")
        return cost(case)

    monkeypatch.setattr(growth, "time_case", time_case)
    figure = str(tmp_path / "growth.png")
    assert main(["bench", "growth", "--device", "cpu", "--figure", figure]) == 1
    out, err = capsys.readouterr()
    assert "left out, failed (RuntimeError: no such tile): SMT at width 64" in out
    assert "width 32" in out and "  left out: failed (RuntimeError: no such tile)\n" in err


def test_no_timings_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    def time_case(case: Case, engine: EngineConfig, seconds: float) -> Timing:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(growth, "time_case", time_case)
    figure = tmp_path / "growth.png"
    assert main(["bench", "growth", "--device", "cpu", "--figure", str(figure)]) == 2
    assert capsys.readouterr().err.endswith("memtrain: nothing was timed: not enough memory\n")
    assert not figure.exists()


def test_no_case_starts_after_the_time_limit(
    timed_cases: list[Case], monkeypatch: pytest.MonkeyPatch
):
    clock = iter(range(0, 10**6, 10))  # each call is ten seconds later
    later = SimpleNamespace(monotonic=lambda: float(next(clock)))
    monkeypatch.setattr(growth, "time", later)
    timed = time_points(points("tiny"), CPU, 1e-3, quiet, minutes=2.0)
    assert 0 < len(timed_cases) < 6
    assert {why for _, why in timed.left_out} == {"not begun within 2 minutes"}
    assert timed.signal_number == 0


def test_powers_are_slopes_between_logarithms(timed_cases: list[Case]):
    assert math.isclose(power([(1, 3.0), (2, 12.0), (8, 192.0)]), 2.0)
    curves = as_curves(time_points(points("tiny"), CPU, 1e-3, quiet), CPU, "tiny")
    found = json.loads(to_json(curves))["powers_of_length"]
    expected = {"SMT": 0.0, "DMT": 1.0, "BPTT": 1.0, "recomputed BPTT": 1.0}
    assert found["seconds"] == pytest.approx(expected)
    halves = {step: number / 2 for step, number in expected.items()}
    assert found["peak_bytes"] == pytest.approx(halves, abs=1e-6)


def test_json_records_where_each_axis_was_measured(timed_cases: list[Case], tmp_path: Path, capsys):
    figure = str(tmp_path / "growth.png")
    assert main(["bench", "growth", "--device", "cpu", "--figure", figure, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["held"]["batch"] == {"length": 8, "memory tokens": 4, "width": 32}
    assert record["held"]["length"] == {"batch": 4, "memory tokens": 4, "width": 32}
    assert len(record["points"]) == POINTS and record["window"] == 32 + 8
    # and it is drawn again from the file
    again = tmp_path / "again.svg"
    redraw = ["bench", "growth", "--redraw", str(tmp_path / "growth.json"), "--figure", str(again)]
    assert main([*redraw, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == record
    assert again.stat().st_size > 10_000


@pytest.mark.parametrize("peak", [True, False])
def test_the_figure_has_plain_numbers_and_covers_no_point(
    peak: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(growth, "time_case", lambda case, *_: cost(case, peak))
    curves = as_curves(time_points(points("paper"), CPU, 1e-3, quiet), CPU, "paper")
    drawn: list[Figure] = []
    monkeypatch.setattr(
        "memtrain.bench.report.save",
        lambda figure, path: (figure.savefig(path), drawn.append(figure)),
    )
    draw_curves(curves, tmp_path / "growth.png")
    (figure,) = drawn
    assert len(figure.axes) == 4 * (1 + peak)  # without peaks of memory there is one row
    titles = [place.get_title() for place in figure.axes[:4]]
    assert titles[0] == held(curves, "length") == "batch 32, 16 memory tokens, width 256"
    assert titles[3] == "length 64, 16 memory tokens, width 256"
    ticks = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert ticks == ["0.05", "0.1", "0.2", "0.5"]
    assert [label.get_text() for label in figure.axes[-4].get_xticklabels()] == [
        "64",
        "128",
        "256",
        "512",
    ]
    (legend,) = figure.legends
    boxes = [place.get_tightbbox() for place in figure.axes]
    assert all(box and legend.get_window_extent().y1 <= box.y0 for box in boxes)
    assert [len(place.lines) for place in figure.axes] == [4] * len(figure.axes)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"points": 3}', '{"machine": "m", "points": [{"step": "SMT"}]}']
)
def test_unrelated_file_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(MemtrainError, match=r"other.json: "):
        read_curves(path)


@pytest.mark.parametrize("field", ["seconds", "value", "peak_bytes"])
def test_nonpositive_numbers_are_refused(field: str, timed_cases: list[Case], tmp_path: Path):
    curves = as_curves(time_points(points("tiny"), CPU, 1e-3, quiet), CPU, "tiny")
    record = json.loads(to_json(curves))
    record["points"][0][field] = -1
    (tmp_path / "growth.json").write_text(json.dumps(record))
    with pytest.raises(MemtrainError, match="not written by memtrain bench growth"):
        read_curves(tmp_path / "growth.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["growth", "--figure", "growth.txt"], "figure=growth.txt: must end in .png, .pdf, .svg"),
        (["growth", "--minutes", "0"], "minutes=0.0: must be above 0"),
        (["smt", "--minutes", "3"], "minutes: only for growth"),
        (["--redraw", "growth.json"], "redraw: only for growth"),
        (["smt", "--figure", "steps.png"], "figure: only for growth; memtrain bench growth"),
        (["growth", "--redraw", "nowhere.json"], "nowhere.json: No such file"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], message: str, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_steps_at_the_shortest_length_run():
    dmt, recomputed = points("tiny")[1], points("tiny")[3]  # fewer steps than a label's stride
    timed = time_points([dmt, recomputed], CPU, 1e-3, quiet)
    assert [point for point, _ in timed.points] == [dmt, recomputed]
    assert all(0 < timing.seconds < timing.start_up for _, timing in timed.points)
