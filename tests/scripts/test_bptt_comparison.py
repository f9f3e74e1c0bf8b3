"""The script that gives BPTT as many seconds as SMT -> DMT: whole, killed, and with lost runs."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import load_script
from memtrain.config import Stream
from memtrain.data.stream import StreamTask
from memtrain.paper import workers as launch
from memtrain.paper.base import Result, Setup
from memtrain.paper.job import Done, Failed
from memtrain.paper.toy_data import MAKERS
from memtrain.recipes import recipe
from memtrain.runs.checkpoint import latest_checkpoint
from memtrain.runs.progress import MetricsFile
from memtrain.training.run import Run

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return load_script("bptt_comparison")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in MNIST's place, little stories in TinyStories'."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("mnist", "tinystories"):
        MAKERS[name](folder / name, Setup(scale="smoke", folder=folder))
    return folder


def start(folder: Path, *options: object) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPTS / "bptt_comparison.py"), "--folder", str(folder)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent / "src"), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    command += [str(option) for option in options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe)


def full_runs(folder: Path) -> list[Path]:
    """The runs that have a checkpoint, without tries."""
    runs = [path for path in folder.glob("runs/*") if "-tune-" not in path.name]
    return [path for path in runs if list(path.glob("checkpoints/0*"))]


def end(process: subprocess.Popen) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.slow
def test_killed_comparison_resumes_and_ends_with_a_table(tmp_path: Path, data: Path):
    folder = tmp_path / "beside"
    first = start(
        folder,
        *("--seconds", "mnist=3", "--step", "transformer=0.3", "gru=0.25"),
        *("--rates", "transformer=3e-3", "gru=1e30,3e-3"),
        *("--size", "tiny", "--device", "cpu", "--data-dir", data),
        *("--sequences", "mnist=8", "--processes", 1),
    )
    while not (begun := full_runs(folder)):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.kill()
    first.communicate()
    (run,) = begun
    created = (run / "config.json").stat().st_mtime_ns

    shown = end(start(folder, "--processes", 1))
    record = json.loads((folder / "beside.json").read_text())
    plan = record["plan"]
    assert (run / "config.json").stat().st_mtime_ns == created  # resumed, not restarted
    lines = (folder / "results.jsonl").read_text().splitlines()
    assert set(Counter(json.loads(line)["job"] for line in lines).values()) == {1}
    assert plan["chosen"] == {"mnist/transformer": 3e-3, "mnist/gru": 3e-3}
    states = {(one["cell"], one["rate"], one["tuning"]): one["state"] for one in record["runs"]}
    assert states.pop(("gru", 1e30, True)) == "diverged"
    assert len(states) == 4 and set(states.values()) == {"done"}

    for one in record["runs"]:
        seconds = plan["timed"][one["cell"]]["seconds"]
        steps = math.floor(3 / seconds) if not one["tuning"] else math.floor(3 / seconds) // 5
        assert one["steps"] == max(1, steps)
        if not one["tuning"]:
            measured, cost = one["measured"], one["cost"]
            assert (measured["length"], measured["sequences"]) == (784, 8)
            assert cost["steps"] == one["steps"] and cost["tokens"] == one["steps"] * 8 * 160
            assert cost["sequential_ops"] > 0 and measured["baselines"]
            assert (folder / measured["samples"]).stat().st_size > 0
            assert f"| 0 | {measured['rnn']['nats']:.4f} | done | 0.003 |" in shown
    assert (folder / "beside.md").read_text() in shown
    assert "best count model" in shown


@pytest.mark.slow
def test_stopped_runs_save_themselves_and_all_data_sets_share_the_machine(
    tmp_path: Path, data: Path
):
    folder = tmp_path / "beside"
    first = start(
        folder,
        *("--seconds", "mnist=8", "tinystories=8", "--timing", 0.5),
        *("--rates", "transformer=3e-3", "gru=3e-3", "--size", "tiny", "--device", "cpu"),
        *("--data-dir", data, "--sequences", "mnist=8", "tinystories=8", "--processes", 2),
    )
    while len(full_runs(folder)) < 2:
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    shown = end(first)
    assert "to continue" in shown and not list(folder.glob("runs/*.error.txt"))
    for run in full_runs(folder):
        saved, _ = latest_checkpoint(run / "checkpoints")
        lines = MetricsFile(run / "metrics.jsonl").read()
        assert saved is not None and saved.progress.step >= lines[-1]["step"] > 0
    record = json.loads(end(start(folder)) and (folder / "beside.json").read_text())
    assert [one["state"] for one in record["runs"]] == ["done"] * 8
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        "mnist-gru.png",
        "mnist-transformer.png",
        "tinystories-gru.txt",
        "tinystories-transformer.txt",
    ]


# ------------------------------------------------------------------------------ without processes


def plan_of(script, data: Path, **changes):
    plan = script.Plan(
        size="tiny",
        data_dir=str(data),
        device="cpu",
        sequences={"mnist": 8, "tinystories": 8},
        rates={"transformer": [1e-4, 3e-4, 1e-3], "gru": [1e-3]},
        seconds={"mnist": 10.0, "tinystories": 20.0},
        timed={cell: {"seconds": 0.1, "share": 0.4} for cell in ("transformer", "gru")},
    )
    return replace(plan, **changes)


def test_a_rate_is_chosen_after_all_trials_and_lost_runs_are_retried(
    script, monkeypatch, data: Path, tmp_path: Path
):
    performed, broken = [], {1e-3}

    def perform(queue, folder, processes, over, fits, on_gpu):
        """Runs at a broken rate fail; of the others the highest rate is the best."""
        while queue:
            work = queue.popleft()
            tags = work.requests[0].tags
            performed.append((tags["data"], tags["cell"], tags["rate"], tags["tuning"]))
            place = folder / (work.place + ".error.txt")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            if tags["rate"] in broken:
                place.write_text("Traceback\nZeroDivisionError: nothing to divide by")
                yield Failed(work.key, "nothing to divide by")
                continue
            nats = {"validation_nats": -tags["rate"], "rnn": {"nats": 1.0}, "baselines": []}
            cost: dict[str, int | float] = dict(steps=1, tokens=1, sequential_ops=1, seconds=1.0)
            request = work.requests[0]
            result = Result(
                figure=request.figure,
                version=1,
                job=request.job,
                key=work.key,
                tags=tags,
                measured=nats,
                cost=cost,
                curve=[],
            )
            yield Done(work.key, [result])

    monkeypatch.setattr(script, "run_locally", perform)
    plan = plan_of(script, data)
    plan.write(tmp_path)
    script.learn(plan, tmp_path, ["tune"], lambda: False, ["mnist"])
    assert {(name, tuning) for name, _, _, tuning in performed} == {("mnist", True)}
    assert plan.chosen == {}
    performed.clear()
    script.learn(plan, tmp_path, ["tune", "train"], lambda: False)
    # Once more what was lost, and what another command left; no full run on half the tries.
    assert Counter(tuning for *_, tuning in performed) == {True: 2 + 4}
    assert plan.chosen == {}
    shown = script.table(script.summary(plan, tmp_path, ""))
    assert shown.count("ZeroDivisionError: nothing to divide by") == 4

    performed.clear()
    broken.clear()
    script.learn(plan, tmp_path, ["tune", "train"], lambda: False)
    assert plan.chosen == {f"{name}/{cell}": 1e-3 for name, cell in plan.contenders()}
    assert script.Plan.read(tmp_path) == plan
    assert Counter(tuning for *_, tuning in performed) == {True: 4, False: 4}
    shown = script.table(script.summary(plan, tmp_path, ""))
    assert shown.count("| 1.0000 | done | 0.001 |") == 4 and "ZeroDivisionError" not in shown


def test_runs_that_do_not_fit_wait_while_smaller_ones_start(
    script, monkeypatch, data: Path, tmp_path: Path
):
    together, most = [], []

    class Worker:
        """Needs a moment for a run, and notes which runs are at work."""

        def __init__(self, folder: Path, threads: int, on_gpu: bool) -> None:
            self.connection, self.there = Pipe()
            self.work = None

        def give(self, work) -> None:
            self.work = work
            together.append(cell := work.requests[0].tags["cell"])
            most.append(sorted(together))

            def finish() -> None:
                together.remove(cell)
                self.there.send(Failed(work.key, "was no run"))

            threading.Timer(0.05, finish).start()

        def close(self) -> None:
            self.connection.close()

    monkeypatch.setattr(launch, "_Worker", Worker)
    monkeypatch.setattr(script, "shared_gpu", nullcontext)
    plan = plan_of(script, data, rates={"transformer": [1e-4, 3e-4], "gru": [1e-4, 3e-4]})
    plan.timed["transformer"]["share"], plan.timed["gru"]["share"] = 0.6, 0.2
    plan.write(tmp_path)
    script.learn(plan, tmp_path, ["tune"], lambda: False, processes=3)
    assert len(most) == 8
    assert ["gru", "transformer"] in most
    assert max(cells.count("transformer") for cells in most) == 1
    assert max(len(cells) for cells in most) == 3
    assert all(plan.fit(cells) for cells in most)


def test_steps_are_the_budget_over_seconds_per_step_and_the_rest_follows_the_recipe(
    script, data: Path
):
    plan = plan_of(script, data, size="paper")
    plan.timed["gru"] = {"seconds": 0.03, "share": 0.1}
    full = plan.job("tinystories", "gru", 1e-3, tuning=False).config
    tried = plan.job("tinystories", "gru", 1e-3, tuning=True).config
    theirs = recipe("tinystories", method="bptt", cell="gru")
    assert (full.bptt.steps, tried.bptt.steps) == (666, 133)
    assert full.bptt.recompute == 0 and theirs.bptt.sequence_length == 256
    ours = replace(full.bptt, steps=theirs.bptt.steps)
    assert (
        (theirs.bptt.learning_rate, ours) == (1e-3, theirs.bptt)
        and full.cell == theirs.cell
        and full.teacher == theirs.teacher
    )
    assert full.data == replace(theirs.data, path=str(data / "tinystories"))


def test_seeds_share_the_rate_and_are_averaged(script, data: Path, tmp_path: Path):
    plan = plan_of(script, data)
    plan.timed["gru"] = {"seconds": 0.03, "share": 0.1}
    assert plan.full_runs("mnist", "gru") == []  # no rate was chosen
    plan.chosen["mnist/gru"], plan.seeds["mnist/gru"] = 3e-3, 2
    runs = plan.full_runs("mnist", "gru")
    assert [job.config.seed for job in runs] == [0, 1]
    assert replace(runs[1].config, seed=0) == runs[0].config
    assert runs[0] == plan.job("mnist", "gru", 3e-3, tuning=False)
    plan.seconds, plan.rates = {"mnist": 20.0}, {"gru": [3e-3]}

    def verdict(*ours: float):
        plan.ours["mnist"] = [{"nats": nats} for nats in ours]
        plan.write(tmp_path)
        known = {"figure": "", "version": 1, "job": "", "key": "", "cost": {}, "curve": []}
        results = [
            Result(**known, tags=job.tags, measured={"rnn": {"nats": nats}})
            for job, nats in zip(runs, (0.4, 0.6), strict=True)
        ]
        return (
            sys.modules["bptt_comparison_plan"]
            .BPTTComparison()
            .judge(Setup(scale="paper", folder=tmp_path), results)
        )

    assert verdict(0.3, 0.6).holds is True and verdict(0.3, 0.8).holds is False
    assert verdict(0.3, 0.6).sentence.endswith("mnist 0.4500 against 0.5000.")


def test_rates_are_chosen_on_other_held_out_data_than_evaluated(script, data: Path, monkeypatch):
    asked, plan = {}, plan_of(script, data)
    plans = sys.modules["bptt_comparison_plan"]

    def evaluate(task, rnn, **options):
        asked.update(options)
        return SimpleNamespace(rnn=SimpleNamespace(nats=0.5))

    monkeypatch.setattr(plans, "evaluate", evaluate)
    engine = SimpleNamespace(device="cpu", eval_mode=nullcontext)
    config = SimpleNamespace(name="mnist-gru")
    run = SimpleNamespace(config=config, engine=engine, task=None, rnn=None)
    assert plans.validate(run, plan) == 0.5
    assert asked["skip"] == plan.sequences["mnist"] and asked["sequences"] == plan.others("mnist")


def test_bptt_starts_at_documents_as_often_as_smt_and_dmt(script, data: Path):
    plan = plan_of(script, data)
    ours, theirs = recipe("mnist").data, plan.base("mnist", "gru")
    assert isinstance(ours, Stream) and isinstance(theirs.data, Stream)
    assert ours.document_starts == theirs.data.document_starts == 0.5
    empty_start_rows = Run(theirs, Path("nowhere")).objective("bptt").empty_start_rows(128)
    assert empty_start_rows == 128  # all of them, so half begin documents
    windows = StreamTask.from_config(theirs.data).windows(32, empty_start_rows)
    drawn = windows.sample(128, torch.Generator().manual_seed(0)).inputs[:64]
    digits = torch.from_numpy(np.array(windows.store.tokens("train"))).view(-1, 64)[:, :32]
    assert bool((drawn[:, None] == digits).all(dim=2).any(dim=1).all())


def test_step_timing_keeps_all_activations(script, data: Path):
    found = script.measure_step(plan_of(script, data), "mnist", "gru", 0.01)
    assert found["seconds"] > 0 and found["share"] == 0  # of a GPU's memory
    assert (found["batch"], found["length"]) == (8, 160)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--seconds: name a data set"),
        (("--seconds", "mnist"), "--seconds mnist: must be NAME=VALUE"),
        (("--seconds", "mnist=-1"), "--seconds -1: must be a number above 0"),
        (("--seconds", "mnist=5", "--sequences", "mnist=400"), "has 238 held-out documents"),
        (("tune", "--seconds", "mnist=5", "--sequences", "mnist=8"), "no step was timed"),
        (("--seeds", "mnist=2"), "--seeds mnist=2: must be NAME=VALUE, NAME one of mnist/trans"),
        (("sing",), "sing: must be one of time, tune, train, table"),
    ],
)
def test_invalid_comparisons_are_refused(
    script, monkeypatch, capsys, data: Path, tmp_path: Path, options, message: str
):
    command = ["bptt_comparison.py", *options, "--folder", str(tmp_path), "--data-dir", str(data)]
    monkeypatch.setattr(sys, "argv", [*command, "--device", "cpu"])
    monkeypatch.setattr(script, "signal", SimpleNamespace(SIGTERM=0, signal=lambda *_: None))
    assert script.main() == 2
    assert message in capsys.readouterr().err


def test_the_budget_is_kept_and_our_runs_are_shown_next_to_bptt(
    script, monkeypatch, capsys, data, tmp_path: Path
):
    costs = {"total_steps": 9, "total_tokens": 8, "total_sequential_ops": 7, "total_seconds": 5.0}
    evaluation = {
        "rnn": {"nats": 0.5},
        "length": 784,
        "run": "r",
        "sequences": 8,
        "seed": 3,
        **costs,
    }
    (tmp_path / "ours.json").write_text(json.dumps(evaluation))
    monkeypatch.setattr(script, "signal", SimpleNamespace(SIGTERM=0, signal=lambda *_: None))

    def call(*options: object) -> int:
        fixed = ("--folder", tmp_path / "beside", "--data-dir", data, "--device", "cpu")
        monkeypatch.setattr(sys, "argv", ["bptt_comparison.py", *map(str, (*options, *fixed))])
        return script.main()

    ours = ("--ours", "mnist={0},{0}".format(tmp_path / "ours.json"))
    assert call("table", *ours, "--sequences", "mnist=8", "--step", "gru=0.5") == 0
    assert (
        "| mnist | SMT → DMT | 3 | 0.5000 | done | | 9 | 8 | 7 | | 5 |\n" * 2
        in capsys.readouterr().out
    )
    assert script.Plan.read(tmp_path / "beside").steps("mnist", "gru") == 10
    assert call("table", "--seconds", "mnist=6") == 2
    assert "was planned with 5.0; choose another --folder" in capsys.readouterr().err
    assert call("table", *ours, "--sequences", "mnist=9") == 2
    assert "--sequences mnist 9" in capsys.readouterr().err
