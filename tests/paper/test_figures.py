"""The figures' grids at every scale, and verdicts that can say both yes and no."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import TINY
from memtrain.data.store_reader import open_store
from memtrain.errors import MemtrainError
from memtrain.objectives.futures import readout_loss
from memtrain.paper import FIGURES, MORE, load
from memtrain.paper.base import SCALES, Experiment, Job, Result, Setup
from memtrain.paper.figures.dmt import plateau
from memtrain.paper.figures.gradients import bptt_norms, fitted_trend, smt_norms
from memtrain.paper.figures.memory_evolution import POINTS, colours, principal, project
from memtrain.paper.figures.memory_maps import (
    edge_length,
    least_distance,
    true_states,
    within_share,
)
from memtrain.paper.figures.resources import (
    JUDGED,
    MIXERS,
    PAPER,
    MixingLayer,
    growth_order,
    kept_bytes,
)
from memtrain.paper.figures.samples import METHODS
from memtrain.paper.figures.sequential_compute import cost_to_reach, lower_envelope
from memtrain.paper.plots import component_size
from memtrain.paper.toy_data import draw_cat, store
from memtrain.training.run import Run


def setup_at(scale: Any, folder: Path) -> Setup:
    for name in ("mnist", "tinystories", "sketchy"):
        place = folder / "prepared" / name
        place.mkdir(parents=True, exist_ok=True)
        for file in ("meta.json", "train.labels.npy"):
            (place / file).touch()  # a grid asks no more than that it is there
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
@pytest.mark.parametrize("name", [*FIGURES, *MORE])
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


@pytest.mark.parametrize("name", ["mnist", "sketchy"])
def test_data_without_labels_is_refused_before_training(name: str, tmp_path: Path):
    setup = setup_at("gpu", tmp_path)
    (setup.data_dir / name / "train.labels.npy").unlink()
    with pytest.raises(MemtrainError, match=f"without labels.* memtrain data {name} --out"):
        load(f"{name}-samples").grid(setup)


def test_toy_data_of_an_older_folder_gets_labels_and_keeps_its_tokens(tmp_path: Path):
    setup = Setup(folder=tmp_path)
    for name, classes in (("mnist", 10), ("sketchy", 3)):
        store(setup, name)
        place = tmp_path / "data" / name
        before = open_store(place)
        assert set(before.labels("train").tolist()) == set(range(classes))
        (place / "train.labels.npy").unlink()
        store(setup, name)
        assert open_store(place).splits == before.splits
        assert open_store(place).labels("train").tolist() == before.labels("train").tolist()


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
def test_length_is_judged_on_the_stack(far: float, holds: bool, tmp_path: Path):
    figure, setup = load("length"), setup_at("gpu", tmp_path)

    def at(task: str) -> dict[str, Any]:
        beyond = {"stack": far, "parity": 0.9, "s5": 0.1}[task]
        inside = 0.5 if task == "s5" else 0.95
        return {"lengths": [16, 32], "rnn": [0.9, beyond], "teacher": [inside, 0.5]}

    results = [result_of(job, **at(str(job.tags["task"]))) for job in figure.grid(setup)]
    assert both_sides(figure, setup, results) is holds
    numbers = figure.judge(setup, results).numbers
    assert numbers["parity"]["outcome"] == "holds"
    assert numbers["s5"]["outcome"] == "teacher not trained"


def at_drift(value: float, one_step: float = 0.1, nats: float | None = None) -> dict[str, Any]:
    path = [0.1, value, value, value]
    nats = value if nats is None else nats
    return {"nats": nats, "path": path, "start": 0.1, "plateau": value, "one_step": one_step}


@pytest.mark.parametrize(
    "after, nats, holds", [(0.5, 0.5, True), (1.5, 0.5, False), (0.5, 1.5, False)]
)
def test_dmt(after: float, nats: float, holds: bool, tmp_path: Path):
    figure, setup = load("dmt"), setup_at("gpu", tmp_path)
    # One-step drift alternates, so that it does not predict the plateau.
    results = [
        result_of(
            job,
            smt=at_drift(1.0),
            dmt=at_drift(after - 0.01 * index, one_step=0.1 + index % 2, nats=nats),
        )
        for index, job in enumerate(figure.grid(setup))
    ]
    assert both_sides(figure, setup, results) is holds


def test_dmt_fails_where_one_step_drift_predicts_the_plateau(tmp_path: Path):
    figure, setup = load("dmt"), setup_at("gpu", tmp_path)
    results = [
        result_of(job, smt=at_drift(1.0), dmt=at_drift(0.5 + 0.01 * index, one_step=0.1 + index))
        for index, job in enumerate(figure.grid(setup))
    ]
    assert both_sides(figure, setup, results) is False


def test_dmt_sweeps_the_weights_of_decoding_and_dynamics(tmp_path: Path):
    jobs = load("dmt").grid(setup_at("gpu", tmp_path))
    pairs = {(job.config.smt.decode_weight, job.config.smt.dynamics_weight) for job in jobs}
    assert len(pairs) == 9 and {job.config.smt.uniformity_weight for job in jobs} == {0.001}
    shared = {job.key for job in load("lambdas").grid(setup_at("gpu", tmp_path))}
    assert sum(job.key in shared for job in jobs) == 9  # decode weight 1, trained once for both


@pytest.mark.parametrize(
    "runs, message",
    [
        (3, "; rank correlation of one-step drift and plateau 1.00."),
        (2, "; too few runs, 2, for a rank correlation of one-step drift and plateau."),
    ],
)
def test_dmt_correlates_only_enough_points(runs: int, message: str, tmp_path: Path):
    figure, setup = load("dmt"), setup_at("gpu", tmp_path)
    results = []
    for index, job in enumerate(figure.grid(setup)[:runs]):
        at = at_drift(1.0 + index, one_step=0.1 + index)
        results.append(result_of(job, smt=at, dmt=at))
    assert figure.judge(setup, results).sentence.endswith(message)


def test_the_plateau_is_the_mean_of_the_last_quarter():
    assert plateau([9, 9, 9, 9, 9, 9, 2, 4]) == 3
    assert plateau([5.0]) == 5


def with_curve(result: Result, *points: tuple[float, float], stage: str = "dmt") -> Result:
    """The result with evaluations at (sequential operations, loss)."""
    curve = [
        {"stage": stage, "sequential_ops": ops, "tokens": ops, "rnn_nats": nats}
        for ops, nats in points
    ]
    return replace(result, curve=curve)


@pytest.mark.parametrize(
    "operations, gru, holds", [(50, 2.0, True), (200, 2.0, False), (50, 0.5, False)]
)
def test_sequential_compute(operations: int, gru: float, holds: bool, tmp_path: Path):
    """BPTT reaches its final loss, 1.0, after 100 operations."""
    figure, setup = load("sequential-compute"), setup_at("gpu", tmp_path)

    def result(job: Job) -> Result:
        if job.tags["way"] == "BPTT":
            return with_curve(result_of(job, rnn_nats=1.0, uniformity=-2), (50, 2.0), (100, 1.0))
        final = gru if job.tags["cell"] == "GRU" else 0.9
        return with_curve(
            result_of(job, rnn_nats=final, uniformity=-2), (10, 3.0), (operations, final)
        )

    tries = [result(job) for job in figure.grid(setup)]
    results = tries + [result(job) for job in figure.follow_up(setup, tries)]
    assert both_sides(figure, setup, results) is holds
    numbers = figure.judge(setup, results).numbers
    assert numbers["mnist_MLP"]["operations_bptt_over_ours"] == 100 / operations
    if gru > 1:
        assert numbers["mnist_GRU"]["operations_bptt_over_ours"] == 0  # never reached


def test_sequential_compute_sweeps_steps_batch_and_length(tmp_path: Path):
    figure, setup = load("sequential-compute"), setup_at("gpu", tmp_path)
    tries = [result_of(job, rnn_nats=float(job.tags["rate"])) for job in figure.grid(setup)]
    swept = {
        (job.tags["way"], job.tags["sweep"]): job.config
        for job in figure.follow_up(setup, tries)
        if (job.tags["data"], job.tags["cell"]) == ("mnist", "Transformer")
    }
    ours, theirs = swept["SMT → DMT", "full"], swept["BPTT", "full"]
    assert ours.smt.learning_rate == theirs.bptt.learning_rate == 3e-4  # the best of the tries
    assert swept["SMT → DMT", "steps / 4"].smt.steps == ours.smt.steps / 4
    assert swept["SMT → DMT", "batch / 4"].smt.batch_size == ours.smt.batch_size / 4
    shorter = swept["SMT → DMT", "length / 4"]
    assert shorter.teacher.context_length == ours.teacher.context_length / 4
    assert shorter.dmt.rollout_length == ours.dmt.rollout_length / 4
    assert swept["BPTT", "length / 4"].bptt.sequence_length == theirs.bptt.sequence_length / 4
    assert ours.dmt.steps >= 2 * ours.log.evaluate_every  # a point within DMT's curve


def test_the_least_cost_over_all_runs_counts(tmp_path: Path):
    job = load("joint").grid(setup_at("smoke", tmp_path))[0]
    runs = [with_curve(result_of(job), (10, 3.0), (40, 1.0)), with_curve(result_of(job), (30, 1.5))]
    assert cost_to_reach(runs, 1.5, "sequential_ops") == 30
    assert cost_to_reach(runs, 0.9, "sequential_ops") == float("inf")


def test_the_lower_envelope_keeps_what_nothing_cheaper_beats():
    points = [(30, 1.5), (10, 3.0), (20, 3.5), (40, 1.0), (50, 1.2)]
    assert lower_envelope(points) == [(10, 3.0), (30, 1.5), (40, 1.0)]


@pytest.mark.parametrize("pretrained, after, holds", [(0.8, 0.9, True), (0.8, 0.7, False)])
def test_post_training(pretrained: float, after: float, holds: bool, tmp_path: Path):
    figure, setup = load("post-training"), setup_at("gpu", tmp_path)

    def result(job: Job) -> Result:
        ours = job.tags["pretraining"] == "SMT → DMT"
        found = result_of(job, rnn_accuracy=after if ours else 0.6)
        stages = [name for name, stage in job.config.stages().items() if stage.steps]
        curve = [{"stage": name, "rnn_accuracy": pretrained} for name in stages]
        return replace(found, curve=curve)

    tries = [result(job) for job in figure.grid(setup)]
    results = tries + [result(job) for job in figure.follow_up(setup, tries)]
    assert both_sides(figure, setup, results) is holds
    assert figure.judge(setup, results).numbers["s5"]["SMT → DMT"] == pytest.approx(
        [pretrained, after]
    )
    whole = {
        job.tags["short_bptt"]: job
        for job in figure.grid(setup)
        if job.tags["pretraining"] == "BPTT"
    }
    short = whole[True].config.bptt.steps - whole[False].config.bptt.steps
    ours = [job for job in figure.grid(setup) if job.tags["pretraining"] == "SMT → DMT"]
    assert ours[-1].config.bptt.steps == short > 0


def test_the_table_beside_the_fifteen_is_not_part_of_all():
    assert len(FIGURES) == 15 and not {*MORE} & {*FIGURES}
    assert load("post-training").title == MORE["post-training"]


@pytest.mark.parametrize(
    "uniformity, rank, holds",
    [(-1.0, 3.0, True), (-2.9, 3.0, False), (-1.0, 90.0, False)],
    ids=["both", "rank alone", "uniformity alone"],
)
def test_lambdas_needs_a_collapse_by_both_measures_in_late_training(
    uniformity: float, rank: float, holds: bool, tmp_path: Path
):
    figure, setup = load("lambdas"), setup_at("gpu", tmp_path)
    results = []
    for job in figure.grid(setup):
        near = job.tags["dynamics"] == 0.1 and float(job.tags["uniformity_weight"]) <= 0.001
        free = job.tags["uniformity_weight"] != 0
        late = (-3.0, 50.0) if free else (uniformity, rank)
        result = result_of(job, rnn_nats=1.0 if near else 2.0, memory_uniformity=late[0])
        # The first evaluation, and those of DMT, do not count.
        for stage, values in (("smt", (0.0, 1.0)), ("smt", late), ("dmt", (0.0, 1.0))):
            point = {"stage": stage, "steps": 10 * len(result.curve)}
            point |= {"memory_uniformity": values[0], "memory_effective_rank": values[1]}
            result.curve.append(point)
        results.append(result)
    assert both_sides(figure, setup, results) is holds
    figure.plot(setup, results)


def test_lambdas_of_runs_without_a_curve_count_their_end(tmp_path: Path):
    figure, setup = load("lambdas"), setup_at("gpu", tmp_path)
    results = [
        result_of(
            job,
            rnn_nats=1.0 + abs(float(job.tags["dynamics"]) - 0.1),
            memory_uniformity=-3.0 if job.tags["uniformity_weight"] else -1.0,
            memory_effective_rank=50.0 if job.tags["uniformity_weight"] else 3.0,
        )
        for job in figure.grid(setup)
    ]
    assert both_sides(figure, setup, results) is True
    figure.plot(setup, results)


@pytest.mark.parametrize(
    "bptt, smt, holds",
    [(20, 0, True), (20, 0.4, True), (-3, 0, True), (1, 0, False), (20, 1, False), (20, 20, False)],
)
def test_gradients(bptt: float, smt: float, holds: bool, tmp_path: Path):
    figure, setup = load("gradients"), setup_at("gpu", tmp_path)

    def norms(decades: float) -> list[float]:
        return (10.0 ** np.linspace(-decades, 0, 128)).tolist()

    results = [result_of(job, bptt=norms(bptt), smt=norms(smt)) for job in figure.grid(setup)]
    assert both_sides(figure, setup, results) is holds


def test_gradients_that_scatter_over_initialisations_are_not_called_flat(tmp_path: Path):
    figure, setup = load("gradients"), setup_at("gpu", tmp_path)
    results = []
    for job in figure.grid(setup):
        decades = 4.0 * (int(job.tags["seed"]) - 2)  # a mean of 0, a standard error of 2.8
        smt = (10.0 ** np.linspace(-decades, 0, 128)).tolist()
        results.append(result_of(job, bptt=(10.0 ** np.linspace(-20, 0, 128)).tolist(), smt=smt))
    assert both_sides(figure, setup, results) is False


def test_the_fitted_trend_is_in_decades_over_the_sequence_with_its_error():
    exact = 10.0 ** np.linspace(-3, 4, 50)
    assert fitted_trend(exact.tolist()) == pytest.approx((7, 0), abs=1e-9)
    noise = np.random.default_rng(0).normal(0, 0.5, (400, 64))
    norms = (10.0 ** (noise + np.linspace(0, 2, 64))).tolist()
    fits = np.array([fitted_trend(row) for row in norms])
    assert fits[:, 0].mean() == pytest.approx(2, abs=0.05)
    assert fits[:, 0].std() == pytest.approx(fits[:, 1].mean(), rel=0.1)  # the error is the spread
    assert np.isnan(fitted_trend([1.0, np.inf, 1.0])).all()
    assert fitted_trend([0.0] * 5) == (0, 0)


def quality(distance: float, **more: float) -> dict[str, Any]:
    found = {"distance": distance, "floor_distance": 2.0, "ceiling_distance": 22.0}
    found |= {"readable": 0.5, "floor_readable": 0.9, "ceiling_readable": 0.3}
    return found | {"classifier_accuracy": 0.98, "rnn_nats": 0.7} | more


@pytest.mark.parametrize(
    "plain, gated, ours, holds",
    [
        (20, 15, 8, True),
        (20, 7, 8, False),  # a GRU by BPTT is nearer
        (13, 15, 8, False),  # less than half of the gap from BPTT's
        (40, 30, 15, False),  # less than half of the gap from neighbours alone
        (1, 15, 0.5, False),  # BPTT's are as good as real: there is no gap to close
    ],
)
def test_mnist_samples(plain: float, gated: float, ours: float, holds: bool, tmp_path: Path):
    figure, setup = load("mnist-samples"), setup_at("gpu", tmp_path)
    far: dict[str, float] = dict(zip(METHODS, (plain, gated, ours), strict=True))
    jobs = figure.grid(setup)
    results = [result_of(job, **quality(far[str(job.tags["method"])])) for job in jobs]
    assert both_sides(figure, setup, results) is holds


@pytest.mark.parametrize("distance, stroke, holds", [(8, 60, True), (14, 60, False), (8, 3, False)])
def test_sketchy_samples(distance: float, stroke: float, holds: bool, tmp_path: Path):
    figure, setup = load("sketchy-samples"), setup_at("gpu", tmp_path)
    strokes = {"stroke": stroke, "stroke_data": 150, "stroke_scattered": 1.5}
    measured = quality(distance, **strokes, ink=0.05, ink_data=0.05)
    results = [result_of(job, **measured) for job in figure.grid(setup)]
    assert both_sides(figure, setup, results) is holds


def test_a_diverged_run_is_mentioned(tmp_path: Path):
    figure, setup = load("length"), setup_at("gpu", tmp_path)
    measured = {"lengths": [16, 32], "rnn": [0.9, 0.9], "teacher": [0.9, 0.5]}
    results = [result_of(job, **measured) for job in figure.grid(setup)]
    results[0] = replace(results[0], diverged="loss is nan")
    assert "1 of 9 runs diverged" in figure.verdict(setup, results).sentence


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


def test_growth_order_finds_the_highest_power():
    x = [32, 64, 128, 256]
    assert growth_order(x, [7, 7, 7, 7]) == 0
    assert growth_order(x, [1000 + 9 * t for t in x]) == 1
    assert growth_order(x, [384 * t + t**2 for t in x]) == 2  # a Transformer narrower than T
    assert growth_order(x, [1000 + 0.1 * t for t in x]) == 0  # grows, but by less than a tenth


def resources_at(orders: dict[str, tuple], setup: Setup) -> list[Result]:
    """Results that grow by the given powers of T."""
    results = []
    for job in load("resources").grid(setup):
        T = int(job.tags["T"])
        rows = {
            row: dict(zip(JUDGED, [float(T) ** power for power in powers], strict=True))
            | {"step_seconds": 1.0}
            for row, powers in orders.items()
        }
        results.append(result_of(job, context={"tokens": T}, **rows))
    return results


def test_resources_hold_if_the_orders_are_the_papers(tmp_path: Path):
    figure, setup = load("resources"), setup_at("gpu", tmp_path)
    paper = {row: orders for row, (orders, _) in PAPER.items()}
    assert both_sides(figure, setup, resources_at(paper, setup)) is True
    grown = paper | {"SMT": (0, 0, 1, 0, 0, 0)}
    verdict = figure.judge(setup, resources_at(grown, setup))
    assert verdict.holds is False
    assert verdict.numbers["differing"] == ["SMT: operations T instead of 1"]
    linear = paper | {"LA (recurrent)": (1, 1, 0, 0, 0, 0)}  # shown, not judged
    verdict = figure.judge(setup, resources_at(linear, setup))
    assert verdict.holds is True and len(verdict.numbers["differing"]) == 1


@pytest.mark.parametrize("name", MIXERS)
def test_a_layer_step_by_step_equals_the_whole_sequence(name: str):
    torch.manual_seed(0)
    layer, x = MixingLayer(16, 2, MIXERS[name]), torch.randn(3, 32, 16)
    state, steps = layer.empty_state(3, 1), []
    with torch.no_grad():
        for token in x.split(1, dim=1):
            steps.append(layer.step(token, state))
            if len(state) == 2:  # room in the cache for one more token
                state = [torch.cat([cache, cache[:, :, -1:]], 2) for cache in state]
        assert torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)


def test_both_forms_of_linear_attention_have_the_same_gradients():
    torch.manual_seed(0)
    one = MixingLayer(16, 2, MIXERS["LA (parallel)"])
    other = MixingLayer(16, 2, MIXERS["LA (recurrent)"])
    other.load_state_dict(one.state_dict())
    x = torch.randn(3, 48, 16)
    for layer in (one, other):
        layer(x).square().mean().backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=1e-5)


def test_true_states_distinguish_different_futures():
    assert true_states("retrieval", [[2, 0, 3, 1, 0]]) == [["before", "next", "3", "3", "3"]]
    assert true_states("copy", [[1, 2, 0, 0]]) == [["1?", "12", "1", ""]]
    (states,) = true_states("stack", [[1, 0, 2]])
    assert states == ["1", "empty, pop 1", "2"]


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


def test_edges_are_short_where_states_follow_one_another_nearby():
    line = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    names = np.array(["a", "b", "c"] * 2)
    assert edge_length(line, names, 3) == pytest.approx(1 / (4 / 3))
    jumps = np.array(["a", "c", "b"] * 2)  # a to c is 2 away, c to b 1
    assert edge_length(line[[0, 2, 1, 0, 2, 1]], jumps, 3) == pytest.approx(1.5 / (4 / 3))


def test_principal_components_of_a_plane():
    random = np.random.default_rng(0)
    plane = np.linalg.qr(random.standard_normal((20, 2)))[0].T
    points = (random.standard_normal((300, 2)) * (5, 1)) @ plane + 7
    placed, share = principal(points.astype(np.float32), 2)
    assert share == pytest.approx(1, abs=1e-5)
    apart = np.linalg.norm(points[:20, None] - points[None, :20], axis=-1)
    again = np.linalg.norm(placed[:20, None] - placed[None, :20], axis=-1)
    assert np.allclose(apart, again, atol=1e-4)
    assert placed[:, 0].std() > 3 * placed[:, 1].std()
    assert principal(points.astype(np.float32), 1)[1] == pytest.approx(25 / 26, abs=0.02)
    assert np.array_equal(principal(points.astype(np.float32), 2)[0], placed)  # repeatable


def test_colours_cover_the_range_of_each_dimension():
    points = np.stack([np.linspace(0, 1, 200), np.linspace(5, -5, 200), np.zeros(200)], axis=1)
    shades = colours(points)
    assert shades[0].tolist() == [0, 255, 0] and shades[-1].tolist() == [255, 0, 0]
    assert abs(int(shades[100, 0]) - 128) < 3


def test_long_paths_are_coloured_by_every_second_memory():
    random = np.random.default_rng(0)
    paths = random.standard_normal((1, 90, 6)).cumsum(axis=1).astype(np.float32)
    found = project(paths)
    assert np.array(found["tsne_rgb"]).shape == (1, 90, 3)
    assert np.array(found["tsne_path"]).shape == (1, 90, 2)
    long = np.repeat(paths, POINTS // 90 + 5, axis=1)[:, : POINTS + 7]
    # t-SNE of so many takes long; PCA goes the same way.
    with pytest.MonkeyPatch.context() as patch:
        module = "memtrain.paper.figures.memory_evolution.tsne"
        patch.setattr(module, lambda points, size: principal(points, size)[0])
        found = project(long)
    rgb = np.array(found["pca_rgb"])[0]
    assert rgb.shape == (POINTS + 7, 3) and len(found["pca_path"][0]) == (POINTS + 8) // 2
    assert np.array_equal(rgb[0:-1:2], rgb[1::2])
