"""On a GPU: objectives equal those on the CPU, and runs of numbers, wrapped cells and labels."""

import copy
import math
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import memtrain
from conftest import TINY, seeded
from memtrain.accel.fast_paths import RNNLoops
from memtrain.bench.cases import Noise
from memtrain.config import EngineConfig, LogConfig, RunConfig, Series
from memtrain.shapes import Values
from memtrain.training.console import Reporter
from memtrain.training.label import label_run
from memtrain.training.run import Interrupted, Run
from memtrain.training.step import Trainer
from run_testing import StopAt, assert_same_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
VALUES = Values(features=3, targets=2)
SIZE: dict = {"width": 32, "heads": 2, "head_dim": 16}
MEMORY: dict = {"memory_tokens": 2, "memory_dim": 32}
CELLS: dict[str, dict] = {
    "gru": {},
    "lstm": {},
    "mlp": {"width": 32, "layers": 1},
    "transformer": SIZE | {"layers": 2},
}


def make_models(kind: str, space: dict) -> tuple[memtrain.Teacher, memtrain.RNN]:
    torch.manual_seed(0)
    layers: dict = {"encoder_layers": 2, "decoder_layers": 1, "context_length": 9}
    teacher = memtrain.Teacher(encoder="causal", **space, **MEMORY, **SIZE, **layers)
    if kind == "wrapped":
        cell = memtrain.wrap(nn.LSTMCell(32, 32), **space)
    else:
        cell = memtrain.make_cell(kind, **space, **MEMORY, **CELLS[kind])
    return teacher, memtrain.RNN(cell, teacher)


@pytest.fixture
def whole_fp32() -> Iterator[None]:
    """Products in fp32: a run of another test may have allowed TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("whole_fp32")
@pytest.mark.parametrize("numbers", [True, False], ids=["numbers", "tokens"])
@pytest.mark.parametrize("kind", [*CELLS, "wrapped"])
def test_objectives_on_a_gpu_equal_those_on_the_cpu(kind: str, numbers: bool):
    space: dict = {"values": VALUES} if numbers else {"vocab_size": 5}
    inputs = torch.randn(4, 9, 3, generator=seeded()) if numbers else torch.randint(5, (4, 9))
    if numbers:
        inputs[torch.rand(inputs.shape, generator=seeded(1)) < 0.1] = torch.nan
    models = make_models(kind, space)
    for number in range(3):
        found = []
        for device in ("cpu", "cuda"):
            teacher, rnn = copy.deepcopy(models)
            teacher, rnn = teacher.to(device), rnn.to(device)
            objective = (
                memtrain.SMT(teacher, rnn, timesteps=0, future_length=4),
                memtrain.DMT(teacher, rnn, through_time=True, decode_weight=1.0),
                memtrain.BPTT(rnn),
            )[number]
            loss = objective(inputs.to(device)).total
            loss.backward()
            gradients = [p.grad.cpu() for p in rnn.parameters() if p.grad is not None]
            found.append((loss.detach().cpu(), gradients))
        assert found[0][1]
        torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_captured_steps_of_a_gated_cell_equal_eager_ones_of_its_loop(kind: str, tmp_path: Path):
    task, found = Noise(vocab_size=4, length=16), []
    for fast in (True, False):
        config = replace(
            TINY,
            cell=replace(TINY.cell, kind=kind, memory_tokens=4),
            bptt=replace(TINY.bptt, steps=10, sequence_length=16),
            engine=EngineConfig(device="cuda", precision="fp32", fast=fast),
        )
        run = Run(config, tmp_path / str(fast), task=task)
        trainer = Trainer(run.objective("bptt"), config.bptt, run.task, run.engine, seed=1)
        assert trainer.captured == fast and isinstance(run.rnn.fast, RNNLoops) == fast
        for _ in range(10):
            metrics = trainer.train_step()
            found.append({name: float(value) for name, value in metrics.items()})
    for captured, eager in zip(found[:10], found[10:], strict=True):
        assert captured == pytest.approx(eager, rel=1e-2)  # products are rounded to TF32
    assert len({metrics["loss"] for metrics in found[:10]}) == 10


@pytest.fixture
def series(tmp_path: Path) -> RunConfig:
    lines = [f"{row},{(row * 7) % 24},{row % 3 == 0:d}" for row in range(400)]
    (tmp_path / "x.csv").write_text("\n".join(["hour,y,promo", *lines]))
    data = Series(
        path=str(tmp_path / "x.csv"), targets="y", known="promo", time="hour", window=8, season=24
    )
    log = LogConfig(every=1, evaluate_every=100, checkpoint_every=5)
    return replace(TINY, name="x", data=data, log=log, engine=EngineConfig(device="cuda"))


def test_a_series_is_learned_and_forecast_on_a_gpu(series: RunConfig, tmp_path: Path):
    longer = replace(series, smt=replace(series.smt, steps=300), dmt=replace(series.dmt, steps=100))
    run = Run.create(longer, tmp_path / "run")
    before = run.evaluate().rnn.nats
    run.train(Reporter())
    assert run.evaluate().rnn.nats < before - 0.2
    found = run.evaluate_forecasts(8, origins=8, count=20)
    assert all(math.isfinite(score.crps) for score in found.methods.values())


@pytest.mark.parametrize(("stage", "step"), [("smt", 7), ("dmt", 3), ("bptt", 2)])
def test_an_interrupted_run_of_numbers_is_bit_exact_on_a_gpu(series, tmp_path, stage, step):
    whole = Run.create(series, tmp_path / "whole").train(Reporter())
    with pytest.raises(Interrupted):
        Run.create(series, tmp_path / "stopped").train(StopAt(stage, step))
    assert_same_weights(whole, Run.open(tmp_path / "stopped").train(Reporter()))


@pytest.mark.parametrize("kind", ["lstm", "torch.nn:LSTMCell", "torch.nn:GRUCell"])
def test_recurrent_cells_solve_retrieval_on_a_gpu(kind: str, tmp_path: Path):
    config = memtrain.recipe("retrieval")
    cell = replace(config.cell, kind=kind, memory_tokens=2)
    config = replace(
        config,
        cell=cell,
        data=replace(config.data, sequence_length=12),
        teacher=replace(config.teacher, normalize_memory=False),
        smt=replace(config.smt, steps=600),
        dmt=replace(config.dmt, steps=300),
        engine=EngineConfig(device="cuda"),
    )
    run = Run.create(config, tmp_path / "run").train(Reporter())
    assert (run.evaluate().rnn.accuracy or 0) > 0.9
    rnn = memtrain.load_rnn(tmp_path / "run", allow_code=True).cpu()
    batch = run.task.held_out(64, seeded())
    right = rnn(batch.inputs)[:, -1].argmax(-1) == batch.targets[:, -1]
    assert right.float().mean() > 0.8


def test_labels_written_and_learned_on_a_gpu(tmp_path: Path):
    config = replace(TINY, engine=EngineConfig(device="cuda"))
    taught = Run.create(config, tmp_path / "taught").train(Reporter())
    labels = label_run(taught, tmp_path / "labels.safetensors", sequences=64, held_out=16)
    learned = replace(labels.config(), engine=EngineConfig(device="cuda"))
    learned = replace(
        learned, smt=replace(learned.smt, steps=50), dmt=replace(learned.dmt, steps=5)
    )
    run = Run.create(learned, tmp_path / "run").train(Reporter())
    assert math.isfinite(run.evaluate().rnn.nats)


def test_an_oracle_trains_an_rnn_on_a_gpu(tmp_path: Path):
    assert runpy.run_path(str(EXAMPLES / "from_labels.py"))["main"](tmp_path) > 0.98
