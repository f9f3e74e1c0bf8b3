"""One table decides what is fast, says why a row is off, and can be left out."""

import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from conftest import TINY
from memtrain.accel import fast_paths, hopper
from memtrain.accel.engine import Engine
from memtrain.accel.fast_paths import (
    FAST_PATHS,
    MODELS,
    ROLLOUTS,
    STEP,
    RNNLoops,
    explain,
    kernel_sampler,
    summary,
)
from memtrain.bench.cases import models
from memtrain.config import CellConfig, EngineConfig, RunConfig
from memtrain.models.build import build_models
from memtrain.models.cells import TransformerCell
from memtrain.models.layers import Block, Lookup, Replaceable, Stack
from memtrain.models.rnn import RNN
from memtrain.models.teacher import Teacher
from memtrain.recipes import recipe
from memtrain.training.console import Reporter
from memtrain.training.run import Run
from memtrain.training.stages import Training
from memtrain.training.step import Trainer


def built(config: RunConfig) -> nn.ModuleDict:
    rnn, teacher = build_models(config, 256)
    return nn.ModuleDict({"rnn": rnn} | ({"teacher": teacher} if teacher else {}))


def on_gpu(monkeypatch, *, triton: str | None = "3.6.0", capability=(9, 0), **options) -> Engine:
    """An engine that takes this machine for one with a GPU."""
    module = ModuleType("triton")
    module.__dict__["__version__"] = triton
    spec = ModuleSpec("triton", None) if triton else None
    monkeypatch.setitem(sys.modules, "triton", module)
    for room in (fast_paths, hopper):
        monkeypatch.setattr(room, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    hopper.why_off.cache_clear()
    engine = Engine(replace(EngineConfig(device="cpu", precision="bf16"), **options))
    engine.device, engine.fast = torch.device("cuda", 0), engine.config.fast
    return engine


@pytest.fixture(autouse=True)
def fresh_answers():
    yield
    hopper.why_off.cache_clear()


STEP_PATHS = "CUDA graph + overlapped streams + bulk weight cast"


class TestExplain:
    def test_all_fast_paths_apply_to_the_papers_models_on_hopper(self, monkeypatch):
        lines = explain(built(models("paper")), on_gpu(monkeypatch))
        assert lines == [
            "encoder: triton + hopper",
            "decoder: triton + hopper",
            "cell: triton + hopper",
            "readout: triton + hopper",
            f"training step: {STEP_PATHS}",
            "rollout: CUDA graphs + triton + hopper",
            "generation: CUDA graphs + triton + hopper",
        ]

    @pytest.mark.parametrize(
        ("facts", "encoder", "rollout"),
        [
            (
                {"triton": "3.7.0"},
                "triton; hopper off: Triton 3.7.0, written for 3.6",
                "CUDA graphs + triton; hopper off: Triton 3.7.0, written for 3.6",
            ),
            (
                {"triton": None},
                "plain PyTorch; triton off: Triton is not installed",
                "CUDA graphs; triton off: Triton is not installed",
            ),
            (
                {"capability": (8, 0), "compile": True},
                "torch.compile; triton off: NVIDIA X is not a Hopper GPU",
                "CUDA graphs; triton off: NVIDIA X is not a Hopper GPU",
            ),
            (
                {"precision": "fp32"},
                "plain PyTorch; triton off: fp32; bf16 needed",
                "CUDA graphs; triton off: fp32; bf16 needed",
            ),
            (
                {"fast": False},
                "plain PyTorch; engine.fast is off",
                "plain PyTorch; engine.fast is off",
            ),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_report_states_why_a_fast_path_is_off(self, monkeypatch, facts, encoder, rollout):
        lines = explain(built(models("paper")), on_gpu(monkeypatch, **facts))
        assert lines[0] == f"encoder: {encoder}" and lines[5] == f"rollout: {rollout}"

    def test_heads_of_another_size_have_no_attention_kernel(self, monkeypatch):
        lines = explain(built(models("tiny")), on_gpu(monkeypatch))
        off = "triton attention off: head_dim 16; 32 or 64 needed"
        assert lines[0] == f"encoder: triton; {off}"
        assert lines[6] == f"generation: CUDA graphs + triton; {off}"

    def test_another_width_has_no_hopper_kernel(self, monkeypatch):
        config = models("paper")
        wide = replace(config, teacher=replace(config.teacher, width=384))
        (line, *_) = explain(built(wide), on_gpu(monkeypatch))
        assert line == "encoder: triton; hopper off: width 384, head_dim 64; 256 and 64 needed"

    def test_fast_paths_on_a_cpu(self):
        lines = explain(built(models("tiny")), Engine(EngineConfig(device="cpu")))
        assert lines == [
            "encoder: plain PyTorch",
            "decoder: projected vocabulary (CPU)",
            "cell: fused unroll (CPU)",
            "readout: plain PyTorch",
            "training step: plain PyTorch",
            "rollout: fused unroll (CPU)",
            "generation: plain PyTorch",
        ]
        lines = explain(built(models("tiny")), Engine(EngineConfig(device="cpu", precision="bf16")))
        assert lines[2] == "cell: plain PyTorch; fused unroll (CPU) off: bf16; fp32 needed"

    @pytest.mark.parametrize("kind", ["gru", "lstm"])
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_gated_cells_are_unrolled_as_a_whole(self, monkeypatch, kind, device):
        config = replace(models("tiny"), cell=CellConfig(kind=kind, memory_dim=8))
        cpu = device == "cpu"
        engine = Engine(EngineConfig(device="cpu")) if cpu else on_gpu(monkeypatch)
        assert explain(built(config), engine)[2] == f"cell: whole-sequence {kind.upper()}"

    @pytest.mark.parametrize("triton", ["3.6.0", "3.7.0", None])
    def test_the_summary_fits_on_a_line(self, monkeypatch, triton):
        line = summary(built(models("paper")), on_gpu(monkeypatch, triton=triton))
        assert len(line) <= 100 and line.startswith("fast paths: ")
        if triton == "3.6.0":
            assert line == f"fast paths: triton + hopper; step: {STEP_PATHS}"
        if triton == "3.7.0":
            assert "triton; hopper off: Triton 3.7.0, written for 3.6" in line


def test_a_run_on_a_gpu_reports_its_fast_paths(monkeypatch):
    class Listener(Reporter):
        def __init__(self) -> None:
            self.lines: list[str] = []

        def say(self, message: str) -> None:
            self.lines.append(message)

    run = Run(replace(models("paper"), engine=EngineConfig(device="cpu")), Path("nowhere"))
    run.engine, listener = on_gpu(monkeypatch), Listener()
    Training(run, listener, ())._prepare_engine()
    assert listener.lines == [f"fast paths: triton + hopper; step: {STEP_PATHS}"]


def test_on_a_gpu_every_row_is_attached(monkeypatch):
    triton = pytest.importorskip("triton")
    parts, engine = built(models("paper")), on_gpu(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", triton)
    engine.prepare(parts)
    rnn = parts["rnn"]
    assert isinstance(rnn, RNN) and isinstance(rnn.fast, RNNLoops) and rnn.fast.graphs is not None
    assert len(rnn.fast.graphs.kernels.stacks) == 2 and len(rnn.fast.graphs.kernels.cells) == 1
    assert rnn.fast.graphs.fast_choice is kernel_sampler and rnn.fast.unroller is None
    for module in parts.modules():
        if isinstance(module, Block | Lookup):
            assert module.fast is not None
        if isinstance(module, Stack | Teacher | TransformerCell):
            assert module.fast is None  # of a CPU, or of rollouts


def test_every_row_names_a_known_role_and_a_replaceable_module():
    for path in FAST_PATHS:
        assert path.device in ("cpu", "cuda", "any") and {*path.roles} <= {
            *MODELS,
            *STEP,
            *ROLLOUTS,
        }
        assert issubclass(path.replaces, Replaceable)


def test_reference_detaches_every_row_and_restores_it():
    parts, engine = built(models("tiny")), Engine(EngineConfig(device="cpu"))
    engine.prepare(parts)
    replaced = [module for module in parts.modules() if isinstance(module, Replaceable)]
    before = [module.fast for module in replaced]
    assert sum(fast is not None for fast in before) == 2  # the decoder and the RNN's loops
    with engine.reference(parts):
        assert all(module.fast is None for module in replaced)
    assert [module.fast for module in replaced] == before


@pytest.mark.parametrize("kind", ["transformer", "gru"])
def test_another_cell_is_unrolled_itself(kind):
    config = replace(TINY, cell=CellConfig(kind=kind, memory_tokens=2, memory_dim=8))
    rnn, tokens = build_models(config, 4)[0], torch.tensor([[3, 0, 2]])
    Engine(EngineConfig(device="cpu")).prepare(rnn)
    assert rnn.fast is not None
    rnn.cell = build_models(replace(config, seed=1), 4)[0].cell
    assert_close(rnn.unroll(tokens)[:, 0], rnn.cell(rnn.empty_memory(1), tokens[:, 0]))


def losses(fast: bool) -> list[float]:
    config = replace(recipe("retrieval"), engine=EngineConfig(device="cpu", fast=fast))
    run = Run(config, Path("nowhere"))
    found = []
    for name in ("smt", "dmt"):
        stage = config.stages()[name]
        trainer = Trainer(run.objective(name), stage, run.task, run.engine, seed=1)
        found += [float(trainer.train_step()["loss"]) for _ in range(2)]
    return found


def test_an_empty_table_trains_to_the_same_losses(monkeypatch):
    expected = losses(fast=True)
    monkeypatch.setattr(fast_paths, "FAST_PATHS", ())
    plain = losses(fast=True)
    assert plain == losses(fast=False)
    assert_close(plain, expected, rtol=1e-4, atol=1e-5)


def test_with_fast_off_nothing_else_of_accel_is_imported():
    code = """
import sys
from dataclasses import replace
from pathlib import Path
from memtrain.config import EngineConfig
from memtrain.recipes import recipe
from memtrain.training.console import Reporter
from memtrain.training.run import Run
from memtrain.training.step import Trainer

config = replace(recipe("retrieval"), engine=EngineConfig(device="cpu", fast=False))
run = Run(config, Path("nowhere"))
Trainer(run.objective("smt"), config.smt, run.task, run.engine, 0).train_step()
run.evaluate(4)
found = {name for name in sys.modules if name.startswith("memtrain.accel")}
assert found == {"memtrain.accel", "memtrain.accel.engine"}, found
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_that_move_to_another_device_lose_their_fast_paths():
    models = built(TINY)
    Engine(EngineConfig(device="cpu")).prepare(models)
    parts = [part for part in models.modules() if isinstance(part, Replaceable)]
    assert any(part.fast is not None for part in parts)
    models.double().float()  # on the same device they stay
    assert any(part.fast is not None for part in parts)
    models.to("meta")
    assert all(part.fast is None for part in parts)
