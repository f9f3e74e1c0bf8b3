"""Sweeps run every job once, despite kills and failures."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import memtrain.paper.sweep as sweep_module
from memtrain.errors import MemtrainError
from memtrain.files import locked
from memtrain.paper import load
from memtrain.paper.base import Result, Setup
from memtrain.paper.job import Done, Event, Progress, Work, attempt, collect
from memtrain.paper.reproduce import Outcome, outcome, reproduce
from memtrain.paper.results import ResultsFile, results_frame
from memtrain.paper.sweep import View, sweep, urgency
from memtrain.paper.workers import run_locally
from memtrain.runs.checkpoint import latest_checkpoint

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # workers look for `sweep_fixture` where their parent does

import sweep_fixture  # noqa: E402
from sweep_fixture import jobs_of, stored  # noqa: E402

SWEEP = """
import sys
from functools import partial
from pathlib import Path
from memtrain.paper import load
from memtrain.paper.base import Setup
from memtrain.paper.workers import run_locally
from memtrain.paper.sweep import sweep

if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    figure = load(name)
    jobs = [(figure, job) for job in figure.grid(Setup(folder=folder))]
    sweep(folder, jobs, partial(run_locally, folder=folder, processes=int(sys.argv[3])))
"""


def outcome_of(name: str, setup: Setup) -> Outcome:
    """The outcome of a figure from the results in its folder."""
    figure = load(name)
    return outcome(figure, setup, figure.grid(setup), ResultsFile(setup.folder).by_id())


def in_process(folder: Path, queue: deque[Work]) -> Iterator[Event]:
    """A launcher without processes, for what does not depend on them."""
    while queue:
        yield attempt(queue.popleft(), folder, lambda progress: None)


def sweep_killed(folder: Path, name: str, kills: int, processes: int) -> int:
    """Start the sweep in a process, kill it while it works, `kills` times, then let it end."""
    script = folder / "sweep.py"
    folder.mkdir(parents=True, exist_ok=True)
    script.write_text(SWEEP)
    paths = [str(HERE), str(HERE.parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder), name, str(processes)]
    killed = 0
    for _ in range(kills):
        seen = len(ResultsFile(folder).read())
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(ResultsFile(folder).read()) < seen + 2:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=True)
    return killed


def assert_each_once(folder: Path, name: str) -> None:
    lines = (folder / "results.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert sorted(keys) == sorted(job.key for _, job in jobs_of(name, folder))


@pytest.mark.slow
def test_a_sweep_killed_three_times_ends_with_every_result_once(tmp_path: Path):
    assert sweep_killed(tmp_path, "sweep_fixture:Quick", 3, processes=1) == 3
    assert_each_once(tmp_path, "sweep_fixture:Quick")


@pytest.mark.slow
def test_a_sweep_of_twenty_runs_killed_three_times(tmp_path: Path):
    assert sweep_killed(tmp_path, "sweep_fixture:Twenty", 3, processes=2) == 3
    assert_each_once(tmp_path, "sweep_fixture:Twenty")


def test_an_interrupted_run_ends_with_the_same_numbers(tmp_path: Path):
    (work,) = collect(jobs_of("sweep_fixture:Quick", tmp_path)[:1])
    whole = attempt(work, tmp_path / "whole", lambda progress: None)

    class Stopped(BaseException):
        pass

    def stop(progress) -> None:
        if progress.stage == "bptt" and progress.step > 20:
            raise Stopped

    with pytest.raises(Stopped):
        attempt(work, tmp_path / "broken", stop)
    again = attempt(work, tmp_path / "broken", lambda progress: None)
    assert isinstance(whole, Done) and isinstance(again, Done)
    assert again.results[0].measured == whole.results[0].measured
    assert again.results[0].cost["steps"] == whole.results[0].cost["steps"]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A swept folder of three runs, of which one failed, and the reported error."""
    folder = tmp_path_factory.mktemp("faulty")
    jobs = jobs_of("sweep_fixture:Faulty", folder)
    return folder, sweep(folder, jobs, partial(in_process, folder)).failed


def test_a_failed_run_is_reported_and_does_not_stop_the_rest(faulty):
    folder, failed = faulty
    assert list(failed) == ["seed=1"]
    assert failed["seed=1"].startswith("ZeroDivisionError: nothing to divide by (see ")
    done = stored(folder, jobs_of("sweep_fixture:Faulty", folder))
    assert [result["seed"] for result in done] == [0, 2]
    (trace,) = (folder / "runs").glob("*.error.txt")
    assert "Traceback" in trace.read_text()


def test_finished_runs_are_skipped_and_failed_ones_retried(faulty):
    folder, _ = faulty
    given = []

    def note(works):
        given.extend(works)
        return iter(())

    sweep(folder, jobs_of("sweep_fixture:Faulty", folder), note)
    assert [work.config.seed for work in given] == [1]


def test_equal_runs_of_two_figures_are_trained_once(tmp_path: Path):
    first, second = (
        jobs_of("sweep_fixture:Twenty", tmp_path)[0],
        jobs_of("sweep_fixture:Quick", tmp_path)[0],
    )
    second = (second[0], replace(second[1], config=first[1].config))
    (work,) = collect([first, second])
    assert [request.figure for request in work.requests] == [
        "sweep_fixture:Twenty",
        "sweep_fixture:Quick",
    ]


def test_a_truncated_last_line_is_removed(faulty, tmp_path: Path):
    file = ResultsFile(tmp_path)
    whole = ResultsFile(faulty[0]).path.read_bytes()
    file.path.write_bytes(whole + b'{"figure": "twen')
    assert len(file.read()) == 2
    file.repair()
    assert file.path.read_bytes() == whole


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path: Path):
    with (
        locked(tmp_path / "sweep.lock", "busy"),
        pytest.raises(MemtrainError, match="another sweep is at work there"),
    ):
        sweep(tmp_path, [], partial(in_process, tmp_path))


def test_a_frame_has_a_row_per_job_with_tags_numbers_and_costs(faulty, monkeypatch):
    folder, _ = faulty
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    row, _ = results_frame(folder)
    assert row["seed"] == 0 and row["cost_steps"] == 25 and row["rnn_nats"] > 0
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MemtrainError, match="pip install .memtrain.frames."):
        results_frame(folder)


# ------------------------------------------------------------------- time, order and follow-ups


def test_a_stopped_run_saves_itself_and_the_next_sweep_continues_it(tmp_path: Path):
    ((figure, job),) = jobs_of("sweep_fixture:Twenty", tmp_path)[:1]
    steps: list[int] = []

    def launch(queue: deque[Work], patience: int) -> Iterator[Event]:
        for event in run_locally(queue, tmp_path, 1, lambda: sum(steps) > patience):
            if isinstance(event, Progress) and event.stage == "bptt":
                steps.append(event.step)
            yield event

    assert sweep(tmp_path, [(figure, job)], partial(launch, patience=0)).failed == {}
    assert ResultsFile(tmp_path).read() == []  # neither done nor failed
    assert not list((tmp_path / "runs").glob("*.error.txt"))
    folder = tmp_path / "runs" / f"{job.config.name}-{job.key}"
    checkpoint, _ = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    saved = checkpoint.progress.step
    assert saved >= max(steps) > 0  # not only every tenth step
    steps.clear()
    assert sweep(tmp_path, [(figure, job)], partial(launch, patience=10**9)).failed == {}
    assert len(ResultsFile(tmp_path).read()) == 1
    assert steps[0] == saved


def test_the_time_left_includes_the_progress_of_running_jobs(tmp_path: Path, monkeypatch, capsys):
    (work,) = collect(jobs_of("sweep_fixture:Twenty", tmp_path)[:1])  # 12 + 8 + 200 steps
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    view = View({work.key: work})
    view.expect(1, 0)
    now = 20.0
    view.show(Progress(work.key, "bptt", 90, 200))  # resumed at half
    assert "left ?" in capsys.readouterr().err
    now = 120.0
    view.show(Progress(work.key, "bptt", 145, 200))  # a quarter more, in 100 s
    assert "left 1:40" in capsys.readouterr().err


def finished(folder: Path) -> list[tuple[str, str]]:
    return [(result.figure, result.job) for result in ResultsFile(folder).read()]


@pytest.fixture
def uncounted(monkeypatch) -> None:
    """Runs whose operations are not counted, which under the checks of shapes takes seconds."""
    monkeypatch.setattr("memtrain.training.stages.sequential_ops", lambda step: 1)


@pytest.mark.usefixtures("uncounted")
def test_no_run_starts_after_the_time_limit_and_the_same_command_continues(
    tmp_path: Path, monkeypatch
):
    now = 0.0
    monkeypatch.setattr(sweep_module, "time", SimpleNamespace(monotonic=lambda: now))
    setup = Setup(folder=tmp_path)

    def launch(queue: deque[Work]) -> Iterator[Event]:
        nonlocal now
        for event in in_process(tmp_path, queue):
            now += 20  # each run takes 20 seconds
            yield event

    reproduce([load("sweep_fixture:Few")], setup, launch, minutes=0.5)
    before = finished(tmp_path)
    assert len(before) == 2
    found = outcome_of("sweep_fixture:Few", setup)
    assert found.picture is not None and found.missing  # one setting, some of its seeds
    assert found.verdict.sentence.endswith("2 of 4 runs are missing (seeds).")
    again = reproduce([load("sweep_fixture:Few")], setup, launch)
    assert finished(tmp_path)[:2] == before
    assert_each_once(tmp_path, "sweep_fixture:Few")
    assert not outcome_of("sweep_fixture:Few", setup).missing
    assert [one.missing for one in again.outcomes] == [0]


def test_a_figure_is_not_drawn_while_a_setting_has_no_result(tmp_path: Path):
    setup = Setup(folder=tmp_path)
    (work, *_) = collect(jobs_of("joint", tmp_path))
    done = Result(
        figure="joint",
        version=1,
        job=work.requests[0].job,
        key=work.key,
        tags=work.requests[0].tags,
        measured={"rnn_accuracy": 1.0},
        cost={"steps": 1, "tokens": 1, "sequential_ops": 1, "seconds": 1.0},
        curve=[],
    )
    ResultsFile(tmp_path).append(done)
    found = outcome_of("joint", setup)
    assert found.picture is None and found.verdict.holds is None
    assert "3 of 4 runs are missing, 3 settings have none" in found.verdict.sentence


@pytest.mark.usefixtures("uncounted")
def test_follow_ups_join_the_queue_before_other_figures_end(tmp_path: Path, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(
        sweep_fixture.Followed,
        "measure",
        lambda self, run: seen.append(run.config.seed) or {"n": 1.0},
    )
    names, setup = ["sweep_fixture:Few", "sweep_fixture:Followed"], Setup(folder=tmp_path)
    reproduce([load(name) for name in names], setup, partial(in_process, tmp_path))
    done = finished(tmp_path)
    # Tries first, since others wait for them; a run of the same config is not measured again.
    assert seen == [0, 1, 2]
    assert [figure for figure, _ in done] == ["sweep_fixture:Followed"] * 4 + [
        "sweep_fixture:Few"
    ] * 4
    assert len(list((tmp_path / "runs").glob("*/config.json"))) == 3 + 4
    assert not outcome_of("sweep_fixture:Followed", setup).missing


@pytest.mark.usefixtures("uncounted")
def test_a_job_that_shares_a_run_waits_and_then_measures_it(tmp_path: Path):
    first, second, *_ = jobs_of("sweep_fixture:Few", tmp_path)
    late = (first[0], replace(second[1], tags={"seed": 9}))
    counts = []

    def more(results):
        counts.append(len(results))
        return [late] if len(results) == 1 and counts.count(1) == 1 else []

    swept = sweep(tmp_path, [first, second], partial(in_process, tmp_path), more=more)
    assert swept.failed == {}
    assert [job for _, job in finished(tmp_path)] == ["seed=0", "seed=1", "seed=9"]


def test_long_runs_and_dependencies_come_first(tmp_path: Path):
    def one(name: str, **steps: int) -> Work:
        figure, job = jobs_of(name, tmp_path)[0]
        bptt = replace(job.config.bptt, **steps)
        (work,) = collect([(figure, replace(job, config=replace(job.config, bptt=bptt)))])
        return work

    short, long = one("sweep_fixture:Quick", steps=5), one("sweep_fixture:Quick", steps=500)
    awaited = one("sweep_fixture:Followed", steps=50)
    assert sorted([short, long, awaited], key=urgency, reverse=True) == [awaited, long, short]


@pytest.mark.usefixtures("uncounted")
def test_a_finished_run_is_freed_before_the_next_starts(tmp_path: Path):
    (work,) = collect(jobs_of("sweep_fixture:Watched", tmp_path))
    sweep_fixture.ALIVE.clear()
    assert isinstance(attempt(work, tmp_path, lambda progress: None), Done)
    assert len(sweep_fixture.ALIVE) == 3 and [ref() for ref in sweep_fixture.ALIVE] == [None] * 3


# ------------------------------------------------------------------- runs that continue another


def trained_stages(folder: Path) -> Callable[[deque[Work]], Iterator[Event]]:
    """A launcher that writes the stages that each run trains to FOLDER/trained.txt."""

    def launch(queue: deque[Work]) -> Iterator[Event]:
        while queue:
            work, seen = queue.popleft(), []
            event = attempt(work, folder, lambda progress, seen=seen: seen.append(progress.stage))
            with (folder / "trained.txt").open("a") as file:
                file.write(f"{work.name}: {' '.join(dict.fromkeys(seen))}\n")
            yield event

    return launch


def lines_of(folder: Path) -> list[str]:
    return (folder / "trained.txt").read_text().splitlines()


@pytest.mark.usefixtures("uncounted")
def test_a_continued_run_equals_the_whole_run_and_the_start_is_trained_once(tmp_path: Path):
    jobs = jobs_of("sweep_fixture:Continued", tmp_path)
    assert sweep(tmp_path, jobs, trained_stages(tmp_path)).failed == {}
    first, *after = stored(tmp_path, jobs)
    assert lines_of(tmp_path) == [
        "method=SMT: smt",
        "method=through time: dmt",
        "method=one step: dmt",
    ]
    figure, job = jobs[1]
    whole = (figure, replace(job, start=None))
    assert whole[1].key != job.key
    sweep(tmp_path / "whole", [whole], partial(in_process, tmp_path / "whole"))
    (expected,) = stored(tmp_path / "whole", [whole])
    (found,) = [result for result in after if result["method"] == "one step"]
    assert found.measured == expected.measured and "smt_accuracy" in found.measured
    costs = ("steps", "tokens", "sequential_ops")
    assert [found.cost[name] for name in costs] == [expected.cost[name] for name in costs]
    assert found.cost["start_steps"] == 12 and found.cost["steps"] == 20
    assert found.cost["start_seconds"] == first.cost["seconds"] < found.cost["seconds"]
    losses = ("stage", "steps", "rnn_nats", "teacher_nats")
    assert [[point[name] for name in losses] for point in found.curve] == [
        [point[name] for name in losses] for point in expected.curve
    ]


@pytest.mark.usefixtures("uncounted")
def test_results_alone_suffice_to_go_on(tmp_path: Path):
    """The start is trained again only for the runs that are missing, and measured no more."""
    jobs = jobs_of("sweep_fixture:Continued", tmp_path)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    sweep(before, jobs[:2], trained_stages(before))
    after.mkdir()
    (after / "results.jsonl").write_bytes((before / "results.jsonl").read_bytes())
    sweep(after, jobs[:2], trained_stages(after))
    assert not (after / "trained.txt").exists()
    assert sweep(after, jobs, trained_stages(after)).failed == {}
    start = f"tiny-{jobs[0][1].key}"
    assert lines_of(after) == [f"{start}: smt", "method=through time: dmt"]
    assert_each_once(after, "sweep_fixture:Continued")


@pytest.mark.usefixtures("uncounted")
def test_a_continued_run_that_was_interrupted_ends_with_the_same_numbers(tmp_path: Path):
    (_, work, _) = collect(jobs_of("sweep_fixture:Continued", tmp_path))
    assert work.start is not None
    whole = attempt(work, tmp_path / "whole", lambda progress: None)

    class Stopped(BaseException):
        pass

    def stop(progress) -> None:
        if progress.step > 5:
            raise Stopped

    for _ in range(2):  # before its first checkpoint, and after it
        with pytest.raises(Stopped):
            attempt(work, tmp_path / "broken", stop)
    again = attempt(work, tmp_path / "broken", lambda progress: None)
    assert isinstance(whole, Done) and isinstance(again, Done)
    assert again.results[0].measured == whole.results[0].measured
    assert again.results[0].cost["steps"] == whole.results[0].cost["steps"] == 20


@pytest.mark.slow
def test_a_sweep_of_continued_runs_killed_in_between_ends_with_every_result_once(tmp_path: Path):
    sweep_killed(tmp_path, "sweep_fixture:Continued", 1, processes=2)
    assert_each_once(tmp_path, "sweep_fixture:Continued")


@pytest.mark.usefixtures("uncounted")
def test_runs_whose_start_failed_fail_without_training(tmp_path: Path, monkeypatch):
    jobs = jobs_of("sweep_fixture:Continued", tmp_path)

    def broken(self, run):
        raise ZeroDivisionError("nothing to divide by")

    monkeypatch.setattr(sweep_fixture.Continued, "measure", broken)
    failed = sweep(tmp_path, jobs, trained_stages(tmp_path)).failed
    assert lines_of(tmp_path) == ["method=SMT: smt"]
    assert failed.keys() == {"method=SMT", "method=one step", "method=through time"}
    reason = "sweep_fixture:Continued: method=SMT, from which it starts, failed"
    assert failed["method=one step"] == reason


def test_a_start_must_be_the_same_run_without_its_last_stages(tmp_path: Path):
    _, (_, job), _ = jobs_of("sweep_fixture:Continued", tmp_path)
    assert job.start is not None
    for start in (
        job.config,
        replace(job.start, seed=1),
        replace(job.start, smt=replace(job.start.smt, learning_rate=1e-4)),
    ):
        with pytest.raises(MemtrainError, match="must be the config of the job without its last"):
            replace(job, start=start)


def test_runs_of_a_lower_rank_come_first(tmp_path: Path):
    jobs = jobs_of("sweep_fixture:Quick", tmp_path)[:2]
    (figure, long), (_, short) = jobs
    long = replace(long, config=replace(long.config, bptt=replace(long.config.bptt, steps=99)))
    assert long.key == replace(long, rank=1).key
    works = collect([(figure, replace(long, rank=1)), (figure, short)])
    first, second = sorted(works, key=urgency, reverse=True)
    assert (first.key, second.key) == (short.key, long.key)


@pytest.mark.usefixtures("uncounted")
def test_an_incremental_figure_is_drawn_and_followed_up_from_partial_results(tmp_path: Path):
    setup = Setup(folder=tmp_path)
    assert outcome_of("sweep_fixture:Growing", setup).picture is None  # nothing to draw yet
    order: list[str] = []

    def launch(queue: deque[Work], most: int) -> Iterator[Event]:
        while queue and len(order) < most:
            order.append(queue[0].name)
            yield attempt(queue.popleft(), tmp_path, lambda progress: None)

    figure = load("sweep_fixture:Growing")
    reproduce([figure], setup, partial(launch, most=1))
    found = outcome_of("sweep_fixture:Growing", setup)
    assert found.picture is not None and found.missing == 3
    assert found.verdict.sentence == "1 results. 3 of 4 runs are missing."
    reproduce([figure], setup, partial(launch, most=9))
    assert order.count("method=SMT again") == 1
    assert not outcome_of("sweep_fixture:Growing", setup).missing
