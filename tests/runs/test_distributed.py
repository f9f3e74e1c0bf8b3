"""Two processes as one: the same losses, checkpoints that either can go on from."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import two_processes
from memtrain.cli import main
from memtrain.config import PretrainConfig, StageConfig, Stream
from memtrain.config.serialize import read_config, to_json
from memtrain.errors import MemtrainError
from memtrain.runs.distributed import Group
from memtrain.runs.processes import StopRequest
from memtrain.runs.run_folder import held
from memtrain.training.console import Reporter
from memtrain.training.loop import Agreement
from memtrain.training.run import Run
from memtrain.training.step import Trainer
from two_processes import CAUSAL, MUON, PAPER, SHARED, SHORT, TWO_STAGES, stop_alone

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"
CLOSE = 1e-5
Hanging = tuple[Path, dict[int, list[subprocess.Popen[str]]]]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(SOURCE), str(TESTS)])
    # A machine's own name need not resolve; the loopback is always there.
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **loopback}


def two(folder: Path, *jobs: str) -> list[tuple[int, str]]:
    """Run jobs, one after the other, in two processes; exit status and output of each."""
    return ended(begin_two([two_processes.__file__, str(folder), *jobs], Path.cwd()))


def two_commands(command: str, folder: Path) -> list[tuple[int, str]]:
    """The same of `memtrain COMMAND`, in a folder."""
    return ended(begin_two(["-m", "memtrain", *command.split()], folder))


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    output = [process.communicate(timeout=240)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, output, strict=True)]


def free_port() -> int:
    """A port that nobody gets before the processes bind it: systems give away higher ones."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def begin_two(arguments: list[str], folder: Path) -> list[subprocess.Popen[str]]:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment() | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def assert_same_numbers(one: Run, other: Run) -> None:
    left, right = one.metrics.read(), other.metrics.read()
    assert [(r["stage"], r["step"]) for r in left] == [(r["stage"], r["step"]) for r in right]
    for a, b in zip(left, right, strict=True):
        for key in (
            "loss",
            "decode",
            "dynamics",
            "uniformity",
            "token",
            "readout",
            "teacher_decode",
        ):
            assert a.get(key) == pytest.approx(b.get(key), abs=CLOSE), (a["stage"], a["step"], key)
    assert left[-1]["evaluation"]["rnn"] == pytest.approx(right[-1]["evaluation"]["rnn"], abs=1e-4)


class Trained(NamedTuple):
    """What two processes trained, and what one did."""

    folder: Path
    outputs: list[str]
    """Those of the two processes."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Every job that both processes survive, in two processes that start once."""
    folder = tmp_path_factory.mktemp("two")
    stop_alone(SHORT, folder / "alone", "smt", 13)
    done = two(folder, "limited", "callbacks", "resume", "train", "stop at save")
    for status, output in done:
        assert status == 0 and "Warning" not in output, output
    Run.create(SHARED, folder / "one").train()
    Run.create(PAPER, folder / "paper").train()
    Run.create(CAUSAL, folder / "causal").train()
    Run.create(TWO_STAGES, folder / "stages").train()
    Run.create(SHORT, folder / "short").train()
    return Trained(folder, [output for _, output in done])


@pytest.fixture
def trained(both: Trained) -> Path:
    return both.folder


@pytest.mark.parametrize(
    ("two", "one"),
    [
        ("shared", "one"),
        ("spread", "paper"),
        ("spread causal", "causal"),
        ("spread chunks", "causal"),
        ("spread stages", "stages"),
    ],
)
def test_two_processes_equal_one_over_all_steps_of_every_stage(trained: Path, two: str, one: str):
    assert_same_numbers(Run.open(trained / one), Run.open(trained / two))


def test_one_process_resumes_a_checkpoint_of_two(trained: Path):
    run = Run.open(trained / "stopped")
    assert (run.progress.stage, run.progress.step) == (0, 12)
    assert_same_numbers(Run.open(trained / "short"), run.train())


def test_stopping_at_a_saved_step_ends_all_processes_cleanly(trained: Path):
    run = Run.open(trained / "stopped at save")
    assert (run.progress.stage, run.progress.step) == (0, 12)
    assert_same_numbers(Run.open(trained / "short"), run.train())


def test_two_processes_resume_a_checkpoint_of_one(trained: Path):
    assert_same_numbers(Run.open(trained / "short"), Run.open(trained / "alone"))


def test_what_a_callback_of_the_main_process_asks_for_is_done_by_both(
    both: Trained, tmp_path: Path
):
    """Both train by Muon: their losses equal those of one process."""
    for rank, text in enumerate(both.outputs):
        said = "out of quota" if rank == 0 else "a callback failed in the main process"
        assert f"rank {rank}: [7, 3] {said}" in text
    resumed = Run.open(both.folder / "callbacks")
    assert [stage.steps for stage in resumed.progress.stages] == [7, 3]
    lines = [one for one in resumed.metrics.read() if one["stage"] == "smt"]
    alone = Run.create(MUON, tmp_path / "alone").train(Reporter()).metrics.read()
    for one, other in zip(lines, alone, strict=False):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_one_clock_ends_a_stage_for_all(trained: Path):
    assert Run.open(trained / "limited").progress.stages[0].steps > 0


@pytest.mark.parametrize(("job", "dead"), [("die", 1), ("die first", 0)], ids=["other", "main"])
def test_when_a_process_dies_the_other_reports_it_and_a_checkpoint_exists(
    tmp_path: Path, job: str, dead: int
):
    done = two(tmp_path, job)
    status, output = done[1 - dead]
    assert done[dead][0] == -9 and status == 2
    assert "a process of the run failed or was lost" in output
    assert "the last whole checkpoint is step 65" in output and "Traceback" not in output
    assert Run.open(tmp_path / f"dead {dead}").progress.global_step == 50 + 15


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hanging]:
    """By the process that hangs, two processes; they wait for it at the same time."""
    folder = tmp_path_factory.mktemp("hanging")
    jobs = {1: "freeze", 0: "freeze first"}
    start = [two_processes.__file__, str(folder)]
    processes = {rank: begin_two([*start, job], Path.cwd()) for rank, job in jobs.items()}
    yield folder, processes
    for process in (one for pair in processes.values() for one in pair):
        process.kill()


@pytest.mark.parametrize("frozen", [1, 0])
def test_when_a_process_hangs_the_other_names_it_and_exits(hanging: Hanging, frozen: int):
    folder, processes = hanging[0], hanging[1][frozen]
    try:
        output, _ = processes[1 - frozen].communicate(timeout=240)
        assert processes[frozen].poll() is None, "it is stopped"
        processes[frozen].send_signal(signal.SIGCONT)
        processes[frozen].communicate(timeout=240)  # and exits by itself once it continues
    finally:
        processes[frozen].kill()
    assert all(process.returncode > 0 for process in processes)
    *progress, line = output.splitlines()
    assert not any("memtrain:" in other or "Traceback" in other for other in progress)
    assert line.startswith(f"memtrain: process {frozen}") and "has not answered for" in line
    assert "the last whole checkpoint is step 65; continue with: memtrain resume" in line
    assert Run.open(folder / f"frozen {frozen}").progress.global_step == 50 + 15


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_stopped_or_killed_leaves_a_saved_run_and_no_process(
    tmp_path: Path, number: int
):
    config = replace(SHARED, smt=replace(SHARED.smt, steps=10**6))
    (tmp_path / "config.json").write_text(to_json(config))
    command = "-m memtrain torchrun --nproc-per-node 2 train config.json --folder run"
    launcher = subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 20):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(number)
    output = launcher.communicate(timeout=240)[0]  # to the end of the last process that may speak
    assert launcher.returncode == (143 if number == signal.SIGTERM else -9)
    *progress, line = output.splitlines()
    assert line.endswith("all is saved; continue with: memtrain resume run"), output
    assert all(one.startswith("smt  ") for one in progress), output
    assert Run.open(tmp_path / "run").progress.step > 20


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--nproc-per-node 2 eval run", "memtrain: torchrun eval: must be train or resume\n"),
        ("--nproc-per-nodes 2 train text", "memtrain: torchrun unrecognized arguments"),
        ("--nproc-per-node many train text", "memtrain: torchrun: "),
    ],
)
def test_torchrun_refuses_in_one_line(arguments: str, expected: str, capsys):
    assert main(["torchrun", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert expected in err and err.count("\n") == 1 and not out


class Exchanging(Group):
    """The first of two processes; the other sends scripted values."""

    def __init__(self, other: list[int]) -> None:
        super().__init__(0, 2)
        self.other, self.times = other, 0

    def highest(self, numbers: Sequence[int]) -> list[int]:
        self.times += 1
        return [max(pair) for pair in zip(numbers, self.other, strict=True)]


def test_processes_agree_to_stop_once_per_second_and_at_required_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    group = Exchanging([0, -(10**6)])
    agreement = Agreement(StopRequest(), group)
    for _ in range(1000):
        now[0] += 0.01
        assert not agreement.reached()
    assert 10 <= group.times <= 20, "of ten seconds"
    for _ in range(10):
        now[0] += 5.0
        agreement.reached()
    assert group.times <= 31, "slow steps: after each of them"
    group.other = [signal.SIGTERM, -1]
    assert agreement.reached(now=True) == signal.SIGTERM
    group.other = [0, -1]
    agreement.request.signal_number = signal.SIGHUP
    assert agreement.reached() == signal.SIGHUP, "the other wanted it after each step"


@pytest.mark.slow
def test_torchrun_restarts_and_resumes(trained: Path, tmp_path: Path):
    """The real launcher; the process that is killed is one it started."""
    (tmp_path / "config.json").write_text(to_json(SHARED))
    command = "-m torch.distributed.run --nproc-per-node 2 --max-restarts 1 -m memtrain train"
    launcher = subprocess.Popen(
        [sys.executable, *command.split(), str(tmp_path / "config.json"), "--folder", "run"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 60):
        assert launcher.poll() is None
        time.sleep(0.02)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[-1]), 9)
    output = launcher.communicate(timeout=240)[1]
    assert launcher.returncode == 0, output
    assert_same_numbers(Run.open(trained / "one"), Run.open(tmp_path / "run"))


TEXT = (
    "train text --data book.txt --option held_out 0.5 --folder run --engine.device cpu "
    "--teacher.width 32 --teacher.heads 1 --teacher.encoder-layers 1 --teacher.context-length 8 "
    "--cell.width 32 --cell.heads 1 --cell.layers 1 --data.evaluate-length 16 "
    "--smt.batch-size 4 --smt.steps 4 --smt.future-length 4 --dmt.steps 0 "
    "--log.evaluate-sequences 2 --log.checkpoint-every 2"
)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str]]]:
    """A folder in which two processes trained on a text, and their outputs."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "book.txt").write_text("it was a dark and stormy night\n" * 50)
    return folder, two_commands(TEXT, folder)


def test_one_process_prepares_data_and_both_train_on_it(
    two_runs: tuple[Path, list[tuple[int, str]]],
):
    folder, [(main, output), (other, other_output)] = two_runs
    assert (main, other) == (0, 0), output + other_output
    assert output.count("prepared data/book") == 1 and not other_output
    config = read_config(folder / "run" / "config.json")
    assert isinstance(config.data, Stream) and config.data.path.startswith("data/book-")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (TEXT.replace("book.txt", "boo.txt"), "memtrain: data=boo.txt: no such file or folder\n"),
        (TEXT.replace("held_out 0.5", "hold_out 0.5"), "did you mean held_out"),
        (TEXT, "memtrain: run: a run is there already"),
        (TEXT.replace("batch-size 4", "batch-size 3"), "memtrain: smt.batch_size=3: 2 processes"),
    ],
    ids=["no data", "no such option", "no place", "no share"],
)
def test_a_failure_of_the_main_process_ends_all_with_one_line(
    two_runs: tuple[Path, list[tuple[int, str]]], command: str, expected: str
):
    (main, output), (other, other_output) = two_commands(command, two_runs[0])
    assert (main, other) == (2, 2) and not other_output
    *before, line = output.splitlines(keepends=True)
    assert expected in line and all("prepared data/book" in one for one in before)


def test_only_one_process_prints_warnings_and_the_final_line(
    two_runs: tuple[Path, list[tuple[int, str]]],
):
    folder = two_runs[0]
    (folder / "run" / "checkpoints" / "00000004" / "state.json").write_text("{")
    with held(folder / "run"):  # as another training would
        (main, output), (other, other_output) = two_commands("resume run", folder)
    assert (main, other) == (2, 2) and not other_output
    assert "another process trains or replaces this run; wait for it" in output.splitlines()[-1]
    for expected in ("passed over a checkpoint: checkpoint 00000004", "run: finished already"):
        (main, output), (other, other_output) = two_commands("resume run", folder)
        assert (main, other) == (0, 0), output + other_output
        assert output.count(expected) == 1 and not other_output


@pytest.mark.parametrize("frozen", [False, True], ids=["joint", "two-stages"])
def test_accumulated_micro_batches_equal_the_whole_batch(tmp_path: Path, frozen: bool):
    few = replace(
        SHARED,
        smt=replace(SHARED.smt, steps=6),
        dmt=replace(SHARED.dmt, steps=6),
        bptt=replace(SHARED.bptt, steps=6),
    )
    if frozen:
        few = replace(
            few,
            pretrain=PretrainConfig(steps=6, batch_size=8),
            smt=replace(few.smt, train_teacher=False),
            dmt=replace(few.dmt, train_teacher=True, uniformity_samples=16),
        )
    turns = replace(
        few,
        pretrain=replace(few.pretrain, accumulate=4),
        smt=replace(few.smt, accumulate=4),
        dmt=replace(few.dmt, accumulate=8),
        bptt=replace(few.bptt, accumulate=2),
    )
    at_once = Run.create(few, tmp_path / "at once").train()
    assert_same_numbers(at_once, Run.create(turns, tmp_path / "turns").train())


def test_an_indivisible_batch_is_refused(tmp_path: Path):
    run = Run.create(SHARED, tmp_path / "run")
    objective = run.objective("bptt")
    with pytest.raises(MemtrainError, match="batch_size=8: 3 processes.* multiple of 3"):
        Trainer(objective, StageConfig(batch_size=8), run.task, run.engine, 0, Group(0, 3))


def test_without_torchrun_there_is_one_process():
    group = Group()
    value = torch.arange(3)
    assert group.main and torch.equal(group.sum(value), value)
    assert torch.equal(group.gather(value), value[None])
    assert group.highest([7, -1]) == [7, -1]
    assert group.from_main(lambda: 7) == 7
