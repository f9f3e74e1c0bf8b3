"""The figures' grids at every scale, and verdicts that can say both yes and no."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import TINY
from memtrain.errors import MemtrainError
from memtrain.objectives.futures import readout_loss
from memtrain.paper import FIGURES, load
from memtrain.paper.base import SCALES, Experiment, Job, Result, Setup
from memtrain.paper.figures.gradients import bptt_norms, smt_norms
from memtrain.paper.figures.memory_maps import least_distance, true_states, within_share
from memtrain.paper.figures.resources import kept_bytes
from memtrain.paper.plots import component_size, nearest_distance
from memtrain.paper.toy_data import draw_cat
from memtrain.training.run import Run


def setup_at(scale: Any, folder: Path) -> Setup:
    for name in ("mnist", "tinystories", "sketchy"):
        place = folder / "prepared" / name
        place.mkdir(parents=True, exist_ok=True)
        (place / "meta.json").touch()  # a grid asks no more than that it is there
    return Setup(scale=scale, folder=folder, data_dir=folder / "prepared")


def result_of(job: Job, **measured: Any) -> Result:
    cost = {"steps": 1, "tokens": 1, "sequential_ops": 1, "seconds": 1.0}
    return Result(
        figure="f",
        version=1,
        job=job.name,
        key=job.key,
        tags=dict(job.tags),
        measured=measured,
        cost=cost,
        curve=[],
    )


def both_sides(figure: Experiment, setup: Setup, results: Sequence[Result]) -> bool | None:
    found = figure.verdict(setup, results)
    assert found.sentence and found.numbers
    return found.holds


# --------------------------------------------------------------------------------------- grids


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FIGURES)
def test_every_grid_builds_at_every_scale(name: str, scale: str, tmp_path: Path):
    figure, setup = load(name), setup_at(scale, tmp_path)
    assert figure.name == name and figure.claim and figure.title
    jobs = figure.grid(setup)
    assert len({(job.key, job.name) for job in jobs}) == len(jobs) > 0
    assert [job.key for job in figure.grid(setup)] == [job.key for job in jobs]
    results = [result_of(job, rnn_nats=1.0, rnn_accuracy=0.5) for job in jobs]
    more = figure.follow_up(setup, results)
    assert bool(more) <= figure.follows_up


@pytest.mark.parametrize("name", ["mnist-samples", "sequential-compute"])
def test_both_methods_get_equal_trials_and_three_seeds(name: str, tmp_path: Path):
    figure, setup = load(name), setup_at("gpu", tmp_path)
    tries = figure.grid(setup)
    sides: dict[bool, int] = {True: 0, False: 0}
    for job in tries:
        sides[job.config.bptt.steps > 0] += 1
    methods = len({job.tags.get("method") for job in tries})
    expected = 2 if methods == 3 else 1  # two cells of BPTT to one of ours
    assert sides[True] == expected * sides[False]
    results = [result_of(job, rnn_nats=1.0, rnn_accuracy=0.5) for job in tries]
    seeds = {job.config.seed for job in [*tries, *figure.follow_up(setup, results)]}
    assert seeds == {0, 1, 2}


def test_unprepared_data_is_an_error_with_the_command(tmp_path: Path):
    setup = Setup(scale="gpu", folder=tmp_path, data_dir=tmp_path / "nowhere")
    with pytest.raises(MemtrainError, match="memtrain data mnist --out"):
        load("mnist-samples").grid(setup)


def test_unknown_figures_are_refused():
    with pytest.raises(MemtrainError, match="did you mean gradients"):
        load("gradient")


# ------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    "joint_short, detached_short, detached_long, holds",
    [(1.0, 0.2, 1.0, True), (0.3, 0.2, 1.0, False), (1.0, 1.0, 1.0, False), (1.0, 0.2, 0.5, False)],
)
def test_joint(joint_short, detached_short, detached_long, holds, tmp_path: Path):
    figure, setup = load("joint"), setup_at("gpu", tmp_path)
    results = []
    for job in figure.grid(setup):
        short = job.tags["T_f"] == 1
        value = 1.0 if not short else joint_short
        if not job.tags["joint"]:
            value = detached_short if short else detached_long
        results.append(result_of(job, rnn_accuracy=value))
    assert both_sides(figure, setup, results) is holds
    smoke = setup_at("smoke", tmp_path)
    small = [result_of(job, rnn_accuracy=1.0) for job in figure.grid(smoke)]
    assert both_sides(figure, smoke, small) is None


@pytest.mark.parametrize("falls", [True, False])
def test_memory_scaling(falls: bool, tmp_path: Path):
    figure, setup = load("memory-scaling"), setup_at("gpu", tmp_path)
    results = [
        result_of(job, rnn_nats=1 / float(job.tags["value"]) if falls else 1.0, teacher_nats=0.5)
        for job in figure.grid(setup)
    ]
    assert both_sides(figure, setup, results) is falls


@pytest.mark.parametrize("far, holds", [(0.9, True), (0.4, False)])
def test_length(far: float, holds: bool, tmp_path: Path):
    figure, setup = load("length"), setup_at("gpu", tmp_path)
    results = [
        result_of(job, lengths=[16, 32], rnn=[0.9, far], teacher=[0.95, 0.5])
        for job in figure.grid(setup)
    ]
    assert both_sides(figure, setup, results) is holds


@pytest.mark.parametrize("after, holds", [(0.5, True), (1.5, False)])
def test_dmt(after: float, holds: bool, tmp_path: Path):
    figure, setup = load("dmt"), setup_at("gpu", tmp_path)

    def at(value: float) -> dict[str, Any]:
        return {"nats": value, "rollout": value, "one_step": 0.1, "path": [value]}

    results = [result_of(job, smt=at(1.0), dmt=at(after)) for job in figure.grid(setup)]
    assert both_sides(figure, setup, results) is holds


@pytest.mark.parametrize(
    "runs, message",
    [
        (3, "; rank correlation of one-step and rollout drift 1.00."),
        (2, "; too few runs, 2, for a rank correlation of one-step and rollout drift."),
    ],
)
def test_dmt_correlates_only_enough_points(runs: int, message: str, tmp_path: Path):
    figure, setup = load("dmt"), setup_at("gpu", tmp_path)
    results = []
    for index, job in enumerate(figure.grid(setup)[:runs]):
        at = {"nats": 1.0, "rollout": 1.0 + index, "one_step": 0.1 + index, "path": [1.0]}
        results.append(result_of(job, smt=at, dmt=at))
    assert figure.judge(setup, results).sentence.endswith(message)


@pytest.mark.parametrize("collapses, holds", [(True, True), (False, False)])
def test_lambdas(collapses: bool, holds: bool, tmp_path: Path):
    figure, setup = load("lambdas"), setup_at("gpu", tmp_path)
    results = []
    for job in figure.grid(setup):
        near = job.tags["dynamics"] == 0.1 and float(job.tags["uniformity_weight"]) <= 0.001
        none = job.tags["uniformity_weight"] == 0 and collapses
        results.append(result_of(job, rnn_nats=1.0 if near else 2.0, uniformity=0 if none else -3))
    assert both_sides(figure, setup, results) is holds


@pytest.mark.parametrize("drop, holds", [(30, True), (0, False)])
def test_gradients(drop: int, holds: bool, tmp_path: Path):
    figure, setup = load("gradients"), setup_at("gpu", tmp_path)
    vanishing = [10.0 ** (-drop * (1 - t / 128)) for t in range(128)]
    results = [result_of(job, bptt=vanishing, smt=[1.0] * 128) for job in figure.grid(setup)]
    assert both_sides(figure, setup, results) is holds
    swapped = [result_of(job, smt=vanishing, bptt=vanishing) for job in figure.grid(setup)]
    assert both_sides(figure, setup, swapped) is False


def test_a_diverged_run_is_mentioned(tmp_path: Path):
    figure, setup = load("length"), setup_at("gpu", tmp_path)
    job = figure.grid(setup)[0]
    result = result_of(job, lengths=[16, 32], rnn=[0.9, 0.9], teacher=[0.9, 0.5])
    object.__setattr__(result, "diverged", "loss is nan")
    assert "1 of 1 runs diverged" in figure.verdict(setup, [result]).sentence


# ------------------------------------------------------------------------------------ measures


def test_bptt_norms_are_those_of_the_gradients_along_time(tmp_path: Path):
    run = Run(TINY, tmp_path)
    batch = run.task.sample(16, torch.Generator().manual_seed(0))
    memory, memories = run.rnn.empty_memory(16), []
    for token in batch.inputs.unbind(1):
        memory = run.rnn.cell(memory, token)
        memory.retain_grad()
        memories.append(memory)
    readout_loss(run.rnn, torch.stack(memories, dim=1), batch.targets).backward()
    expected = [float(memory.grad.norm()) for memory in memories]
    assert bptt_norms(run) == pytest.approx(expected, rel=1e-5)
    assert len(smt_norms(run)) == len(expected) and min(smt_norms(run)) > 0


def test_kept_bytes_counts_each_storage_once():
    x = torch.ones(10, 10, requires_grad=True)
    assert kept_bytes(lambda: x.exp().sum()) == 400
    assert kept_bytes(lambda: (x * x).sum()) == 400
    assert kept_bytes(lambda: x.exp().sin().sum()) == 400  # one's result is the other's input
    assert kept_bytes(lambda: x.sin().exp().sum()) == 800


def test_true_states_distinguish_different_futures():
    assert true_states("retrieval", [[2, 0, 3, 1, 0]]) == [["before", "next", "3", "3", "3"]]
    assert true_states("copy", [[1, 2, 0, 0]]) == [["1?", "12", "1", ""]]
    (states,) = true_states("stack", [[1, 0, 2]])
    assert states == ["1 said -", " said 1", "2 said -"]


def test_constant_states_have_no_variance_within():
    points = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    names = np.array(["a", "a", "b"])
    assert within_share(points, names) == 0
    assert within_share(points, np.array(["a", "b", "b"])) > 0.5
    assert least_distance(points, names) == pytest.approx(2**0.5 / (4 / 9) ** 0.5)


def test_strokes_are_longer_than_scattered_ink():
    cat = draw_cat(32)[None]
    scattered = np.random.default_rng(0).permuted(cat.reshape(1, -1), axis=1).reshape(cat.shape)
    assert component_size(cat) == (cat < 128).sum()  # one closed outline
    assert component_size(scattered) < 5
    assert component_size(np.full((1, 4, 4), 255, np.uint8)) == 0


def test_nearest_distance():
    known = np.zeros((2, 2, 2), np.uint8)
    known[1] = 255
    assert nearest_distance(known, known) == 0
    assert nearest_distance(np.full((1, 2, 2), 51, np.uint8), known) == pytest.approx(0.4)
