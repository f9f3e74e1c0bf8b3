"""Training steps repeat on fixed tensors as a CUDA graph would repeat them, without a GPU.

tests/training/test_gpu_runs.py and the other tests marked `gpu` capture real graphs.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from accel.recorded_step import HostRead, RecordedStep
from conftest import TINY
from memtrain import shapes
from memtrain.accel.fast_paths import loops
from memtrain.accel.gated_unroll import UnrolledLSTM
from memtrain.config import BPTTConfig, DMTConfig, RunConfig, SMTConfig, StageConfig
from memtrain.training.run import Run
from memtrain.training.step import Trainer

SMT = SMTConfig(steps=12, batch_size=4, future_length=4, timesteps=0)
DMT = DMTConfig(steps=12, batch_size=4, learning_rate=1e-3, schedule="constant", future_length=4)
CARRIED = replace(DMT, rollout="carried", segment=3, label_stride=2, decode_weight=1.0)
STAGES: dict[str, StageConfig] = {
    "smt": SMT,
    "smt-some-timesteps": replace(SMT, timesteps=3, decode_timesteps=2),
    "smt-everything": replace(
        SMT,
        next_weight=1.0,
        token_weight=1.0,
        dynamics_steps=2,
        normalize_dynamics=True,
        memory_noise=0.3,
        cell_decode_weight=1.0,
    ),
    "smt-segments": replace(
        SMT,
        dynamics_steps=2,
        dynamics_labels="last",
        own_starts=0.5,
        own_sweeps=2,
        memory_noise=0.3,
        cell_decode_weight=1.0,
    ),
    "dmt": DMT,
    "dmt-segments": replace(DMT, segment=3, label_stride=2, readout_stride=2, empty_start=0.5),
    "dmt-decoder": replace(DMT, decode_weight=1.0, through_time=True),
    "dmt-teacher": replace(DMT, train_teacher=True),
    "dmt-picard": replace(DMT, rollout="picard", sweeps=2, segment=2),
    "dmt-carried": CARRIED,
    "dmt-carried-one": replace(CARRIED, segment=1, label_stride=1, readout_stride=1),
    "dmt-carried-teacher": replace(CARRIED, train_teacher=True),
    "dmt-carried-from-short": replace(CARRIED, curriculum=((4, 5),)),
    "bptt-from-short": BPTTConfig(steps=12, batch_size=4, curriculum=((3, 5),)),
    "bptt": BPTTConfig(steps=12, batch_size=4),
    "bptt-truncated": BPTTConfig(steps=12, batch_size=4, truncate=3),
    "bptt-recomputed": BPTTConfig(steps=12, batch_size=4, recompute=3),
    "bptt-pieces": BPTTConfig(steps=12, batch_size=4, truncate=3, sweeps=2),
}

BPTT = [name for name in STAGES if name.startswith("bptt")]


def config_of(stage: StageConfig, cell: str) -> RunConfig:
    stages: dict = {"smt": SMT, "dmt": DMTConfig(), "bptt": BPTTConfig()}
    stages[stage_name(stage)] = stage
    return replace(
        TINY,
        **stages,
        teacher=replace(TINY.teacher, encoder="causal", normalize_memory=cell == "transformer"),
        cell=replace(TINY.cell, kind=cell),
        engine=replace(TINY.engine, fast=False, device="cpu"),
    )


def stage_name(stage: StageConfig) -> str:
    return type(stage).__name__.removesuffix("Config").lower()


def trainer_of(stage: StageConfig, cell: str, folder: Path, recorded: bool) -> Trainer:
    run, name = Run.create(config_of(stage, cell), folder), stage_name(stage)
    if cell == "lstm":
        loops(run.rnn, unroller=UnrolledLSTM())
    trainer = Trainer(run.objective(name), stage, run.task, run.engine, seed=1)
    trainer.check_on_host = False  # as on a GPU
    if recorded:
        # A GPU rehearses a step before the first one, to compile its kernels.
        trainer.captured, first = True, trainer.rehearse
        run.engine.capture = lambda compute, generator, _: RecordedStep(  # type: ignore[method-assign]
            compute, generator, first
        )
        trainer._use_length(0)
    return trainer


def losses(trainer: Trainer, steps: int = 10) -> list[Tensor]:
    """The losses of some steps, and the weights after them."""
    found = []
    for _ in range(steps):
        trainer.update_length()
        found.append(trainer.train_step()["loss"].clone())
    return [*found, *(p.detach().clone() for p in trainer.ordered)]


@pytest.fixture(autouse=True)
def _like_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Choose everywhere what is chosen on a GPU: no reading on the host."""
    monkeypatch.setattr(shapes, "FREE_TO_READ", ())


@pytest.mark.parametrize(
    ("name", "cell"),
    [(name, "transformer") for name in STAGES]
    + [(name, "gru") for name in ("smt", "dmt-carried")]
    + [(name, "lstm") for name in ("smt-everything", "dmt-decoder", "dmt-carried", *BPTT)],
)
def test_a_repeated_step_equals_a_computed_one(name: str, cell: str, tmp_path: Path):
    expected = losses(trainer_of(STAGES[name], cell, tmp_path / "computed", recorded=False))
    found = losses(trainer_of(STAGES[name], cell, tmp_path / "recorded", recorded=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert len({float(loss) for loss in expected[:10]}) == 10


def test_a_number_read_on_the_host_is_found(tmp_path: Path):
    trainer = trainer_of(SMT, "gru", tmp_path / "run", recorded=True)
    trainer.check_on_host = True
    with pytest.raises(HostRead):
        losses(trainer)


def test_a_count_kept_in_python_is_found(tmp_path: Path):
    trainer = trainer_of(SMT, "gru", tmp_path / "run", recorded=False)
    count = 0

    def step() -> dict[str, Tensor]:
        nonlocal count
        count += 1
        return trainer.compute() | {"count": torch.zeros(()) + count}

    repeated = RecordedStep(step, trainer.generator)
    assert [float(repeated()["count"]) for _ in range(6)] == [1, 2, 3, 4, 4, 4]
