"""Trackers: files that TensorBoard, W&B and trackio wrote, read back."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from memtrain.errors import MemtrainError
from memtrain.training.console import Reporter
from memtrain.training.run import Run
from memtrain.training.trackers import TRACKERS, make_trackers, numbers_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
WAIT = 60.0
"""Seconds that a test waits for what must happen; longer only if it failed."""
CONFIG = replace(TINY, smt=replace(TINY.smt, steps=12), bptt=replace(TINY.bptt, steps=0))


class Killed(Reporter):
    """Ends the process's training as a crash would, after a checkpoint and a few more steps."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        if step == 8:
            raise SystemExit


def tracked(folder: Path, name: str) -> Run:
    """A run that was killed at step 8, resumed from step 5, and lengthened afterwards."""
    with pytest.raises(SystemExit):
        Run.create(CONFIG, folder).train(Killed(), callbacks=make_trackers(name, folder))
    Run.open(folder).train(Reporter(), callbacks=make_trackers("", folder))
    changes = {"dmt.steps": 12}
    run = Run.open(folder, changes=changes)
    return run.train(Reporter(), callbacks=make_trackers("", folder))


def expected(run: Run) -> dict[int, dict[str, float]]:
    return {line["total_steps"]: numbers_of(line) for line in run.metrics.read()}


def assert_tracked(found: list[tuple[int, dict[str, float]]], run: Run) -> None:
    """Every step once, with the numbers of metrics.jsonl (but for the clock)."""
    assert [step for step, _ in found] == sorted(expected(run))
    for step, numbers in found:
        wanted = expected(run)[step]
        assert numbers.keys() == wanted.keys()
        for name in wanted.keys() - {"progress/seconds"}:
            assert numbers[name] == pytest.approx(wanted[name], rel=1e-6), (step, name)


def test_tensorboard_has_every_step_once(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert tag not in found.setdefault(event.step, {}), (tag, event.step)
            found[event.step][tag] = event.value
    assert_tracked(sorted(found.items()), run)
    assert "held_out/rnn" in found[10] and "held_out/teacher" in found[10]
    assert "config/text_summary" in events.Tags()["tensors"]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, in it W&B's own protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # a block's rest
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + length > len(data):  # it is being written
            return
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def wandb_steps(folder: Path) -> tuple[list[tuple[int, dict[str, float]]], set[str]]:
    """The steps in the .wandb files below a folder, and the names of their runs."""
    found, ids = [], set()
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {
                    (one.key or "/".join(one.nested_key)): json.loads(one.value_json)
                    for one in record.history.item
                }
                step = items.pop("_step")
                own = {k: v for k, v in items.items() if not k.startswith("_")}
                found.append((step, own))
    return found, ids


def test_wandb_offline_has_every_step_once_in_one_run(tmp_path: Path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked(tmp_path / "run", "wandb")
    wanted, ends = len(expected(run)), time.monotonic() + WAIT
    found, ids = wandb_steps(run.folder / "wandb")
    while len(found) < wanted and time.monotonic() < ends:  # a process of W&B's writes the files
        time.sleep(0.1)
        found, ids = wandb_steps(run.folder / "wandb")
    assert ids == {run.id[:16]}
    assert_tracked(found, run)


def test_trackio_has_every_step_once_in_its_local_storage(tmp_path: Path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads the variable when it is imported
    run = tracked(tmp_path / "run", "trackio")
    from trackio.sqlite_storage import SQLiteStorage  # type: ignore[import-not-found]

    name = f"run-{run.id[:8]}"
    found = []
    for line in SQLiteStorage.get_logs("memtrain", name):
        own = {k: v for k, v in line.items() if k not in ("step", "timestamp")}
        found.append((line["step"], own))
    assert_tracked(found, run)


def test_a_tracker_that_is_added_later_gets_the_earlier_steps(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    Run.create(CONFIG, folder).train(Reporter(), until="smt")
    assert make_trackers("", folder) == []
    run = Run.open(folder).train(Reporter(), callbacks=make_trackers("tensorboard", folder))
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [one.step for one in events.Scalars("train/loss")] == sorted(expected(run))
    assert [type(one).__name__ for one in make_trackers("", folder)] == ["TensorBoard"]
    assert make_trackers("none", folder) == []
    other = Run.create(CONFIG, folder, overwrite=True)
    assert not (folder / "tensorboard").exists() and make_trackers("", folder) == []
    assert other.progress.global_step == 0


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch):
    for name, package, extra in (("wandb", "wandb", "track"), ("trackio", "trackio", "trackio")):
        monkeypatch.setitem(sys.modules, package, None)
        run = Run.create(CONFIG, tmp_path / name)
        words = rf'track={name}: .*pip install "memtrain\[{extra}\]", or train without it$'
        with pytest.raises(MemtrainError, match=words) as caught:
            run.train(Reporter(), callbacks=make_trackers(name, run.folder))
        assert caught.value.command_line == f"{caught.value} (--track none)"
        assert run.progress.global_step == 0


def test_unknown_trackers_are_refused(tmp_path: Path):
    with pytest.raises(MemtrainError, match="track='tensorbord': did you mean tensorboard"):
        make_trackers("tensorbord", tmp_path)
    with pytest.raises(MemtrainError, match="track='none': "):
        make_trackers("wandb,none,x", tmp_path)
    assert [*TRACKERS] == ["tensorboard", "wandb", "trackio"]


def test_damaged_notes_do_not_stop_a_run(tmp_path: Path):
    pytest.importorskip("tensorboard")
    run = Run.create(CONFIG, tmp_path / "run")
    (tmp_path / "run" / "tracking.json").write_text('{"steps": [')
    trackers = make_trackers("tensorboard", run.folder)
    assert run.train(Reporter(), callbacks=trackers, until="smt").progress.stage == 1
