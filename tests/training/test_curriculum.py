"""A curriculum over the sequence length: its batches, counts, resumed runs, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import TINY
from memtrain.config import (
    Arithmetic,
    BPTTConfig,
    Copy,
    DataConfig,
    Digits,
    EngineConfig,
    Parity,
    PretrainConfig,
    Recall,
    Retrieval,
    RunConfig,
    Series,
    Stream,
)
from memtrain.data.prepare.token_files import prepare_tokens
from memtrain.data.synthetic import RetrievalTask
from memtrain.data.task import Task, build_task
from memtrain.errors import MemtrainError
from memtrain.runs.processes import Interrupted
from memtrain.runs.progress import StageProgress
from memtrain.shapes import Batch
from memtrain.training.console import Reporter
from memtrain.training.run import Run
from memtrain.training.step import Trainer
from run_testing import CountingReporter, StopAt, assert_same_weights, comparable, weights

SHORT = {
    "pretrain": ((3, 2), (5, 1)),
    "smt": ((3, 4), (4, 3)),
    "dmt": ((4, 3),),
    "bptt": ((3, 1), (5, 1)),
}
"""Of TINY's sequences of 6."""


def staged(config: RunConfig, curricula: dict[str, Any]) -> RunConfig:
    """A config whose stages have these curricula; pretraining takes 5 steps."""
    config = replace(config, pretrain=PretrainConfig(steps=5, batch_size=4))
    stages = {
        name: replace(config.stages()[name], curriculum=pairs) for name, pairs in curricula.items()
    }
    return replace(config, log=replace(config.log, every=1), **stages)


CURRICULUM = staged(TINY, SHORT)


def only(stage: str, curriculum: tuple = (), **changes: Any) -> RunConfig:
    """TINY with one of its stages."""
    stages = {name: replace(one, steps=0) for name, one in TINY.stages().items()}
    stages[stage] = replace(TINY.stages()[stage], curriculum=curriculum, **changes)
    return replace(TINY, **stages)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All stages with a curriculum, never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return Run.create(CURRICULUM, folder).train(Reporter())


def by_hand(run: Run, name: str) -> list[float]:
    """The losses of a stage as a chain: a task and a trainer per length, which hand on weights,
    optimizer and random numbers."""
    stage, losses = run.config.stages()[name], []
    seed, state, step = run.config.seed * 8 + run.stages.index(name), None, 0
    rest = stage.steps - sum(steps for _, steps in stage.curriculum)
    for length, steps in (*stage.curriculum, (6, rest)):
        task = build_task(replace(run.config.data, sequence_length=length))
        objective = run.objective(name)
        trainer = Trainer(objective, replace(stage, curriculum=()), task, run.engine, seed)
        if state is not None:
            trainer.load_tensors(state)
            trainer.step = step
        with trainer.frozen_rest():
            losses += [float(trainer.train_step()["loss"]) for _ in range(steps)]
        state, step = trainer.tensors(), trainer.step
    run.objective(name).sync_readout()
    return losses


def test_losses_and_weights_equal_those_of_a_chain_by_hand(whole: Run):
    chain = Run(CURRICULUM)
    for name in ("pretrain", "smt", "dmt", "bptt"):
        found = [line["loss"] for line in whole.metrics.read() if line["stage"] == name]
        assert by_hand(chain, name) == found
    assert_same_weights(whole, chain)


def test_lengths_and_tokens_are_those_of_each_step(whole: Run):
    lines, seen = whole.metrics.read(), {}
    for name in SHORT:
        seen[name] = [line["length"] for line in lines if line["stage"] == name]
    assert seen["smt"] == 4 * [3] + 3 * [4] + 5 * [6]
    assert seen["dmt"] == 3 * [4] + 5 * [6] and seen["bptt"] == [3, 5, 6, 6]
    for stage in whole.progress.stages:
        assert stage.tokens == 4 * sum(seen[stage.name])  # sequences per step
        assert stage.lengths_over == len(SHORT[stage.name])


def test_evaluations_are_of_whole_sequences(whole: Run):
    lengths = {one["evaluation"]["length"] for one in whole.metrics.read() if "evaluation" in one}
    assert lengths == {6}


@pytest.mark.parametrize("name", ["smt", "dmt", "bptt"])
def test_sequential_operations_are_counted_at_each_length(whole: Run, name: str, tmp_path: Path):
    def operations(length: int) -> int:
        data = replace(TINY.data, sequence_length=length)
        config = replace(TINY, data=data, smt=replace(TINY.smt, steps=1))
        config = replace(config, **{name: replace(config.stages()[name], steps=1)})
        run = Run.create(config, tmp_path / f"{length}").train(Reporter())
        return next(one for one in run.progress.stages if one.name == name).sequential_ops_a_step

    done = next(one for one in whole.progress.stages if one.name == name)
    counted = [line["length"] for line in whole.metrics.read() if line["stage"] == name]
    costs = {length: operations(length) for length in set(counted)}
    assert done.sequential_ops == sum(costs[length] for length in counted)
    assert done.sequential_ops_a_step == costs[6]
    assert (len(set(costs.values())) == 1) == (name == "smt")  # which is not unrolled


STOPS = [
    ("pretrain", 2),
    *(("smt", step) for step in (2, 4, 5, 7, 8)),
    *(("dmt", step) for step in (2, 3, 4)),
    *(("bptt", step) for step in (1, 2, 3)),
]


@pytest.mark.parametrize(("stage", "step"), STOPS)
def test_a_resumed_run_equals_one_that_was_not_stopped(
    whole: Run, tmp_path: Path, stage: str, step: int
):
    run = Run.create(CURRICULUM, tmp_path / "run")
    with pytest.raises(Interrupted):
        run.train(StopAt(stage, step))
    run = Run.open(tmp_path / "run").train(Reporter())
    assert_same_weights(whole, run)
    assert comparable(run) == comparable(whole)
    assert [vars(one) | {"seconds": 0} for one in run.progress.stages] == [
        vars(one) | {"seconds": 0} for one in whole.progress.stages
    ]


@pytest.mark.parametrize("rollout", ["carried", "picard"])
def test_other_rollouts_of_dmt_go_through_a_curriculum(tmp_path: Path, rollout: Any):
    """Carried memories, of sequences of one length, are dropped where it changes."""
    dmt = replace(TINY.dmt, steps=10, rollout=rollout, curriculum=((3, 3), (4, 4)))
    config = replace(TINY, smt=replace(TINY.smt, steps=1), dmt=dmt, bptt=BPTTConfig())
    config = replace(config, log=replace(TINY.log, every=1))
    whole = Run.create(config, tmp_path / "whole").train(Reporter())
    assert [line["length"] for line in whole.metrics.read()[-10:]] == 3 * [3] + 4 * [4] + 3 * [6]
    for step in (2, 3, 4):
        with pytest.raises(Interrupted):
            Run.create(config, tmp_path / f"{step}").train(StopAt("dmt", step))
        run = Run.open(tmp_path / f"{step}").train(Reporter())
        assert_same_weights(whole, run)
        assert comparable(run) == comparable(whole)


def test_the_run_says_when_the_length_changes(tmp_path: Path):
    config, reporter = only("bptt", ((3, 1), (5, 2))), CountingReporter()
    Run.create(config, tmp_path / "run").train(reporter)
    said = [message for message in reporter.messages if "tokens" in message]
    assert said == [
        "bptt: sequences of 3 tokens from step 1",
        "bptt: sequences of 5 tokens from step 2",
        "bptt: sequences of 6 tokens from step 4",
    ]


def test_a_run_without_a_curriculum_records_none(tmp_path: Path):
    reporter = CountingReporter()
    run = Run.create(only("bptt"), tmp_path / "run").train(reporter)
    assert not any("length" in line for line in run.metrics.read())
    assert not any("sequences of" in message for message in reporter.messages)
    assert "lengths_over" not in run.progress.stages[0].to_json()


def test_a_lengthened_run_equals_a_long_one(tmp_path: Path):
    short = only("bptt", ((3, 1), (5, 2)), warmup=0.0)
    Run.create(short, tmp_path / "run").train(Reporter())
    longer = Run.open(tmp_path / "run", changes={"bptt.steps": 7}).train(Reporter())
    config = replace(short, bptt=replace(short.bptt, steps=7))
    assert_same_weights(longer, Run.create(config, tmp_path / "long").train(Reporter()))


def test_the_curriculum_of_a_stage_that_has_begun_is_kept(tmp_path: Path):
    Run.create(only("bptt", ((3, 1),)), tmp_path / "run").train(Reporter())
    with pytest.raises(MemtrainError, match="bptt.curriculum=.*without it, and a run keeps"):
        Run.open(tmp_path / "run", changes={"bptt.steps": 9, "bptt.curriculum": ((5, 2),)})


def test_a_time_limit_shortens_it_and_a_raised_limit_does_not_go_back(tmp_path: Path):
    config = only("bptt", ((3, 10), (5, 10)), steps=100, seconds=10.0)
    trainer = Trainer(
        Run(config).objective("bptt"), config.bptt, build_task(config.data), Run(config).engine, 0
    )
    trainer.clock.start_up = 0.0
    trainer.clock.seconds = 1.1
    trainer.clock.update(step=5)
    trainer.step = 5
    assert trainer.update_length() and trainer.length == 5  # 11 % of the time, 5 % of the steps
    raised = Trainer(
        Run(config).objective("bptt"),
        replace(config.bptt, seconds=1000.0),
        build_task(config.data),
        Run(config).engine,
        0,
    )
    progress = StageProgress("bptt", 1, seconds=1.1, start_up_seconds=0.0, lengths_over=1)
    raised.restore(5, progress)
    assert not raised.update_length() and raised.length == 5


def test_patience_counts_on_whole_sequences_only(tmp_path: Path):
    config = only("bptt", ((3, 8),), steps=40, patience=1, learning_rate=1e-12)
    config = replace(config, log=replace(config.log, evaluate_every=2))
    run = Run.create(config, tmp_path / "run").train(Reporter())
    assert 10 < run.progress.stages[0].steps < 40
    plain = replace(config, bptt=replace(config.bptt, curriculum=()))
    assert Run.create(plain, tmp_path / "plain").train(Reporter()).progress.stages[0].steps < 10


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["smt", "dmt", "bptt"])
def test_every_length_has_its_own_graph_on_a_gpu(stage: str):
    """Losses of captured steps equal those of eager ones through three lengths."""
    changes: dict = {"steps": 20, "learning_rate": 1e-3, "curriculum": ((3, 6), (4, 7))}
    stages: dict = {stage: replace(TINY.stages()[stage], **changes)}
    config, losses = replace(TINY, **stages), []
    for fast in (True, False):
        run = Run(replace(config, engine=EngineConfig(device="cuda", precision="fp32", fast=fast)))
        trainer = Trainer(run.objective(stage), run.config.stages()[stage], run.task, run.engine, 1)
        assert trainer.captured == fast
        found, lengths = [], []
        with trainer.frozen_rest():
            for _ in range(20):
                trainer.update_length()
                found.append(float(trainer.train_step()["loss"]))
                lengths.append(trainer.length)
        assert lengths == 6 * [3] + 7 * [4] + 7 * [6]
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


# -------------------------------------------------------------------------------------- streams


@pytest.fixture
def stream(tmp_path: Path) -> Callable[..., RunConfig]:
    """DMT and BPTT on a stream, with rollouts of 7 and sequences of 9 at the end."""
    tokens = np.random.default_rng(0).integers(0, 50, (100, 40)).astype(np.uint8)
    np.save(tmp_path / "tokens.npy", tokens)
    folder = prepare_tokens(tmp_path / "tokens.npy", tmp_path / "store").folder

    def config(resident: Any = "auto", **curricula: Any) -> RunConfig:
        data = Stream(path=str(folder), evaluate_length=24, resident=resident)
        config = replace(
            TINY,
            data=data,
            smt=replace(TINY.smt, steps=2, timesteps=1, future_length=5),
            dmt=replace(TINY.dmt, steps=6, rollout_length=7),
            bptt=replace(TINY.bptt, steps=6, sequence_length=9),
        )
        return replace(staged(config, curricula), pretrain=PretrainConfig())

    return config


@pytest.mark.parametrize("resident", ["auto", "disk"])
def test_rollouts_of_a_stream_grow_and_resume(stream: Callable, resident: str, tmp_path: Path):
    config = stream(resident, dmt=((3, 2),), bptt=((4, 2), (5, 1)))
    whole = Run.create(config, tmp_path / "whole").train(Reporter())
    lines = whole.metrics.read()
    lengths = {
        name: [line["length"] for line in lines if line["stage"] == name]
        for name in ("dmt", "bptt")
    }
    assert lengths == {"dmt": [3, 3, 7, 7, 7, 7], "bptt": [4, 4, 5, 9, 9, 9]}
    tokens = {stage.name: stage.tokens for stage in whole.progress.stages}
    assert tokens["dmt"] == 4 * sum(lengths["dmt"]) and tokens["bptt"] == 4 * sum(lengths["bptt"])
    for stage, step in (("dmt", 2), ("bptt", 1)):
        folder = tmp_path / f"{stage}{step}"
        with pytest.raises(Interrupted):
            Run.create(config, folder).train(StopAt(stage, step))
        run = Run.open(folder).train(Reporter())
        assert_same_weights(whole, run)
        assert comparable(run) == comparable(whole)


def test_disk_and_memory_give_the_same_curriculum(stream: Callable, tmp_path: Path):
    curricula = dict(dmt=((3, 2),), bptt=((4, 2), (5, 1)))
    runs = [
        Run.create(stream(resident, **curricula), tmp_path / resident).train(Reporter())
        for resident in ("auto", "disk")
    ]
    assert_same_weights(*runs)


def test_windows_of_a_stream_in_smt_do_not_grow(stream: Callable, tmp_path: Path):
    with pytest.raises(MemtrainError, match="smt.curriculum=3: smt draws windows of context"):
        Run.create(stream(smt=((3, 1),)), tmp_path / "run")
    with pytest.raises(MemtrainError, match="dmt.curriculum=7: must be below 7, the length that"):
        Run.create(stream(dmt=((7, 1),)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_segments_fit_the_windows_of_a_stream(stream: Callable, tmp_path: Path):
    config = stream()  # windows of a context of 6 and a future of 5
    config = replace(config, smt=replace(config.smt, timesteps=0, dynamics_steps=12))
    with pytest.raises(MemtrainError, match="sequences of 11 tokens .* needs at least 12; lower"):
        Run.create(config, tmp_path / "run")


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("data", "length", "words"),
    [
        (Retrieval(sequence_length=6), 2, "sequence_length=2: must be at least 3"),
        (Retrieval(sequence_length=6), 6, "must be below 6, the length that bptt ends with"),
        (Copy(), 5, "sequence_length=5: must be even"),
        (Arithmetic(), 5, "sequences of 5 tokens: must be even, pairs of x and y"),
        (
            Recall(key_length=2),
            7,
            "every pair of a key and a value takes 3, the query 2; possible are 5, 8, 11",
        ),
        (Recall(), 1, "every pair of a key and a value takes 2, the query 1; possible are 3, 5, 7"),
        (Digits(), 8, "all sequences of DigitsTask have 64 tokens; leave the curriculum out"),
    ],
)
def test_impossible_lengths_are_refused_before_training(
    tmp_path: Path, data: DataConfig, length: int, words: str
):
    config = replace(only("bptt", ((length, 1),)), data=data)
    with pytest.raises(MemtrainError, match=f"bptt.curriculum={length}: .*{words}"):
        Run.create(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("data", "lengths"),
    [
        (Copy(), [2, 14]),
        (Arithmetic(), [2, 14]),
        (Recall(key_length=2, pairs=4), [5, 8, 11]),
        (Parity(), [1, 15]),
    ],
)
def test_shorter_tasks_are_those_of_a_shorter_config(data: DataConfig, lengths: list[int]):
    whole = build_task(data)
    for length in lengths:
        task = whole.of_length(length)
        assert type(task) is type(whole) and task.space == whole.space
        batch = task.sample(3, torch.Generator().manual_seed(0))
        assert batch.inputs.shape == (3, length) and task.sequence_length == length
        again = task.of_length(whole.sequence_length).sample(3, torch.Generator().manual_seed(0))
        expected = whole.sample(3, torch.Generator().manual_seed(0))
        assert torch.equal(again.inputs, expected.inputs)


def test_a_needle_stays_in_the_first_part_of_shorter_sequences():
    whole = build_task(Retrieval(sequence_length=64, needle_within=0.25))
    assert isinstance(whole, RetrievalTask)
    short = whole.of_length(16)
    assert isinstance(short, RetrievalTask) and short.needle_positions == 4


def test_windows_of_a_series_grow(tmp_path: Path):
    rows = [f"{(7 * row) % 24},{row % 3}" for row in range(300)]
    (tmp_path / "x.csv").write_text("\n".join(["y,z", *rows]))
    data = Series(path=str(tmp_path / "x.csv"), targets="y", window=8)
    config = replace(only("bptt", ((3, 2),)), data=data)
    run = Run.create(config, tmp_path / "run").train(Reporter())
    assert run.progress.stages[0].tokens == 4 * (2 * 3 + 2 * 8)
    with pytest.raises(MemtrainError, match="bptt.curriculum=1: window=1: must be at least 2"):
        Run.create(replace(config, bptt=replace(config.bptt, curriculum=((1, 2),))), tmp_path / "a")


class Ones(Task):
    """A user's task."""

    vocab_size = 4

    def __init__(self, length: int = 6, off: int = 0) -> None:
        self.sequence_length, self.off = length, off

    def of_length(self, length: int) -> Task:
        return Ones(length + self.off)

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(4, (count, self.sequence_length), generator=generator)
        return Batch(tokens, tokens)


def test_a_users_task_takes_part_with_of_length(tmp_path: Path):
    config = only("bptt", ((3, 2),))
    run = Run.create(config, tmp_path / "run", task=Ones()).train(Reporter())
    assert run.progress.stages[0].tokens == 4 * (2 * 3 + 2 * 6)
    with pytest.raises(MemtrainError, match=r"Ones.of_length\(3\) gives sequences of 4 tokens"):
        Run.create(config, tmp_path / "other", task=Ones(off=1))


def test_steps_that_the_cell_takes_at_once_fit_the_shortest_length(tmp_path: Path):
    config = only("smt", ((3, 2),), dynamics_steps=4)
    with pytest.raises(MemtrainError, match="smt: sequences of 3 tokens are too short, smt.dyn"):
        Run.create(config, tmp_path / "run")
    with pytest.raises(MemtrainError, match="sequences of 6 tokens .* needs at least 7; lower it"):
        Run.create(only("smt", dynamics_steps=7), tmp_path / "run")
    config = only("smt", ((4, 2),), dynamics_steps=4)
    assert weights(Run.create(config, tmp_path / "run").train(Reporter()))
