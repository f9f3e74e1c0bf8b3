"""Whole runs on tiny models: stages, resume, interruption, divergence, a user's own cell."""

import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memtrain
from conftest import TINY
from memtrain.accel.fast_paths import RNNLoops
from memtrain.accel.gated_unroll import UnrolledLSTM
from memtrain.config import CellConfig, Custom, PretrainConfig, Stream
from memtrain.data.prepare import prepare_tokens
from memtrain.data.task import Task
from memtrain.errors import CheckpointError, DivergedError, MemtrainError
from memtrain.evaluation.cost import OPERATION_COST
from memtrain.evaluation.evaluate import Evaluation
from memtrain.shapes import Batch
from memtrain.training.console import Reporter
from memtrain.training.run import Interrupted, Run
from run_testing import CountingReporter, StopAt, assert_same_weights, comparable, weights

ONLY_SMT = replace(TINY, dmt=replace(TINY.dmt, steps=0), bptt=replace(TINY.bptt, steps=0))


def copied(run: Run, folder: Path) -> Path:
    return Path(shutil.copytree(run.folder, folder))


def test_a_run_trains_every_stage_and_leaves_a_complete_folder(trained_tiny: Run):
    run = trained_tiny
    assert run.finished
    assert [stage.name for stage in run.progress.stages] == ["smt", "dmt", "bptt"]
    assert [stage.steps for stage in run.progress.stages] == [12, 8, 4]
    assert run.totals()["total_tokens"] == (12 + 8 + 4) * 4 * 6
    names = {path.name for path in run.folder.iterdir()}
    assert names == {"config.json", "run.json", ".lock", "metrics.jsonl", "checkpoints"}
    reopened = Run.open(run.folder)
    assert reopened.finished
    assert_same_weights(run, reopened)


@pytest.mark.parametrize("encoder", ["bidirectional", "causal"])
@pytest.mark.parametrize("timesteps", [0, 1, 3])
def test_both_encoders_train_in_both_modes(tmp_path: Path, encoder, timesteps):
    config = replace(
        TINY,
        teacher=replace(TINY.teacher, encoder=encoder),
        smt=replace(TINY.smt, timesteps=timesteps),
    )
    run = Run.create(config, tmp_path / "run").train()
    assert run.finished


@pytest.mark.parametrize(
    ("stage", "step"), [("smt", 4), ("smt", 10), ("dmt", 2), ("dmt", 6), ("bptt", 2)]
)
def test_an_interrupted_run_is_bit_exact(trained_tiny: Run, tmp_path: Path, stage, step):
    with pytest.raises(Interrupted, match=f"step {step} of {stage}"):
        Run.create(TINY, tmp_path / "cut").train(StopAt(stage, step))
    resumed = Run.open(tmp_path / "cut").train()
    assert_same_weights(trained_tiny, resumed)
    assert comparable(trained_tiny) == comparable(resumed)


def test_an_interrupted_run_of_an_lstm_is_bit_exact(tmp_path: Path):
    teacher = replace(TINY.teacher, normalize_memory=False)
    config = replace(TINY, cell=CellConfig(kind="lstm", memory_dim=8), teacher=teacher)
    whole = Run.create(config, tmp_path / "whole").train()
    assert isinstance(whole.rnn.fast, RNNLoops)
    assert isinstance(whole.rnn.fast.unroller, UnrolledLSTM)
    for stage, step in (("smt", 4), ("dmt", 6), ("bptt", 2)):
        with pytest.raises(Interrupted):
            Run.create(config, tmp_path / stage).train(StopAt(stage, step))
        resumed = Run.open(tmp_path / stage).train()
        assert_same_weights(whole, resumed)
        assert comparable(whole) == comparable(resumed)


TWO_STAGES = replace(
    TINY,
    teacher=replace(TINY.teacher, rotary_fraction=0.5, head_bias=True),
    cell=replace(TINY.cell, rotary_fraction=0.5),
    pretrain=PretrainConfig(steps=7, batch_size=4, learning_rate=1e-2),
    smt=replace(TINY.smt, train_teacher=False),
    dmt=replace(TINY.dmt, train_teacher=True, future_length=4),
)
"""The teacher alone, the cell alone, both; half of each head rotated, a bias on the logits."""


@pytest.fixture(scope="module")
def trained_two_stages(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run.create(TWO_STAGES, tmp_path_factory.mktemp("two") / "run").train(Reporter())


@pytest.mark.parametrize(
    ("stage", "step"), [("pretrain", 2), ("pretrain", 6), ("smt", 4), ("dmt", 2), ("dmt", 6)]
)
def test_an_interrupted_run_of_two_stages_is_bit_exact(
    trained_two_stages: Run, tmp_path: Path, stage, step
):
    with pytest.raises(Interrupted, match=f"step {step} of {stage}"):
        Run.create(TWO_STAGES, tmp_path / "cut").train(StopAt(stage, step))
    resumed = Run.open(tmp_path / "cut").train()
    assert_same_weights(trained_two_stages, resumed)
    assert comparable(trained_two_stages) == comparable(resumed)


def test_each_stage_trains_its_models_alone(tmp_path: Path):
    run, before = Run.create(TWO_STAGES, tmp_path / "run"), {}
    expected = {
        "pretrain": {"teacher", "readout"},  # which is a copy of the decoder
        "smt": {"cell"},
        "dmt": {"teacher", "cell", "readout"},
    }
    assert run.teacher is not None
    for stage, changes in expected.items():
        before = {name: value.clone() for name, value in weights(run).items()}
        run.train(until=stage)
        after = weights(run)
        changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
        assert {name.split(".")[name.startswith("rnn.")] for name in changed} == changes
        if stage != "dmt":
            decoder = run.teacher.decoder.state_dict()
            assert "head.bias" in decoder
            pairs = run.rnn.readout.state_dict().items()
            assert all(torch.equal(value, decoder[name]) for name, value in pairs)
    lines = run.metrics.read()
    logged = {one["stage"]: one.keys() for one in lines}
    assert "dynamics" not in logged["pretrain"] and "decode" in logged["pretrain"]
    assert "dynamics" in logged["smt"] and "decode" not in logged["smt"]
    assert {"teacher_decode", "uniformity", "readout"} <= logged["dmt"]
    assert [stage.name for stage in run.progress.stages] == ["pretrain", "smt", "dmt"]
    assert all(stage.sequential_ops > 0 for stage in run.progress.stages)
    # The teacher of frozen SMT stays the one of the pretraining.
    teacher = [one["evaluation"]["teacher"]["nats"] for one in lines if "evaluation" in one]
    stages = [one["stage"] for one in lines if "evaluation" in one]
    frozen = [nats for nats, stage in zip(teacher, stages, strict=True) if stage == "smt"]
    assert frozen == pytest.approx([teacher[stages.index("smt") - 1]] * len(frozen), rel=1e-6)


def test_a_teacher_can_be_trained_alone(tmp_path: Path):
    off = {name: replace(getattr(TINY, name), steps=0) for name in ("smt", "dmt", "bptt")}
    config = replace(TINY, **off, pretrain=PretrainConfig(steps=5, batch_size=4))
    run = Run.create(config, tmp_path / "run").train()
    assert run.finished and run.stages == ["pretrain"]
    assert Run.open(tmp_path / "run").evaluate(8).teacher is not None


def test_sequential_operations_of_a_stream_are_counted_on_the_trained_sequences(tmp_path: Path):
    np.save(tmp_path / "alternating.npy", np.arange(800) % 2)
    prepare_tokens(tmp_path / "alternating.npy", tmp_path / "data")
    counts = []
    for sequence, held_out in ((8, 8), (8, 32), (16, 8)):
        config = replace(
            TINY,
            data=Stream(path=str(tmp_path / "data"), evaluate_length=held_out),
            smt=replace(TINY.smt, steps=0),
            dmt=replace(TINY.dmt, steps=0),
            bptt=replace(TINY.bptt, steps=1, sequence_length=sequence),
        )
        run = Run.create(config, tmp_path / f"{sequence}-{held_out}").train()
        counts.append(run.totals()["total_sequential_ops"])
    assert counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_sequential_operations_of_a_gated_cell_are_those_of_its_loop(tmp_path: Path, kind: str):
    counts = {}
    for fast in (True, False):
        for length in (6, 8):
            config = replace(
                TINY,
                data=replace(TINY.data, sequence_length=length),
                cell=CellConfig(kind=kind, memory_tokens=4, memory_dim=8),
                smt=replace(TINY.smt, steps=0),
                dmt=replace(TINY.dmt, steps=0),
                bptt=replace(TINY.bptt, steps=1),
                engine=replace(TINY.engine, device="cpu", fast=fast),
            )
            run = Run.create(config, tmp_path / f"{fast}-{length}").train()
            assert isinstance(run.rnn.fast, RNNLoops) == fast
            counts[fast, length] = run.progress.stages[0].sequential_ops_a_step
    assert counts[True, 6] == counts[False, 6] and counts[True, 8] == counts[False, 8]
    layers = {"gru": 4, "lstm": 2}[kind]
    per_token = 2 * layers * OPERATION_COST[f"{kind}_cell"]  # forward and backward
    assert counts[True, 8] - counts[True, 6] == 2 * per_token


def test_a_run_killed_between_checkpoints_repeats_steps_and_is_bit_exact(
    trained_tiny: Run, tmp_path: Path
):
    """As after kill -9: lines of metrics behind the last checkpoint are written once only."""

    class Killed(Reporter):
        def advance(self, step: int, metrics: dict[str, float]) -> None:
            if step == 8:
                raise SystemExit("killed")

    with pytest.raises(SystemExit, match="killed"):
        Run.create(TINY, tmp_path / "cut").train(Killed())
    resumed = Run.open(tmp_path / "cut").train()
    assert_same_weights(trained_tiny, resumed)
    assert comparable(trained_tiny) == comparable(resumed)


def test_random_state_of_a_cell_with_dropout_survives_a_resume(tmp_path: Path):
    class Dropping(nn.Module):
        memory_tokens, memory_dim = 1, 8

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(4, 8)
            self.linear = nn.Linear(8, 8)
            self.dropout = nn.Dropout(0.5)

        def forward(self, memory, token):
            return torch.tanh(self.linear(self.dropout(memory)) + self.embedding(token)[:, None])

    def cell() -> nn.Module:
        torch.manual_seed(5)
        return Dropping()

    whole = Run.create(ONLY_SMT, tmp_path / "whole", cell=cell()).train()
    with pytest.raises(Interrupted):
        Run.create(ONLY_SMT, tmp_path / "cut", cell=cell()).train(StopAt("smt", 6))
    assert_same_weights(whole, Run.open(tmp_path / "cut", cell=cell()).train())


def test_sigterm_saves_too_and_is_named(tmp_path: Path):
    with pytest.raises(Interrupted) as caught:
        Run.create(TINY, tmp_path / "run").train(StopAt("smt", 4, signal.SIGTERM))
    assert caught.value.signal_number == signal.SIGTERM


def test_training_in_a_thread_installs_no_signal_handlers(tmp_path: Path):
    thread = threading.Thread(target=Run.create(SHORT, tmp_path / "run").train)
    thread.start()
    thread.join()
    assert Run.open(tmp_path / "run").finished


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    trained_tiny: Run, tmp_path: Path
):
    assert_same_weights(trained_tiny, Run.create(TINY, tmp_path / "2").train())
    other = Run.create(replace(TINY, seed=1), tmp_path / "3").train()
    assert not torch.equal(trained_tiny.rnn.readout.head.weight, other.rnn.readout.head.weight)


def test_evaluating_during_training_does_not_change_the_result(trained_tiny: Run, tmp_path: Path):
    quiet = replace(TINY, log=replace(TINY.log, evaluate_every=0))
    assert_same_weights(trained_tiny, Run.create(quiet, tmp_path / "quiet").train())


# --------------------------------------------------------------------------- a user's own things


class LSTMLike(nn.Module):
    """h and c as two memory tokens of width 5: a shape that none of our cells has."""

    memory_tokens, memory_dim = 2, 5

    def __init__(self, vocab_size: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 5)
        self.lstm = nn.LSTMCell(5, 5)

    def forward(self, memory: Tensor, token: Tensor) -> Tensor:
        hidden, state = memory.unbind(1)
        return torch.stack(self.lstm(self.embedding(token), (hidden, state)), dim=1)


def test_a_user_lstm_trains_through_every_stage(tmp_path: Path):
    torch.manual_seed(0)
    run = Run.create(TINY, tmp_path / "run", cell=LSTMLike())
    before = [p.clone() for p in run.rnn.cell.parameters()]
    run.train()
    assert run.finished
    assert run.rnn.empty_memory(3).shape == (3, 2, 5)
    moved = [not torch.equal(a, b) for a, b in zip(before, run.rnn.cell.parameters(), strict=True)]
    assert all(moved)


def test_user_cells_and_tasks_are_found_by_name(tmp_path: Path, monkeypatch):
    (tmp_path / "their_code.py").write_text(
        "import torch\n"
        "from memtrain import Batch, Task\n"
        "class Elman(torch.nn.Module):\n"
        "    def __init__(self, vocab_size, size=6):\n"
        "        super().__init__()\n"
        "        self.memory_tokens, self.memory_dim = 1, size\n"
        "        self.embedding = torch.nn.Embedding(vocab_size, size)\n"
        "        self.recur = torch.nn.Linear(size, size)\n"
        "    def forward(self, memory, token):\n"
        "        return torch.tanh(self.recur(memory) + self.embedding(token)[:, None])\n"
        "class Parity(Task):\n"
        "    vocab_size = 2\n"
        "    def __init__(self, length=5):\n"
        "        self.sequence_length = length\n"
        "    def sample(self, count, generator):\n"
        "        bits = torch.randint(2, (count, self.sequence_length), generator=generator)\n"
        "        return Batch(bits, bits.cumsum(1) % 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    config = replace(
        TINY,
        cell=CellConfig(kind="their_code:Elman", options={"size": 7}),
        data=Custom(path="their_code:Parity", options={"length": 4}),
    )
    run = Run.create(config, tmp_path / "run").train(until="smt")
    assert run.rnn.empty_memory(1).shape == (1, 1, 7)
    assert run.task.sequence_length == 4
    with pytest.raises(MemtrainError, match="their_code:Elman; pass allow_code=True") as caught:
        Run.open(tmp_path / "run")
    assert "their_code:Elman; pass --allow-code" in caught.value.command_line
    assert_same_weights(run, Run.open(tmp_path / "run", allow_code=True))


def test_a_cell_that_breaks_the_contract_is_refused_before_anything_is_written(tmp_path: Path):
    class Forgetful(LSTMLike):
        def forward(self, memory: Tensor, token: Tensor) -> Tensor:
            return super().forward(torch.zeros_like(memory), token)

    with pytest.raises(MemtrainError, match="must depend on the old one"):
        Run.create(TINY, tmp_path / "run", cell=Forgetful())
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------- bad days


def test_a_folder_with_a_run_is_refused_without_overwrite(trained_tiny: Run, tmp_path: Path):
    copied(trained_tiny, tmp_path / "run")
    place = re.escape(str(tmp_path / "run"))
    remedy = (
        rf"Run.open\('{place}'\) continues it, overwrite=True replaces it, or .* another folder$"
    )
    with pytest.raises(MemtrainError, match=f"^{place}: a run is there already; {remedy}"):
        Run.create(TINY, tmp_path / "run")
    again = Run.create(TINY, tmp_path / "run", overwrite=True)
    assert not again.finished and not again.metrics.read()


def test_a_folder_with_other_files_is_never_touched(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(MemtrainError, match="not a run"):
        Run.create(TINY, tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run.create(TINY, tmp_path_factory.mktemp("interrupted") / "run")
    with pytest.raises(Interrupted):
        run.train(StopAt("dmt", 4))
    return run


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "state"])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one_with_a_warning(
    trained_tiny: Run, interrupted: Run, tmp_path: Path, damage
):
    copied(interrupted, tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    weights_file = newest / "weights.safetensors"
    if damage == "cut":
        weights_file.write_bytes(weights_file.read_bytes()[:-10])
    elif damage == "flipped":
        content = bytearray(weights_file.read_bytes())
        content[-1] ^= 1
        weights_file.write_bytes(bytes(content))
    elif damage == "missing":
        weights_file.unlink()
    else:
        (newest / "state.json").write_text("{")
    reporter = CountingReporter()
    run = Run.open(tmp_path / "run", reporter=reporter)
    assert len(reporter.messages) == 1 and newest.name in reporter.messages[0]
    assert run.progress.global_step < int(newest.name)
    assert_same_weights(trained_tiny, run.train())


def test_a_run_without_a_valid_checkpoint_is_refused(trained_tiny: Run, tmp_path: Path):
    copied(trained_tiny, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        (folder / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        Run.open(tmp_path / "run")


class PoisonedTask(Task):
    """Its cell's embedding is set to NaN after the given number of batches."""

    vocab_size, sequence_length = 4, 6

    def __init__(self, poison) -> None:
        self.poison = poison
        self.batches = 0

    def sample(self, count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(4, (count, 6), generator=generator)
        if count == 4:
            self.batches += 1
            self.poison(self.batches)
        return Batch(tokens, tokens)


def test_a_nan_loss_stops_at_once_and_keeps_the_last_good_checkpoint(tmp_path: Path):
    def poison(batches: int) -> None:
        if batches == 8:
            assert run.teacher is not None
            run.teacher.decoder.head.weight.data.fill_(float("nan"))

    run = Run.create(TINY, tmp_path / "run", task=PoisonedTask(poison))
    with pytest.raises(DivergedError, match=r"smt step 7: decode is nan.*smt\.learning_rate"):
        run.train()
    good = Run.open(tmp_path / "run", task=PoisonedTask(lambda _: None))
    assert good.progress.global_step == 5
    assert all(bool(value.isfinite().all()) for value in weights(good).values())


def test_an_infinite_gradient_stops_before_the_weights_are_touched(tmp_path: Path):
    def poison(batches: int) -> None:
        if batches == 3:
            weight = run.rnn.cell.get_parameter("embedding.weight")
            weight.register_hook(lambda gradient: gradient * float("inf"))

    run = Run.create(TINY, tmp_path / "run", task=PoisonedTask(poison))
    with pytest.raises(DivergedError, match="step 2: gradient_norm_cell"):
        run.train()
    assert all(bool(value.isfinite().all()) for value in weights(run).values())


def test_weights_of_another_shape_are_refused_with_a_reason(trained_tiny: Run, tmp_path: Path):
    copied(trained_tiny, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"memory_tokens": 2', '"memory_tokens": 3'))
    with pytest.raises(MemtrainError, match="weights do not fit the config"):
        Run.open(tmp_path / "run")


def test_evaluating_zero_sequences_is_refused(tmp_path: Path):
    with pytest.raises(MemtrainError, match="sequences=0: must be at least 1"):
        Run.create(TINY, tmp_path / "run").evaluate(0)


# --------------------------------------------------------------------------------------- report

SHORT = replace(ONLY_SMT, smt=replace(TINY.smt, steps=6))


def test_reporters_receive_the_held_out_losses_when_they_are_computed(tmp_path: Path):
    received = []

    class Log(Reporter):
        def evaluated(self, step: int, evaluation: Evaluation, unit: str) -> None:
            received.append((step, evaluation.rnn.nats, unit))

        def advance(self, step: int, metrics: dict[str, float]) -> None:
            received.append(step)

    run = Run.create(SHORT, tmp_path / "run").train(Log())
    records = [record for record in run.metrics.read() if "evaluation" in record]
    scores = [(one["step"], one["evaluation"]["rnn"]["nats"], "target") for one in records]
    assert [one for one in received if isinstance(one, tuple)] == scores
    assert received == [2, 4, scores[0], 5, scores[1], 6]


def test_a_run_reports_unless_it_is_silenced(tmp_path: Path, capsys):
    Run.create(SHORT, tmp_path / "one").train(Reporter())
    assert capsys.readouterr() == ("", "")
    Run.create(SHORT, tmp_path / "other").train()
    out, err = capsys.readouterr()
    assert not out and "smt  6/6  took 0:" in err
    assert "smt  step 5: held-out " in err and " nats per target (teacher " in err


def test_a_run_has_a_one_line_repr(tmp_path: Path):
    run = Run.create(TINY, tmp_path / "run")
    assert repr(run) == f"<Run tiny in {tmp_path}/run: smt 0/12, dmt 0/8, bptt 0/4 steps, cpu>"
    run.train(Reporter(), until="smt")
    assert "smt 12/12, dmt 0/8, bptt 0/4 steps" in repr(run)


def test_a_run_shows_its_stages_and_curves_in_notebooks(tmp_path: Path):
    run = Run.create(TINY, tmp_path / "run")
    assert run._repr_png_() is None and "<img" not in run._repr_html_()
    run.train(Reporter(), until="dmt")
    figure = run.plot()
    titles = [axes.get_title() for axes in figure.axes]
    assert "smt: losses on its batches" in titles and "dmt: losses on its batches" in titles
    image, page = run._repr_png_(), run._repr_html_()
    assert image is not None and image.startswith(b"\x89PNG")
    assert "<th>smt</th><td>12 of 12</td>" in page and "<th>bptt</th><td>0 of 4</td>" in page
    assert "data:image/png;base64," in page


def test_the_rnn_of_a_task_with_answers_is_loaded_as_an_rnn(trained_tiny: Run):
    run = Run.open(trained_tiny.folder)
    loaded = memtrain.load_rnn(run.folder)
    assert isinstance(loaded, memtrain.RNN) and loaded.rnn is loaded and loaded.spelling is None
    tokens = torch.tensor([[1, 0, 3, 2, 1, 0]])
    torch.testing.assert_close(loaded(tokens), run.rnn.eval()(tokens))
    scored = memtrain.evaluate(run.task, loaded, sequences=16)
    assert scored.rnn.nats == pytest.approx(run.evaluate(16).rnn.nats)
