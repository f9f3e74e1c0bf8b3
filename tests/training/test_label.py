"""Runs from label files: written by a teacher or an oracle, trained, resumed and evaluated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memtrain
from memtrain import Labels, Reporter, Run
from memtrain.cli import main
from memtrain.config import Digits, LogConfig, Retrieval, RunConfig
from memtrain.errors import MemtrainError
from memtrain.recipes import recipe
from memtrain.runs.processes import Interrupted
from memtrain.training.label import label_run
from run_testing import StopAt, assert_same_weights

QUIET = LogConfig(evaluate_sequences=4)


def short(config: RunConfig, smt: int = 6, dmt: int = 4, **options: Any) -> RunConfig:
    config = replace(config, smt=replace(config.smt, steps=smt, batch_size=8), **options)
    return replace(config, dmt=replace(config.dmt, steps=dmt, batch_size=8))


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of retrieval with a teacher, trained for a few steps."""
    config = short(recipe("retrieval"), data=Retrieval(sequence_length=8))
    return Run.create(config, tmp_path_factory.mktemp("taught") / "run").train(Reporter())


@pytest.fixture(scope="module")
def labels(taught: Run) -> Labels:
    return label_run(taught, taught.folder.parent / "labels.safetensors", sequences=40, held_out=8)


def test_a_file_has_the_teachers_memories_and_its_origin(taught: Run, labels: Labels):
    batch = labels.batch(torch.arange(48))
    assert taught.teacher is not None and batch.memories is not None
    with torch.no_grad():
        expected = taught.teacher.encode(batch.inputs)
    torch.testing.assert_close(batch.memories, expected, rtol=1e-5, atol=1e-5)
    assert labels.card.source["run"] == taught.id
    assert labels.card.source["step"] == "10" and len(labels.card.source["teacher"]) == 32
    assert (labels.shape, labels.card.held_out) == ((48, 8, 1, 64), 8)


def test_memory_use_does_not_grow_with_the_number_of_sequences(
    taught: Run, labels: Labels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("memtrain.training.label.CHUNK_FLOATS", 8 * 64 * 7)  # 7 sequences at once
    counts: list[int] = []
    again = label_run(
        taught,
        tmp_path / "x.safetensors",
        sequences=40,
        held_out=8,
        report=lambda done, _: counts.append(done),
    )
    assert counts == [7, 14, 21, 28, 35, 40, 47, 48]
    assert torch.equal(again.inputs[40:], labels.inputs[40:])


def test_the_readout_starts_as_the_teachers_decoder(taught: Run, labels: Labels, tmp_path: Path):
    run = Run.create(short(labels.config()), tmp_path / "run")
    assert taught.teacher is not None and run.teacher is None
    for name, value in taught.teacher.decoder.state_dict().items():
        assert torch.equal(run.rnn.readout.state_dict()[name], value)
    narrow = replace(labels.config(), teacher=replace(run.config.teacher, width=32))
    assert Run.create(narrow, tmp_path / "other").rnn.readout.head.in_features == 32


def test_a_resumed_run_equals_one_that_was_not_stopped(labels: Labels, tmp_path: Path):
    config = short(labels.config())
    whole = Run.create(config, tmp_path / "whole").train(Reporter())
    for stage, step in (("smt", 3), ("dmt", 2)):
        folder = tmp_path / stage
        config = replace(config, log=replace(config.log, every=1))
        with pytest.raises(Interrupted):
            Run.create(config, folder).train(StopAt(stage, step))
        assert_same_weights(Run.open(folder).train(Reporter()), whole)


def test_evaluation_compares_the_rollout_with_the_labels(labels: Labels, tmp_path: Path):
    run = Run.create(short(labels.config()), tmp_path / "run").train(Reporter())
    result = run.evaluate()
    assert result.teacher is None and result.drift is not None
    assert result.sequences == 8 and len(result.drift.rollout) == 8
    batch = labels.batch(torch.arange(40, 48))
    with torch.no_grad():
        own = run.rnn.unroll(batch.inputs)
    assert batch.memories is not None
    expected = (own - batch.memories).square().mean(dim=(0, 2, 3))
    torch.testing.assert_close(torch.tensor(result.drift.rollout), expected, rtol=1e-4, atol=1e-6)


def test_sequences_without_targets_train_the_cell_under_the_teachers_decoder(
    taught: Run, tmp_path: Path
):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 9, (30, 12)))
    path = tmp_path / "labels.safetensors"
    labels = label_run(taught, path, data=tmp_path / "x.npy")
    assert labels.targets is None and labels.shape[:2] == (30, 12)
    run = Run.create(short(labels.config()), tmp_path / "run")
    before = {name: value.clone() for name, value in run.rnn.state_dict().items()}
    run.train(Reporter())
    changed = {n for n, value in run.rnn.state_dict().items() if not torch.equal(value, before[n])}
    assert changed and all(name.startswith("cell.") for name in changed)
    with pytest.raises(MemtrainError, match="has no targets to train a readout on"):
        Run.create(
            short(
                recipe("labels"),
                data=run.config.data,
                cell=run.config.cell,
                teacher=run.config.teacher,
            ),
            tmp_path / "wrong",
        )


def test_a_generative_run_generates_and_completes_images(tmp_path: Path):
    config = short(recipe("digits"), smt=2, dmt=0, data=Digits(held_out=0.1), log=QUIET)
    run = Run.create(config, tmp_path / "digits").train(Reporter())
    labels = label_run(run, tmp_path / "x.safetensors", sequences=8, held_out=4, dtype="fp16")
    config = short(labels.config(), smt=2, dmt=0, log=QUIET)
    trained = Run.create(config, tmp_path / "run").train(Reporter())
    assert memtrain.generate(trained, count=2).pictures().shape == (2, 8, 8)
    out = str(tmp_path / "grid.png")
    assert (
        main(["generate", str(trained.folder), "--given", "0.5", "--count", "2", "--out", out]) == 0
    )


def test_a_cell_that_cannot_hold_the_labels_is_refused(labels: Labels, tmp_path: Path):
    config, folder = labels.config(), tmp_path / "run"
    wrong = replace(config, cell=replace(config.cell, memory_dim=32))
    with pytest.raises(MemtrainError, match="has memories of 1 x 64, the cell's are 1 x 32"):
        Run.create(wrong, folder)
    with pytest.raises(MemtrainError, match="cell.kind=gru: has memories within -1..1"):
        Run.create(replace(config, cell=replace(config.cell, kind="gru")), folder)
    inputs, memories = labels.inputs, labels.memories(torch.arange(48))
    unscaled = Labels(inputs, 3 * memories, inputs)
    with pytest.raises(MemtrainError, match=r"scales memory tokens to RMS 1.*normalize=True"):
        Run.create(unscaled.save(tmp_path / "x.safetensors").config(), folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrain.steps": 3}, "pretrain.steps=3: must be 0 with data.kind=labels"),
        ({"smt.train_teacher": True}, "smt.train_teacher=True: must be False"),
        ({"smt.token_weight": 1.0}, "smt.token_weight=1.0: must be 0"),
        ({"dmt.decode_weight": 1.0}, "dmt.decode_weight=1.0: must be 0"),
        ({"dmt.train_teacher": True}, "dmt.train_teacher=True: must be False"),
    ],
)
def test_settings_that_need_a_teacher_are_refused(options: dict[str, Any], message: str):
    config = recipe("labels")
    ((name, value),) = options.items()
    stage, field = name.split(".")
    with pytest.raises(MemtrainError, match=message):
        replace(config, **{stage: replace(getattr(config, stage), **{field: value})})


def test_a_run_refuses_a_file_that_was_replaced(labels: Labels, tmp_path: Path):
    path = tmp_path / "labels.safetensors"
    assert labels.path is not None
    path.write_bytes(labels.path.read_bytes())
    run = Run.create(short(Labels.open(path).config(), dmt=0), tmp_path / "run").train(Reporter())
    inputs = labels.inputs
    Labels(inputs, labels.memories(torch.arange(48)), inputs, vocab_size=9).save(path)
    with pytest.raises(MemtrainError, match="is not the data that .* learned from"):
        Run.open(run.folder)


def test_commands(labels: Labels, taught: Run, tmp_path: Path, capsys: Any, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    label = ["label", str(taught.folder), "-o", "x.safetensors", "--sequences", "20"]
    assert main([*label, "--held-out", "4"]) == 0
    assert "24 sequences of 8, 4 of them held out" in capsys.readouterr().out
    assert main(label) == 2
    assert "is there already" in capsys.readouterr().err
    train = ["train", "labels", "--data", "x.safetensors", "--smt.steps", "2", "--dmt.steps", "2"]
    assert main(train) == 0
    assert main([*train, "--resume"]) == 0
    assert main(["resume", "runs/labels"]) == 0
    assert main(["eval", "runs/labels", "--json"]) == 0
    capsys.readouterr()
    assert labels.path is not None
    assert main([*train[:3], str(labels.path), *train[4:], "--resume"]) == 2
    assert "the run learns from x.safetensors" in capsys.readouterr().err
    for arguments, message in (
        (["train", "labels"], "data.path: name a label file"),
        (["train", "labels", "x.safetensors"], "did you mean --data x.safetensors?"),
        (["train", "labels", "--data", "none"], "none: No such file"),
        (["train", "labels", "--data", "."], "not a regular file"),
        (["label", "runs/labels"], "runs/labels: has no teacher"),
        (["label", str(taught.folder), "none.npy", "-o", "y"], "data=none.npy: no such file"),
        (["label", str(taught.folder), "-o", "y", "--sequences", "0"], "sequences=0: must be"),
        (["label", str(taught.folder), "-o", "y", "--length", "9"], "length=9"),
    ):
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
