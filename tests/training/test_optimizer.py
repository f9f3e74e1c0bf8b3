"""AdamW, the schedule by steps and by the clock, and stages that end by the clock."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_step import Pull, trainer
from torch import nn

from conftest import TINY
from memtrain.config import StageConfig
from memtrain.errors import MemtrainError
from memtrain.training import schedule
from memtrain.training.console import ETA
from memtrain.training.run import Interrupted, Run
from memtrain.training.schedule import START_STEPS, learning_rate
from run_testing import StopAt


def test_the_schedule_warms_up_linearly_and_then_holds():
    rates = [
        learning_rate(StageConfig(steps=100, learning_rate=1.0, warmup=0.1), step)
        for step in range(100)
    ]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert set(rates[10:]) == {1.0}


def test_cosine_ends_near_zero():
    stage = StageConfig(steps=100, learning_rate=1.0, warmup=0.0, schedule="cosine")
    assert learning_rate(stage, 50) == pytest.approx(0.5 * (1 + math.cos(math.pi * 49 / 99)))
    assert learning_rate(stage, 99) < 1e-3


def test_norms_and_biases_do_not_decay():
    stage = StageConfig(steps=1, weight_decay=0.5)
    groups = trainer(Pull(), stage).optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert all(p.dim() > 1 for p in groups[0]["params"])
    assert all(p.dim() == 1 for p in groups[1]["params"])


def test_restored_moments_have_the_memory_format_of_their_parameters():
    objective = Pull()
    objective.left.weight = nn.Parameter(torch.randn(3, 4).T)
    objective.left.bias = nn.Parameter(torch.zeros(4))
    saved = trainer(objective, StageConfig(steps=3))
    saved.train_step()
    contiguous = {name: value.contiguous() for name, value in saved.tensors().items()}
    restored = trainer(objective, StageConfig(steps=3))
    restored.load_tensors(contiguous)
    for parameter in restored.ordered:
        state, expected = restored.optimizer.state[parameter], saved.optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].stride() == parameter.stride() == expected[key].stride()
            assert torch.equal(state[key], expected[key])


def test_the_optimizer_has_the_betas_of_the_stage():
    groups = trainer(Pull(), StageConfig(steps=1, betas=(0.5, 0.6))).optimizer.param_groups
    assert {tuple(group["betas"]) for group in groups} == {(0.5, 0.6)}


CLASSES = ["NAdam", "RAdam", "SGD", "RMSprop", "Adagrad", "Adafactor", "Adamax", "ASGD", "Rprop"]


@pytest.mark.parametrize("name", ["muon", *(f"torch.optim:{name}" for name in CLASSES)])
def test_a_resumed_optimizer_takes_the_same_step(name: str):
    stage = StageConfig(steps=9, optimizer=name, weight_decay=0.0, learning_rate=0.1)
    one, other = trainer(Pull(), stage), trainer(Pull(), stage)
    for _ in range(3):
        one.train_step()
    other.load_tensors({key: value.clone() for key, value in one.tensors().items()})
    other.objective.load_state_dict(one.objective.state_dict())
    other.step = one.step
    for trained in (one, other):
        trained.train_step()
    expected, found = one.objective.state_dict(), other.objective.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in expected.items())
    fresh = Pull().state_dict()
    assert not any(torch.equal(fresh[f"{key}.weight"], found[f"{key}.weight"]) for key in ("left",))


def test_options_reach_the_optimizer_and_numbers_of_its_state_are_saved():
    options = {"momentum": 0.5, "nesterov": True}
    stage = StageConfig(steps=2, optimizer="torch.optim:SGD", optimizer_options=options)
    groups = trainer(Pull(), stage).optimizer.param_groups
    assert {group["momentum"] for group in groups} == {0.5}
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]

    class Counts(torch.optim.SGD):
        """Keeps a Python number, as optimizers of users do."""

        def step(self, closure=None):  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                        p.data -= group["lr"] * p.grad / self.state[p]["seen"]

    pulled = trainer(Pull(), StageConfig(steps=5))
    pulled.optimizer.parts = [Counts(pulled.ordered, lr=0.1)]
    for _ in range(3):
        pulled.train_step()
    named = pulled.optimizer.tensors()
    assert {float(value) for name, value in named.items() if name.endswith("seen#int")} == {3.0}
    pulled.optimizer.load_tensors(named)
    state = pulled.optimizer.state[pulled.ordered[0]]
    assert state["seen"] == 3 and type(state["seen"]) is int


def test_the_state_of_another_optimizer_is_refused():
    muon, adamw = (trainer(Pull(), StageConfig(steps=2, optimizer=n)) for n in ("muon", "adamw"))
    muon.train_step()
    with pytest.raises(MemtrainError, match="optimizer.safetensors does not fit the run"):
        adamw.load_tensors(muon.tensors())


class Forgets(torch.optim.SGD):
    """Keeps its state where nothing saves it."""

    seen = 0

    def step(self, closure=None):  # type: ignore[override]
        self.seen += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * self.seen * p.grad


def test_an_optimizer_that_would_not_resume_is_refused(tmp_path: Path):
    for name, words in (
        ("test_optimizer:Forgets", "smt.optimizer=.*Forgets: a resumed run would differ"),
        ("torch.optim:SparseAdam", "weight_decay=0.01: optimizer=torch.optim:SparseAdam has none"),
        ("memtrain.training.muon:Muon", "a step without a closure failed"),
    ):
        config = replace(TINY, smt=replace(TINY.smt, optimizer=name))
        with pytest.raises(MemtrainError, match=words):
            Run.create(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_run_on_disk_does_not_import_an_optimizer_without_permission(tmp_path: Path):
    config = replace(TINY, smt=replace(TINY.smt, optimizer="test_optimizer:Kept"))
    Run.create(config, tmp_path / "run")
    with pytest.raises(MemtrainError, match="smt imports its optimizer, test_optimizer:Kept"):
        Run.open(tmp_path / "run").train()
    Run.open(tmp_path / "run", allow_code=True).train(until="smt")


class Kept(torch.optim.SGD):
    """An optimizer of a user."""


TICK = 0.125
"""Seconds per step here: half of them between two clock readings."""


@pytest.fixture
def ticking(monkeypatch):
    """Each clock reading is one tick later."""
    now = [0.0]

    def perf_counter() -> float:
        now[0] += TICK
        return now[0]

    monkeypatch.setattr(schedule, "time", SimpleNamespace(perf_counter=perf_counter))
    return now


def rates(stage: StageConfig) -> list[float]:
    pulled = trainer(Pull(), stage)
    found = []
    while not pulled.done:
        pulled.train_step()
        found.append(pulled.rate)
    return found


def test_a_limit_ends_the_stage_and_its_cosine(ticking):
    stage = StageConfig(
        steps=10**6, seconds=200 * TICK, learning_rate=1.0, schedule="cosine", warmup=0.1
    )
    found = rates(stage)
    assert len(found) == 200
    peak = found.index(max(found))
    assert peak == pytest.approx(START_STEPS + 0.1 * (200 - START_STEPS), abs=2)
    assert max(found) == pytest.approx(1.0, abs=1e-3) and found[-1] < 1e-3
    assert found[:peak] == sorted(found[:peak]) and found[peak:] == sorted(found[peak:])[::-1]


def test_compilation_counts_but_does_not_use_up_the_warm_up(ticking):
    """The first step takes half of the time; the warm-up comes after it."""
    stage = StageConfig(
        steps=10**6, seconds=200 * TICK, learning_rate=1.0, schedule="cosine", warmup=0.1
    )
    pulled = trainer(Pull(), stage)
    pulled.clock.seconds = 100 * TICK
    found = []
    while not pulled.done:
        pulled.train_step()
        found.append(pulled.rate)
    assert len(found) == 100
    assert found.index(max(found)) == pytest.approx(START_STEPS + 0.1 * 95, abs=2)


def test_a_time_limit_that_is_not_reached_changes_nothing(ticking):
    stage = StageConfig(steps=100, learning_rate=1.0, schedule="cosine", warmup=0.1)
    assert rates(replace(stage, seconds=1e6)) == pytest.approx(rates(stage), abs=1e-3)


def test_a_limit_without_steps_is_refused():
    with pytest.raises(MemtrainError, match="seconds=5.0 with steps=0: the stage is skipped"):
        StageConfig(seconds=5.0)
    with pytest.raises(MemtrainError, match="seconds=-1.0: must be at least 0"):
        StageConfig(steps=1, seconds=-1.0)
    with pytest.raises(MemtrainError, match="seconds=.*: must be at most"):
        StageConfig(steps=1, seconds=float("inf"))


LIMITED = replace(
    TINY,
    smt=replace(TINY.smt, steps=10**6, seconds=40 * TICK, schedule="cosine"),
    dmt=replace(TINY.dmt, steps=3),
    bptt=replace(TINY.bptt, steps=0),
)


def test_the_next_stage_starts_when_the_time_is_over(ticking, tmp_path: Path):
    run = Run.create(LIMITED, tmp_path / "run").train()
    smt, dmt = run.progress.stages
    assert run.finished and dmt.steps == 3
    # Metrics and checkpoints wait for the device, which is training time too.
    assert 20 < smt.steps < 40 and smt.seconds >= 40 * TICK
    assert smt.start_up_seconds is not None and 0 < smt.start_up_seconds < smt.seconds
    last = [line for line in run.metrics.read() if line["stage"] == "smt"][-1]
    assert last["step"] == smt.steps and "evaluation" in last
    assert last["learning_rate"] < 0.05 * LIMITED.smt.learning_rate


def test_a_resumed_run_continues_its_clock(ticking, tmp_path: Path):
    whole = Run.create(LIMITED, tmp_path / "whole").train()
    with pytest.raises(Interrupted, match="step 18 of smt"):
        Run.create(LIMITED, tmp_path / "cut").train(StopAt("smt", 18))
    resumed = Run.open(tmp_path / "cut")
    assert resumed.progress.stages[0].seconds > 18 * TICK
    resumed.train()
    one, other = (run.progress.stages[0] for run in (whole, resumed))
    assert other.steps == pytest.approx(one.steps, abs=2)  # saving read the clock
    assert other.start_up_seconds == one.start_up_seconds
    found = [line["learning_rate"] for line in resumed.metrics.read() if line["step"] > 6][:-1]
    assert found == sorted(found, reverse=True)  # no leap where it was taken up


def test_time_left_follows_the_time_limit_that_ends_the_stage(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pace = ETA(0, 10**6)
    now[0] = 10.0
    assert pace.at(100).left == pytest.approx(1e5, rel=0.01)
    pace.limit(5.0)
    assert pace.at(100).left == 5.0 and pace.at(100).steps == pytest.approx(150, abs=2)
    pace.limit(1e9)
    assert pace.at(100).steps == 10**6
