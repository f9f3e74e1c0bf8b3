"""The gpu scale is expensive to run, so its grids are checked here first."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrain.config import RunConfig, Stream
from memtrain.data.codec import TEXT_VOCAB
from memtrain.data.images import ImageFormat
from memtrain.data.prepare.store_writer import write_store
from memtrain.data.store import Split, StoreMeta
from memtrain.data.task import build_task
from memtrain.models.build import build_models
from memtrain.paper import FIGURES, MORE, load
from memtrain.paper.base import Job, Result, Setup
from memtrain.paper.sweep import rough_cost
from memtrain.training.run import Run


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    """Random data sets of the real shapes."""
    folder = tmp_path_factory.mktemp("gpu")
    random = np.random.default_rng(0)
    pictures = {
        "mnist": ImageFormat(height=28, width=28, levels=256),
        "sketchy": ImageFormat(height=64, width=64, levels=2, patch=2),
    }
    for name, picture in pictures.items():
        meta = StoreMeta(
            name=name,
            vocab_size=picture.vocab_size,
            source="random",
            document_length=picture.length,
            picture=picture,
        )
        shape = (20, picture.length)
        tokens = random.integers(picture.vocab_size, size=shape).astype(meta.dtype)
        split = Split(tokens.ravel(), labels=np.arange(len(tokens)) % 2)
        splits = {"train": split, "test": split}
        write_store(folder / name, meta, splits)
    text = random.integers(97, 123, size=20_000).astype(np.uint8)
    starts = np.arange(0, len(text), 2000)
    meta = StoreMeta(name="stories", vocab_size=TEXT_VOCAB, source="random", text=True)
    split = Split(text, starts)
    write_store(folder / "tinystories", meta, {"train": split, "test": split})
    return Setup(scale="gpu", folder=folder, data_dir=folder, device="cpu")


def all_jobs(name: str, setup: Setup) -> list[Job]:
    figure = load(name)
    jobs = figure.grid(setup)
    found = [a_result(job) for job in jobs]
    return [*jobs, *figure.follow_up(setup, found)]


def a_result(job: Job) -> Result:
    return Result(
        figure="f",
        version=1,
        job=job.name,
        key=job.key,
        tags=dict(job.tags),
        measured={"rnn_nats": 1.0, "rnn_accuracy": 0.5},
        cost={"steps": 1, "tokens": 1, "sequential_ops": 1, "seconds": 1.0},
        curve=[],
    )


def short(config: RunConfig) -> RunConfig:
    """The same models, a step of each stage, few sequences, rollouts of streams cut short."""
    stages: dict[str, Any] = {
        name: replace(stage, steps=min(1, stage.steps), batch_size=2)
        for name, stage in config.stages().items()
    }
    data = config.data
    if isinstance(data, Stream):
        data = replace(data, evaluate_length=4)
        stages["dmt"] = replace(stages["dmt"], rollout_length=10)
        stages["bptt"] = replace(stages["bptt"], sequence_length=6)
    log = replace(config.log, evaluate_sequences=2)
    return replace(config, data=data, log=log, **stages)


def shape_of(config: RunConfig) -> tuple:
    """What decides whether a config works, and the rest left out."""
    lengths = [config.dmt.rollout_length, config.bptt.sequence_length, config.smt.future_length]
    stages = [name for name, stage in config.stages().items() if stage.steps]
    return str(config.data), str(config.teacher), str(config.cell), str(lengths), str(stages)


@pytest.mark.parametrize("name", [*FIGURES, *MORE])
def test_all_models_of_a_grid_are_built(name: str, setup: Setup):
    for config in {shape_of(job.config): job.config for job in all_jobs(name, setup)}.values():
        rnn, teacher = build_models(config, build_task(config.data).vocab_size, None)
        assert sum(p.numel() for p in rnn.parameters()) > 0
        assert (teacher is not None) == bool(config.smt.steps + config.dmt.steps)


def kinds(setup: Setup) -> Iterator[tuple[str, RunConfig]]:
    """The cheapest run of each figure that has another cell, task or set of stages."""
    seen = set()
    for name in [*FIGURES, *MORE]:
        jobs = sorted(all_jobs(name, setup), key=lambda job: rough_cost(job.config))
        for job in jobs:
            config = job.config
            stages = tuple(name for name, stage in config.stages().items() if stage.steps)
            way = (config.dmt.segment, config.dmt.through_time, config.smt.joint)
            kind = (config.data.kind, config.cell.kind, stages, way)
            if kind not in seen and job.train:
                seen.add(kind)
                yield name, config


@pytest.mark.slow
def test_a_run_of_every_kind_takes_a_step(setup: Setup, tmp_path: Path, monkeypatch):
    # Counted elsewhere; under the checks of shapes it takes most of the time.
    monkeypatch.setattr("memtrain.training.stages.sequential_ops", lambda step: 1)
    trained = 0
    for index, (name, config) in enumerate(kinds(setup)):
        run = Run.create(short(config), tmp_path / str(index)).train()
        assert run.finished, (name, config)
        trained += 1
    assert trained >= 20


def test_runs_are_small_enough_to_share_a_gpu(setup: Setup):
    """No run compiles, and evaluations and checkpoints are rare."""
    for name in [*FIGURES, *MORE]:
        for job in all_jobs(name, setup):
            config, steps = job.config, sum(s.steps for s in job.config.stages().values())
            assert not config.engine.compile
            assert not config.log.evaluate_every or steps / config.log.evaluate_every <= 24
            assert steps / config.log.checkpoint_every <= 6
