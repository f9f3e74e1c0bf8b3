"""Series as a task: what is held out stays unseen, windows stay inside series."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import seeded
from memtrain.config import RunConfig, Series, SMTConfig, columns_of
from memtrain.config.serialize import from_json, to_json
from memtrain.data.series import SeriesTask
from memtrain.data.task import build_task, check_task
from memtrain.errors import MemtrainError
from memtrain.shapes import Values

ROWS = (50, 80, 65)


def write(folder: Path, rows: tuple[int, ...] = ROWS, name: str = "x.csv") -> str:
    """Several series; the target tells series and row: series + row / 1000."""
    lines = ["id,t,y,k"]
    for series, count in enumerate(rows):
        lines += [f"s{series},{row},{series + row / 1000},{row * 2}" for row in range(count)]
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


def make(folder: Path, **options) -> SeriesTask:
    config = Series(path=write(folder), targets="y", known="k", time="t", series="id", window=8)
    return SeriesTask.from_config(replace(config, **options))


def places(task: SeriesTask, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The series and the row of target numbers."""
    thousandths = (task.format.unscale_targets(scaled.double())[..., 0] * 1000).round()
    return (thousandths / 1000).floor().nan_to_num(-1).long(), thousandths % 1000


def split_of(task: SeriesTask, series: torch.Tensor) -> torch.Tensor:
    return torch.tensor([count - round(task.config.held_out * count) for count in ROWS])[series]


def test_inputs_are_a_row_and_what_is_known_of_the_next(tmp_path):
    task = make(tmp_path)
    assert task.values == Values(features=2, targets=1) and task.space == task.values
    assert task.sequence_length == 8 and task.unit == "value"
    batch = task.sample(20, seeded())
    assert batch.inputs.shape == (20, 8, 2) and batch.targets.shape == (20, 8, 1)
    series, row = places(task, batch.inputs[..., :1])
    later_series, later = places(task, batch.targets)
    assert torch.equal(series, later_series) and torch.equal(later, row + 1)
    known = batch.inputs[..., 1] * task.format.known_scale[0] + task.format.known_centre[0]
    torch.testing.assert_close(known.double(), 2 * later, rtol=1e-4, atol=1e-3)
    check_task(task)  # as a task of a user's own


def test_training_windows_stay_in_the_training_part_of_one_series(tmp_path):
    task = make(tmp_path)
    seen: set[tuple[int, int]] = set()
    for seed in range(30):
        batch = task.sample(64, seeded(seed))
        series, row = places(task, torch.cat([batch.inputs[..., :1], batch.targets], dim=1))
        assert bool((series == series[:, :1]).all())
        assert bool((row < split_of(task, series)).all())
        seen |= set(zip(series.flatten().tolist(), row.flatten().int().tolist(), strict=True))
    assert len(seen) == sum(count - round(0.2 * count) for count in ROWS)  # and every row is used


def test_held_out_numbers_change_neither_scale_nor_training_batches(tmp_path):
    task = make(tmp_path)
    path = Path(task.config.path)
    header, *lines = path.read_text().splitlines()
    changed = []
    for line in lines:
        name, time, *_ = line.split(",")
        held = int(time) >= split_of(task, torch.tensor(int(name[1:])))
        changed.append(f"{name},{time},1e6,-1e6" if held else line)
    path.write_text("\n".join([header, *changed]))
    other = SeriesTask.from_config(task.config)
    assert other.format == task.format and other.identity != task.identity
    one, two = (each.sample(50, seeded()) for each in (task, other))
    assert torch.equal(one.inputs, two.inputs) and torch.equal(one.targets, two.targets)


@pytest.mark.parametrize("window", [4, 8, 30])
@pytest.mark.parametrize("count", [3, 1000])
def test_held_out_windows_have_targets_in_the_held_out_part_only(tmp_path, window, count):
    task = make(tmp_path, window=window)
    batch = task.held_out(count, seeded())
    again = task.held_out(count, seeded())
    assert torch.equal(batch.inputs, again.inputs) and batch.inputs.shape[1] == window
    series, row = places(task, batch.targets)
    there = ~batch.targets[..., 0].isnan()
    assert bool(there.any(dim=1).all())
    assert bool((row >= split_of(task, series))[there].all())
    own, before = places(task, batch.inputs[..., :1])
    assert bool((own == own[:, :1]).all()) and bool((before[:, 1:] == before[:, :-1] + 1).all())
    whole = torch.tensor([round(0.2 * count) >= window for count in ROWS])[own[:, 0]]
    assert bool(there[whole].all())  # a window is cut only where it must be
    if count == 1000:  # all places, each once, so that every held-out row is a target
        found = {*zip(series[there].tolist(), row[there].int().tolist(), strict=True)}
        assert len(found) == sum(round(0.2 * count) for count in ROWS)
        assert len({*zip(own[:, 0].tolist(), before[:, 0].tolist(), strict=True)}) == len(
            batch.inputs
        )


def test_forecast_cases_cover_the_held_out_part(tmp_path):
    task = make(tmp_path)
    cases = task.forecast_cases(1000, horizon=5, history=20)
    assert cases.inputs.shape[1:] == (20, 2) and cases.targets.shape[1:] == (5, 1)
    assert len(cases.inputs) == sum(round(0.2 * count) - 5 + 1 for count in ROWS)
    series, row = places(task, cases.targets)
    past_series, past = places(task, cases.inputs[..., :1])
    assert bool((row >= split_of(task, series)).all())
    assert torch.equal(past_series[:, -1:].expand(-1, 5), series)
    assert torch.equal(past[:, -1] + 1, row[:, 0])
    known = cases.known[..., 0] * task.format.known_scale[0] + task.format.known_centre[0]
    inside = ~known.isnan()
    torch.testing.assert_close(known[inside].double(), 2 * (row + 1)[inside], rtol=1e-4, atol=1e-3)
    assert bool(inside[:, :-1].all())  # nothing is known after the end of a series
    few = task.forecast_cases(3, horizon=10, history=10_000)
    assert len(few.inputs) == 3 and few.inputs.shape[1] == task.longest_history == 40
    assert task.longest_horizon == 10
    with pytest.raises(MemtrainError, match="horizon=11: must be at most 10"):
        task.forecast_cases(3, horizon=11, history=5)
    with pytest.raises(MemtrainError, match="count=0: must be a whole number above 0"):
        task.forecast_cases(0, horizon=1, history=5)


def test_missing_numbers_survive_and_do_not_count_in_the_scale(tmp_path):
    path = tmp_path / "x.csv"
    rows = [("" if row % 5 == 2 else str(row % 7), "NA" if row % 3 else "1") for row in range(60)]
    path.write_text("y,k\n" + "\n".join(f"{y},{k}" for y, k in rows))
    task = SeriesTask.from_config(Series(path=str(path), known="k", window=10))
    present = [row % 7 for row in range(48) if row % 5 != 2]
    assert task.format.target_centre[0] == pytest.approx(np.mean(present))
    assert task.format.target_scale[0] == pytest.approx(np.std(present))
    assert task.format.known_scale == (1.0,)  # constant
    batch = task.sample(30, seeded())
    assert batch.targets.isnan().float().mean() == pytest.approx(0.2, abs=0.03)
    assert batch.inputs[..., 1].isnan().float().mean() == pytest.approx(2 / 3, abs=0.05)


def test_large_numbers_keep_their_digits(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("y\n" + "\n".join(f"{1e9 + row % 2}" for row in range(100)))
    task = SeriesTask.from_config(Series(path=str(path), window=4))
    assert task.sample(9, seeded()).inputs.unique().tolist() == [-1.0, 1.0]


def test_irregular_time_is_known_beforehand(tmp_path):
    path = tmp_path / "x.csv"
    times = np.cumsum([1, 1, 1, 4, 1, 1, 0.5] * 12)
    path.write_text("t,y\n" + "\n".join(f"{time},{row}" for row, time in enumerate(times)))
    config = Series(path=str(path), time="t", time_gap=True, window=7)
    task = SeriesTask.from_config(config)
    assert task.values.known == 1 and task.format.known == ("log time gap",)
    assert task.format.known_centre == (0.0,) and task.format.known_scale == (1.0,)
    batch = task.sample(40, seeded())
    gaps = batch.inputs[..., 1]
    assert {round(one, 4) for one in gaps.unique().tolist()} == {
        round(math.log(one), 4) for one in (0.5, 1, 4)
    }
    row = (task.format.unscale_targets(batch.inputs[..., :1].double())[..., 0]).round().long()
    expected = torch.from_numpy(np.log(np.diff(times)))[row]
    torch.testing.assert_close(gaps.double(), expected, rtol=1e-4, atol=1e-4)
    without = SeriesTask.from_config(replace(config, time_gap=False))
    assert without.values.known == 0 and without.identity != task.identity


def test_identity_is_of_content_and_options(tmp_path):
    task = make(tmp_path)
    path = Path(task.config.path)
    path.rename(tmp_path / "moved.csv")
    moved = replace(task.config, path=str(tmp_path / "moved.csv"))
    assert build_task(moved).identity == task.identity
    assert build_task(replace(moved, held_out=0.3)).identity != task.identity
    (tmp_path / "moved.csv").write_text(
        (tmp_path / "moved.csv").read_text().replace("0.033", "0.034")
    )
    assert build_task(moved).identity != task.identity


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"held_out": 0.02}, "data.held_out=0.02: holds out 1 of the 50 rows of"),
        (
            {"window": 40},
            "series 's0' has 40 rows, enough for windows of 39 steps; set data.window to",
        ),
        ({"path": ""}, "memtrain train series --data FILE --data.targets y"),
        ({"targets": "z"}, "data.targets='z'"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path, options, part):
    with pytest.raises(MemtrainError) as caught:
        make(tmp_path, **options)
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("y,z\n" + "1,2\n3,2\n" * 50, "'z' is 2 in the whole training part"),
        ("y,z\n" + "1,\n3,\n" * 50, "'z' has no number in the training part; leave it out: --data"),
        (
            "t\n" + "1\n2\n" * 40 + "nan\n" * 20,
            "'t' has no number in the held-out part, the last 0.2",
        ),
        ("y,z\n" + "1,2\n3,4\n" * 40 + "5,\n" * 20, "or the column: --data.targets y"),
        ("y\n" + "0\n1e-20\n" * 40 + "1e29\n" * 20, "too far from those of its training part"),
        ("y\n1\n2\n", "the series is too short, take more rows"),
    ],
)
def test_columns_that_cannot_be_learned_are_refused(tmp_path, text, part):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(MemtrainError) as caught:
        SeriesTask.from_config(Series(path=str(tmp_path / "x.csv"), window=4))
    assert part in str(caught.value)


def test_the_config_names_columns_with_commas():
    config = Series(targets='a,"b, c"', known="d, e")
    assert columns_of(config.targets) == ("a", "b, c") and columns_of(config.known) == ("d", "e")
    saved = to_json(RunConfig(data=config, smt=SMTConfig(steps=1)))
    assert from_json(saved).data == config
    wrong: list[tuple[dict, str]] = [
        ({"targets": "a,,b"}, "targets='a,,b': has an empty name"),
        ({"targets": "a,a"}, "a is named twice"),
        ({"targets": "a", "known": "a"}, "known='a': a is of targets too"),
        ({"known": "t", "time": "t"}, "time='t': t is of known too"),
        ({"time_gap": True}, "time_gap=True: needs the times"),
        ({"held_out": 1.0}, "held_out=1.0: must lie between 0 and 1"),
        ({"window": 1}, "window=1: must be at least 2"),
    ]
    for options, part in wrong:
        with pytest.raises(MemtrainError) as caught:
            Series(**options)
        assert part in str(caught.value)
